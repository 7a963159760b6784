"""Checks of the operators' arguments, the choice of a kernel, and its launch."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linrope import backends
from linrope.backends import library, native
from linrope.common.argument_checks import check_name
from linrope.common.private_names import forward_mode, transformed
from linrope.common.tracing import exporting, has_tangents, plain
from linrope.operation.plan import PLANS, keep
from linrope.recurrence.call import with_dense_rows


@dataclass
class Plan:
    """How calls that are alike are computed."""

    kernel: str  # "native", "triton" or "eager"
    as_is: bool  # True: the native kernel may take the call's own tensors
    refused: Hashable = None  # the strides with which it last did not take them


def plan_of(settings: tuple[Any, ...], tensors: Sequence[Tensor | None], check: Callable[[], str]) -> Plan:
    """The plan of a call. Its kernel is what ``check`` returns, which is called once for all calls that are alike.

    check: raises if an argument does not fit, and chooses. It looks at the settings, at the tensors' shapes, dtypes,
    devices and layouts, and at nothing else. settings: the operator's name, and all arguments that are no tensors.
    """
    if not plain(tensors) or forward_mode():
        return Plan(check(), as_is=False)
    kinds = tuple([x if x is None else (x.shape, x.dtype, x.device, x.layout) for x in tensors])
    key = settings, kinds, native.why_not()
    try:
        plan: Plan | None = PLANS.get(key)
    except TypeError:  # a setting that cannot be looked up, which the checks refuse
        return Plan(check(), as_is=False)
    if plan is None:
        kernel = check()
        plan = Plan(kernel, as_is=kernel == "native")
        keep(key, plan)
    return plan


def run_as_is(plan: Plan, operator: str, tensors: Iterable[Tensor | None], *settings: Any) -> Any:
    """The native kernel's result from the call's own tensors. None: autograd records the call, or they do not fit."""
    if not plan.as_is or (plan.refused is not None and plan.refused == _strides(tensors)):
        return None
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return None
    try:
        return library.run(operator, *tensors, *settings)
    except RuntimeError:  # it checks everything before it computes
        plan.refused = _strides(tensors)
        return None


def _strides(tensors: Iterable[Tensor | None]) -> Hashable:
    return tuple([None if x is None else x.stride() for x in tensors])


def check_shape(name: str, x: Tensor, *shapes: tuple[int, ...]) -> None:
    """Raises ValueError unless x has one of the shapes."""
    if not any(len(shape) == x.ndim and all(a == b for a, b in zip(x.shape, shape)) for shape in shapes):
        expected = " or ".join(str(shape) for shape in dict.fromkeys(shapes))
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected {expected}")


def choose(backend: str, tensors: Iterable[Tensor | None], size: int, what: str, most: dict[str, int]) -> str:
    """The backend that runs the call: "native" or "triton", which are kernels, or "eager", plain PyTorch.

    "auto" takes the kernel for the tensors' device if it can run the call, else eager.

    size: the number of ``what`` that the kernels take up to a limit. most: the kernels that the operator has, with it.

    Raises:
        ValueError: unknown name.
        RuntimeError: the kernel cannot run the call. The message has the reason.
    """
    present = [x for x in tensors if x is not None]
    check_name("backend", backend, ("auto", *most, "eager"))
    device, auto = present[0].device, backend == "auto"
    names = [x for x in (backends.tried_on(device) if auto else (backend,)) if x in most]
    if not names or (auto and exporting()):
        return "eager"
    name = names[0]

    def why_not_call(kernels: Any) -> str | None:
        if transformed() or has_tangents(present):
            return "inside a transformation of torch.func or forward mode: use backend='eager'"
        if 0 < most[name] < size:  # a missing library has no limits
            return f"{size} {what}: it takes up to {most[name]}; use backend='eager'"
        reason: str | None = kernels.why_not_on(device, [x.dtype for x in present])
        return reason

    reason = backends.why_not(name, why_not_call, auto)
    if reason is not None and not auto:
        raise RuntimeError(f"backend={backend!r} cannot run: {reason}")
    return name if reason is None else "eager"


def launch(launcher: str, record: Sequence[Any], *others: Tensor | None) -> Any:
    """Calls a launcher of the Triton kernels by its name. record: an operator's arguments, of which x is the first."""
    from linrope.backends import triton  # imports Triton, which may be absent

    return triton.launch(launcher, record, *others)


def as_tokens(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """x in this dtype with a last stride of 1, as the kernels take tokens."""
    if x is None or (x.dtype == dtype and x.stride(-1) == 1):
        return x
    return with_dense_rows(converted(x, dtype))


def as_parameter(x: Tensor | None) -> Tensor | None:
    """x as the kernels take parameters."""
    if x is None or (x.dtype == torch.float32 and x.is_contiguous()):
        return x
    return x.float().contiguous()


def gradient_of(x: Tensor | None, gradient: Tensor) -> Tensor | None:
    """The kernel's gradient in the dtype of x; None if x is absent."""
    return None if x is None else converted(gradient, x.dtype)


def converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype), but short calls notice the time that PyTorch takes to find nothing to do."""
    return x if x.dtype == dtype else x.to(dtype)

"""The table of the operators' backends, and the rule that chooses one for a call."""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd import forward_ad

from linrope.backends.call import transformed
from linrope.common.names import check_name
from linrope.layer.operators import native

# The fused backends, each with the device for which "auto" tries it. "eager" is plain PyTorch and runs everywhere.
FUSED: dict[str, tuple[str, ModuleType]] = {"native": ("cpu", native)}
NAMES = ("auto", *FUSED, "eager")


def choose(name: str, tensors: Sequence[Tensor | None], taps: int = 1) -> str:
    """The name of the backend for these tensors. "auto" takes a fused backend where one can run, else eager.

    Raises:
        ValueError: unknown name.
        RuntimeError: the backend cannot run the call. The message has the reason.
    """
    check_name("backend", name, NAMES)
    given = [x for x in tensors if x is not None]
    if name == "auto":
        device = given[0].device.type
        candidates = [] if _exporting() else [x for x, (where, _) in FUSED.items() if where == device]
        return next((x for x in candidates if why_not(x, given, taps) is None), "eager")
    reason = None if name == "eager" else why_not(name, given, taps)
    if reason is not None:
        raise RuntimeError(f"backend={name!r} cannot run: {reason}")
    return name


def why_not(name: str, tensors: Sequence[Tensor], taps: int) -> str | None:
    """The reason why a fused backend cannot run the call; None: it can."""
    if transformed() or _has_tangents(tensors):
        return "inside a transformation of torch.func or forward mode: use backend='eager'"
    reason: str | None = FUSED[name][1].supports(tensors, taps)
    return reason


def _has_tangents(tensors: Sequence[Tensor]) -> bool:
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def _exporting() -> bool:
    """True while a graph is recorded for other runtimes, which do not have the fused operators."""
    if torch.compiler.is_compiling():
        return torch.compiler.is_exporting()
    return torch.onnx.is_in_onnx_export() or torch._C._get_tracing_state() is not None

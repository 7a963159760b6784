"""The one operator that all chunked backends share: to torch.compile and autograd each call is opaque.

Its list of arguments is Call's, and the sums that the call goes on from.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils import _pytree as pytree

from linrope.backends.call import Call, Sums, needs_gradients, transformed
from linrope.sequence.state import LinearAttentionState

_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    str: "str",
    bool: "bool",
    float: "float",
}
_CALL = [f"{_TYPES[kind]} {name}" for name, kind in get_type_hints(Call).items()]
_ARGUMENTS = ", ".join(["str backend", *_CALL, "Tensor? kv", "Tensor? z", "Tensor? angle"])
_FIELDS = len(Call._fields)


def attend(backend: str, call: Call, state: LinearAttentionState | None) -> tuple[Tensor, Sums | None]:
    """out and, if wanted, the last sums, by a chunked backend's ``forward`` and ``backward``."""
    state = None if state is None else state.rows()
    kv, z, angle = (None, None, None) if state is None else (state.kv, state.z, state.angle)
    save = torch.is_grad_enabled() and needs_gradients(call, state)
    run: Any = _attend
    if transformed():
        run = _Transformed.apply
    elif save and _plain(call, state):
        run = _Recorded.apply
    out, kv, z, *_ = run(backend, *call, kv, z, angle, save)
    return out, Sums(kv, z, call.last_angle(angle)) if call.want_state else None


def _plain(call: Call, state: LinearAttentionState | None) -> bool:
    """Whether autograd alone looks on: no compiler or dispatch mode, no tensor of another kind.

    The operator's own autograd costs more than a short call; ``_Recorded`` is the same without it.
    """
    if torch.compiler.is_compiling():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None:
        return False
    tensors = call if state is None else (*call, state.kv, state.z, state.angle)
    return all(type(x) in (Tensor, Parameter) for x in tensors if isinstance(x, Tensor))


def _read(arguments: Sequence[Any]) -> tuple[ModuleType, Call, Sums | None]:
    """The backend, the call and the sums that the operator's arguments hold."""
    name, fields, (kv, z, angle) = (
        arguments[0],
        arguments[1 : 1 + _FIELDS],
        arguments[1 + _FIELDS : 4 + _FIELDS],
    )
    return _module(name), Call(*fields), None if kv is None else Sums(kv, z, angle)


@cache
def _module(backend: str) -> ModuleType:
    return import_module(f"linrope.backends.{backend}")


def _full_precision(call: Call) -> AbstractContextManager[object]:
    """Without autocast, where there is some: entering and leaving its context takes time."""
    device = call.v.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _absent(like: Tensor) -> Tensor:
    """In place of None, which an operator cannot return."""
    return like.new_empty(0)


def _new_out(call: Call) -> Tensor:
    return _absent(call.v) if call.q is None else call.v.new_empty(*call.q.shape[:3], call.v.shape[3])


def _new_sums(call: Call, sums: Sums | None) -> tuple[Tensor, Tensor]:
    if not call.want_state:
        return _absent(call.v), _absent(call.v)
    (_, _, g, f), e, s = call.k.shape, call.v.shape[3], call.sequences
    wide = torch.promote_types(call.v.dtype, torch.float32)
    kv_dtype, z_dtype = (wide, torch.float64) if sums is None else (sums.kv.dtype, sums.z.dtype)
    return call.v.new_empty(s, g, f, e, dtype=kv_dtype), call.v.new_empty(s, g, f, dtype=z_dtype)


@torch.library.custom_op(
    "linrope::attend",
    mutates_args=(),
    schema=f"({_ARGUMENTS}, bool save) -> (Tensor, Tensor, Tensor, Tensor[])",
)
def _attend(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    return _run(*arguments)


def _run(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """out, the last kv and z, and what the backend saves for its backward pass."""
    backend, call, sums = _read(arguments)
    if call.k.shape[0] == 0:
        return _new_out(call), *_new_sums(call, sums), backend.new_saved(call) if arguments[-1] else []
    with _full_precision(call):
        out, last, saved = backend.forward(call, sums, arguments[-1])
    out = _absent(call.v) if out is None else out
    kv, z = (_absent(call.v), _absent(call.v)) if last is None else last
    return out, kv, z, saved


@_attend.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    backend, call, sums = _read(arguments)
    return _new_out(call), *_new_sums(call, sums), backend.new_saved(call) if arguments[-1] else []


def _new_gradients(call: Call, sums: Sums | None) -> list[Tensor]:
    inputs = (*call[:5], *(() if sums is None else sums[:2]))
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs if x is not None]


@torch.library.custom_op(
    "linrope::attend_backward", mutates_args=(),
    schema=f"({_ARGUMENTS}, Tensor[] results, Tensor? g_out, Tensor? g_kv, Tensor? g_z) -> Tensor[]",
)  # fmt: skip
def _attend_backward(*arguments: Any) -> list[Tensor]:
    return _run_backward(*arguments)


def _run_backward(*arguments: Any) -> list[Tensor]:
    """The gradients of what there is among q, k, v, log_decay, angle_steps, kv and z."""
    backend, call, sums = _read(arguments)
    results, g_out, g_kv, g_z = arguments[-4:]
    if call.k.shape[0] == 0:
        return _new_gradients(call, sums)
    with _full_precision(call):
        gradients = backend.backward(call, sums, results, g_out, g_kv, g_z)
    return [x for x in gradients if x is not None]


@_attend_backward.register_fake
def _(*arguments: Any) -> list[Tensor]:
    return _new_gradients(*_read(arguments)[1:])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *arguments, _save = inputs
    out, kv, z, saved = output
    backend, call, _ = _read(arguments)
    reads = backend.READS_RESULTS  # of triton a function, since few of its calls do
    results = [out, kv, z, *saved] if (reads(call) if callable(reads) else reads) else list(saved)
    ctx.tensors = [i for i, x in enumerate(arguments) if isinstance(x, Tensor)]
    ctx.others = [None if isinstance(x, Tensor) else x for x in arguments]
    ctx.save_for_backward(*(arguments[i] for i in ctx.tensors), *results)
    ctx.set_materialize_grads(False)
    ctx.recorded = False


def _backward(ctx: Any, g_out: Tensor | None, g_kv: Tensor | None, g_z: Tensor | None, _: Any = None) -> Any:
    arguments, tensors = list(ctx.others), list(ctx.saved_tensors)
    for i in ctx.tensors:
        arguments[i] = tensors.pop(0)
    call = _read(arguments)[1]
    g_out = None if call.q is None else g_out  # compiled code gives zeros for what is absent
    g_kv, g_z = (g_kv, g_z) if call.want_state else (None, None)
    run: Any = _run_backward if ctx.recorded and not torch.is_grad_enabled() else _attend_backward
    if transformed():
        run = _TransformedBackward.run
    found = iter(run(*arguments, tensors, g_out, g_kv, g_z))
    gradients: list[Tensor | None] = [None] * (len(arguments) + 1)
    for i in (1, 2, 3, 4, 5, 1 + _FIELDS, 2 + _FIELDS):
        if arguments[i] is not None:
            gradients[i] = next(found)
    return tuple(gradients)


_attend.register_autograd(_backward, setup_context=_setup_context)


class _Recorded(torch.autograd.Function):
    """The operator and its gradient without the dispatcher: see ``_plain``."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        results = _run(*arguments)
        _setup_context(ctx, arguments, results)
        ctx.recorded = True
        return results[:3]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return _backward(ctx, *gradients)


class _Transformed(torch.autograd.Function):
    """The operator within torch.func's transformations, which want it in this form."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        out, kv, z, saved = _attend(*arguments)
        return out, kv, z, *saved

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _setup_context(ctx, inputs, (*output[:3], output[3:]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return _backward(ctx, *gradients[:3])


class _TransformedBackward(torch.autograd.Function):
    """Its backward pass, likewise; arguments in another order, since lists of tensors are not followed."""

    generate_vmap_rule = True

    @classmethod
    def run(cls, *arguments: Any) -> Any:
        *call, results, g_out, g_kv, g_z = arguments
        return cls.apply(*call, g_out, g_kv, g_z, *results)  # type: ignore[no-untyped-call]

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        end = _FIELDS + 7  # the backend's name, the call, three sums and three gradients
        return tuple(
            _attend_backward(*arguments[: end - 3], list(arguments[end:]), *arguments[end - 3 : end])
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        raise RuntimeError("second derivatives: got a fused backend, expected backend='reference'")


def _one_after_another(operator: Any) -> Any:
    """vmap's rule for an operator: as many calls of it as there are."""

    def rule(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
        dims, spec = pytree.tree_flatten(in_dims, is_leaf=lambda x: x is None)
        leaves = pytree.tree_flatten(arguments, is_leaf=lambda x: x is None)[0]

        def run(i: int) -> Any:
            one = [x if d is None else x.select(d, i) for x, d in zip(leaves, dims, strict=True)]
            return operator(*pytree.tree_unflatten(one, spec))

        results = pytree.tree_map(lambda *x: torch.stack(x), *(run(i) for i in range(info.batch_size)))
        return results, pytree.tree_map(lambda _: 0, results)

    return rule


_attend.register_vmap(_one_after_another(_attend))
_attend_backward.register_vmap(_one_after_another(_attend_backward))

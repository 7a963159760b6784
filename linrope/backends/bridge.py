"""The operator behind all chunked backends: one opaque node for autograd and for torch.compile.

Operators take flat lists of arguments. ``flatten`` and ``unflatten`` turn a call into such a list and back. The list,
its schema and the indices of its differentiable tensors follow from the fields of ``Call``.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, cast, get_type_hints

import torch
from torch import Tensor

from linrope.backends.protocol import ChunkedBackend
from linrope.common.precision import full_precision
from linrope.common.private_names import transformed
from linrope.common.tracing import check_not_in_onnx, plain
from linrope.recurrence.call import (
    INPUTS,
    Call,
    Inputs,
    Resolved,
    ResultGradients,
    Settings,
    Sums,
    TokenLayout,
    needs_gradients,
    sums_of,
)
from linrope.recurrence.state import LinearAttentionState

_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    str: "str",
    bool: "bool",
    float: "float",
}
# The plan has used up the other fields of a call: see ``Call``.
_FIELDS = tuple(field.name for group in (Inputs, TokenLayout, Settings, Resolved) for field in fields(group))
_ARGUMENTS = ("backend", *_FIELDS, *Sums._fields)
_DIFFERENTIABLE = [_ARGUMENTS.index(name) for name in (*INPUTS, "kv", "z")]


def _schema() -> str:
    """The types and names of the list that ``flatten`` makes."""
    hints = get_type_hints(Call) | {"backend": str, "feature_map": str, "positions": Tensor}
    hints |= dict.fromkeys(Sums._fields, Tensor | None)
    return ", ".join(f"{_TYPES[hints[name]]} {name}" for name in _ARGUMENTS)


def flatten(backend: str, call: Call, sums: Sums | None) -> tuple[Any, ...]:
    """The operator's arguments, without ``save``."""
    return backend, *[getattr(call, name) for name in _FIELDS], *(sums or (None, None, None))


def unflatten(arguments: Sequence[Any]) -> tuple[ChunkedBackend, Call, Sums | None]:
    """The backend, the call and the incoming sums from the operator's arguments."""
    named = dict(zip(_ARGUMENTS, arguments))
    backend, kv, z, angle = (named.pop(name) for name in ("backend", *Sums._fields))
    return _module(backend), Call(**named), None if kv is None else Sums(kv, z, angle)


def _module(name: str) -> ChunkedBackend:
    from linrope.backends import load  # the table imports the backends, which import this module

    return cast(ChunkedBackend, load(name))


def attend(backend: str, call: Call, state: LinearAttentionState | None) -> tuple[Tensor, Sums | None]:
    """Runs a chunked backend with autograd and torch.compile. Returns out and, if wanted, the last sums."""
    state = None if state is None else state.rows()
    sums = sums_of(state)
    save = torch.is_grad_enabled() and needs_gradients(call, state)
    arguments = flatten(backend, call, sums)
    if save and plain(x for x in arguments if isinstance(x, Tensor)):
        inputs = [arguments[i] for i in _DIFFERENTIABLE]
        out, kv, z = _WithoutDispatcher.apply(arguments, call, sums, *inputs)  # type: ignore[no-untyped-call]
    else:
        run: Any = _Transformed.apply if transformed() else _attend
        out, kv, z, *_ = run(*arguments, save)
    if not call.return_state:
        return out, None
    return out, Sums(kv, z, call.last_angle(None if sums is None else sums.angle))


def _absent(like: Tensor) -> Tensor:
    """An empty tensor, which stands for None: custom operators cannot return optionals."""
    return like.new_empty(0)


def _new_out(call: Call) -> Tensor:
    if call.q is None:
        return _absent(call.v)
    b, n, heads, _ = call.q.shape
    return call.v.new_empty(b, n, heads * call.value_group, call.v.shape[3])


def _new_sums(call: Call, sums: Sums | None) -> tuple[Tensor, Tensor]:
    if not call.return_state:
        return _absent(call.v), _absent(call.v)
    (g, e), f, s = call.v.shape[2:], call.k.shape[3], call.sequences
    wide = torch.promote_types(call.v.dtype, torch.float32)
    kv_dtype, z_dtype = (wide, torch.float64) if sums is None else (sums.kv.dtype, sums.z.dtype)
    return call.v.new_empty(s, g, f, e, dtype=kv_dtype), call.v.new_empty(s, g, f, dtype=z_dtype)


@torch.library.custom_op(
    "linrope::attend",
    mutates_args=(),
    schema=f"({_schema()}, bool save) -> (Tensor, Tensor, Tensor, Tensor[])",
)
def _attend(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    return _run(*arguments)


def _run(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """out, the last kv and z, and what the backend saves for its backward pass."""
    return _compute(*unflatten(arguments), arguments[-1])


def _compute(
    backend: ChunkedBackend, call: Call, sums: Sums | None, save: bool
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    if call.k.shape[0] == 0:
        return _new_out(call), *_new_sums(call, sums), backend.new_saved(call) if save else []
    with full_precision(call.v.device):
        out, last, saved = backend.forward(call, sums, save)
    out = _absent(call.v) if out is None else out
    kv, z = (_absent(call.v), _absent(call.v)) if last is None else last
    return out, kv, z, saved


@_attend.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    check_not_in_onnx(arguments[0], "'reference' or 'onnx'")
    backend, call, sums = unflatten(arguments)
    return _new_out(call), *_new_sums(call, sums), backend.new_saved(call) if arguments[-1] else []


def _new_gradients(call: Call, sums: Sums | None) -> list[Tensor]:
    tensors = [getattr(call, name) for name in INPUTS] + ([] if sums is None else [sums.kv, sums.z])
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors if x is not None]


@torch.library.custom_op(
    "linrope::attend_backward",
    mutates_args=(),
    schema=f"({_schema()}, Tensor[] results, Tensor? g_out, Tensor? g_kv, Tensor? g_z) -> Tensor[]",
)
def _attend_backward(*arguments: Any) -> list[Tensor]:
    return _run_backward(*arguments)


def _run_backward(*arguments: Any) -> list[Tensor]:
    """The gradients of the inputs that are present among q, k, v, log_decay, angle_steps, write, kv and z."""
    return _compute_backward(*unflatten(arguments), *arguments[-4:])


def _compute_backward(
    backend: ChunkedBackend, call: Call, sums: Sums | None, results: list[Tensor], *g: Tensor | None
) -> list[Tensor]:
    if call.k.shape[0] == 0:  # the batch is empty, but gates of batch size 1 are not: their gradient is 0
        return [x.zero_() for x in _new_gradients(call, sums)]
    with full_precision(call.v.device):
        gradients = backend.backward(call, sums, results, ResultGradients(*g))
    return [x for x in gradients if x is not None]


@_attend_backward.register_fake
def _(*arguments: Any) -> list[Tensor]:
    return _new_gradients(*unflatten(arguments)[1:])


def _refuse(ctx: Any, *_: Any) -> Any:
    raise RuntimeError(f"second derivatives: got backend={ctx.backend!r}, expected 'reference'")


def _keep_backend(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.backend = inputs[0]


_attend_backward.register_autograd(_refuse, setup_context=_keep_backend)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *arguments, _save = inputs
    backend, call, _ = unflatten(arguments)
    _keep(ctx, arguments, output, backend.reads_results(call))


def _keep(ctx: Any, arguments: Sequence[Any], output: Any, reads_results: bool) -> None:
    out, kv, z, saved = output
    results = [out, kv, z, *saved] if reads_results else list(saved)
    ctx.tensor_indices = [i for i, x in enumerate(arguments) if isinstance(x, Tensor)]
    ctx.non_tensors = [None if isinstance(x, Tensor) else x for x in arguments]
    ctx.save_for_backward(*(arguments[i] for i in ctx.tensor_indices), *results)
    ctx.set_materialize_grads(False)
    ctx.skipped_dispatcher = False


def _backward(ctx: Any, *gradients_of_results: Any) -> Any:
    gradients: list[Tensor | None] = [None] * (len(_ARGUMENTS) + 1)
    for i, x in zip(_DIFFERENTIABLE, _input_gradients(ctx, *gradients_of_results[:3]), strict=True):
        gradients[i] = x
    return tuple(gradients)


def _input_gradients(ctx: Any, *gradients_of_results: Tensor | None) -> list[Tensor | None]:
    """The gradients of the arguments at ``_DIFFERENTIABLE``."""
    arguments, tensors = list(ctx.non_tensors), list(ctx.saved_tensors)
    for i in ctx.tensor_indices:
        arguments[i] = tensors.pop(0)
    backend, call, sums = unflatten(arguments)
    g = ResultGradients(*gradients_of_results)
    if call.q is None:  # compiled code passes zeros for absent results
        g = g._replace(out=None)
    if not call.return_state:
        g = g._replace(kv=None, z=None)
    if transformed():
        found = _TransformedBackward.run(*arguments, tensors, *g)
    elif ctx.skipped_dispatcher and not torch.is_grad_enabled():
        found = _compute_backward(backend, call, sums, tensors, *g)
    else:
        found = _attend_backward(*arguments, tensors, *g)
    present = iter(found)
    return [None if arguments[i] is None else next(present) for i in _DIFFERENTIABLE]


_attend.register_autograd(_backward, setup_context=_setup_context)


class _WithoutDispatcher(torch.autograd.Function):
    """The operator and its gradient as a plain autograd.Function. The dispatcher would take longer than a short call.

    arguments holds the operator's arguments in one tuple, because autograd inspects every argument of a Function. The
    tensors that may need gradients are passed again as inputs.
    """

    @staticmethod
    def forward(
        ctx: Any, arguments: tuple[Any, ...], call: Call, sums: Sums | None, *inputs: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        backend = _module(arguments[0])
        results = _compute(backend, call, sums, True)
        _keep(ctx, arguments, results, backend.reads_results(call))
        ctx.skipped_dispatcher = True
        return results[:3]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return None, None, None, *_input_gradients(ctx, *gradients)


class _Transformed(torch.autograd.Function):
    """The operator in the form that torch.func's transformations require."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        out, kv, z, saved = _attend(*arguments)
        return out, kv, z, *saved

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _keep_backend(ctx, inputs, output)
        _setup_context(ctx, inputs, (*output[:3], output[3:]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return _backward(ctx, *gradients)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        _refuse(ctx)


class _TransformedBackward(torch.autograd.Function):
    """The backward operator in the form that torch.func requires, which ignores lists: each result is an argument."""

    generate_vmap_rule = True

    @classmethod
    def run(cls, *arguments: Any) -> Any:
        *flat, results, g_out, g_kv, g_z = arguments
        return cls.apply(*flat, g_out, g_kv, g_z, *results)  # type: ignore[no-untyped-call]

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        flat, (g_out, g_kv, g_z, *results) = arguments[: len(_ARGUMENTS)], arguments[len(_ARGUMENTS) :]
        return tuple(_attend_backward(*flat, results, g_out, g_kv, g_z))

    setup_context = staticmethod(_keep_backend)
    backward = jvp = staticmethod(_refuse)


def _vmap_by_loop(operator: Any) -> Any:
    """vmap's rule for an operator: one call per entry of the batch."""

    def rule(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
        def entry(x: Any, dim: Any, i: int) -> Any:
            if isinstance(x, (list, tuple)):
                return [entry(y, d, i) for y, d in zip(x, dim, strict=True)]
            return x if dim is None else x.select(dim, i)

        def stacked(results: Any) -> Any:
            if isinstance(results[0], Tensor):
                return torch.stack(results)
            return type(results[0])(map(stacked, zip(*results, strict=True)))

        def zeros(result: Any) -> Any:
            return 0 if isinstance(result, Tensor) else type(result)(map(zeros, result))

        results = [operator(*entry(arguments, in_dims, i)) for i in range(info.batch_size)]
        return stacked(results), zeros(results[0])

    return rule


_attend.register_vmap(_vmap_by_loop(_attend))
_attend_backward.register_vmap(_vmap_by_loop(_attend_backward))

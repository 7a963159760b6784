"""What every backend is given: one frozen Call. And the one operator that all chunked backends share.

A backend is a module with ``attend(call, state) -> (out, sums)`` and ``supports(call, state) -> why not, or
None``. A chunked backend gives ``forward`` and ``backward`` instead, and takes ``attend`` from here: to
torch.compile and autograd each call of it is then one opaque operator, whatever the length.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils import _pytree as pytree

from linrope.packing import at_last, rising_bounds, spread, sums_so_far
from linrope.rotary import cos_sin_of_turns, spell_out, to_turns
from linrope.state import LinearAttentionState


class Sums(NamedTuple):
    """What a sequence's keys add up to, as its last token sees them."""

    kv: Tensor  # (s, g, f, e) float32 or float64; s sequences: b, or as many as are packed
    z: Tensor  # (s, g, f)
    angle: Tensor | None  # (s, g or 1, pairs) int64: the sum of angle_steps in 2^-64 turns


class Call(NamedTuple):
    """One call of the operation, checked and resolved.

    Features are phi(q) and psi(k) where ``feature_map`` is the name of an elementwise map; "identity": q
    and k are
    features already. Token t's log_decay and angle_steps are 0 where a mask hides it.
    """

    q: Tensor | None  # (b, n, h, f); None: the last state alone is wanted
    k: Tensor  # (b, m, g, f)
    v: Tensor  # (b, m, g, e)
    log_decay: Tensor | None  # (b or 1, m, g or 1) <= 0: all decay per head, of whatever origin; causal only
    angle_steps: Tensor | None  # (b or 1, m, g or 1, pairs) radians
    theta: Tensor | None  # (axes, g or 1, pairs) int64: 2^-64 turns per position
    positions: (
        Tensor  # (b or 1, n) int64; (b or 1, 1): consecutive from there on; with axes (b or 1, n, axes)
    )
    key_positions: Tensor | None  # of keys, likewise; None: as positions
    fade: Tensor | None  # (f,) float64: xPos' log decay per position, in the numerator only
    distances: Tensor | None  # (b or 1, m) int64, beside fade: positions passed since the token before
    key_mask: Tensor | None  # (b, m) bool, True: attend
    cu_seqlens: Tensor | None  # (s + 1,) int32 or int64, b == 1: packed sequences; nobody has checked a GPU's
    layout: str  # of the pairs that turn: "interleaved" or "half"
    feature_map: str
    causal: bool
    normalize: bool
    eps: float
    eps_mode: str  # "clamp": max(den, eps); "add": den + eps
    want_state: bool

    @property
    def pairs(self) -> int:
        """How many pairs of features turn."""
        angles = self.theta if self.theta is not None else self.angle_steps
        return 0 if angles is None else angles.shape[-1]

    @property
    def sequences(self) -> int:
        """s."""
        return self.k.shape[0] if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    @property
    def group(self) -> int:
        """r: query heads per key/value head."""
        return 1 if self.q is None else self.q.shape[2] // self.k.shape[2]

    @property
    def bounds(self) -> Tensor | None:
        return rising_bounds(self.cu_seqlens, self.k.shape[1])

    def turns(self, angle: Tensor | None, *, keys: bool = False) -> Tensor | None:
        """(b or 1, n, g or 1, pairs) int64: Theta of all queries or keys, in 2^-64 turns that wrap."""
        total, n = None, self.k.shape[1] if keys or self.q is None else self.q.shape[1]
        if self.theta is not None:
            given = self.positions if self.key_positions is None or not keys else self.key_positions
            axes = given if given.ndim == 3 else spell_out(given, n)[..., None]
            total = (axes[..., None, None] * self.theta).sum(2)
        if self.angle_steps is not None:
            steps = sums_so_far(to_turns(self.angle_steps), self.bounds)
            if angle is not None:
                steps = steps + spread(angle, n, self.bounds)
            total = steps if total is None else total + steps
        return total

    def cos_sin(
        self, angle: Tensor | None, dtype: torch.dtype, *, keys: bool = False
    ) -> tuple[Tensor, Tensor] | None:
        """Of all angles, formed in float64."""
        turns = self.turns(angle, keys=keys)
        return None if turns is None else cos_sin_of_turns(turns, dtype)

    def last_angle(self, angle: Tensor | None) -> Tensor | None:
        """(s, g or 1, pairs): angle and all steps of a sequence."""
        if self.angle_steps is None:
            return None
        so_far = sums_so_far(to_turns(self.angle_steps), self.bounds)  # as sum() in onnxruntime does not wrap
        total = at_last(so_far, so_far.new_zeros(1, *so_far.shape[2:]), self.bounds).expand(
            self.sequences, -1, -1
        )
        return total.clone() if angle is None else total + angle


# ---- The operator. Its list of arguments is Call's, and the sums that the call goes on from.

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

# out, the last kv and z, and what is saved for the backward pass; None: not wanted.
Results: TypeAlias = tuple[Tensor | None, tuple[Tensor, Tensor] | None, list[Tensor]]


class Gradients(NamedTuple):
    """Of a call's tensors, in their shapes; None where there is nothing."""

    q: Tensor | None
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    angle_steps: Tensor | None
    kv: Tensor | None
    z: Tensor | None


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


def needs_gradients(call: Call, state: LinearAttentionState | None) -> bool:
    inputs = call[:5] if state is None else (*call[:5], state.kv, state.z)
    return any(x is not None and x.requires_grad for x in inputs)


def summed_to(x: Tensor, like: Tensor) -> Tensor:
    """x in the shape and dtype of like, summed where like has one entry for many."""
    ones = [i for i, (have, want) in enumerate(zip(x.shape, like.shape)) if want == 1 and have != 1]
    return (x.sum(ones, keepdim=True) if ones else x).to(like.dtype)


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


def has_tangents(call: Call, state: LinearAttentionState | None) -> bool:
    """Whether forward-mode differentiation follows an input, which an operator would drop unseen."""
    if forward_ad._current_level < 0:
        return False
    tensors = call if state is None else (*call, state.kv, state.z)
    return any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def transformed() -> bool:
    """Whether torch.func (vmap, grad, jacrev ..) transforms this call."""
    return torch._C._are_functorch_transforms_active()


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

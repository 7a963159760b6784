"""``Call``, the record of one call, and ``Sums``, ``Gradients`` and ``Results``, which backends return.

b batch, n queries, m keys, h query heads, g key/value heads, r = h / g, f features, e values, s sequences. If v has
more heads than q and k, g counts v's heads, q and k have g / value_group heads each, and h is g.
"""

from collections.abc import Collection
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from linrope.recurrence.decay import zero_hidden
from linrope.recurrence.packing import at_last, per_token, rising_bounds, sums_so_far
from linrope.recurrence.state import LinearAttentionState
from linrope.rotation.rotary import Rotary, cos_sin_of_turns, spell_out, to_turns


@dataclass(kw_only=True)
class Inputs:
    """The tensors that gradients flow to."""

    q: Tensor | None  # (b, n, h, f); None: only the last state is wanted
    k: Tensor  # (b, m, g, f)
    v: Tensor  # (b, m, g, e)
    log_decay: Tensor | None = None  # (b or 1, m, g or 1), or with a last axis of units, <= 0; causal only
    angle_steps: Tensor | None = None  # (b or 1, m, g or 1, pairs) in radians
    write: Tensor | None = None  # (b or 1, m, g or 1): the factor of each value
    erase: Tensor | None = None  # (b or 1, m, g or 1): b of the delta rule, see linear_rope_attention


@dataclass(kw_only=True)
class TokenLayout:
    """The tokens' positions, and which tokens are hidden or packed."""

    # Tensor (b or 1, n), (b or 1, n, axes), or (b or 1, 1): the first of n that follow each other. None: from 0 or the
    # state's position
    positions: Any = None
    key_positions: Tensor | None = None  # the same for keys; None: the queries' positions
    key_mask: Tensor | None = None  # (b, m) bool; False: hidden
    cu_seqlens: Tensor | None = None  # (s + 1,), b is then 1: bounds of packed sequences; see ``bounds``


@dataclass(kw_only=True)
class Settings:
    """Options of the computation."""

    feature_map: Any = "elu+1"  # a name, a FeatureMap, or None: q and k are features
    causal: bool = True
    normalize: bool = True
    eps: float = 1e-6
    eps_mode: str = "clamp"  # max(den, eps); "add": den + eps
    return_state: bool = False


@dataclass(kw_only=True)
class Resolved:
    """What the operation makes of ``rotary`` and of the map for the backends."""

    # 0: ``feature_map`` names the whole map. Otherwise the map is a UnitMap and ``feature_map`` names its activation.
    # This is then the length of the features of queries; those of keys have length 1.
    query_factor: float = 0.0

    theta_turns: Tensor | None = None  # (axes, g or 1, pairs) int64: theta in 2^-64 turns per position
    layout: str = "interleaved"  # how features pair up to rotate; or "half"
    xpos_log_decay: Tensor | None = None  # (f,) float64 per position, in the numerator only
    distances: Tensor | None = None  # (b or 1, m) int64, with xPos: positions since the previous token


@dataclass(kw_only=True)
class Call(Resolved, Settings, TokenLayout, Inputs):
    """One call of ``linear_rope_attention``: its arguments by their public names, which its docstring describes.

    A backend gets the call that ``linrope.operation.attend`` makes of it: checked; q and k mapped, apart from an
    elementwise map, whose name ``feature_map`` then is; ``log_decay`` and ``angle_steps`` as totals per token that are
    0 where the mask hides one, with the fixed ``decay`` in log_decay; ``positions`` as int64; and ``rotary`` resolved.
    It gets the state to continue from as an argument of its own: ``linrope.recurrence.stabilizer`` may have rescaled
    ``call.state``.
    """

    rotary: Rotary | None = None
    decay: Tensor | None = None
    rope_order: str = "after"
    backend: str = "auto"
    state: LinearAttentionState | None = None

    def changed(self, **fields: Any) -> "Call":
        """A copy with other values of these fields."""
        if torch.compiler.is_compiling():  # PyTorch 2.11 cannot trace the lines below
            return replace(self, **fields)
        call = object.__new__(Call)
        call.__dict__.update(self.__dict__, **fields)
        return call

    @property
    def num_queries(self) -> int:
        """n: the number of queries, or of keys if only the state is wanted."""
        return self.k.shape[1] if self.q is None else self.q.shape[1]

    @property
    def decays_by_position(self) -> bool:
        """True if keys decay with the distance between positions."""
        return self.decay is not None or (self.rotary is not None and self.rotary.xpos is not None)

    @property
    def pairs(self) -> int:
        """The number of feature pairs that rotate."""
        if self.theta_turns is None and self.rotary is not None and self.rope_order == "after":
            return self.rotary.rotary_dim // 2
        angles = self.theta_turns if self.theta_turns is not None else self.angle_steps
        return 0 if angles is None else angles.shape[-1]

    @property
    def decays_by_unit(self) -> bool:
        """True if log_decay has a number per pair that turns and per feature that does not, not one per head."""
        return isinstance(self.log_decay, Tensor) and self.log_decay.ndim == 4

    @property
    def sequences(self) -> int:
        """s: the batch, or the number of packed sequences."""
        return self.k.shape[0] if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    @property
    def group(self) -> int:
        """r: query heads per key/value head."""
        return 1 if self.q is None else self.q.shape[2] // self.k.shape[2]

    @property
    def value_group(self) -> int:
        """Value heads per head of q and k; 1, unless v has more heads than they have."""
        return self.v.shape[2] // self.k.shape[2]

    def expanded(self, *, written: bool = True) -> "Call":
        """The same call, but each value head has a query and a key of its own, and values are multiplied by write.

        The products are float32 or wider. written=False: values are not multiplied, and write stays.
        """
        v, write = self.v, self.write
        if self.value_group == 1 and (write is None or not written):
            return self
        q, k = repeat_heads(v, self.q, self.k)
        if written and write is not None:
            v, factors = zero_hidden(v, self.key_mask), zero_hidden(write, self.key_mask)
            v, write = v * factors[..., None].to(torch.promote_types(v.dtype, torch.float32)), None
        return replace(self, q=q, k=k, v=v, write=write)

    def by_heads(self, size: int) -> "list[Call]":
        """The call, cut into calls of ``size`` heads of k each; the last may have fewer."""
        count = -(-self.k.shape[2] // size)
        sizes = {"q": size * self.group, "k": size}  # of the rest: size * self.value_group
        dims = dict.fromkeys(INPUTS, 2) | {"theta_turns": 1}
        parts = {
            name: split_heads(getattr(self, name), dim, sizes.get(name, size * self.value_group), count)
            for name, dim in dims.items()
        }
        return [replace(self, **{name: part[i] for name, part in parts.items()}) for i in range(count)]

    @property
    def bounds(self) -> Tensor | None:
        """cu_seqlens, safe to index with. On a GPU its values are unchecked."""
        return rising_bounds(self.cu_seqlens, self.k.shape[1])

    def angles_in_turns(self, angle: Tensor | None, *, keys: bool = False) -> Tensor | None:
        """Theta of all queries or, with ``keys``, keys: (b or 1, n, g or 1, pairs) int64 in 2^-64 turns that wrap.

        None without a rotation. angle: the incoming state's sum of angle steps, (s, g or 1, pairs); None counts as 0.
        """
        total, n = None, self.k.shape[1] if keys or self.q is None else self.q.shape[1]
        if self.theta_turns is not None:
            positions = self.positions if self.key_positions is None or not keys else self.key_positions
            coordinates = positions if positions.ndim == 3 else spell_out(positions, n)[..., None]
            total = (coordinates[..., None, None] * self.theta_turns).sum(2)
        if self.angle_steps is not None:
            steps = sums_so_far(to_turns(self.angle_steps), self.bounds)
            if angle is not None:
                steps = steps + per_token(angle, n, self.bounds)
            total = steps if total is None else total + steps
        return total

    def cos_sin(
        self, angle: Tensor | None, dtype: torch.dtype, *, keys: bool = False
    ) -> tuple[Tensor, Tensor] | None:
        """cos and sin of ``angles_in_turns``, computed in float64 and cast to dtype."""
        turns = self.angles_in_turns(angle, keys=keys)
        return None if turns is None else cos_sin_of_turns(turns, dtype)

    def last_angle(self, angle: Tensor | None) -> Tensor | None:
        """The angle of an incoming state plus all steps of each sequence, (s, g or 1, pairs)."""
        if self.angle_steps is None:
            return None
        # The last of the cumulative sums, because onnxruntime's sum does not wrap.
        so_far = sums_so_far(to_turns(self.angle_steps), self.bounds)
        zero = so_far.new_zeros(1, *so_far.shape[2:])
        total = at_last(so_far, zero, self.bounds).expand(self.sequences, -1, -1)
        return total.clone() if angle is None else total + angle


INPUTS = tuple(field.name for field in fields(Inputs))
TOKEN_INPUTS = INPUTS[3:]  # all but q, k and v: each is None or has an axis of tokens
# What a backend receives, in the operator's order. A plan has used up the other fields of a call.
RECEIVED = {each.name: each for group in (Inputs, TokenLayout, Settings, Resolved) for each in fields(group)}
EPS_MODES = ("clamp", "add")


# What a call may lack, with the defaults. Every call that a backend receives has a map and positions.
_OPTIONAL = {
    name: each.default
    for name, each in RECEIVED.items()
    if each.default is not MISSING and name not in ("feature_map", "positions")
}


def option_beyond(known: Collection[str], call: Call) -> str | None:
    """The name of an option that the call has and that is none of the known ones; None: it has no such option."""
    for name, default in _OPTIONAL.items():
        if name not in known:
            value = getattr(call, name)
            if value is not default and (isinstance(value, Tensor) or value != default):
                return name
    return None


class Sums(NamedTuple):
    """Sums over the keys of each sequence, decayed to its last token."""

    kv: Tensor  # (s, g, f, e) float32 or float64
    z: Tensor  # (s, g, f); with erase 0
    angle: Tensor | None  # (s, g or 1, pairs) int64: the sum of angle_steps in 2^-64 turns


class Gradients(NamedTuple):
    """The gradients of a call's inputs and of its incoming kv and z, or None for those that the call lacks.

    The order is that of ``Inputs``, then kv and z.
    """

    q: Tensor | None
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    angle_steps: Tensor | None
    write: Tensor | None
    erase: Tensor | None
    kv: Tensor | None
    z: Tensor | None


class ResultGradients(NamedTuple):
    """The gradients of a call's out and of its last kv and z, or None for those that the loss does not depend on."""

    out: Tensor | None = None
    kv: Tensor | None = None
    z: Tensor | None = None


# out, the last kv and z (None if not wanted), and the tensors saved for the backward pass.
Results: TypeAlias = tuple[Tensor | None, tuple[Tensor, Tensor] | None, list[Tensor]]


def sums_of(state: LinearAttentionState | None) -> Sums | None:
    """The sums that a state holds."""
    return None if state is None else Sums(state.kv, state.z, state.angle)


def repeat_heads(v: Tensor, *tensors: Any) -> list[Any]:
    """Each tensor (b, n, heads, ..) or None, with its heads repeated: as many as v has.

    A single head is not copied. A tensor with at least as many heads as v is returned as it is.
    """

    def repeated(x: Tensor) -> Tensor:
        times = v.shape[2] // x.shape[2]
        return x if times <= 1 else x.unsqueeze(3).expand(*x.shape[:3], times, *x.shape[3:]).flatten(2, 3)

    return [None if x is None else repeated(x) for x in tensors]


def split_heads(x: Tensor | None, dim: int, size: int, count: int) -> Any:
    """x cut along its axis of heads into ``count`` parts of ``size`` heads. Each part has a single shared head."""
    return [x] * count if x is None or x.shape[dim] == 1 else x.split(size, dim)


def contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def with_dense_rows(x: Tensor) -> Tensor:
    """x with a last stride of 1, which the kernels require. Other strides may have any value."""
    return x if x.stride(-1) == 1 else x.contiguous()


def dense_heads(tensors: tuple[Tensor, ...], count: int) -> tuple[Tensor, ...]:
    """The tensors, the first ``count`` of them (q, if any, k and v) with a last stride of 1."""
    for x in tensors[:count]:
        if x.stride(-1) != 1:
            return *map(with_dense_rows, tensors[:count]), *tensors[count:]
    return tensors


def differentiable(call: Call, state: LinearAttentionState | None) -> list[Tensor]:
    """The tensors that gradients may flow to."""
    tensors = [getattr(call, name) for name in (*INPUTS, "decay")]
    if state is not None:
        tensors += [state.kv, state.z]
    return [x for x in tensors if x is not None]


def needs_gradients(call: Call, state: LinearAttentionState | None) -> bool:
    """True if autograd will ask for gradients of this call."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in differentiable(call, state))


def summed_to(x: Tensor, like: Tensor) -> Tensor:
    """x in the shape and dtype of ``like``, summed over the axes that ``like`` broadcasts."""
    ones = [i for i, (have, want) in enumerate(zip(x.shape, like.shape)) if want == 1 and have != 1]
    return (x.sum(ones, keepdim=True) if ones else x).to(like.dtype)

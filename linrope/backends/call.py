"""What every backend is given: one frozen Call.

A backend is a module with ``attend(call, state) -> (out, sums)`` and ``supports(call, state) -> why not, or
None``. A chunked backend gives ``forward`` and ``backward`` instead, and takes ``attend`` from
``linrope.backends.operators``.
"""

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

from linrope.rotation.rotary import cos_sin_of_turns, spell_out, to_turns
from linrope.sequence.packing import at_last, rising_bounds, spread, sums_so_far
from linrope.sequence.state import LinearAttentionState


class Sums(NamedTuple):
    """What a sequence's keys add up to, as its last token sees them."""

    kv: Tensor  # (s, g, f, e) float32 or float64; s sequences: b, or as many as are packed
    z: Tensor  # (s, g, f)
    angle: Tensor | None  # (s, g or 1, pairs) int64: the sum of angle_steps in 2^-64 turns


class Call(NamedTuple):
    """One call of the operation, checked and resolved.

    Features are phi(q) and psi(k) where ``feature_map`` is the name of an elementwise map; "identity": q
    and k are features already. Token t's log_decay and angle_steps are 0 where a mask hides it.
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


def needs_gradients(call: Call, state: LinearAttentionState | None) -> bool:
    inputs = call[:5] if state is None else (*call[:5], state.kv, state.z)
    return any(x is not None and x.requires_grad for x in inputs)


def has_tangents(call: Call, state: LinearAttentionState | None) -> bool:
    """Whether forward-mode differentiation follows an input, which an operator would drop unseen."""
    if forward_ad._current_level < 0:
        return False
    tensors = call if state is None else (*call, state.kv, state.z)
    return any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def transformed() -> bool:
    """Whether torch.func (vmap, grad, jacrev ..) transforms this call."""
    return torch._C._are_functorch_transforms_active()


def summed_to(x: Tensor, like: Tensor) -> Tensor:
    """x in the shape and dtype of like, summed where like has one entry for many."""
    ones = [i for i, (have, want) in enumerate(zip(x.shape, like.shape)) if want == 1 and have != 1]
    return (x.sum(ones, keepdim=True) if ones else x).to(like.dtype)

"""Combines the states of several ranks into one, decayed to the last token of all.

b batch, g key/value heads, f features, e values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from linrope.recurrence.state import LinearAttentionState
from linrope.recurrence.transition import Transition
from linrope.rotation.rotary import cos_sin_of_turns, rotate

# The optional fields of ``Call`` that shards know. ``fold`` computes their effect on a state, if they have any, but
# that of erase is computed in turn (``pipeline.py``).
KNOWN = (
    *("log_decay", "angle_steps", "write", "erase", "key_positions", "key_mask", "cu_seqlens"),
    *("causal", "normalize", "eps", "eps_mode", "return_state"),
)


class Rules(NamedTuple):
    """How a state decays and rotates as later tokens arrive."""

    log_gamma: Tensor | None  # (g,) float64: log decay per position
    xpos: Tensor | None  # (f,) float64: further log decay per position, in the numerator only
    layout: str  # how features pair up to rotate: "interleaved" or "half"


def fold(
    gathered: Mapping[str, Tensor],  # (size, b, ..): the state of each rank's tokens alone, by field
    chain: Sequence[int],
    start: LinearAttentionState,
    rules: Rules,
    *,
    fresh: bool,
    skip: int | None = None,
) -> LinearAttentionState:
    """The state after the ranks of ``chain``, in that order, without the keys of rank ``skip``.

        S <- M_s S + R(A_s) S_s        m <- max(m + D_s, m_s), if states have a log_scale

    M_s is the transition of rank s's tokens (``linrope.recurrence.transition``), D_s their summed log decay, and A_s
    the sum of the angle steps before them. Ranks outside the chain are left out, not multiplied by 0, so that an
    overflow in later tokens does not reach earlier ones.

    start: the state before the chain. fresh: whether no tokens precede the chain.
    """
    state, scale = _depending_on(start, gathered["kv"]), start.log_scale
    kv, z = state.kv, state.z
    for s in chain:
        local = {name: x[s] for name, x in gathered.items()}
        position = state.position
        distance = torch.zeros_like(position) if fresh else local["position"] - position
        transition, of_local = _decay(local.get("gates"), distance, rules), Transition(None)
        if scale is not None:
            of_scale = _decay(local.get("largest_gates", local.get("gates")), distance, rules).log
            decayed_scale = scale if of_scale is None else scale + of_scale[..., 0].detach()
            largest = torch.maximum(decayed_scale, local["log_scale"])
            transition = transition.after(Transition((scale - largest)[..., None]))
            of_local, scale = Transition((local["log_scale"] - largest)[..., None]), largest
        if not fresh:
            kv, z = transition.after(_xpos(distance, rules)).apply(kv), transition.apply(z)
        if s != skip:
            local_kv = of_local.apply(_rotated(local["kv"], state, rules.layout))
            kv, z = kv + local_kv.to(kv.dtype), z + of_local.apply(local["z"]).to(z.dtype)
        state, fresh = _moved(state, local), False
    return replace(state, kv=kv, z=z, log_scale=scale)


def follow(
    gathered: Mapping[str, Tensor], chain: Sequence[int], start: LinearAttentionState
) -> LinearAttentionState:
    """The state ``start`` with the position and the angle after the ranks of ``chain``. kv and z remain.

    gathered: (size, b, ..), the position after each rank's tokens, and the sum of their angle steps.
    """
    state = start
    for x in gathered.values():
        state = _depending_on(state, x) if x.is_floating_point() else state
    for s in chain:
        state = _moved(state, {name: x[s] for name, x in gathered.items()})
    return state


def _depending_on(state: LinearAttentionState, gathered: Tensor) -> LinearAttentionState:
    """The state, whose kv now depends on the gather, although nothing is added to it.

    A rank that skips the backward all-to-all would deadlock the others.
    """
    return replace(state, kv=state.kv + gathered[:0].sum().to(state.kv.dtype), donated=False)


def _moved(state: LinearAttentionState, local: Mapping[str, Tensor]) -> LinearAttentionState:
    """The state with the position and the angle after a rank's tokens."""
    sums: dict[str, Tensor] = {}
    for name in ("angle", "angle_gradient_path"):
        if name in local:
            before = getattr(state, name)
            sums[name] = local[name] if before is None else before + local[name]
    return replace(state, position=local["position"], **sums)  # type: ignore[arg-type]


def _decay(gates: Tensor | None, distance: Tensor, rules: Rules) -> Transition:
    """The decay of a state over all tokens of a rank, per position and by the sum of their gates, (b, g, 1 or f)."""
    if rules.log_gamma is None:
        return Transition(gates)
    return Transition(gates).after(Transition((distance[:, None] * rules.log_gamma)[..., None]))


def _xpos(distance: Tensor, rules: Rules) -> Transition:
    """What xPos's decay does to kv, (b, 1, f) float64."""
    return Transition(None if rules.xpos is None else distance[:, None, None] * rules.xpos)


def _rotated(kv: Tensor, state: LinearAttentionState, layout: str) -> Tensor:
    """R(angle) kv for kv (b, g, f, e), with the angle of the state."""
    if state.angle is None:
        return kv
    cos, sin = cos_sin_of_turns(state.angle, kv.dtype)
    if state.angle_gradient_path is not None:  # zeros that carry the gradient of the integer angle
        zero = state.angle_gradient_path.to(kv.dtype)
        cos, sin = cos - sin * zero, sin + cos * zero
    return rotate(kv.mT, cos[:, :, None], sin[:, :, None], layout).mT

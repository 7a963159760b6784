"""The states of several ranks in one, as the last of their tokens sees it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from linrope.rotation.angles import cos_sin_of_turns, rotate
from linrope.sequence.chunks import fade
from linrope.sequence.state import LinearAttentionState


class Rules(NamedTuple):
    """How a state changes while later tokens pass."""

    log_gamma: Tensor | None  # (g,) float64: log decay per position
    xpos: Tensor | None  # (f,) float64: the numerator's, beside it
    layout: str  # of the pairs that turn


def fold(
    own: Mapping[str, Tensor],  # (size, b, ..): of each rank's tokens, as if nothing came before them
    chain: Sequence[int],
    start: LinearAttentionState,
    rules: Rules,
    *,
    fresh: bool,
    skip: int | None = None,
) -> LinearAttentionState:
    """The state after the ranks of chain, in that order, without the keys of rank skip.

        S <- e^(D_s) S + R(A_s) S_s        m <- max(m + D_s, m_s), where states have a log_scale

    D_s is all log decay over rank s's tokens and A_s the sum of angles before them. Ranks that are not in the
    chain are left out, not multiplied by 0: what overflows in later tokens does not reach earlier ones.

    start: what precedes them; fresh: whether that is nothing.
    """
    # The empty slice adds nothing. Through it every rank's output depends on what was gathered, and none
    # leaves the others waiting in the backward pass.
    kv, z = start.kv + own["kv"][:0].sum(0).to(start.kv.dtype), start.z
    position, angle, slope, scale = start.position, start.angle, start.angle_slope, start.log_scale
    for s in chain:
        part = {name: x[s] for name, x in own.items()}
        passed = torch.zeros_like(position) if fresh else part["position"] - position
        log = _log_decay(part, passed, rules)
        factor = None  # of this rank's sums
        if scale is not None:
            own_scale = part["log_scale"]
            faded = scale if log is None else scale + log.detach()
            largest = torch.maximum(faded, own_scale)
            kept = scale - largest
            log = kept if log is None else log + kept
            factor, scale = (own_scale - largest).exp(), largest
        if not fresh:
            along = None if log is None else log[..., None, None]
            if rules.xpos is not None:
                numerator = passed[:, None, None, None] * rules.xpos[:, None]
                along = numerator if along is None else along + numerator
            kv, z = fade(kv, along), fade(z, None if log is None else log[..., None])
        if s != skip:
            more, more_z = _turned(part["kv"], angle, slope, rules.layout), part["z"]
            if factor is not None:
                more, more_z = more * factor[..., None, None].to(more.dtype), more_z * factor[..., None]
            kv, z = kv + more.to(kv.dtype), z + more_z.to(z.dtype)
        if "angle" in part:
            angle = part["angle"] if angle is None else angle + part["angle"]
        if "angle_slope" in part:
            slope = part["angle_slope"] if slope is None else slope + part["angle_slope"]
        position, fresh = part["position"], False
    return replace(
        start, kv=kv, z=z, position=position, angle=angle, angle_slope=slope, log_scale=scale, donated=False
    )


def _log_decay(part: Mapping[str, Tensor], passed: Tensor, rules: Rules) -> Tensor | None:
    """(b, g) float64 over all of a rank's tokens: by positions, and by gates."""
    log = part.get("gates")
    if rules.log_gamma is None:
        return log
    fixed = passed[:, None] * rules.log_gamma
    return fixed if log is None else log + fixed


def _turned(kv: Tensor, angle: Tensor | None, slope: Tensor | None, layout: str) -> Tensor:
    """R(angle) kv of kv (b, g, f, e), whose gradient goes to slope, of zeros."""
    if angle is None:
        return kv
    cos, sin = cos_sin_of_turns(angle, kv.dtype)
    if slope is not None:
        zero = slope.to(kv.dtype)
        cos, sin = cos - sin * zero, sin + cos * zero
    return rotate(kv.mT, cos[:, :, None], sin[:, :, None], layout).mT

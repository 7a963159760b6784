"""How tokens fade and turn by the data, and the running maximum that keeps exponential features in range."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from linrope.sequence.packing import at_first, at_last, previous, running_maximum, spread, sums_so_far
from linrope.sequence.state import NO_KEYS, LinearAttentionState

NOTHING_KEPT = -1e4  # e^-10000 is 0 in every dtype, and sums of such numbers stay finite


class Tokens(NamedTuple):
    """Where the tokens of a call are, and what precedes them."""

    bounds: Tensor | None  # of packed sequences
    start: Tensor  # (b or 1,), of packed sequences (s,): the position of the first token to come
    positions: Tensor  # (b or 1, m), or (b or 1, 1): consecutive from there on; with axes (b or 1, m, axes)
    key_positions: Tensor | None  # likewise; None: as positions


def distances(tokens: Tokens, m: int) -> Tensor:
    """(b or 1, m) int64: how many positions each token is from the one before it, or the state's last."""
    if tokens.positions.shape[1] == 1 and m != 1:
        return tokens.start.new_ones(1, 1).expand(1, m)
    return tokens.positions - previous(tokens.positions, tokens.start - 1, tokens.bounds)


def log_decay_of_tokens(
    decay: Tensor | None, log_decay: Tensor | None, key_mask: Tensor | None, tokens: Tokens, m: int
) -> Tensor | None:
    """(b or 1, m, g or 1): a fixed decay by positions, and gates, in one; hidden tokens' gates are 0."""
    if log_decay is not None:
        log_decay = visible(log_decay, key_mask).to(torch.promote_types(log_decay.dtype, torch.float32))
        log_decay = log_decay.clamp(min=NOTHING_KEPT)
    if decay is None:
        return log_decay
    fixed = distances(tokens, m)[..., None] * decay.double().log()
    fixed = fixed.clamp(min=NOTHING_KEPT)
    return fixed if log_decay is None else log_decay + fixed


def steps_of_tokens(
    angle_steps: Tensor | None, key_mask: Tensor | None, state: LinearAttentionState | None, tokens: Tokens
) -> Tensor | None:
    """angle_steps (b or 1, n, g or 1, pairs), hidden tokens' 0; the state's zeros join its first ones."""
    if angle_steps is None:
        return None
    steps = visible(angle_steps, key_mask)
    if state is not None and state.angle_slope is not None and steps.shape[1]:
        steps = steps + at_first(state.angle_slope, steps.shape[1], tokens.bounds).to(steps.dtype)
    return steps


def slope_of_angle(steps: Tensor, state: LinearAttentionState | None, tokens: Tokens) -> Tensor | None:
    """(s, g or 1, pairs) zeros whose gradient is that of the sums of steps, which are integers themselves."""
    if not steps.requires_grad or not torch.is_grad_enabled():
        return None
    sums = sums_so_far(steps.double(), tokens.bounds)
    before = sums.new_zeros(1, *sums.shape[2:])
    if state is not None and state.angle_slope is not None:
        before = state.angle_slope  # of a sequence without tokens: the others' sums have it
    total = at_last(sums, before, tokens.bounds)
    sequences = sums.shape[0] if tokens.bounds is None else len(tokens.bounds) - 1
    total = total.expand(sequences, -1, -1)
    return total - total.detach()


def visible(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """x (b or 1, m, ..) with 0 where the mask hides a token."""
    return x if key_mask is None else x.masked_fill(~key_mask.view(*key_mask.shape, *[1] * (x.ndim - 2)), 0)


class Stabilized(NamedTuple):
    """Keys in range, what that does to decay and state, and the running maximum m of the keys' log_scale."""

    k: Tensor
    log_decay: Tensor | None
    state: LinearAttentionState | None
    at_tokens: Tensor  # (b or 1, m, g)
    last: Tensor  # (s, g)


def stabilize(
    k: Tensor, log_scale: Tensor, log_decay: Tensor | None, state: LinearAttentionState | None,
    tokens: Tokens, *, key_mask: Tensor | None, causal: bool, exponential: bool,
) -> Stabilized:  # fmt: skip
    """Keys e^(s_i - m_i) psi_i, which fade by a_i + m_(i-1) - m_i, with the running maximum

        m_i = max(m_(i-1) + a_i, s_i)

    in place of keys e^(s_i) psi_i that fade by a_i: the same output, every number in range, no future token
    read. m is a constant to the gradient. Bidirectional calls take the maximum over all keys instead.

    k (b, m, g, f) are features psi or, where the backend applies exp itself (exponential), their logarithms;
    log_scale s is (b, m, g). Source: the stabilizer of xLSTM, arXiv 2405.04517, for feature maps.
    """
    bounds = tokens.bounds
    scale = log_scale.detach().double().clamp(min=NO_KEYS)
    if key_mask is not None:
        scale = scale.masked_fill(~key_mask[..., None], NO_KEYS)
    sequences, g = scale.shape[0] if bounds is None else len(bounds) - 1, scale.shape[2]
    first = scale.new_full((1, g), NO_KEYS)
    rows = None if state is None else state.rows()
    if rows is not None and rows.log_scale is not None:
        first = rows.log_scale
    largest = running_maximum(
        scale, None if log_decay is None else log_decay.detach().double(), first, bounds
    )
    last = at_last(largest, first, bounds).expand(sequences, g).clone()  # alone: it goes into the state
    if causal:
        before = previous(largest, first, bounds)
        # Where no key came before nothing fades: a decay of e^-10000 there would cost all later sums of logs
        # four digits.
        fading = (before - largest).masked_fill(before == NO_KEYS, 0)
        if log_decay is None:
            log_decay = fading.clamp(NOTHING_KEPT, 0)
        else:  # rounding may leave a little more than 0, where clamp would have no gradient
            kept = (fading + log_decay.detach()).clamp(NOTHING_KEPT, 0)
            log_decay = kept + (log_decay - log_decay.detach())
    else:
        largest = spread(last, k.shape[1], bounds)
        if rows is not None:
            kept = (first - last).exp()
            state = replace(
                rows, kv=rows.kv * kept.to(rows.kv.dtype)[..., None, None], z=rows.z * kept[..., None]
            )
    wide = torch.promote_types(k.dtype, torch.float32)
    below = (scale - largest).clamp(min=NOTHING_KEPT)[..., None]
    k = k.to(wide) + below.to(wide) if exponential else k * below.exp().to(wide)
    return Stabilized(k, log_decay, state, largest, last)

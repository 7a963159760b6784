"""Keeps keys with exponential features in range, by the running maximum of their log_scale."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from linrope.recurrence.call import Call
from linrope.recurrence.decay import MIN_LOG_DECAY
from linrope.recurrence.packing import Tokens, at_last, per_token, previous, running_maximum
from linrope.recurrence.state import NO_KEYS, LinearAttentionState


class Stabilized(NamedTuple):
    """Keys in range, the log_decay and the state rescaled to match, and the running maximum m of log_scale."""

    k: Tensor
    log_decay: Tensor | None
    state: LinearAttentionState | None
    maximum: Tensor  # (b, keys or 1, g): causal: the running maximum at each token; else that of all keys
    last_maximum: Tensor  # (s, g): m after the last token


def stabilize(
    call: Call,
    tokens: Tokens,
    k: Tensor,
    log_scale: Tensor,
    log_decay: Tensor | None,
    backend_applies_exp: bool,
) -> Stabilized:
    """Replaces keys e^(s_i) psi_i, whose size is unbounded, with keys relative to the running maximum m of s:

        m_i = max(m_(i-1) + a_i, s_i)       keys e^(s_i - m_i) psi_i       log decay a_i + m_(i-1) - m_i

    With a log decay per unit, the a_i of the first formula is the largest of the token's units.

    The output stays the same, no token reads a later one, and m is a constant to the gradient. Bidirectional calls
    use the maximum over all keys instead.

    k (b, m, g, f) are features psi or, with backend_applies_exp, their logarithms; log_scale s is (b, m, g), and
    log_decay a is (b or 1, m, g or 1), with units (.., units).

    Source: the stabilizer of xLSTM, arXiv 2405.04517, for feature maps.
    """
    bounds, key_mask, state = tokens.bounds, call.key_mask, call.state
    scale = log_scale.detach().double().clamp(min=NO_KEYS)
    if key_mask is not None:
        scale = scale.masked_fill(~key_mask[..., None], NO_KEYS)
    sequences, g = scale.shape[0] if bounds is None else len(bounds) - 1, scale.shape[2]
    first = scale.new_full((1, g), NO_KEYS)
    rows = None if state is None else state.rows()
    if rows is not None and rows.log_scale is not None:
        first = rows.log_scale
    largest_decay = None if log_decay is None else log_decay.detach().double()
    if largest_decay is not None and largest_decay.ndim == 4:
        largest_decay = largest_decay.amax(-1)
    largest = running_maximum(scale, largest_decay, first, bounds)
    # A clone, because the state keeps it.
    last = at_last(largest, first, bounds).expand(sequences, g).clone()
    if call.causal:
        previous_maximum = previous(largest, first, bounds)
        # At the first key there is nothing to decay yet. A log decay of -10^4 there would cost all later sums of logs
        # four digits.
        drop = (previous_maximum - largest).masked_fill(previous_maximum == NO_KEYS, 0)
        if log_decay is None:
            log_decay = drop.clamp(MIN_LOG_DECAY, 0)
        else:
            if log_decay.ndim == 4:
                drop = drop[..., None]
            # Rounding may lift the sum above 0, where clamp has no gradient: clamp a constant.
            constant = (drop + log_decay.detach()).clamp(MIN_LOG_DECAY, 0)
            log_decay = constant + (log_decay - log_decay.detach())
    else:
        largest = per_token(last, k.shape[1], bounds)
        if rows is not None:
            factor = (first - last).exp()[..., None]
            kv, z = rows.kv * factor[..., None].to(rows.kv.dtype), rows.z * factor.to(rows.z.dtype)
            state = replace(rows, kv=kv, z=z)
    wide = torch.promote_types(k.dtype, torch.float32)
    relative = (scale - largest).clamp(min=MIN_LOG_DECAY)[..., None]
    k = k.to(wide) + relative.to(wide) if backend_applies_exp else k * relative.exp().to(wide)
    return Stabilized(k, log_decay, state, largest, last)

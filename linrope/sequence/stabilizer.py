"""The running maximum that keeps keys with exponential features in range."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from linrope.sequence.decay import NOTHING_KEPT, Tokens
from linrope.sequence.packing import at_last, per_token, previous, running_maximum
from linrope.sequence.state import NO_KEYS, LinearAttentionState


class Stabilized(NamedTuple):
    """Keys in range with the decay and state that go with them, and the running maximum m of their log_scale."""

    k: Tensor
    log_decay: Tensor | None
    state: LinearAttentionState | None
    at_tokens: Tensor  # (b or 1, m, g)
    last: Tensor  # (s, g)


def stabilize(
    *,
    k: Tensor,
    log_scale: Tensor,
    log_decay: Tensor | None,
    state: LinearAttentionState | None,
    tokens: Tokens,
    key_mask: Tensor | None,
    causal: bool,
    exponential: bool,
) -> Stabilized:
    """Replaces keys e^(s_i) psi_i with log decay a_i by keys that stay in range, with the running maximum m of s:

        m_i = max(m_(i-1) + a_i, s_i)       keys e^(s_i - m_i) psi_i       log decay a_i + m_(i-1) - m_i

    The output is the same and no token reads a later one. m is a constant to the gradient. Bidirectional calls take
    the maximum over all keys instead.

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
    last = (
        at_last(largest, first, bounds).expand(sequences, g).clone()
    )  # in memory of its own: it goes into the state
    if causal:
        before = previous(largest, first, bounds)
        # Before the first key there is nothing to decay. A decay of e^-10000 there would cost all later sums of logs
        # four digits.
        fading = (before - largest).masked_fill(before == NO_KEYS, 0)
        if log_decay is None:
            log_decay = fading.clamp(NOTHING_KEPT, 0)
        else:  # rounding may leave a little more than 0, where clamp would have no gradient
            kept = (fading + log_decay.detach()).clamp(NOTHING_KEPT, 0)
            log_decay = kept + (log_decay - log_decay.detach())
    else:
        largest = per_token(last, k.shape[1], bounds)
        if rows is not None:
            kept = (first - last).exp()
            state = replace(
                rows, kv=rows.kv * kept.to(rows.kv.dtype)[..., None, None], z=rows.z * kept[..., None]
            )
    wide = torch.promote_types(k.dtype, torch.float32)
    below = (scale - largest).clamp(min=NOTHING_KEPT)[..., None]
    k = k.to(wide) + below.to(wide) if exponential else k * below.exp().to(wide)
    return Stabilized(k, log_decay, state, largest, last)

"""Turns q and k into the features that a backend receives."""

from typing import NamedTuple

from torch import Tensor

from linrope.feature_maps import ElementwiseMap
from linrope.feature_maps.base import widen
from linrope.operation.plan import Plan
from linrope.operation.positions import spell_out_positions
from linrope.recurrence.call import Call, repeat_heads
from linrope.recurrence.packing import Tokens


class MappedInputs(NamedTuple):
    """q and k as a backend receives them. If they have scales, ``stabilize`` changes k once more."""

    q: Tensor | None
    k: Tensor
    q_scale: Tensor | None = None  # (b, n, heads): the features are to be multiplied by e^scale
    k_scale: Tensor | None = None


def map_features(call: Call, plan: Plan, tokens: Tokens) -> MappedInputs:
    """Rotates q and k if rope_order asks for it, and applies the feature map, or leaves it to the backend.

    If a map has a log_scale, q and k then have a head for each head of v, because the running maximum of the scales
    decays by log_decay, of which each of these has its own.
    """
    q, k = _scaled_and_rotated(call, plan, tokens)
    if not plan.maps_in_python:
        return MappedInputs(q, k)
    fmap = plan.named_map or call.feature_map
    if call.key_mask is not None:  # the map may overflow at padding, and 0 * inf is NaN
        k = k.masked_fill(~call.key_mask[:, :, None, None], 0)
    if plan.resolved["feature_map"] == "exp":  # centred here, applied by the backend
        assert isinstance(fmap, ElementwiseMap)
        queries, keys = None if q is None else fmap.centre(q), fmap.centre(k)
    else:
        queries, keys = fmap(q, k)
        if not fmap.log_scaled:
            return MappedInputs(queries, keys)
    (q, q_scale), (k, k_scale) = (None, None) if queries is None else queries, keys
    q, k, q_scale, k_scale = repeat_heads(call.v, q, k, q_scale, k_scale)
    return MappedInputs(q, k, q_scale, k_scale)


def _scaled_and_rotated(call: Call, plan: Plan, tokens: Tokens) -> tuple[Tensor | None, Tensor]:
    """q and k times rotary.attention_factor and, with rope_order="before", rotated.

    If Python applies the map they are computed in float32 or wider: an exponential would amplify the rounding error of
    half precision.
    """
    q, k, rotary, before = call.q, call.k, call.rotary, call.rope_order == "before"
    if rotary is None or not (before or rotary.attention_factor != 1):
        return q, k
    if before and rotary.heads > k.shape[2]:
        q, k = repeat_heads(call.v, q, k)  # every value head has its own theta
    if plan.maps_in_python:
        q, k = None if q is None else widen(q), widen(k)
    if rotary.attention_factor != 1:
        q, k = None if q is None else q * rotary.attention_factor, k * rotary.attention_factor
    if before:
        q_positions, k_positions = spell_out_positions(tokens, q, k)
        q, k = None if q is None else rotary(q, q_positions), rotary(k, k_positions)
    return q, k

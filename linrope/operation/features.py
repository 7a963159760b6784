"""Turns q and k into the features that a backend receives."""

from torch import Tensor

from linrope.feature_maps import ElementwiseMap, FeatureMap
from linrope.feature_maps.base import has_hooks, widen
from linrope.operation.positions import spell_out_positions
from linrope.recurrence.decay import Tokens
from linrope.rotation.rotary import Rotary


def scale_and_rotate(
    q: Tensor | None,
    k: Tensor,
    fmap: FeatureMap | None,
    rotary: Rotary | None,
    rope_order: str,
    tokens: Tokens,
) -> tuple[Tensor | None, Tensor, Rotary | None]:
    """Multiplies q and k by rotary.attention_factor and, with rope_order="before", rotates them.

    Also returns the rotation that is still to be applied to the features. If ``map_features`` applies the map, q and
    k are computed in float32 or wider: an exponential would amplify the rounding error of half precision.
    """
    if rotary is None:
        return q, k, rotary
    if (rotary.attention_factor != 1 or rope_order == "before") and _backend_map(fmap) is None:
        q, k = None if q is None else widen(q), widen(k)
    if rotary.attention_factor != 1:
        q, k = None if q is None else q * rotary.attention_factor, k * rotary.attention_factor
    if rope_order == "after":
        return q, k, rotary
    q_positions, k_positions = spell_out_positions(tokens, q, k)
    return None if q is None else rotary(q, q_positions), rotary(k, k_positions), None


def map_features(
    q: Tensor | None, k: Tensor, fmap: FeatureMap | None, key_mask: Tensor | None, tokens: Tokens
) -> tuple[Tensor | None, Tensor, str, Tensor | None, Tensor | None]:
    """Applies the feature map, or leaves it to the backend.

    Returns q, k, the elementwise map that the backend then applies, and the log_scale of q and of k (None: 0).
    """
    if (name := _backend_map(fmap)) is not None:
        return q, k, name, None, None
    assert fmap is not None
    if key_mask is not None:  # the map may overflow at padding, and 0 * inf is NaN
        k = k.masked_fill(~key_mask[:, :, None, None], 0)
    if isinstance(fmap, ElementwiseMap) and not has_hooks(fmap):  # exp: centred here, applied by the backend
        (q, q_scale), (k, k_scale) = (None, None) if q is None else fmap.centre(q), fmap.centre(k)
        return q, k, fmap.elementwise, q_scale, k_scale
    positions = spell_out_positions(tokens, q, k) if fmap.positional else ()
    queries, keys = fmap(q, k, *positions)
    if not fmap.log_scaled:
        return queries, keys, "identity", None, None
    (q, q_scale), (k, k_scale) = (None, None) if queries is None else queries, keys
    return q, k, "identity", q_scale, k_scale


def _backend_map(fmap: FeatureMap | None) -> str | None:
    """The name of an elementwise map that a backend can apply to q and k. None: ``map_features`` applies the map."""
    if fmap is None:
        return "identity"
    return None if fmap.log_scaled or has_hooks(fmap) else fmap.elementwise

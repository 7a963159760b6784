"""What backends get of q and k: rotated before the map where the caller wants it so, and mapped."""

from torch import Tensor

from linrope.feature_maps import ElementwiseMap, FeatureMap
from linrope.feature_maps.base import widen
from linrope.rotation.rotary import Rotary, spell_out
from linrope.sequence.decay import Tokens


def rotate_before(
    q: Tensor | None,
    k: Tensor,
    fmap: FeatureMap | None,
    rotary: Rotary | None,
    rope_order: str,
    tokens: Tokens,
) -> tuple[Tensor | None, Tensor, Rotary | None]:
    """q, k with the attention factor, rotated where that precedes the map; and the rotation that is left.

    In float32 or wider where the map computes in it anyway: half precision would round an exponent x by u x.
    """
    if rotary is None:
        return q, k, rotary
    if (rotary.attention_factor != 1 or rope_order == "before") and _by_backend(fmap) is None:
        q, k = None if q is None else widen(q), widen(k)
    if rotary.attention_factor != 1:
        q, k = None if q is None else q * rotary.attention_factor, k * rotary.attention_factor
    if rope_order == "after":
        return q, k, rotary
    q_where, k_where = _spelled_out(q, k, tokens)
    return None if q is None else rotary(q, *q_where), rotary(k, *k_where), None


def map_features(
    q: Tensor | None, k: Tensor, fmap: FeatureMap | None, key_mask: Tensor | None, tokens: Tokens
) -> tuple[Tensor | None, Tensor, str, Tensor | None, Tensor | None]:
    """q, k, the elementwise map that backends apply to them, and the log_scale of each query and key."""
    if (name := _by_backend(fmap)) is not None:
        return q, k, name, None, None
    assert fmap is not None
    if key_mask is not None:  # what padding holds may overflow in the map, and 0 * inf is no 0
        k = k.masked_fill(~key_mask[:, :, None, None], 0)
    if isinstance(fmap, ElementwiseMap):  # exp: centred here, applied by the backend
        (q, q_scale), (k, k_scale) = (None, None) if q is None else fmap.centre(q), fmap.centre(k)
        return q, k, fmap.elementwise, q_scale, k_scale
    q_where, k_where = _spelled_out(q, k, tokens) if fmap.positional else ((), ())
    queries, keys = None if q is None else fmap.queries(q, *q_where), fmap.keys(k, *k_where)
    if not fmap.log_scaled:
        return queries, keys, "identity", None, None  # type: ignore[return-value]
    (q, q_scale), (k, k_scale) = (None, None) if queries is None else queries, keys
    return q, k, "identity", q_scale, k_scale


def _by_backend(fmap: FeatureMap | None) -> str | None:
    """The map that a backend applies itself, to q and k as they are; None: they are mapped before."""
    if fmap is None:
        return "identity"
    return None if fmap.log_scaled else fmap.elementwise


def _spelled_out(q: Tensor | None, k: Tensor, tokens: Tokens) -> tuple[tuple[Tensor], tuple[Tensor]]:
    """A position for each query, and for each key."""
    given = tokens.positions if tokens.key_positions is None else tokens.key_positions
    n = k.shape[1] if q is None else q.shape[1]
    return (spell_out(tokens.positions, n),), (spell_out(given, k.shape[1]),)

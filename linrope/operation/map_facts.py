"""``MapFacts``: all that the checks and the plan of a call know of its feature map."""

from typing import NamedTuple

from linrope.feature_maps import ElementwiseMap, FeatureMap
from linrope.feature_maps.base import is_changed
from linrope.feature_maps.unit import UnitMap


class MapFacts(NamedTuple):
    """Calls with equal facts share a plan. The names are those of ``FeatureMap``.

    The defaults are those of calls without a map, whose q and k are features already.
    """

    head_dim: int | None = None
    feature_dim: int | None = None  # None: q and k have as many features as numbers
    positive: bool = True
    log_scaled: bool = False
    long_keys: bool = False
    # What a backend can apply to q and k, of a log_scaled map after Python has centred them. None: Python maps them.
    elementwise: str | None = "identity"
    query_factor: float = 0.0  # 0 for all maps but a UnitMap
    identity: str | None = "features"  # None: it depends on the weights of the map


def facts_of(fmap: FeatureMap | None) -> MapFacts:
    """The facts of a map as it is now: hooks and methods of one object may come and go."""
    if fmap is None:
        return _WITHOUT_MAP
    elementwise, query_factor = fmap.elementwise, 0.0
    if (
        not isinstance(fmap, FeatureMap)  # a wrapper, which may compute something else
        or is_changed(fmap)
        or (elementwise and "elementwise" not in vars(fmap) and not fmap.computes_what_it_names)
        or (fmap.log_scaled and not isinstance(fmap, ElementwiseMap))
    ):
        elementwise = None
    elif type(fmap) is UnitMap:
        elementwise, query_factor = fmap.activation, fmap.query_factor
    without_weights = type(fmap) is ElementwiseMap or query_factor > 0
    return MapFacts(
        fmap.head_dim,
        fmap.feature_dim,
        fmap.positive,
        fmap.log_scaled,
        fmap.long_keys,
        elementwise,
        query_factor,
        fmap.identity if without_weights else None,
    )


_WITHOUT_MAP = MapFacts()


def backend_map(fmap: FeatureMap | None) -> tuple[str | None, float]:
    """The map that a backend can apply to q and k as they are, and its query_factor. None: Python applies the map."""
    facts = facts_of(fmap)
    return None if facts.log_scaled else facts.elementwise, facts.query_factor

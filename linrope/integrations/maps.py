"""The feature map of other libraries' delta rules."""

from linrope.feature_maps.unit import UnitMap

_MOST = 64
_maps: dict[tuple[int, float], UnitMap] = {}


def unit_map(size: int, query_factor: float) -> UnitMap:
    """One object per size and factor, because making one takes as long as a step. A graph can record the look-up."""
    key = size, query_factor
    if key not in _maps:
        if len(_maps) >= _MOST:
            _maps.clear()
        _maps[key] = UnitMap(size, query_factor=query_factor)
    return _maps[key]

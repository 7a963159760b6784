"""Feature maps by name: ``make(name, head_dim)``."""

from difflib import get_close_matches
from functools import partial
from typing import Any

from linrope.feature_maps.base import FeatureMap
from linrope.feature_maps.elementwise import ELEMENTWISE, Elementwise, ElementwiseMap
from linrope.feature_maps.favor import FavorPlus
from linrope.feature_maps.softmax import SoftmaxMap

__all__ = [
    "ELEMENTWISE",
    "NAMES",
    "Elementwise",
    "ElementwiseMap",
    "FavorPlus",
    "FeatureMap",
    "SoftmaxMap",
    "make",
]

_MAKERS: dict[str, Any] = {
    **{name: partial(ElementwiseMap, name) for name in ELEMENTWISE},
    "softmax": SoftmaxMap,
    "favor+": FavorPlus,
}
NAMES = tuple(_MAKERS)


def make(name: str, head_dim: int, **options: Any) -> FeatureMap:
    """Makes the feature map of that name for heads of that size.

    Raises:
        ValueError: unknown name (the message lists the known ones), or head_dim < 1.
        TypeError: an option that the map does not have.

    >>> make("favor+", 64, num_features=128, seed=0).feature_dim
    128
    """
    if name not in _MAKERS:
        near = get_close_matches(str(name), NAMES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"feature_map={name!r}: expected one of {', '.join(NAMES)}{hint}")
    if head_dim < 1:
        raise ValueError(f"head_dim={head_dim}: expected at least 1")
    made: FeatureMap = _MAKERS[name](head_dim=head_dim, **options)
    return made

"""Feature maps by name: ``make(name, head_dim)``."""

from functools import partial
from inspect import signature
from typing import Any

from linrope.common.argument_checks import check_name, expected_one_of
from linrope.feature_maps.base import FeatureMap, Features
from linrope.feature_maps.elementwise import ELEMENTWISE, Elementwise, ElementwiseMap
from linrope.feature_maps.favor import FavorPlus
from linrope.feature_maps.learned import T2R, Hedgehog, LearnedMap
from linrope.feature_maps.paired import PairedMap
from linrope.feature_maps.polynomial import Rebased, Taylor2
from linrope.feature_maps.softmax import SoftmaxMap
from linrope.feature_maps.unit import UnitMap

__all__ = [
    "ELEMENTWISE",
    "NAMES",
    "PER_HEAD",
    "T2R",
    "Elementwise",
    "ElementwiseMap",
    "FavorPlus",
    "FeatureMap",
    "Features",
    "Hedgehog",
    "LearnedMap",
    "PairedMap",
    "Rebased",
    "SoftmaxMap",
    "Taylor2",
    "UnitMap",
    "make",
]


def _paired(head_dim: int, inner: str = "elu+1", layout: str = "interleaved", **options: Any) -> PairedMap:
    return PairedMap(make(inner, head_dim, **options), layout)


_MAKERS: dict[str, Any] = {
    **{name: partial(ElementwiseMap, name) for name in ELEMENTWISE},
    "unit": UnitMap,
    "softmax": SoftmaxMap,
    "favor+": FavorPlus,
    "t2r": T2R,
    "hedgehog": Hedgehog,
    "taylor2": Taylor2,
    "rebased": Rebased,
    "paired": _paired,
}
NAMES = tuple(_MAKERS)
# Names in other libraries and papers, for the hint in the error message.
_ALIASES = {
    "performer": "favor+",
    "favor": "favor+",
    "prf": "favor+",
    "orf": "favor+",
    "elu": "elu+1",
    "1+elu": "elu+1",
    "linear": "elu+1",
    "relu^2": "relu2",
    "squared_relu": "relu2",
    "based": "taylor2",
    "taylor": "taylor2",
    "lolcats": "hedgehog",
    "l2": "unit",
    "l2norm": "unit",
    "none": "identity",
}
# Of docs/examples/historical_maps.py, by their names in papers
_EXAMPLES = {
    "favor+hyperbolic": "FavorHyperbolic",
    "favor++": "FavorPlusPlus",
    "generalized": "GeneralizedRandomFeatures",
    "rff": "RandomFourier",
    "rfa": "RandomFourier",
    "dpfp": "DPFP",
    "deltanet": "DPFP",
    "cosformer": "cosformer",
}
# The maps with learned weights, which take num_heads and num_kv_heads.
PER_HEAD = frozenset({"t2r", "hedgehog", "rebased"})


def make(name: str, head_dim: int, **options: Any) -> FeatureMap:
    """Makes the feature map of that name for heads of that size.

    Options are those of the map's class; "paired" takes inner (the name of another map, "elu+1" by
    default), layout, and the inner map's options.

    Raises:
        ValueError: the name is unknown (the message lists the known ones), head_dim < 1, or the value of an
            option does not fit.
        TypeError: head_dim is not an integer, the map does not have an option, or a required option is missing.

    >>> make("favor+", 64, num_features=128, seed=0).feature_dim
    128
    """
    if isinstance(name, str) and (known := _ALIASES.get(name.lower())):
        raise ValueError(f"feature_map={name!r}: {expected_one_of(known, NAMES)}")
    if isinstance(name, str) and (example := _EXAMPLES.get(name.lower())):
        raise ValueError(
            f"feature_map={name!r}: expected one of {', '.join(NAMES)}; docs/examples/historical_maps.py has {example}"
        )
    check_name("feature_map", name, NAMES)
    try:
        made: FeatureMap = _MAKERS[name](head_dim=head_dim, **options)
    except TypeError:
        _check_options(name, head_dim, options)
        raise
    return made


def _check_options(name: str, head_dim: int, options: dict[str, Any]) -> None:
    """Raises TypeError if the map does not have an option, or a required one is missing."""
    arguments = signature(_MAKERS[name])
    try:
        arguments.bind_partial(head_dim=head_dim, **options)  # names an option that the map does not have
        arguments.bind(head_dim=head_dim, **options)
    except TypeError as error:
        known = ", ".join(x for x in arguments.parameters if x != "head_dim") or "none"
        raise TypeError(f"feature_map={name!r}: {error}; its options: {known}") from None

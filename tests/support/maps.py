"""Every feature map that tests run through, and how to call one."""

from typing import Any

from torch import Tensor

from linrope import feature_maps
from linrope.feature_maps import FeatureMap, Features

RANDOM = ("favor+",)
LEARNED = ("t2r", "hedgehog", "rebased")
HEADS = {"num_heads": 2, "num_kv_heads": 2}

# The name and options of each map, by label, for heads of any size
MAPS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in (*feature_maps.ELEMENTWISE, "softmax", "taylor2")},
    **{name: (name, {"num_features": 8, "seed": 0}) for name in RANDOM},
    "favor+ of 7": ("favor+", {"num_features": 7, "seed": 0}),
    **{name: (name, {}) for name in LEARNED},
    **{f"{name} by head": (name, HEADS) for name in LEARNED},
    "paired": ("paired", {}),
    "paired half": ("paired", {"layout": "half"}),
    "paired relu": ("paired", {"inner": "relu"}),
    "paired softmax": ("paired", {"inner": "softmax"}),
    "paired favor+": ("paired", {"inner": "favor+", "num_features": 8, "seed": 0}),
    "paired exp": ("paired", {"inner": "exp"}),
    "paired t2r": ("paired", {"inner": "t2r", **HEADS}),
    "unit": ("unit", {}),
    "unit silu": ("unit", {"activation": "silu", "query_factor": 0.5}),
}


def build(label: str, head_dim: int = 4) -> FeatureMap:
    name, options = MAPS[label]
    return feature_maps.make(name, head_dim, **options)


def plain(features: Features) -> Tensor:
    """The features of a map, log_scaled or not, as one tensor of their dtype."""
    if isinstance(features, Tensor):
        return features
    x, log_scale = features
    return (x.double() * log_scale.exp()[..., None]).to(x.dtype)


def features(fmap: FeatureMap, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """phi and psi, multiplied out, of (b, n, h, d) tensors."""
    return plain(fmap.queries(q)), plain(fmap.keys(k))

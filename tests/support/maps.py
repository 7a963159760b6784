"""Every feature map that tests run through, and how to call one."""

from typing import Any

import torch
from torch import Tensor

from linrope import feature_maps
from linrope.feature_maps import FeatureMap, Features

RANDOM = ("favor+", "favor+hyperbolic", "favor++", "rff", "generalized")
LEARNED = ("t2r", "hedgehog", "rebased")
HEADS = {"num_heads": 2, "num_kv_heads": 2}

# The name and options of each map, by label, for heads of any size
MAPS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in (*feature_maps.ELEMENTWISE, "softmax", "taylor2")},
    **{name: (name, {"num_features": 8, "seed": 0}) for name in RANDOM},
    "favor++ of narrow inputs": ("favor++", {"num_features": 8, "seed": 0, "mean_square": 0.5}),
    "favor+ of 7": ("favor+", {"num_features": 7, "seed": 0}),
    "favor++ of 7": ("favor++", {"num_features": 7, "seed": 0}),
    "generalized of 7": ("generalized", {"num_features": 7, "seed": 0}),
    "generalized tanh": ("generalized", {"num_features": 8, "seed": 0, "kernel": "tanh"}),
    "dpfp": ("dpfp", {}),
    "dpfp-1": ("dpfp", {"nu": 1}),
    **{name: (name, {}) for name in LEARNED},
    **{f"{name} by head": (name, HEADS) for name in LEARNED},
    "cosformer": ("cosformer", {"max_length": 100}),
    "paired": ("paired", {}),
    "paired half": ("paired", {"layout": "half"}),
    "paired relu": ("paired", {"inner": "relu"}),
    "paired softmax": ("paired", {"inner": "softmax"}),
    "paired favor+": ("paired", {"inner": "favor+", "num_features": 8, "seed": 0}),
    "paired exp": ("paired", {"inner": "exp"}),
    "paired t2r": ("paired", {"inner": "t2r", **HEADS}),
    "paired cosformer": ("paired", {"inner": "cosformer", "max_length": 100}),
    "unit": ("unit", {}),
    "unit silu": ("unit", {"activation": "silu", "query_factor": 0.5}),
}


def build(label: str, head_dim: int = 4) -> FeatureMap:
    name, options = MAPS[label]
    options = options | ({"nu": 1} if name == "dpfp" and head_dim == 1 else {})
    return feature_maps.make(name, head_dim, **options)


def plain(features: Features) -> Tensor:
    """The features of a map, log_scaled or not, as one tensor of their dtype."""
    if isinstance(features, Tensor):
        return features
    x, log_scale = features
    return (x.double() * log_scale.exp()[..., None]).to(x.dtype)


def features(fmap: FeatureMap, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """phi and psi, multiplied out, of (b, n, h, d) tensors at positions 0, 1, .."""
    where = (torch.arange(q.shape[1])[None],) if fmap.positional else ()
    return plain(fmap.queries(q, *where)), plain(fmap.keys(k, *where))

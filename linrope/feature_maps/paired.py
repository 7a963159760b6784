"""A feature map whose rotated weights never exceed the unrotated ones."""

from collections.abc import Callable

import torch
from torch import Tensor

from linrope.feature_maps.base import FeatureMap, Features, widen

_TWICE: dict[str, Callable[[Tensor], Tensor]] = {
    "interleaved": lambda x: torch.stack((x, x), -1).flatten(-2),
    "half": lambda x: torch.cat((x, x), -1),
}


class PairedMap(FeatureMap):
    """Another map, whose features each fill both members of a rotation pair.

        interleaved   a1 a1 a2 a2 ..
        half          a1 a2 .. a1 a2 ..

    A rotation of the same layout, by theta_t for pair t, then weighs each feature by a cosine:

        <R(p) phi(x), R(p') psi(y)> = sum_t 2 phi_t psi_t cos((p - p') theta_t)

    If the features are >= 0, no weight exceeds the unrotated one in absolute value. Then |out| <= max |v|
    over the visible keys, which eq. 19 does not guarantee. If only the products of the inner map are
    positive (taylor2, rebased), the bound does not hold. (..., d) -> (..., 2f), computed in float32 or
    wider.

    Args:
        inner: the map that makes the features; its head_dim, positive, log_scaled and long_keys carry over.
        layout: the layout of the rotation, "interleaved" or "half".

    Raises:
        TypeError: inner is not a FeatureMap.
        ValueError: the layout is unknown.

    >>> from linrope import feature_maps
    >>> feature_maps.make("paired", 2, inner="relu").queries(torch.tensor([3.0, 4.0])).tolist()
    [3.0, 3.0, 4.0, 4.0]
    """

    def __init__(self, inner: FeatureMap, layout: str = "interleaved") -> None:
        super().__init__()
        if not isinstance(inner, FeatureMap):
            raise TypeError(f"inner: got {type(inner).__name__}, expected a FeatureMap")
        if layout not in _TWICE:
            raise ValueError(f"layout={layout!r}: expected one of {', '.join(_TWICE)}")
        self.inner, self.layout = inner, layout
        self.head_dim, self.feature_dim = inner.head_dim, 2 * inner.feature_dim
        self.positive, self.log_scaled, self.long_keys = inner.positive, inner.log_scaled, inner.long_keys

    def queries(self, q: Tensor) -> Features:
        return self._twice(self.inner(widen(q), None)[0])

    def keys(self, k: Tensor) -> Features:
        return self._twice(self.inner(None, widen(k))[1])

    def _twice(self, features: Features) -> Features:
        twice = _TWICE[self.layout]
        return (twice(features[0]), features[1]) if isinstance(features, tuple) else twice(features)

    @property
    def identity(self) -> str:
        return f"PairedMap({self.inner.identity}, {self.layout})"

    def extra_repr(self) -> str:
        return f"layout={self.layout!r}"

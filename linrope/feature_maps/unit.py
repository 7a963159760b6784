"""The map of the delta rule: features of length 1."""

import math

from torch import Tensor

from linrope.common.argument_checks import check_name, check_numbers, check_sizes
from linrope.feature_maps.base import FeatureMap, widen
from linrope.feature_maps.elementwise import ELEMENTWISE

EPS = 1e-6  # added to the squared length: that of flash-linear-attention
ACTIVATIONS = tuple(name for name in ELEMENTWISE if name != "exp")  # the maps without a log_scale


class UnitMap(FeatureMap):
    """Vectors of length 1, as the delta rule needs them.

        y = activation(x),   psi(k) = y / sqrt(|y|^2 + 1e-6),   phi(q) = query_factor y / sqrt(|y|^2 + 1e-6)

    (..., d) -> (..., d), computed in float32 or wider and not rounded to half precision: keys of length 1 keep
    ``erase`` b from making the state grow, for b from 0 to 2. x = 0 has the features 0. So have vectors longer than
    1e19, whose squared length is beyond float32. Source: Gated DeltaNet, arXiv 2412.06464.

    Args:
        head_dim: d.
        activation: an elementwise map other than "exp", which comes first: "silu" in Gated DeltaNet, where the short
            convolution may apply it too. The map is positive if this one is.
        query_factor: the factor of the queries. Gated DeltaNet and Kimi Delta Attention take d^-0.5. A norm of the
            output cancels it, up to its eps. States do not depend on it.

    Raises:
        ValueError: the activation is unknown, or query_factor is not positive and finite.

    >>> unit = UnitMap(2, query_factor=0.5)
    >>> unit.keys(torch.tensor([3.0, 4.0])), unit.queries(torch.tensor([3.0, 4.0]))
    (tensor([0.6000, 0.8000]), tensor([0.3000, 0.4000]))
    """

    def __init__(self, head_dim: int, activation: str = "identity", query_factor: float = 1.0) -> None:
        super().__init__()
        check_sizes(head_dim=head_dim)
        check_name("activation", activation, ACTIVATIONS)
        check_numbers(query_factor=query_factor)
        if not 0 < query_factor < math.inf:
            raise ValueError(f"query_factor={query_factor}: expected a positive finite number")
        self.head_dim = self.feature_dim = head_dim
        self.activation, self.query_factor = activation, float(query_factor)
        self.positive = ELEMENTWISE[activation].positive

    def queries(self, q: Tensor) -> Tensor:
        return self._of_length(self.query_factor, q)

    def keys(self, k: Tensor) -> Tensor:
        return self._of_length(1, k)

    def _of_length(self, length: float, x: Tensor) -> Tensor:
        y = ELEMENTWISE[self.activation].value(widen(x))
        return y / ((y.square().sum(-1, keepdim=True) + EPS).sqrt() / length)

    @property
    def identity(self) -> str:  # spares each call the search for weights, of which this class has none
        return f"UnitMap({self.settings()})" if type(self) is UnitMap else super().identity

    def settings(self) -> str:
        return f"{self.head_dim}, activation={self.activation!r}"

    def extra_repr(self) -> str:
        return f"{self.settings()}, query_factor={self.query_factor}"

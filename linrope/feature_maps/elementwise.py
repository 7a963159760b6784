"""Feature maps that act on each number alone; kernels apply them as they load a tensor."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from linrope.common.argument_checks import check_sizes
from linrope.feature_maps.base import FeatureMap, Features
from linrope.feature_maps.log_scale import centre, exponential


def _elu1(x: Tensor) -> Tensor:
    # elu(x) + 1 = exp(x) - 1 + 1 would lose a small exp(x). max(exp(x), x + 1) would have a wrong slope where
    # rounding makes both equal. In this sum each term has half of the slope at 0, and one has all of it
    # elsewhere.
    zero = x.new_zeros(())
    return torch.minimum(x, zero).exp() + torch.maximum(x, zero)


def _silu_slope(x: Tensor, y: Tensor) -> Tensor:
    # (x s)' = s + y (1 - s) with s = sigmoid(x), y = x s
    s = x.sigmoid()
    return s + y * (1 - s)


class Elementwise(NamedTuple):
    """y = value(x) and dy/dx = slope(x, y); ``positive`` as in FeatureMap."""

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]
    positive: bool


ELEMENTWISE: dict[str, Elementwise] = {
    "elu+1": Elementwise(_elu1, lambda x, y: y.clamp(max=1), True),
    "relu": Elementwise(torch.relu, lambda x, y: y.sign(), True),
    "relu2": Elementwise(lambda x: x.relu().square(), lambda x, y: 2 * x.relu(), True),
    "exp": Elementwise(torch.exp, lambda x, y: y, True),
    "silu": Elementwise(lambda x: x * x.sigmoid(), _silu_slope, False),
    "identity": Elementwise(lambda x: x, lambda x, y: torch.ones_like(y), False),
}


class ElementwiseMap(FeatureMap):
    """phi = psi = one function of each number.

        elu+1      x + 1 if x >= 0 else exp(x)     Katharopoulos et al. 2020, arXiv 2006.16236
        relu       max(x, 0)
        relu2      max(x, 0)^2
        exp        exp(x)           log_scaled: features exp(x - s), s = max x
        silu       x sigmoid(x)     signed: only with normalize=False
        identity   x                signed: only with normalize=False

    >>> from linrope import feature_maps
    >>> feature_maps.make("elu+1", 2).queries(torch.tensor([0.0, 2.0])).tolist()
    [1.0, 3.0]
    """

    def __init__(self, name: str, head_dim: int) -> None:
        super().__init__()
        check_sizes(head_dim=head_dim)
        self.name = name
        self.head_dim = self.feature_dim = head_dim
        self.positive = ELEMENTWISE[name].positive
        self.log_scaled = name == "exp"
        self.long_keys = self.elementwise is not None  # other keys of a subclass may have any length

    @property
    def elementwise(self) -> str | None:  # type: ignore[override]
        """The map's name; None for a subclass with other queries or keys, which kernels do not know."""
        return self.name if self.computes_what_it_names else None

    def queries(self, q: Tensor) -> Features:
        if self.log_scaled:
            return exponential(q)
        return ELEMENTWISE[self.name].value(q)

    def keys(self, k: Tensor) -> Features:
        return self.queries(k)

    def centre(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(x - s, s) with s = max x over the features: a kernel's input for "exp", and log_scale.

        (..., d) -> (..., d) in float32 or wider, since x - s has more digits than x, and (...) float64. See
        ``feature_maps.log_scale.centre``.

        Raises:
            RuntimeError: the map is not "exp".

        >>> from linrope import feature_maps
        >>> feature_maps.make("exp", 2).centre(torch.tensor([300.0, 299.0]))
        (tensor([ 0., -1.]), tensor(300., dtype=torch.float64))
        """
        if not self.log_scaled:
            raise RuntimeError(f"centre: feature_map={self.name!r} has no log_scale, expected 'exp'")
        return centre(x)

    @property
    def identity(self) -> str:
        return super().identity if self.elementwise is None else f"{self.name}({self.feature_dim})"

    def extra_repr(self) -> str:
        return f"{self.name!r}, {self.feature_dim}"

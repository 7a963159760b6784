"""Feature maps whose dot products are polynomials of the inputs' dot product."""

import torch
from torch import Tensor
from torch.nn import functional as F

from linrope.common.argument_checks import check_sizes
from linrope.feature_maps.base import FeatureMap, pad_to_even, widen
from linrope.feature_maps.learned import LearnedMap


def quadratic(x: Tensor) -> Tensor:
    """[x_i^2, sqrt(2) x_i x_j for i < j], so that <quadratic(x), quadratic(y)> = (x.y)^2.

    (..., d) -> (..., d(d+1)/2). Uses slices, whose gradients require no atomic sums, rather than an index.
    """
    scaled = 2**0.5 * x
    return torch.cat([x.square(), *(scaled[..., :-j] * x[..., j:] for j in range(1, x.shape[-1]))], -1)


class Taylor2(FeatureMap):
    """Based: dot products that are exactly the second-order Taylor polynomial of the exponential.

        phi(x) = psi(x) = [1, x', quadratic(x') / sqrt(2)],   x' = x / d^(1/4)
        <phi(q), psi(k)> = 1 + s + s^2/2 >= 1/2,   s = q.k / sqrt(d)

    (..., d) -> (..., 1 + d + d(d+1)/2), with a zero feature appended if that is odd; computed in float32 or
    wider. The features are signed, their products are positive. The map is meant for small heads: d = 16
    has 154 features. Arora et al. 2024, arXiv 2402.18668.

    Args:
        head_dim: d.

    >>> phi, x = Taylor2(4), torch.ones(4)
    >>> phi.queries(x) @ phi.keys(x)  # 1 + 2 + 2
    tensor(5.0000)
    """

    positive, long_keys = True, True
    head_dim: int

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        check_sizes(head_dim=head_dim)
        self.head_dim = head_dim
        size = 1 + head_dim + head_dim * (head_dim + 1) // 2
        self.feature_dim = size + size % 2

    def queries(self, q: Tensor) -> Tensor:
        x = widen(q) * self.head_dim**-0.25
        return pad_to_even(torch.cat((torch.ones_like(x[..., :1]), x, quadratic(x) * 0.5**0.5), -1))

    def keys(self, k: Tensor) -> Tensor:
        return self.queries(k)

    def extra_repr(self) -> str:
        return f"{self.head_dim}"


class Rebased(LearnedMap):
    """ReBased: the square of the dot product of learned, normalized vectors.

        y(x) = gamma * LayerNorm(x) + beta,   <phi(q), psi(k)> = (y_q(q) . y_k(k))^2

    phi = quadratic(y_q) and psi = quadratic(y_k), each with its own gamma and beta. (..., h, d) ->
    (..., h, d(d+1)/2), with a zero feature appended if that is odd; computed in float32 or wider. Products
    may be 0. Aksenov et al. 2024, arXiv 2402.10644.

    Args:
        head_dim: d.
        num_heads: the number of sets of weights for queries; default: one set for all heads.
        num_kv_heads: the number of sets of weights for keys; default num_heads.

    Raises:
        ValueError: a number of heads does not fit.

    >>> phi, x = Rebased(2).requires_grad_(False), torch.tensor([[1.0, -1.0]])
    >>> round(float((phi.queries(x) * phi.keys(x)).sum()), 3)  # (1, -1).(1, -1), squared
    4.0
    """

    positive, long_keys = True, True

    def __init__(self, head_dim: int, num_heads: int | None = None, num_kv_heads: int | None = None) -> None:
        check_sizes(head_dim=head_dim)
        size = head_dim * (head_dim + 1) // 2
        super().__init__(head_dim, size + size % 2, num_heads, num_kv_heads)

    def weights(self, heads: int) -> dict[str, Tensor]:
        return {"gamma": torch.ones(heads, self.head_dim), "beta": torch.zeros(heads, self.head_dim)}

    def features(self, x: Tensor, weights: dict[str, Tensor]) -> Tensor:
        normal = F.layer_norm(x, (self.head_dim,))
        return pad_to_even(quadratic(weights["gamma"] * normal + weights["beta"]))

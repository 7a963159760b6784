"""Feature maps with learned weights: one set, or one for each head."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linrope.common.argument_checks import check_integers, check_sizes
from linrope.common.precision import full_precision
from linrope.feature_maps.base import FeatureMap, widen


class HeadWeights(nn.ParameterDict):
    """The weights of phi, or those of psi: a module that is called, so that its hooks bring and release them."""

    __call__ = nn.Module.__call__  # a ParameterDict refuses calls

    def forward(self, x: Tensor, features: Callable[[Tensor, dict[str, Tensor]], Tensor]) -> Tensor:
        """features(x, weights), both in float32 or wider."""
        x = widen(x)
        with full_precision(x.device):
            return features(x, {key: weight.to(x.dtype) for key, weight in self.items()})


class LearnedMap(FeatureMap):
    """The base of maps with learned weights: one set for queries (``phi``), another for keys (``psi``).

    x is (..., h, d). Without num_heads all heads share one set of weights, of leading size 1. With it each
    query head and each key/value head has its own set. Subclasses implement ``weights(heads)``, the initial
    tensors (heads, ..), and ``features(x, weights)``, which is called in float32 or wider. The weights are
    part of the identity: a state from before an optimizer step is rejected after it.
    """

    head_dim: int

    def __init__(
        self, head_dim: int, feature_dim: int, num_heads: int | None, num_kv_heads: int | None
    ) -> None:
        super().__init__()
        check_sizes(head_dim=head_dim)
        check_integers(num_heads=num_heads, num_kv_heads=num_kv_heads)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        phi_heads, psi_heads = (1 if heads is None else heads for heads in (num_heads, num_kv_heads))
        if (num_heads is None) != (num_kv_heads is None) or min(phi_heads, psi_heads) < 1:
            raise ValueError(
                f"num_heads={num_heads}, num_kv_heads={num_kv_heads}: expected positive numbers, or None for both"
            )
        self.head_dim, self.feature_dim = head_dim, feature_dim
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.phi = HeadWeights(self.weights(phi_heads))
        self.psi = HeadWeights(self.weights(psi_heads))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Sets the weights to their initial values, for a map that ``to_empty`` moved off the meta device."""
        for side in (self.phi, self.psi):
            for name, weight in self.weights(len(next(iter(side.values())))).items():
                side[name].copy_(weight)

    def weights(self, heads: int) -> dict[str, Tensor]:
        raise NotImplementedError

    def features(self, x: Tensor, weights: dict[str, Tensor]) -> Tensor:
        raise NotImplementedError

    def queries(self, q: Tensor) -> Tensor:
        return self._apply_weights("num_heads", q, self.num_heads, self.phi)

    def keys(self, k: Tensor) -> Tensor:
        return self._apply_weights("num_kv_heads", k, self.num_kv_heads, self.psi)

    def _apply_weights(self, name: str, x: Tensor, heads: int | None, weights: HeadWeights) -> Tensor:
        if heads not in (None, x.shape[-2]):
            raise ValueError(f"x: got {x.shape[-2]} heads, expected the map's {name}={heads}")
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.forget_digest()  # an optimizer step may follow, and torch does not count those of fused ones
        features: Tensor = weights(x, self.features)
        return features

    def extra_repr(self) -> str:
        heads = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
        return f"{self.head_dim}, num_features={self.feature_dim}, {heads}"


class T2R(LearnedMap):
    """A learned layer of rectified units; T2R puts it in place of softmax attention and finetunes the model.

        phi(x) = relu(W x + b),   psi the same with another W and b

    (..., h, d) -> (..., h, f), computed in float32 or wider. W and b start uniform in +-1/sqrt(d), as
    in torch.nn.Linear. Kasai et al. 2021, arXiv 2103.13076.

    Args:
        head_dim: d.
        num_features: f; default d, or d + 1 if d is odd.
        num_heads: the number of sets of weights for queries; default: one set for all heads.
        num_kv_heads: the number of sets of weights for keys; default num_heads.

    Raises:
        ValueError: num_features is odd or not positive, or a number of heads does not fit.

    >>> T2R(16, num_heads=8, num_kv_heads=2).psi["weight"].shape
    torch.Size([2, 16, 16])
    """

    positive, long_keys = True, True

    def __init__(
        self,
        head_dim: int,
        num_features: int | None = None,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
    ) -> None:
        check_sizes(head_dim=head_dim)
        check_integers(num_features=num_features)
        num_features = head_dim + head_dim % 2 if num_features is None else num_features
        if num_features <= 0 or num_features % 2:
            raise ValueError(f"num_features={num_features}: expected a positive even number")
        super().__init__(head_dim, num_features, num_heads, num_kv_heads)

    def weights(self, heads: int) -> dict[str, Tensor]:
        f, d = self.feature_dim, self.head_dim
        bound = d**-0.5
        return {
            "weight": torch.empty(heads, f, d).uniform_(-bound, bound),
            "bias": torch.empty(heads, f).uniform_(-bound, bound),
        }

    def features(self, x: Tensor, weights: dict[str, Tensor]) -> Tensor:
        return F.relu(torch.einsum("...hd,hfd->...hf", x, weights["weight"]) + weights["bias"])


class Hedgehog(LearnedMap):
    """A softmax over a learned transform of the vector and its opposite.

        phi(x) = softmax over features of [y, -y],  y = W x + b,   psi the same with another W, b

    (..., h, d) -> (..., h, 2d), computed in float32 or wider. W starts as the identity. The paper writes exp(W x),
    exp(-W x); its authors' implementation takes the softmax, which divides each token's features by their sum. With
    the normalizer this division cancels for queries; for keys it acts as a weight. It requires no log_scale, since no
    feature exceeds 1 and the largest is at least 1/(2d). Zhang et al. 2024, arXiv 2402.04347.

    Args:
        head_dim: d.
        num_heads: the number of sets of weights for queries; default: one set for all heads.
        num_kv_heads: the number of sets of weights for keys; default num_heads.
        bias: whether the map has b, which starts at 0.

    Raises:
        ValueError: a number of heads does not fit.

    >>> Hedgehog(2).queries(torch.zeros(1, 2)).tolist()
    [[0.25, 0.25, 0.25, 0.25]]
    """

    positive = True

    def __init__(
        self,
        head_dim: int,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        bias: bool = False,
    ) -> None:
        self.bias = bias
        super().__init__(head_dim, 2 * head_dim, num_heads, num_kv_heads)

    def weights(self, heads: int) -> dict[str, Tensor]:
        weight = {"weight": torch.eye(self.head_dim).repeat(heads, 1, 1)}
        return weight | ({"bias": torch.zeros(heads, self.head_dim)} if self.bias else {})

    def features(self, x: Tensor, weights: dict[str, Tensor]) -> Tensor:
        y = torch.einsum("...hd,hfd->...hf", x, weights["weight"]) + weights.get("bias", 0.0)
        return torch.cat((y, -y), -1).softmax(-1)

"""Feature maps with learned weights: one set, or one for each head."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linrope.feature_maps.base import FeatureMap, widen


class LearnedMap(FeatureMap):
    """A function with weights of its own for queries (``phi``) and for keys (``psi``).

    x is (..., h, d). Without num_heads all heads share one set of weights, of leading size 1; with it
    each query head and each key/value head has its own. Subclasses give ``weights(heads)``, tensors
    (heads, ..) as they start, and ``features(x, weights)``, called in float32 or wider. The weights are in
    the identity: a state made before an optimizer's step is refused after it.
    """

    head_dim: int

    def __init__(
        self, head_dim: int, feature_dim: int, num_heads: int | None, num_kv_heads: int | None
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        phi_heads, psi_heads = (1 if heads is None else heads for heads in (num_heads, num_kv_heads))
        if (num_heads is None) != (num_kv_heads is None) or min(phi_heads, psi_heads) < 1:
            raise ValueError(
                f"num_heads={num_heads}, num_kv_heads={num_kv_heads}: expected positive numbers, or None"
            )
        self.head_dim, self.feature_dim = head_dim, feature_dim
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.phi = nn.ParameterDict(self.weights(phi_heads))
        self.psi = nn.ParameterDict(self.weights(psi_heads))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Makes the weights as they start, as after ``to_empty`` of a map made on the meta device."""
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

    def _apply_weights(self, name: str, x: Tensor, heads: int | None, weights: nn.ParameterDict) -> Tensor:
        if heads not in (None, x.shape[-2]):
            raise ValueError(f"{name}={heads}: the map was made for that many heads, got {x.shape[-2]}")
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._last = None  # an optimizer's step may follow, and fused ones are not seen otherwise
        x = widen(x)
        with torch.autocast(x.device.type, enabled=False):
            return self.features(x, {key: weight.to(x.dtype) for key, weight in weights.items()})

    def extra_repr(self) -> str:
        heads = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
        return f"{self.head_dim}, num_features={self.feature_dim}, {heads}"


class T2R(LearnedMap):
    """A layer of rectified units: what softmax attention is finetuned into by T2R.

        phi(x) = relu(W x + b),   psi likewise with its own W and b

    (..., h, d) -> (..., h, f), computed in float32 or wider. W and b start uniform in +-1/sqrt(d), as
    in torch.nn.Linear. Kasai et al. 2021, arXiv 2103.13076.

    Args:
        head_dim: d.
        num_features: f; default d, or d + 1 where d is odd.
        num_heads: sets of weights for queries; default: one for all heads.
        num_kv_heads: sets of weights for keys; default num_heads.

    Raises:
        ValueError: num_features is odd or not positive; a number of heads does not fit.

    >>> T2R(16, num_heads=8, num_kv_heads=2).psi["weight"].shape
    torch.Size([2, 16, 16])
    """

    positive = True

    def __init__(
        self,
        head_dim: int,
        num_features: int | None = None,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
    ) -> None:
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

        phi(x) = softmax over features of [y, -y],  y = W x + b,   psi likewise with its own W, b

    (..., h, d) -> (..., h, 2d), computed in float32 or wider. W starts as the identity. The paper
    writes exp(W x), exp(-W x); its authors' code takes the softmax, which divides each token's features by
    their sum: that cancels for queries, weighs keys, and holds without a log_scale, since no feature
    exceeds 1 and the largest is at least 1/(2d). Zhang et al. 2024, arXiv 2402.04347.

    Args:
        head_dim: d.
        num_heads: sets of weights for queries; default: one for all heads.
        num_kv_heads: sets of weights for keys; default num_heads.
        bias: whether there is b; it starts at 0.

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

"""The map of Efficient Attention, RoFormer's own example of phi != psi."""

from torch import Tensor

from linrope.feature_maps.base import FeatureMap, widen


class SoftmaxMap(FeatureMap):
    """phi(q) = softmax over the features of q,  psi(k) = exp(k).

    (..., d) -> (..., d), computed in float32 or wider. Shen et al. 2021, arXiv 1812.01243; RoFormer
    section 3.3. The paper's other choice for keys, a softmax along the sequence, sees the future and
    is left out; here the normalizer does its work. psi overflows for k > 88.

    >>> SoftmaxMap(2).queries(torch.zeros(2)).tolist()
    [0.5, 0.5]
    """

    positive = True

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = self.feature_dim = head_dim

    def queries(self, q: Tensor) -> Tensor:
        return widen(q).softmax(-1)

    def keys(self, k: Tensor) -> Tensor:
        return widen(k).exp()

    def extra_repr(self) -> str:
        return f"{self.feature_dim}"

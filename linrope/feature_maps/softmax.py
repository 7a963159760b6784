"""The map of Efficient Attention, RoFormer's own example of phi != psi."""

import torch
from torch import Tensor

from linrope.common.argument_checks import check_sizes
from linrope.feature_maps.base import FeatureMap, widen
from linrope.feature_maps.log_scale import exponential


class SoftmaxMap(FeatureMap):
    """phi(q) = softmax over the features of q,  psi(k) = exp(k).

    (..., d) -> (..., d), computed in float32 or wider. Shen et al. 2021, arXiv 1812.01243; RoFormer
    section 3.3. The paper also takes a softmax of the keys along the sequence. That sees the future and is
    left out; the normalizer does its work. log_scale is the maximum of a key, and 0 for queries.

    >>> features, log_scale = SoftmaxMap(2).queries(torch.zeros(2))
    >>> features, log_scale
    (tensor([0.5000, 0.5000]), tensor(0., dtype=torch.float64))
    """

    positive = True
    log_scaled = True

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        check_sizes(head_dim=head_dim)
        self.head_dim = self.feature_dim = head_dim

    def queries(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return widen(q).softmax(-1), q.new_zeros(q.shape[:-1], dtype=torch.float64)

    def keys(self, k: Tensor) -> tuple[Tensor, Tensor]:
        return exponential(k)

    def extra_repr(self) -> str:
        return f"{self.feature_dim}"

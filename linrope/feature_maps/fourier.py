"""Random Fourier features."""

import torch
from torch import Tensor

from linrope.feature_maps.random_features import RandomFeatureMap


class RandomFourier(RandomFeatureMap):
    """Random Fourier features: their dot product estimates the gaussian kernel.

        phi(x) = [sin(w_i . x'), cos(w_i . x')] / sqrt(M),   x' = x / d^(1/4),   i = 1 .. M
        E <phi(x), phi(y)> = exp(-|x' - y'|^2 / 2)

    The w are gaussian, orthogonal in blocks of d. (..., d) -> (..., 2M), computed in float32 or wider. The
    features are signed and require normalize=False. If all |x| are equal and all |y| are (RFA normalizes both
    to length 1), the kernel is exp(q.k / sqrt(d)) up to a factor. Peng et al. 2021, arXiv 2103.02143.

    Args:
        head_dim: d.
        num_features: 2M; default 2 d.
        seed: the seed of the projection; default: drawn from torch's generator.

    Raises:
        ValueError: num_features is odd or not positive.

    >>> phi = RandomFourier(16, num_features=64, seed=0)
    >>> bool((phi.queries(torch.randn(16)).square().sum() - 1).abs() < 1e-5)
    True
    """

    positive = False
    features_per_row = 2

    def queries(self, q: Tensor) -> Tensor:
        logits = self.project(q)
        features: Tensor = torch.cat((logits.sin(), logits.cos()), -1) * (self.feature_dim / 2) ** -0.5
        return features

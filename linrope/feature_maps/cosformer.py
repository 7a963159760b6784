"""The map of cosFormer: rectified units, weighted by distance."""

import math

import torch
from torch import Tensor

from linrope.common.argument_checks import check_sizes
from linrope.common.tracing import values_readable
from linrope.feature_maps.base import FeatureMap, widen
from linrope.rotation.angles import cos_sin


class Cosformer(FeatureMap):
    """Rectified units whose product decreases with the distance, to 0 at max_length L.

        phi(x, i) = psi(x, i) = [relu(x) cos(pi i / 2L), relu(x) sin(pi i / 2L)]
        <phi(q, i), psi(k, j)> = relu(q).relu(k) cos(pi (i - j) / 2L) >= 0   for 0 <= i, j < L

    (b, n, h, d) and positions (b or 1, n) -> (b, n, h, 2d), computed in float32 or wider, angles in
    float64. This is a rotation at one frequency, in the normalizer as well. It requires no other rotation;
    RoPE on top of it turns only the numerator. Qin et al. 2022, arXiv 2202.08791.

    Args:
        head_dim: d.
        max_length: L, more than every position. It cannot change: the features in a state depend on it.

    Raises:
        ValueError: max_length < 1, or a position is not below max_length. Positions are checked only on a CPU
            and outside of compiled code; elsewhere the normalizer may vanish for such positions.

    >>> phi, x = Cosformer(1, max_length=100), torch.ones(1, 2, 1, 1)
    >>> features = phi.queries(x, torch.tensor([[0, 50]]))
    >>> (features[:, 0] * features[:, 1]).sum()  # cos(pi / 4)
    tensor(0.7071)
    """

    positive, long_keys = True, True
    positional = True

    def __init__(self, head_dim: int, max_length: int) -> None:
        super().__init__()
        check_sizes(head_dim=head_dim, max_length=max_length)
        self.head_dim = head_dim
        self.feature_dim = 2 * head_dim
        self.max_length = max_length

    def queries(self, q: Tensor, positions: Tensor) -> Tensor:
        if values_readable(positions) and positions.numel() and int(positions.max()) >= self.max_length:
            raise ValueError(
                f"positions: got {int(positions.max())}, expected less than max_length={self.max_length}"
            )
        x = widen(q).relu()
        angles = positions[..., None, None].double() * (math.pi / 2 / self.max_length)
        cos, sin = cos_sin(angles, x.dtype)
        return torch.cat((x * cos, x * sin), -1)

    def keys(self, k: Tensor, positions: Tensor) -> Tensor:
        return self.queries(k, positions)

    def extra_repr(self) -> str:
        return f"{self.head_dim}, max_length={self.max_length}"

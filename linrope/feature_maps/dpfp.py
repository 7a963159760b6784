"""Deterministic parameter-free projection (DPFP)."""

import torch
from torch import Tensor

from linrope.common.argument_checks import check_integers, check_sizes
from linrope.feature_maps.base import FeatureMap, widen


class DPFP(FeatureMap):
    """Products of neighboring entries in the positive and negative parts of a vector.

        r = [relu(x), relu(-x)],   phi(x) = psi(x) = [r_i r_(i+j)],  i = 1 .. 2d cyclic, j = 1 .. nu

    (..., d) -> (..., 2 d nu), computed in float32 or wider. At most nu (d + 1) features are nonzero, and
    vectors of different signs share few of them. Schlag et al. 2021, arXiv 2102.11174.

    Args:
        head_dim: d.
        nu: the number of neighbors, 1 .. 2d - 1.

    Raises:
        ValueError: nu is out of range.

    >>> DPFP(2, nu=1).queries(torch.tensor([2.0, -3.0])).tolist()
    [0.0, 0.0, 0.0, 6.0]
    """

    positive, long_keys = True, True

    def __init__(self, head_dim: int, nu: int = 3) -> None:
        super().__init__()
        check_sizes(head_dim=head_dim)
        check_integers(nu=nu)
        if not 1 <= nu < 2 * head_dim:
            raise ValueError(f"nu={nu}: expected 1 .. {2 * head_dim - 1} for head_dim={head_dim}")
        self.head_dim = head_dim
        self.feature_dim = 2 * head_dim * nu
        self.nu = nu

    def queries(self, q: Tensor) -> Tensor:
        x = widen(q)
        r = torch.cat((x, -x), -1).relu()
        return torch.cat([r * r.roll(-j, -1) for j in range(1, self.nu + 1)], -1)

    def keys(self, k: Tensor) -> Tensor:
        return self.queries(k)

    def extra_repr(self) -> str:
        return f"{self.head_dim}, nu={self.nu}"

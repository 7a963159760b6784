"""DPFP: neighbors' products."""

import pytest
import torch
from torch.testing import assert_close

from linrope.feature_maps import DPFP


@pytest.mark.parametrize("nu", [1, 2, 3, 5])
def test_features_are_the_formula(nu: int) -> None:
    x = [0.5, -1.0, 2.0]
    r = [max(number, 0.0) for number in x] + [max(-number, 0.0) for number in x]
    expected = [r[i] * r[(i + j) % 6] for j in range(1, nu + 1) for i in range(6)]
    fmap, given = DPFP(3, nu=nu), torch.tensor(x, dtype=torch.float64)
    assert_close(fmap.queries(given), given.new_tensor(expected))
    assert torch.equal(fmap.keys(given), fmap.queries(given))
    assert fmap.feature_dim == 6 * nu


@pytest.mark.parametrize("nu", [0, -1, 6])
def test_nu_must_name_neighbors(nu: int) -> None:
    with pytest.raises(ValueError, match=rf"nu={nu}: expected 1 \.\. 5 for head_dim=3"):
        DPFP(3, nu=nu)

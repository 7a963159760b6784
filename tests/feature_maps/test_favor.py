"""FAVOR+ and its two successors of lower variance."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from linrope.feature_maps import FavorHyperbolic, FavorPlus, FavorPlusPlus
from tests.support.maps import plain
from tests.support.oracle import randoms


def test_with_kernel_epsilon_no_product_of_far_inputs_is_0() -> None:
    q, k, _ = randoms(1, 50, 1, 64, scale=6, dtype=torch.float32)
    fmap = FavorPlus(64, seed=0, kernel_epsilon=1e-4)
    phi, psi = fmap.queries(q)[0][0, :, 0], fmap.keys(k)[0][0, :, 0]
    assert float((phi @ psi.T).min()) > 1e-4


def products(fmap: FavorPlusPlus | FavorPlus, x: Tensor, y: Tensor) -> Tensor:
    """One estimate of the kernel from each row of the projection."""
    return plain(fmap.queries(x)) * plain(fmap.keys(y)) * fmap.feature_dim


@pytest.mark.parametrize("s", [0.3, 1.5])
def test_second_moment_of_favor_plus_plus_is_the_documented_one_and_least_at_its_a(s: float) -> None:
    d = 4
    x, y = torch.randn(2, d, generator=torch.Generator().manual_seed(1), dtype=torch.float64, device="cpu")
    x, y = ((s**0.5 * z / (x + y).norm()) for z in (x, y))  # of the scaled inputs
    squares = float(x @ x + y @ y)

    def log_moment(rho: float) -> float:
        return d * math.log((1 + rho) / (2 * rho)) + d / 2 * math.log(rho) + s * (1 + rho) - squares

    fmap = FavorPlusPlus(d, num_features=40_000, seed=0, mean_square=s).cpu().double()
    z = products(fmap, x * d**0.25, y * d**0.25)
    rho = 1 / (1 - 8 * fmap.a)
    assert_close(float(z.mean()), math.exp(float(x @ y)), rtol=0.03, atol=0)
    assert_close(float(z.square().mean()), math.exp(log_moment(rho)), rtol=0.1, atol=0)
    assert log_moment(rho) < min(log_moment(1.01 * rho), log_moment(0.99 * rho))


def test_variance_of_favor_hyperbolic_is_less_by_the_documented_factor() -> None:
    d, m, x = 4, 20_000, torch.tensor([0.3, 0.1, 0.0, -0.15], dtype=torch.float64, device="cpu")
    scaled = x / d**0.25
    z = products(FavorPlus(d, num_features=m, seed=0).cpu().double(), x, x)
    both = products(FavorHyperbolic(d, num_features=2 * m, seed=0).cpu().double(), x, x)
    ways = both.unflatten(-1, (2, -1)).mean(-2)  # of one direction, used both ways
    # two features for each direction: with as many features, half as many terms
    factor = 2 * float(ways.var() / z.var())
    assert_close(factor, 1 - math.exp(-4 * float(scaled @ scaled)), rtol=0.05, atol=0)


def test_fit_takes_the_mean_over_pairs_that_meet_in_a_head() -> None:
    q, k, _ = randoms(2, 5, 4, 8, g=2, m=3)
    fmap = FavorPlusPlus(8, seed=0)
    before = fmap.identity
    fmap.fit(q, k)
    pairs = [
        float((q[b, i, h] + k[b, j, h // 2]).square().sum()) / 8**0.5
        for b, h, i, j in product(range(2), range(4), range(5), range(3))
    ]
    assert fmap.mean_square == pytest.approx(sum(pairs) / len(pairs), rel=1e-12)
    assert fmap.identity != before


def test_a_cast_of_the_module_rounds_neither_seed_nor_mean_square() -> None:
    fmap = FavorPlusPlus(4, seed=2**61 + 1, mean_square=1 / 3).bfloat16()
    other = FavorPlusPlus(4, seed=0).bfloat16()
    other.load_state_dict(fmap.state_dict())
    assert (other.seed, other.mean_square) == (2**61 + 1, 1 / 3)


@pytest.mark.parametrize("bad", [torch.ones(1, 0, 2, 4), torch.full((1, 3, 2, 4), math.inf)])
def test_fit_refuses_inputs_without_a_mean(bad: Tensor) -> None:
    good = torch.ones(1, 3, 2, 4)
    for name, (q, k) in {"q": (bad, good), "k": (good, bad)}.items():
        with pytest.raises(ValueError, match=f"^{name}: got an empty or non-finite tensor, expected finite"):
            FavorPlusPlus(4).fit(q, k)

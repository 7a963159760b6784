"""docs/examples/historical_maps.py against its formulas."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from linrope import LinearRoPEAttention, linear_rope_attention
from linrope.feature_maps import FavorPlus, FeatureMap
from tests.support.examples import load
from tests.support.maps import plain
from tests.support.oracle import randoms

pytestmark = pytest.mark.skipif(torch.get_default_device().type != "cpu", reason="examples run on the CPU")

maps = load("historical_maps")
X = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
Y = X / 3**0.25  # as the random features take it
HALF = float(Y @ Y) / 2


def favor_plus_plus(s: float, w: Tensor) -> Tensor:
    rho = (math.sqrt((2 * s + 3) ** 2 + 24 * s) - 2 * s - 3) / (4 * s) if s else 1.0
    a = (1 - 1 / rho) / 8
    factor, scale = (1 - 4 * a) ** 0.75 / 2, (1 - 4 * a) ** 0.5
    return factor * (a * w.square().sum(-1) + scale * w @ Y - HALF).exp()


def products_of_neighbors(nu: int) -> Tensor:
    r = F.relu(torch.cat((X, -X)))
    return torch.stack([r[i] * r[(i + j) % 6] for j in range(1, nu + 1) for i in range(6)])


# The map and its features of X, from the projection w, by label
FORMULAS: dict[str, tuple[FeatureMap, Any]] = {
    "hyperbolic": (maps.FavorHyperbolic(3, 4, 0), lambda w: (torch.cat((w @ Y, -w @ Y)) - HALF).exp() / 8**0.5),
    **{
        f"favor++ of {s}": (maps.FavorPlusPlus(3, 4, 0, s), lambda w, s=s: favor_plus_plus(s or 2 * 3**0.5, w))
        for s in (None, 1e-9, 0.5, 7.0)
    },
    "generalized": (maps.GeneralizedRandomFeatures(3, 4, 0), lambda w: ((w @ Y).relu() + 1e-3) / 2),
    "generalized tanh": (
        maps.GeneralizedRandomFeatures(3, 4, 0, torch.tanh, 0.5, positive=False),
        lambda w: ((w @ Y).tanh() + 0.5) / 2,
    ),
    "rff": (maps.RandomFourier(3, 4, 0), lambda w: torch.cat(((w @ Y).sin(), (w @ Y).cos())) / 2),
    **{f"dpfp-{nu}": (maps.DPFP(3, nu), lambda _, nu=nu: products_of_neighbors(nu)) for nu in (1, 2, 3, 5)},
}  # fmt: skip


@pytest.mark.parametrize("label", FORMULAS)
def test_features_are_the_formula(label: str) -> None:
    fmap, formula = FORMULAS[label]
    fmap = copy.deepcopy(fmap).double()
    expected, phi = formula(getattr(fmap, "projection", X)), plain(fmap.queries(X))
    # for small s the rho of the paper cancels
    assert_close(phi, expected, rtol=1e-6 if "1e-09" in label else 1e-12, atol=0)
    assert torch.equal(plain(fmap.keys(X)), phi)
    assert fmap.feature_dim == len(expected)
    assert not fmap.positive or bool((phi >= 0).all())


def test_states_of_other_options_are_rejected() -> None:
    identities = {fmap.identity for fmap, _ in FORMULAS.values()}
    assert len(identities) == len(FORMULAS)
    layer, other = (
        LinearRoPEAttention(6, 2, feature_map=maps.FavorPlusPlus(3, 4, 0, s), rotary=None) for s in (1, 2)
    )
    _, state = layer(torch.ones(1, 3, 6), return_state=True)
    with pytest.raises(ValueError, match=r"mean_square=1.*expected .*mean_square=2"):
        other(torch.ones(1, 1, 6), state=state)


def products(fmap: FeatureMap, x: Tensor, y: Tensor) -> Tensor:
    """One estimate of the kernel from each row of the projection."""
    return plain(fmap.queries(x)) * plain(fmap.keys(y)) * fmap.feature_dim


@pytest.mark.parametrize("s", [0.3, 1.5])
def test_second_moment_of_favor_plus_plus_is_the_documented_one_and_least_at_its_a(s: float) -> None:
    d = 4
    x, y = torch.randn(2, d, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x, y = ((s**0.5 * z / (x + y).norm()) for z in (x, y))  # of the scaled inputs
    squares = float(x @ x + y @ y)

    def log_moment(rho: float) -> float:
        return d * math.log((1 + rho) / (2 * rho)) + d / 2 * math.log(rho) + s * (1 + rho) - squares

    fmap = maps.FavorPlusPlus(d, 10_000, seed=0, mean_square=s).double()
    z = products(fmap, x * d**0.25, y * d**0.25)
    rho = 1 / (1 - 8 * fmap.a)
    assert_close(float(z.mean()), math.exp(float(x @ y)), rtol=0.03, atol=0)
    assert_close(float(z.square().mean()), math.exp(log_moment(rho)), rtol=0.1, atol=0)
    assert log_moment(rho) < min(log_moment(1.01 * rho), log_moment(0.99 * rho))


def test_variance_of_favor_hyperbolic_is_less_by_the_documented_factor() -> None:
    d, m, x = 4, 20_000, torch.tensor([0.3, 0.1, 0.0, -0.15], dtype=torch.float64)
    scaled = x / d**0.25
    z = products(FavorPlus(d, num_features=m, seed=0).double(), x, x)
    both = products(maps.FavorHyperbolic(d, m, seed=0).double(), x, x)
    ways = both.unflatten(-1, (2, -1)).mean(-2)  # of one direction, used both ways
    factor = 2 * float(ways.var() / z.var())  # with as many features, half as many terms
    assert_close(factor, 1 - math.exp(-4 * float(scaled @ scaled)), rtol=0.05, atol=0)


def test_products_of_fourier_features_estimate_the_gaussian_kernel() -> None:
    q, k = 0.3 * torch.randn(2, 8, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    fmap = maps.RandomFourier(8, 20_000, seed=0).double()
    exact = torch.exp(-(q - k).square().sum() / 8**0.5 / 2)
    assert_close(fmap.queries(q) @ fmap.keys(k), exact, rtol=0.01, atol=0)


def test_cosformer_weighs_by_the_cosine_of_the_distance_and_takes_shifts() -> None:
    q, k, v = randoms(1, 20, 2, 4)
    q[..., 0] = k[..., 0] = 1  # no sum of weights is 0
    positions = torch.arange(20)
    weights = torch.cos(math.pi / 200 * (positions[:, None] - positions)).tril().double()
    scores = torch.einsum("nhd,mhd->hnm", q[0].relu(), k[0].relu()) * weights
    expected = (scores @ v[0].transpose(0, 1) / scores.sum(-1, keepdim=True)).transpose(0, 1)[None]
    for shift in (0, 70):
        phi, psi = (maps.cosformer(x, positions + shift, 100) for x in (q, k))
        assert_close(linear_rope_attention(phi, psi, v, feature_map=None), expected)


def test_redraw_draws_alike_in_every_process_and_random_maps_alone() -> None:
    fmap = {"name": "favor+", "seed": 1}
    layers = nn.ModuleList(LinearRoPEAttention(8, 2, feature_map=x) for x in (fmap, fmap, "t2r"))
    before, twin = [x.feature_map.identity for x in layers], copy.deepcopy(layers)
    maps.redraw(layers)
    torch.manual_seed(99)
    maps.redraw(twin)
    now = [x.feature_map.identity for x in layers]
    assert [a == b for a, b in zip(before, now)] == [False, False, True]
    assert now[0] == now[1]  # equal before, equal after
    assert [x.feature_map.identity for x in twin] == now


def test_the_maps_run_in_layers(capsys) -> None:
    maps.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert all(float(line.split()[-1]) < 1e-5 for line in lines[:-1])

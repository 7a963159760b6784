"""Taylor2 and ReBased: products that are polynomials of a dot product."""

import pytest
import torch
from torch.testing import assert_close

from linrope.feature_maps import Rebased, Taylor2
from linrope.feature_maps.polynomial import quadratic
from tests.support.oracle import randoms


@pytest.mark.parametrize("d", [1, 2, 3, 5, 8])
def test_products_of_quadratic_features_are_squares(d: int) -> None:
    x, y, _ = randoms(1, 6, 1, d)
    assert quadratic(x).shape[-1] == d * (d + 1) // 2
    assert_close((quadratic(x) * quadratic(y)).sum(-1), (x * y).sum(-1).square())


@pytest.mark.parametrize(("d", "f"), [(1, 4), (2, 6), (3, 10), (4, 16), (16, 154), (64, 2146)])
def test_products_of_taylor2_are_the_polynomial(d: int, f: int) -> None:
    fmap, (q, k, _) = Taylor2(d), randoms(1, 6, 1, d)
    s = (q * k).sum(-1) / d**0.5
    assert fmap.queries(q).shape[-1] == fmap.feature_dim == f
    assert_close((fmap.queries(q) * fmap.keys(k)).sum(-1), 1 + s + s.square() / 2)


@pytest.mark.parametrize(("d", "f"), [(1, 2), (2, 4), (3, 6), (4, 10), (5, 16)])
def test_products_of_rebased_are_squares_of_normalized_products(d: int, f: int) -> None:
    fmap, (q, k, _) = Rebased(d, num_heads=2).double(), randoms(2, 6, 2, d)
    for weight in fmap.parameters():
        torch.nn.init.normal_(weight)
    y = []
    for x, weights in ((q, fmap.phi), (k, fmap.psi)):
        centered = x - x.mean(-1, keepdim=True)
        normal = centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        y.append(weights["gamma"].detach() * normal + weights["beta"].detach())
    phi, psi = fmap.queries(q), fmap.keys(k)
    assert phi.shape[-1] == psi.shape[-1] == fmap.feature_dim == f
    assert_close((phi * psi).sum(-1).detach(), (y[0] * y[1]).sum(-1).square())


def test_rebased_starts_as_a_plain_layer_norm() -> None:
    fmap = Rebased(4, num_heads=3)
    for weights in (fmap.phi, fmap.psi):
        assert torch.equal(weights["gamma"].detach(), torch.ones(3, 4))
        assert torch.equal(weights["beta"].detach(), torch.zeros(3, 4))

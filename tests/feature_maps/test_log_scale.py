"""Exponential maps stay in range: features from 0 to 1, and a log_scale."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from linrope import feature_maps
from linrope.feature_maps import FeatureMap
from linrope.feature_maps.log_scale import centre, exponential
from linrope.feature_maps.random_features import RandomFeatureMap
from tests.support.maps import MAPS, build
from tests.support.oracle import randoms

SCALED = ("exp", "softmax", "favor+")
names = pytest.mark.parametrize("name", SCALED)
U = 2.0**-24


def make(name: str, d: int = 64) -> FeatureMap:
    return feature_maps.make(name, d, **({"num_features": 64, "seed": 0} if "favor" in name else {}))


def log_products(fmap: FeatureMap, q: Tensor, k: Tensor) -> Tensor:
    """(n, m): the logarithms of the products of all queries with all keys, from the features and scales."""
    (phi, s), (psi, t) = fmap.queries(q), fmap.keys(k)
    return (phi.double() @ psi.double().T).log() + s[:, None] + t


def rounding(fmap: FeatureMap, x: Tensor) -> Tensor:
    """(n,): how far float32 may move a token's logits: a few u times the numbers that they are sums of."""
    if isinstance(fmap, RandomFeatureMap):
        return 4 * U * (x.abs() @ fmap.projection.abs().T).amax(-1) * fmap.head_dim**-0.25
    return 4 * U * x.abs().amax(-1)


def test_the_maps_that_are_log_scaled() -> None:
    known = {label: build(label).log_scaled for label in MAPS}
    # A paired map has a log_scale if its inner map has one.
    expected = {label: label.removeprefix("paired ").split(" of ")[0] in SCALED for label in MAPS}
    assert known == expected


@names
@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_products_are_those_of_float64_at_the_sizes_of_real_models(name: str, size: int) -> None:
    fmap, wide = make(name), make(name).double()
    q, k = (x[0, :, 0] for x in randoms(1, 200, 1, 64, scale=size, dtype=torch.float32)[:2])
    for features, log_scale in (fmap.queries(q), fmap.keys(k)):
        assert bool(((features >= 0) & (features <= 1)).all())
        assert bool((features.amax(-1) >= 1 / 64).all())  # and so never all 0
        assert bool(log_scale.isfinite().all())
        assert log_scale.shape == (200,)
        assert log_scale.dtype == torch.float64
    # the terms are positive: an error of the logarithm is one relative to their sum
    error = (log_products(fmap, q, k) - log_products(wide, q.double(), k.double())).abs()
    assert bool((error <= rounding(fmap, q)[:, None] + rounding(fmap, k) + 4 * U).all())


@names
def test_numbers_far_out_of_range_keep_their_products(name: str) -> None:
    """q.k in the thousands, of which no float64 holds the exponential."""
    fmap, x = make(name).double(), torch.linspace(-100, 100, 64, dtype=torch.float64)
    (phi, s), (psi, t) = fmap.queries(x), fmap.keys(x)
    assert 0 < float(phi @ psi) <= 64
    assert math.isfinite(float(s + t))


@names
def test_the_log_scale_is_a_constant_and_the_features_carry_the_gradient(name: str) -> None:
    fmap, x = make(name, 4), torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    fmap = fmap.double()
    features, log_scale = fmap.keys(x)
    assert features.requires_grad
    assert not log_scale.requires_grad
    weight = torch.linspace(-1, 1, features.shape[-1], dtype=torch.float64)

    def value(x: Tensor) -> Tensor:
        features, log_scale = fmap.keys(x)
        return (features * weight).sum(-1) * log_scale.exp()

    assert torch.autograd.gradcheck(value, x)


@names
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_token_that_is_no_number_leaves_the_others_alone(name: str, bad: float) -> None:
    fmap, x = make(name, 4), torch.randn(3, 4)
    leaf = x.clone()
    leaf[1] = bad
    leaf.requires_grad_()
    features, log_scale = fmap.keys(leaf)
    expected, expected_scale = fmap.keys(x)
    assert bool(log_scale.isfinite().all())  # even the token's own: a maximum over tokens stays a number
    assert torch.equal(features[::2], expected[::2])
    assert torch.equal(log_scale[::2], expected_scale[::2])
    features[::2].sum().backward()
    assert leaf.grad is not None
    assert bool(leaf.grad[::2].isfinite().all())
    assert bool(features[1].isnan().any()) or math.isinf(bad)


def test_logits_that_are_all_minus_infinity_make_features_of_0() -> None:
    logits = torch.tensor([[-math.inf, -math.inf], [0.0, -math.inf]], requires_grad=True)
    features, log_scale = exponential(logits)
    assert features.tolist() == [[0, 0], [1, 0]]
    # finite, and so far below that float32 neither overflows nor gives it weight beside any other
    assert_close(log_scale, torch.tensor([-1e38, 0], dtype=torch.float64))
    features.sum().backward()
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())


def test_a_shared_term_keeps_its_digits_beside_the_logits() -> None:
    logits = torch.tensor([[1.0, 0.5]])
    shared = torch.tensor([[-1000.000000001]], dtype=torch.float64)
    features, log_scale = exponential(logits, shared)
    assert torch.equal(features, (logits - 1).exp())
    assert_close(log_scale, shared[0] + 1, rtol=1e-15, atol=0)


def test_exp_centres_for_kernels_that_apply_it_and_other_elementwise_maps_do_not() -> None:
    fmap = feature_maps.make("exp", 4)
    assert isinstance(fmap, feature_maps.ElementwiseMap)
    assert fmap.elementwise == "exp"
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = (30 * torch.randn(2, 3, 1, 4)).to(dtype)
        centred, log_scale = fmap.centre(x)
        assert centred.dtype == torch.promote_types(dtype, torch.float32)
        assert torch.equal(log_scale, x.amax(-1).double())
        features, same_scale = fmap.keys(x)
        assert torch.equal(features, centred.exp())
        assert torch.equal(log_scale, same_scale)
    x = torch.randn(4, requires_grad=True)
    fmap.centre(x)[0].sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(4))  # the maximum is a constant
    with pytest.raises(RuntimeError, match="centre: feature_map='relu' has no log_scale, expected 'exp'"):
        feature_maps.make("relu", 4).centre(x)


def test_centred_logits_are_widened() -> None:
    centred, _ = centre(torch.tensor([256.0, -0.5], dtype=torch.bfloat16))
    assert torch.equal(centred, torch.tensor([0, -256.5]))  # which bfloat16 does not have

"""The elementwise maps: values, slopes, and what ``positive`` promises."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from linrope import feature_maps
from linrope.feature_maps import ELEMENTWISE
from tests.feature_maps.table import plain

FORMULAS = {
    "elu+1": lambda x: x + 1 if x >= 0 else math.exp(x),
    "relu": lambda x: x if x >= 0 else 0.0,
    "relu2": lambda x: x * x if x >= 0 else 0.0,
    "exp": math.exp,
    "silu": lambda x: x / (1 + math.exp(-x)),
    "identity": lambda x: x,
}
POINTS = torch.tensor([-30.0, -3.0, -0.7, -1e-3, 0.0, 1e-3, 0.4, 2.0, 20.0], dtype=torch.float64)
names = pytest.mark.parametrize("name", ELEMENTWISE)


@names
def test_values_are_the_formula(name: str) -> None:
    fmap = feature_maps.make(name, len(POINTS))
    expected = torch.tensor([FORMULAS[name](x) for x in POINTS.tolist()], dtype=torch.float64)
    assert_close(plain(fmap.queries(POINTS)), expected, atol=0, rtol=1e-14)
    assert torch.equal(plain(fmap.keys(POINTS)), plain(fmap.queries(POINTS)))
    assert fmap.feature_dim == len(POINTS)
    assert fmap.elementwise == name


@names
def test_slopes_are_those_of_autograd_and_of_differences(name: str) -> None:
    value, slope, _ = ELEMENTWISE[name]
    x = POINTS.clone().requires_grad_()
    y = value(x)
    (by_autograd,) = torch.autograd.grad(y.sum(), x)
    x, y, step = x.detach(), y.detach(), 1e-5
    given = slope(x, y)
    assert_close(given, by_autograd, atol=1e-15, rtol=1e-13)
    x, given = x[x != 0], given[x != 0]  # relu's slope at 0 is a choice: PyTorch's
    differences = (value(x + step) - value(x - step)) / (2 * step)
    # relative to the largest value: exp(20) has third derivatives of that size
    assert_close(given, differences, atol=1e-9, rtol=1e-9)


@names
def test_slope_at_zero_is_one_of_the_sided_ones(name: str) -> None:
    value, slope, _ = ELEMENTWISE[name]
    zero, step = torch.zeros(1, dtype=torch.float64), 1e-7
    sides = [float(value(zero + s) - value(zero)) / s for s in (-step, step)]
    at_zero = float(slope(zero, value(zero)))
    assert min(abs(at_zero - side) for side in sides) < 1e-6


def test_elu_plus_1_keeps_relative_precision_far_below_zero() -> None:
    x = torch.linspace(-87, 0, 5001)
    exact = x.double().exp()
    assert_close(ELEMENTWISE["elu+1"].value(x).double(), exact, atol=0, rtol=2.0**-22)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_elu_plus_1_has_limits_at_infinity_and_no_nan(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([-math.inf, -largest, -1e4, 0, 1e4, largest, math.inf], dtype=dtype).requires_grad_()
    y = feature_maps.make("elu+1", 7).queries(x)
    assert y[0] == y[1] == 0
    assert torch.equal(y[3:], x[3:] + 1)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.tensor([0, 0, x.grad[2], 1, 1, 1, 1], dtype=dtype))


@names
@settings(deadline=None)
@given(
    x=st.lists(st.floats(-60, 60, width=32), min_size=3, max_size=3),
    y=st.lists(st.floats(-60, 60, width=32), min_size=3, max_size=3),
)
def test_maps_marked_positive_have_no_negative_feature(name: str, x: list[float], y: list[float]) -> None:
    fmap = feature_maps.make(name, 3)
    features = plain(fmap.queries(torch.tensor(x))), plain(fmap.keys(torch.tensor(y)))
    assert not fmap.positive or all(bool((feature >= 0).all()) for feature in features)


@names
def test_maps_not_marked_positive_have_one(name: str) -> None:
    fmap = feature_maps.make(name, 2)
    negative = bool((plain(fmap.queries(torch.tensor([-1.0, 1.0]))) < 0).any())
    assert negative == (not fmap.positive)


@names
def test_identity_names_the_map_and_its_size(name: str) -> None:
    assert feature_maps.make(name, 6).identity == feature_maps.make(name, 6).identity
    others = [feature_maps.make(other, size) for other in ELEMENTWISE for size in (4, 6)]
    assert len({other.identity for other in others}) == len(others)

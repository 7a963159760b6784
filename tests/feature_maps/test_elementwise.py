"""The elementwise maps: values, and what ``positive`` promises. Slopes are in test_slopes.py."""

import math

import pytest
import torch
from torch.testing import assert_close

from linrope import feature_maps
from linrope.feature_maps import ELEMENTWISE
from tests.support.maps import plain

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
    assert fmap.positive == bool((expected >= 0).all())
    assert torch.equal(plain(fmap.keys(POINTS)), plain(fmap.queries(POINTS)))
    assert fmap.feature_dim == len(POINTS)
    assert fmap.elementwise == name


def test_elu_plus_1_keeps_relative_precision_far_below_zero() -> None:
    x = torch.linspace(-87, 0, 5001)
    exact = x.double().exp()
    assert_close(ELEMENTWISE["elu+1"].value(x).double(), exact, atol=0, rtol=2.0**-22)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_elu_plus_1_has_limits_at_infinity_and_keeps_a_nan(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor(
        [-math.inf, -largest, -1e4, 0, 1e4, largest, math.inf, math.nan], dtype=dtype
    ).requires_grad_()
    y = feature_maps.make("elu+1", 8).queries(x)
    assert y[0] == y[1] == 0
    assert torch.equal(y[3:7], x[3:7] + 1)
    assert y[7].isnan()
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad[:7], torch.tensor([0, 0, x.grad[2], 1, 1, 1, 1], dtype=dtype))
    assert x.grad[7].isnan()

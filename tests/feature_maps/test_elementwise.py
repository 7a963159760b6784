"""The elementwise maps: values, and what ``positive`` promises. Slopes are in test_slopes.py."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from linrope import LinearRoPEAttention, feature_maps, linear_rope_attention
from linrope.feature_maps import ELEMENTWISE, ElementwiseMap, Features
from tests.support.maps import plain
from tests.support.oracle import BACKENDS, randoms

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


class Doubled(ElementwiseMap):
    """Its keys are twice those of its parent, which kernels do not know."""

    def keys(self, k: Tensor) -> Features:
        features = super().keys(k)
        return (2 * features[0], features[1]) if isinstance(features, tuple) else 2 * features


def test_a_subclass_that_changes_nothing_is_computed_by_the_backend_like_its_parent() -> None:
    fmap = type("Renamed", (ElementwiseMap,), {})("relu", 4)
    assert (fmap.elementwise, fmap.long_keys) == ("relu", True)
    assert fmap.identity == feature_maps.make("relu", 4).identity
    assert (Doubled("relu", 4).elementwise, Doubled("relu", 4).long_keys) == (None, False)


def test_a_map_has_one_name() -> None:
    fmap, x = ElementwiseMap("relu", 4), randoms(1, 9, 2, 4, dtype=torch.float32)
    fmap.name = "relu2"
    for backend in ("auto", *BACKENDS):
        expected = linear_rope_attention(*x, feature_map="relu2", backend=backend)
        assert_close(linear_rope_attention(*x, feature_map=fmap, backend=backend), expected)


@pytest.mark.parametrize("of_instance", [False, True], ids=["subclass", "method of one object"])
@pytest.mark.parametrize("name", ["elu+1", "exp"])
def test_keys_of_a_subclass_are_computed_in_every_backend(name: str, of_instance: bool) -> None:
    q, k, v = randoms(1, 9, 2, 4, dtype=torch.float32)
    plain_map, fmap = feature_maps.make(name, 4), Doubled(name, 4)
    if of_instance:
        fmap = ElementwiseMap(name, 4)
        fmap.keys = Doubled(name, 4).keys  # type: ignore[method-assign]
    how: dict[str, Any] = {"normalize": False, "return_state": True}
    for backend in ("auto", *BACKENDS):
        out, _ = linear_rope_attention(q, k, v, feature_map=fmap, backend=backend, **how)
        expected, state = linear_rope_attention(q, k, v, feature_map=plain_map, backend=backend, **how)
        assert_close(out, 2 * expected)
    if not of_instance:
        with pytest.raises(ValueError, match=rf"^state: made with .*; expected {__name__}\.Doubled"):
            linear_rope_attention(q, k, v, feature_map=fmap, state=state, **how)
        assert "feature_map=Doubled" in repr(LinearRoPEAttention(8, 2, feature_map=fmap))

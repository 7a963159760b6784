"""The softmax map."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from linrope import feature_maps
from tests.feature_maps.table import plain


def test_queries_are_a_softmax_over_features_and_keys_an_exponential() -> None:
    x = [-1.5, 0.0, 2.0]
    fmap = feature_maps.make("softmax", 3)
    total = sum(math.exp(number) for number in x)
    expected = torch.tensor([math.exp(number) / total for number in x], dtype=torch.float64)
    given_x = torch.tensor(x, dtype=torch.float64)
    assert_close(plain(fmap.queries(given_x)), expected)
    assert_close(plain(fmap.keys(given_x)), expected * total)
    assert fmap.elementwise is None
    assert fmap.feature_dim == 3


@settings(deadline=None)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=4, max_size=4))
def test_features_are_finite_and_not_negative(x: list[float]) -> None:
    fmap = feature_maps.make("softmax", 4)
    assert fmap.positive
    for features, log_scale in (fmap.queries(torch.tensor(x)), fmap.keys(torch.tensor(x))):
        assert bool(log_scale.isfinite())
        assert bool(((features >= 0) & features.isfinite()).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    x = torch.linspace(-4, 4, 8).to(dtype)
    fmap = feature_maps.make("softmax", 8)
    assert torch.equal(plain(fmap.queries(x)), plain(fmap.queries(x.float())))
    assert torch.equal(plain(fmap.keys(x)), plain(fmap.keys(x.float())))
    assert plain(fmap.keys(x)).dtype == torch.float32

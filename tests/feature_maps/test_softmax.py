"""The softmax map, and ``make``."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from linrope import feature_maps


def test_queries_are_a_softmax_over_features_and_keys_an_exponential() -> None:
    x = [-1.5, 0.0, 2.0]
    fmap = feature_maps.make("softmax", 3)
    total = sum(math.exp(number) for number in x)
    expected = torch.tensor([math.exp(number) / total for number in x], dtype=torch.float64)
    given_x = torch.tensor(x, dtype=torch.float64)
    assert_close(fmap.queries(given_x), expected)
    assert_close(fmap.keys(given_x), expected * total)
    assert fmap.elementwise is None
    assert fmap.feature_dim == 3


@settings(deadline=None)
@given(st.lists(st.floats(-1e4, 80, width=32), min_size=4, max_size=4))
def test_features_are_finite_and_not_negative(x: list[float]) -> None:
    fmap = feature_maps.make("softmax", 4)
    assert fmap.positive
    for features in (fmap.queries(torch.tensor(x)), fmap.keys(torch.tensor(x))):
        assert bool(((features >= 0) & features.isfinite()).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    x = torch.linspace(-4, 4, 8).to(dtype)
    fmap = feature_maps.make("softmax", 8)
    assert torch.equal(fmap.queries(x), fmap.queries(x.float()))
    assert torch.equal(fmap.keys(x), fmap.keys(x.float()))
    assert fmap.keys(x).dtype == torch.float32


@pytest.mark.parametrize("name", feature_maps.NAMES)
def test_a_token_s_features_are_its_own(name: str) -> None:
    """A map that looks along the sequence leaks the future."""
    fmap = feature_maps.make(name, 4)
    x = torch.randn(2, 7, 3, 4, generator=torch.Generator().manual_seed(0))
    y = x.clone()
    y[:, 4:] = 50.0
    for function in (fmap.queries, fmap.keys):
        assert torch.equal(function(x)[:, :4], function(y)[:, :4])


def test_make_passes_options_on() -> None:
    fmap = feature_maps.make("favor+", 8, num_features=6, seed=3)
    assert isinstance(fmap, feature_maps.FavorPlus)
    assert (fmap.feature_dim, fmap.seed) == (6, 3)


def test_make_refuses_options_that_the_map_does_not_have() -> None:
    with pytest.raises(TypeError, match="num_features"):
        feature_maps.make("elu+1", 8, num_features=6)


@pytest.mark.parametrize("near", feature_maps.NAMES)
def test_unknown_name_lists_the_known_ones_and_the_nearest(near: str) -> None:
    with pytest.raises(ValueError, match="feature_map=") as error:
        feature_maps.make(near + "_", 8)
    assert all(name in str(error.value) for name in feature_maps.NAMES)
    assert f"did you mean {near!r}?" in str(error.value)


def test_a_name_like_no_other_gets_no_suggestion() -> None:
    with pytest.raises(ValueError, match="'@@@'") as error:
        feature_maps.make("@@@", 8)
    assert "did you mean" not in str(error.value)


@pytest.mark.parametrize("name", feature_maps.NAMES)
@pytest.mark.parametrize("head_dim", [0, -2])
def test_head_dim_must_be_positive(name: str, head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"head_dim={head_dim}"):
        feature_maps.make(name, head_dim)

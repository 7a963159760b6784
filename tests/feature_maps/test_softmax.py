"""The softmax map."""

import math

import torch
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

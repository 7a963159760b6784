"""Random Fourier features; what all random maps share is in test_random_features.py."""

import math

import pytest
import torch
from torch.testing import assert_close

from linrope import linear_rope_attention
from linrope.feature_maps import RandomFourier
from tests.oracle import randoms


def test_features_are_the_formula() -> None:
    fmap = RandomFourier(3, num_features=4, seed=0).cpu().double()
    x = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64, device="cpu")
    ways = [float(w @ x) / 3**0.25 for w in fmap.projection]
    assert len(ways) == 2
    expected = [math.sin(way) / 2**0.5 for way in ways] + [math.cos(way) / 2**0.5 for way in ways]
    assert_close(fmap.queries(x), x.new_tensor(expected))
    assert torch.equal(fmap.keys(x), fmap.queries(x))


def test_the_normalizer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"signed.*expected normalize=False"):
        linear_rope_attention(*randoms(1, 3, 1, 4), feature_map=RandomFourier(4, seed=0).double())

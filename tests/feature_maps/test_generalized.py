"""Performer's generalized kernels."""

import pytest
import torch
from torch import Tensor

from linrope import feature_maps
from linrope.feature_maps import GeneralizedRandomFeatures
from linrope.feature_maps.generalized import KERNELS


def shifted(x: Tensor) -> Tensor:
    return x + 10


def test_the_default_is_relu_and_a_thousandth() -> None:
    fmap = feature_maps.make("generalized", 3, seed=0)
    same = GeneralizedRandomFeatures(3, seed=0, kernel="relu", kernel_epsilon=1e-3)
    assert fmap.identity == same.identity
    x = torch.linspace(-2, 3, 6).view(2, 3)
    assert float(fmap.queries(x).min()) == pytest.approx(1e-3 / 6**0.5)


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_marked_positive_are_never_negative_and_others_are(kernel: str) -> None:
    fmap = GeneralizedRandomFeatures(3, seed=0, kernel=kernel, kernel_epsilon=0)
    features = fmap.queries(10 * torch.randn(100, 3, generator=torch.Generator().manual_seed(0)))
    assert bool((features >= 0).all()) == fmap.positive


def test_a_function_is_positive_if_the_caller_says_so() -> None:
    assert not GeneralizedRandomFeatures(3, kernel=shifted).positive
    assert GeneralizedRandomFeatures(3, kernel=shifted, positive=True).positive

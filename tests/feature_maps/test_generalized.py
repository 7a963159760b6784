"""Performer's generalized kernels."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from linrope import feature_maps
from linrope.feature_maps import GeneralizedRandomFeatures
from linrope.feature_maps.generalized import KERNELS

X = torch.linspace(-2, 3, 6, dtype=torch.float64).view(2, 3)


def shifted(x: Tensor) -> Tensor:
    return x + 10


@pytest.mark.parametrize(
    ("kernel", "function"),
    [("relu", F.relu), ("tanh", torch.tanh), ("identity", torch.clone), (torch.exp, torch.exp)],
)
def test_features_are_the_formula(
    kernel: str | Callable[[Tensor], Tensor], function: Callable[[Tensor], Tensor]
) -> None:
    fmap = GeneralizedRandomFeatures(3, num_features=4, seed=0, kernel=kernel, kernel_epsilon=0.5).double()
    expected = (function(X @ fmap.projection.T / 3**0.25) + 0.5) / 2
    assert_close(fmap.queries(X), expected)
    assert torch.equal(fmap.keys(X), fmap.queries(X))


def test_the_default_is_relu_and_a_thousandth() -> None:
    fmap = feature_maps.make("generalized", 3, seed=0)
    same = GeneralizedRandomFeatures(3, seed=0, kernel="relu", kernel_epsilon=1e-3)
    assert fmap.identity == same.identity
    assert float(fmap.queries(X.float()).min()) == pytest.approx(1e-3 / 6**0.5)


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_marked_positive_are_never_negative_and_others_are(kernel: str) -> None:
    fmap = GeneralizedRandomFeatures(3, seed=0, kernel=kernel, kernel_epsilon=0)
    features = fmap.queries(10 * torch.randn(100, 3, generator=torch.Generator().manual_seed(0)))
    assert bool((features >= 0).all()) == fmap.positive


def test_a_function_is_positive_if_the_caller_says_so() -> None:
    assert not GeneralizedRandomFeatures(3, kernel=shifted).positive
    assert GeneralizedRandomFeatures(3, kernel=shifted, positive=True).positive


def test_identities_have_kernel_and_epsilon() -> None:
    options = [{}, {"kernel": "abs"}, {"kernel": shifted}, {"kernel_epsilon": 1e-2}]
    made = [GeneralizedRandomFeatures(3, seed=0, **chosen) for chosen in options]
    assert len({fmap.identity for fmap in made}) == len(made)


def test_what_is_no_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="kernel='relu6': expected one of relu, abs"):
        GeneralizedRandomFeatures(3, kernel="relu6")
    with pytest.raises(ValueError, match=r"kernel: got .*<lambda>, expected a function defined with def"):
        GeneralizedRandomFeatures(3, kernel=lambda x: x + 1)
    with pytest.raises(TypeError, match="kernel: got ReLU, expected a name or a function"):
        GeneralizedRandomFeatures(3, kernel=torch.nn.ReLU())
    with pytest.raises(ValueError, match="kernel_epsilon=-1: expected"):
        GeneralizedRandomFeatures(3, kernel_epsilon=-1)

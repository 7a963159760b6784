"""The features of one vector, written out. Others: test_elementwise, test_learned, test_polynomial."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from linrope import feature_maps
from tests.support.maps import RANDOM, plain

X = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64, device="cpu")
Y = X / 3**0.25  # as the random features take it
HALF = float(Y @ Y) / 2
Formula = Callable[[Tensor], Tensor]  # of the projection


def stabilized(logits: Tensor, epsilon: float) -> Tensor:
    return ((logits - logits.max()).exp() + epsilon) * logits.max().exp()


# The map, its options and its formula, by label. Random maps have four features.
FORMULAS: dict[str, tuple[str, dict[str, Any], Formula]] = {
    "softmax": ("softmax", {}, lambda _: X.exp() / X.exp().sum()),
    "favor+": ("favor+", {}, lambda w: (w @ Y - HALF).exp() / 2),
    "favor+ and epsilon": ("favor+", {"kernel_epsilon": 0.125}, lambda w: stabilized(w @ Y - HALF, 0.125) / 2),
}  # fmt: skip


@pytest.mark.parametrize("label", FORMULAS)
def test_features_are_the_formula(label: str) -> None:
    name, options, formula = FORMULAS[label]
    random = {"num_features": 4, "seed": 0} if name in RANDOM else {}
    fmap = feature_maps.make(name, 3, **random, **options).cpu().double()
    expected = formula(getattr(fmap, "projection", X))
    phi, psi = plain(fmap.queries(X)), plain(fmap.keys(X))
    assert_close(phi, expected, rtol=1e-12, atol=0)
    if name == "softmax":
        assert_close(psi, X.exp(), rtol=1e-12, atol=0)
    else:
        assert torch.equal(psi, phi)
    assert fmap.feature_dim == len(expected)
    assert fmap.elementwise is None

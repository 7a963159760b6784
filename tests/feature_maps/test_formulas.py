"""The features of one vector, written out. Others: test_elementwise, test_learned, test_cosformer, test_polynomial."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from linrope import feature_maps
from tests.support.maps import RANDOM, plain

X = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64, device="cpu")
Y = X / 3**0.25  # as the random features take it
HALF = float(Y @ Y) / 2
Formula = Callable[[Tensor], Tensor]  # of the projection


def stabilized(logits: Tensor, epsilon: float) -> Tensor:
    return ((logits - logits.max()).exp() + epsilon) * logits.max().exp()


def favor_plus_plus(s: float) -> Formula:
    rho = (math.sqrt((2 * s + 3) ** 2 + 24 * s) - 2 * s - 3) / (4 * s) if s else 1.0
    a = (1 - 1 / rho) / 8
    factor, scale = (1 - 4 * a) ** 0.75 / 2, (1 - 4 * a) ** 0.5
    return lambda w: factor * (a * w.square().sum(-1) + scale * w @ Y - HALF).exp()


def products_of_neighbors(nu: int) -> Formula:
    r = F.relu(torch.cat((X, -X)))
    return lambda _: torch.stack([r[i] * r[(i + j) % 6] for j in range(1, nu + 1) for i in range(6)])


def generalized(function: Callable[[Tensor], Tensor], kernel: Any) -> tuple[str, dict[str, Any], Formula]:
    options = {"kernel": kernel, "kernel_epsilon": 0.5}
    return "generalized", options, lambda w: (function(w @ Y) + 0.5) / 2


# The map, its options and its formula, by label. Random maps have four features.
FORMULAS: dict[str, tuple[str, dict[str, Any], Formula]] = {
    "softmax": ("softmax", {}, lambda _: X.exp() / X.exp().sum()),
    "favor+": ("favor+", {}, lambda w: (w @ Y - HALF).exp() / 2),
    "favor+ and epsilon": ("favor+", {"kernel_epsilon": 0.125}, lambda w: stabilized(w @ Y - HALF, 0.125) / 2),
    "favor+hyperbolic": ("favor+hyperbolic", {}, lambda w: (torch.cat((w @ Y, -w @ Y)) - HALF).exp() / 2),
    "favor++": ("favor++", {}, favor_plus_plus(2 * 3**0.5)),
    **{f"favor++ of {s}": ("favor++", {"mean_square": s}, favor_plus_plus(s)) for s in (0.0, 1e-9, 0.5, 7.0)},
    "rff": ("rff", {}, lambda w: torch.cat(((w @ Y).sin(), (w @ Y).cos())) / 2**0.5),
    "generalized relu": generalized(F.relu, "relu"),
    "generalized tanh": generalized(torch.tanh, "tanh"),
    "generalized identity": generalized(torch.clone, "identity"),
    "generalized exp": generalized(torch.exp, torch.exp),
    **{f"dpfp-{nu}": ("dpfp", {"nu": nu}, products_of_neighbors(nu)) for nu in (1, 2, 3, 5)},
}  # fmt: skip


@pytest.mark.parametrize("label", FORMULAS)
def test_features_are_the_formula(label: str) -> None:
    name, options, formula = FORMULAS[label]
    random = {"num_features": 4, "seed": 0} if name in RANDOM else {}
    fmap = feature_maps.make(name, 3, **random, **options).cpu().double()
    expected = formula(getattr(fmap, "projection", X))
    phi, psi = plain(fmap.queries(X)), plain(fmap.keys(X))
    # for small s the rho of the paper cancels
    assert_close(phi, expected, rtol=1e-6 if label == "favor++ of 1e-09" else 1e-12, atol=0)
    if name == "softmax":
        assert_close(psi, X.exp(), rtol=1e-12, atol=0)
    else:
        assert torch.equal(psi, phi)
    assert fmap.feature_dim == len(expected)
    assert fmap.elementwise is None

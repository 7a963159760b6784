"""Paired features: rotation turns into weights by cosines, and no output exceeds the values."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from linrope import Rotary, feature_maps, linear_rope_attention
from linrope.feature_maps import FeatureMap, PairedMap
from tests.support.maps import HEADS
from tests.support.oracle import examples, randoms

INNER: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("elu+1", "relu", "silu", "softmax", "hedgehog")},
    "favor+": {"num_features": 6, "seed": 0},
    "t2r": HEADS,
}
layouts = pytest.mark.parametrize("layout", ["interleaved", "half"])


def paired(name: str, layout: str) -> FeatureMap:
    torch.manual_seed(0)  # t2r's weights
    return feature_maps.make("paired", 4, inner=name, layout=layout, **INNER[name]).double()


@layouts
@pytest.mark.parametrize("name", INNER)
def test_every_feature_is_both_members_of_a_pair(name: str, layout: str) -> None:
    fmap, (q, k, _) = paired(name, layout), randoms(1, 5, 2, 4)
    assert isinstance(fmap, PairedMap)
    inner = fmap.inner
    for kind in ("head_dim", "positive", "log_scaled"):
        assert getattr(fmap, kind) == getattr(inner, kind)
    for side, x in (("queries", q), ("keys", k)):
        twice, once = (getattr(made, side)(x) for made in (fmap, inner))
        if inner.log_scaled:
            (twice, log_scale), (once, expected) = twice, once
            assert torch.equal(log_scale, expected)
        f = once.shape[-1]
        assert twice.shape[-1] == fmap.feature_dim == 2 * f
        index = [t // 2 for t in range(2 * f)] if layout == "interleaved" else [*range(f), *range(f)]
        assert torch.equal(twice, once[..., index])


@layouts
def test_rotated_products_are_weighted_by_cosines(layout: str) -> None:
    fmap, rotary = paired("elu+1", layout), Rotary(8, layout=layout)
    q, k, _ = randoms(1, 1, 1, 4)
    at, there = torch.tensor([3]), torch.tensor([17])
    product = (rotary(fmap.queries(q), at) * rotary(fmap.keys(k), there)).sum()
    inner = feature_maps.make("elu+1", 4)
    expected = (2 * inner.queries(q) * inner.keys(k) * torch.cos(14 * rotary.theta.to(q.device))).sum()
    assert_close(product, expected)


@examples(100)
@given(
    name=st.sampled_from(sorted(INNER.keys() - {"silu"})),
    layout=st.sampled_from(["interleaved", "half"]),
    causal=st.booleans(),
    n=st.integers(1, 80),
    scale=st.sampled_from([0.1, 1.0, 5.0]),
    seed=st.integers(0, 10**6),
)
def test_no_output_exceeds_the_largest_value_seen(
    name: str, layout: str, causal: bool, n: int, scale: float, seed: int
) -> None:
    fmap, (q, k, v) = paired(name, layout), randoms(1, n, 2, 4, seed=seed)
    with torch.no_grad():
        out = linear_rope_attention(
            scale * q, scale * k, v,
            feature_map=fmap, rotary=Rotary(fmap.feature_dim, layout=layout), causal=causal,
        )  # fmt: skip
    seen = v.abs().cummax(1).values if causal else v.abs().amax(1, keepdim=True)
    assert bool((out.abs() <= seen * (1 + 1e-9)).all())


def test_without_pairs_an_output_exceeds_the_values() -> None:
    """Eq. 19 alone: the products of different features of a pair are not in the normalizer."""
    phi = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    psi = torch.tensor([1e-3, 1.0]).view(1, 1, 1, 2)
    how = {"rotary": Rotary(2), "positions": torch.tensor([1]), "key_positions": torch.tensor([0])}
    out = linear_rope_attention(phi, psi, torch.ones(1, 1, 1, 1), feature_map="relu", **how)
    assert float(out.abs()) > 100
    both = linear_rope_attention(
        phi, psi, torch.ones(1, 1, 1, 1),
        feature_map=feature_maps.make("paired", 2, inner="relu"), **how | {"rotary": Rotary(4)},
    )  # fmt: skip
    assert float(both.abs()) <= 1

"""Maps with learned weights, of all heads or of each."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from linrope import feature_maps
from linrope.feature_maps import T2R, Hedgehog
from tests.support.maps import LEARNED
from tests.support.oracle import randoms

names = pytest.mark.parametrize("name", LEARNED)
heads = pytest.mark.parametrize("options", [{}, {"num_heads": 4}, {"num_heads": 4, "num_kv_heads": 2}])


def random_weights(name: str, d: int, **options: Any) -> feature_maps.LearnedMap:
    fmap = feature_maps.make(name, d, **options).double()
    assert isinstance(fmap, feature_maps.LearnedMap)
    for weight in fmap.parameters():
        torch.nn.init.normal_(weight)
    return fmap


def by_head(fmap: feature_maps.LearnedMap, x: Tensor, side: str, formula: Any) -> Tensor:
    """formula(x (b, n, d), weights without their leading axis), head by head."""
    sets = dict(getattr(fmap, side))
    heads = [{key: x.detach()[h % len(x)] for key, x in sets.items()} for h in range(x.shape[2])]
    return torch.stack([formula(x[:, :, h], own) for h, own in enumerate(heads)], 2)


def t2r(x: Tensor, weights: dict[str, Tensor]) -> Tensor:
    return (x @ weights["weight"].T + weights["bias"]).clamp_min(0)


def hedgehog(x: Tensor, weights: dict[str, Tensor]) -> Tensor:
    y = x @ weights["weight"].T + weights.get("bias", 0)
    both = torch.cat((y.exp(), (-y).exp()), -1)
    return both / both.sum(-1, keepdim=True)


@heads
@pytest.mark.parametrize(
    ("name", "formula", "bias"), [("t2r", t2r, {}), ("hedgehog", hedgehog, {}), ("hedgehog", hedgehog, {"bias": True})]
)  # fmt: skip
def test_features_are_the_formula(name: str, formula: Any, bias: dict, options: dict[str, int]) -> None:
    fmap = random_weights(name, 3, **options, **bias)
    q, k, _ = randoms(2, 5, 4, 3, g=options.get("num_kv_heads", 4))
    assert_close(fmap.queries(q), by_head(fmap, q, "phi", formula))
    assert_close(fmap.keys(k), by_head(fmap, k, "psi", formula))


@names
@heads
def test_queries_and_keys_have_weights_of_their_own(name: str, options: dict[str, int]) -> None:
    state = feature_maps.make(name, 4, **options).state_dict()
    num_heads = options.get("num_heads", 1)
    sizes = {"phi": num_heads, "psi": options.get("num_kv_heads", num_heads)}
    assert {key.split(".")[0]: len(weight) for key, weight in state.items()} == sizes
    assert all(weight.dtype == torch.float32 for weight in state.values())


def test_t2r_starts_like_a_linear_layer() -> None:
    fmap = T2R(16, num_heads=50)
    for x in fmap.state_dict().values():
        assert float(x.abs().max()) <= 1 / 4
        assert float(x.std()) == pytest.approx(1 / 4 / 3**0.5, rel=0.1)
    assert not torch.equal(fmap.phi["weight"], fmap.psi["weight"])


@pytest.mark.parametrize("bias", [False, True])
def test_hedgehog_starts_with_the_identity(bias: bool) -> None:
    fmap, x = Hedgehog(2, num_heads=3, bias=bias), torch.tensor([1.0, -2.0])
    assert ("bias" in fmap.phi, "bias" in fmap.psi) == (bias, bias)
    weights = [math.exp(number) for number in (1, -2, -1, 2)]
    expected = x.new_tensor(weights) / sum(weights)
    assert_close(fmap.queries(x.expand(3, 2)).detach(), expected.expand(3, 4))
    assert torch.equal(fmap.keys(x.expand(3, 2)), fmap.queries(x.expand(3, 2)))


def test_t2r_sizes() -> None:
    assert [T2R(d).feature_dim for d in (4, 5)] == [4, 6]
    assert T2R(4, num_features=10).queries(torch.ones(3, 2, 4)).shape == (3, 2, 10)


@names
def test_another_number_of_heads_is_refused(name: str) -> None:
    fmap = feature_maps.make(name, 4, num_heads=4, num_kv_heads=2)
    with pytest.raises(ValueError, match=r"got 2 heads, expected the map.s num_heads=4"):
        fmap.queries(torch.ones(1, 3, 2, 4))
    with pytest.raises(ValueError, match=r"got 4 heads, expected the map.s num_kv_heads=2"):
        fmap.keys(torch.ones(1, 3, 4, 4))
    alone = feature_maps.make(name, 4, num_heads=1)
    with pytest.raises(ValueError, match=r"got 2 heads, expected the map.s num_heads=1"):
        alone.queries(torch.ones(1, 3, 2, 4))


@names
@pytest.mark.parametrize("fused", [False, True])  # fused ones change weights without counting versions
@pytest.mark.parametrize("compiled", [False, True])
def test_an_optimizer_step_changes_the_identity(name: str, fused: bool, compiled: bool) -> None:
    fmap, x = feature_maps.make(name, 4), torch.randn(3, 1, 4)
    optimizer = torch.optim.AdamW(fmap.parameters(), fused=fused)
    fmap.eval()
    with torch.no_grad():
        before = fmap.identity
        assert fmap.identity == before
    if compiled:
        fmap.train()  # which is what tells, since compiled code does not
    queries = torch.compile(fmap.queries, backend="eager") if compiled else fmap.queries
    queries(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        assert fmap.identity != before


@names
@heads
def test_reset_parameters_makes_the_weights_as_they_start(name: str, options: dict[str, int]) -> None:
    torch.manual_seed(0)
    fmap = feature_maps.make(name, 4, **options)
    fresh = fmap.identity
    assert isinstance(fmap, feature_maps.LearnedMap)
    for weight in fmap.parameters():
        torch.nn.init.normal_(weight)
    torch.manual_seed(0)
    fmap.reset_parameters()
    assert fmap.identity == fresh

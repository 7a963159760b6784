"""Exponential feature maps at the magnitudes of real models: the running maximum of the keys' scales."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from linrope import Rotary, feature_maps, linear_rope_attention
from linrope.feature_maps import FeatureMap
from tests.support.equation import Equation
from tests.support.oracle import both_directions, every_backend, randoms

MAPS = ("exp", "softmax", "favor+")
D = 64


def build(name: str, d: int = D) -> FeatureMap:
    return feature_maps.make(name, d, **({"seed": 0, "num_features": d} if "favor" in name else {}))


@pytest.mark.parametrize("size", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_float32_is_the_sum_formed_in_the_log_domain(decay: float, name: str, size: float) -> None:
    """In the equation each query divides all its keys by the largest key that it sees, without a state."""
    q, k, v = randoms(1, 300, 1, D, e=8, dtype=torch.float32, scale=size)
    fmap, equation = build(name), Equation()
    how: dict[str, Any] = {"feature_map": fmap, "rotary": Rotary(fmap.feature_dim)}
    how["decay"] = None if decay == 1 else torch.tensor([decay], dtype=torch.float64)
    expected, _ = equation(q.double(), k.double(), v.double(), **how)
    out = linear_rope_attention(q, k, v, backend="eager", **how)
    error = ((out.double() - expected).abs() / equation.sizes.out)[equation.sizes.den > 1e-6]
    # The logits themselves, sums of 64 products of size 3, are off by 1e-5 in float32.
    assert float(error.max()) < 2e-4


def share_at_eps(name: str, size: float) -> float:
    """Of the queries, how many have a normalizer at eps."""
    fmap = build(name)
    q, k, _ = randoms(1, 1000, 2, D, dtype=torch.float32, scale=size)
    counted = linear_rope_attention(q, k, torch.ones_like(k[..., :1]), feature_map=fmap)
    return float((counted < 1 - 1e-3).float().mean())


def test_few_normalizers_sink_to_eps_at_ordinary_magnitudes(record_property: Any) -> None:
    shares = {name: [share_at_eps(name, float(size)) for size in range(1, 7)] for name in MAPS}
    for name, found in shares.items():
        record_property(name, found)
        print(f"{name}: share of rows at eps for sizes 1 to 6: {', '.join(f'{x:.3f}' for x in found)}")
    assert shares["favor+"][0] == 0
    assert max(shares["favor+"][:3]) < 0.05  # 0.9 without the running maximum, at size 3


@every_backend
@pytest.mark.parametrize("name", MAPS)
def test_a_later_key_changes_no_earlier_bit(name: str, backend: str) -> None:
    fmap = build(name, 8)
    q, k, v = randoms(1, 150, 2, 8, dtype=torch.float32, scale=2.0)
    how: dict[str, Any] = {"feature_map": fmap, "rotary": Rotary(fmap.feature_dim), "backend": backend}
    before = linear_rope_attention(q, k, v, **how)
    k[:, 97:] *= 20
    after = linear_rope_attention(q, k, v, **how)
    assert torch.equal(before[:, :97], after[:, :97])
    assert bool(after.isfinite().all())


class Scaled(FeatureMap):
    """Features as they are; the last number is the log_scale."""

    log_scaled, positive = True, True

    def __init__(self) -> None:
        super().__init__()
        self.feature_dim = 2

    def queries(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return q[..., :-1], q[..., -1].double()

    def keys(self, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.queries(k)


@every_backend
def test_a_key_far_below_the_largest_keeps_its_digits_where_queries_miss_the_largest(backend: str) -> None:
    """Its weight is e^-60; formed in float32 it would be 60 units in the last place off."""
    q = torch.tensor([0.0, 1, 0]).expand(1, 2, 1, 3)
    k = torch.tensor([[1, 0, 30.1], [0, 1, -30.3]])[None, :, None]
    v = torch.ones(1, 2, 1, 1)
    out = linear_rope_attention(q, k, v, feature_map=Scaled(), normalize=False, backend=backend)
    expected = k[0, 1, 0, 2].double().exp()
    assert abs(out[0, 1, 0, 0].double() / expected - 1) < 4 * 2.0**-24


@both_directions
@pytest.mark.parametrize("name", ["kv", "z"])
def test_a_state_keeps_its_dtypes(name: str, causal: bool) -> None:
    q, k, v = randoms(1, 5, 1, 4)
    how: dict[str, Any] = {"feature_map": "exp", "causal": causal, "return_state": True}
    state = linear_rope_attention(q, k, v, **how)[1]
    state = replace(state, **{name: getattr(state, name).float()})
    after = linear_rope_attention(q, k, v, state=state, **how)[1]
    assert (after.kv.dtype, after.z.dtype) == (state.kv.dtype, state.z.dtype)

"""FAVOR+: orthogonal positive random features, and a projection that travels with the state dict."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from linrope import LinearRoPEAttention
from linrope.feature_maps import FavorPlus


def test_features_are_the_formula() -> None:
    fmap = FavorPlus(3, num_features=4, seed=0).double()
    x = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
    scaled = x / 3**0.25
    expected = [float(torch.exp(w @ scaled - scaled @ scaled / 2)) / 2 for w in fmap.projection]
    assert_close(fmap.queries(x), torch.tensor(expected, dtype=torch.float64))
    assert torch.equal(fmap.keys(x), fmap.queries(x))


@pytest.mark.parametrize(("d", "m"), [(8, 8), (8, 16), (8, 12), (16, 4), (5, 12)])
def test_rows_are_orthogonal_within_each_block_of_d(d: int, m: int) -> None:
    projection = FavorPlus(d, num_features=m, seed=1).projection.double()
    assert projection.shape == (m, d)
    for block in projection.split(d):
        directions = block / block.norm(dim=-1, keepdim=True)
        # the projection is stored in float32
        identity = torch.eye(len(block), dtype=torch.float64)
        assert_close(directions @ directions.T, identity, atol=1e-6, rtol=0)


def test_rows_are_as_long_and_as_isotropic_as_gaussian_ones() -> None:
    d = 8
    w = FavorPlus(d, num_features=8000, seed=0).projection.double()
    # Squared lengths are chi^2(d): mean d, variance 2d; the bounds are 5 standard errors.
    assert abs(float(w.square().sum(-1).mean()) - d) < 5 * (2 * d / 8000) ** 0.5
    # Without the sign correction after QR the means are some 0.2 off.
    assert float(w.mean(0).abs().max()) < 5 * 8000**-0.5
    second = w.T @ w / 8000 - torch.eye(d)
    assert float(second.abs().max()) < 5 * (2 / 8000) ** 0.5


def relative_errors(m: int, seeds: int) -> torch.Tensor:
    """Errors of the estimate of exp(q.k / sqrt(d)), by seed."""
    d = 8
    q, k = 0.3 * torch.randn(2, d, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    exact = torch.exp(q @ k / d**0.5)
    maps = [FavorPlus(d, num_features=m, seed=seed).double() for seed in range(seeds)]
    return torch.stack([phi.queries(q) @ phi.keys(k) / exact - 1 for phi in maps])


def test_products_estimate_the_softmax_kernel_with_an_error_that_falls_as_the_root_of_m() -> None:
    few, many = relative_errors(8, 300), relative_errors(128, 300)
    for errors in (few, many):  # unbiased: the mean lies within 4 standard errors
        assert abs(float(errors.mean())) < 4 * float(errors.std()) / 300**0.5
    # The blocks of d rows are independent: sqrt(128 / 8) = 4. Each spread is known to 5 to 10 % of itself.
    ratio = float(few.square().mean().sqrt() / many.square().mean().sqrt())
    assert 4 / 1.3 < ratio < 4 * 1.3
    assert float(many.square().mean().sqrt()) < 0.1


@settings(deadline=None)
@given(st.lists(st.floats(-100, 100, width=32), min_size=4, max_size=4))
def test_features_are_finite_and_not_negative(x: list[float]) -> None:
    fmap = FavorPlus(4, seed=0)
    assert fmap.positive
    features = fmap.queries(torch.tensor(x))
    assert bool(((features >= 0) & features.isfinite()).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast_are_computed_in_float32(dtype: torch.dtype) -> None:
    fmap, x = FavorPlus(8, seed=0), torch.linspace(-2, 2, 16).view(2, 8)
    narrow = x.to(dtype)
    assert torch.equal(fmap.queries(narrow), fmap.queries(narrow.float()))
    with torch.autocast("cpu", torch.bfloat16):
        inside = fmap.queries(x)
    assert torch.equal(inside, fmap.queries(x))


def test_the_default_seed_follows_torch_s_generator() -> None:
    torch.manual_seed(3)
    first, second = FavorPlus(4), FavorPlus(4)
    torch.manual_seed(3)
    assert torch.equal(FavorPlus(4).projection, first.projection)
    assert not torch.equal(second.projection, first.projection)


def test_a_seed_leaves_torch_s_generator_alone() -> None:
    before = torch.get_rng_state()
    assert torch.equal(FavorPlus(4, seed=5).projection, FavorPlus(4, seed=5).projection)
    assert torch.equal(torch.get_rng_state(), before)


def test_no_forward_redraws() -> None:
    fmap = FavorPlus(4, seed=0).train()
    before = fmap.projection.clone()
    fmap.queries(torch.ones(3, 4))
    assert torch.equal(fmap.projection, before)


@pytest.mark.parametrize("through_file", [False, True])
def test_projection_and_seed_travel_through_the_state_dict(through_file: bool, tmp_path) -> None:
    saved, loaded = (LinearRoPEAttention(8, 2, feature_map=FavorPlus(4, seed=seed)) for seed in (1, 2))
    assert saved.feature_map.identity != loaded.feature_map.identity
    tensors = saved.state_dict()
    if through_file:
        save_file(tensors, tmp_path / "layer.safetensors")
        tensors = load_file(tmp_path / "layer.safetensors")
    loaded.load_state_dict(tensors)
    assert loaded.feature_map.identity == saved.feature_map.identity
    assert torch.equal(loaded.feature_map.projection, saved.feature_map.projection)
    x = torch.ones(1, 3, 8)
    _, state = saved(x, return_state=True)
    assert torch.equal(loaded(x, state=state), saved(x, state=state))


def test_redraw_changes_the_identity_and_makes_old_states_invalid() -> None:
    fmap = FavorPlus(4, seed=1)
    layer, x = LinearRoPEAttention(8, 2, feature_map=fmap), torch.ones(1, 3, 8)
    _, state = layer(x, return_state=True)
    before, projection = fmap.identity, fmap.projection.clone()
    fmap.redraw(2)
    assert fmap.identity != before
    assert not torch.equal(fmap.projection, projection)
    with pytest.raises(ValueError, match=r"made with .*seed=1.*expected .*seed=2"):
        layer(x, state=state)
    fmap.redraw(1)
    assert torch.equal(fmap.projection, projection)
    layer(x, state=state)


def test_copies_are_independent() -> None:
    fmap = FavorPlus(4, seed=1)
    twin = copy.deepcopy(fmap)
    assert twin.identity == fmap.identity
    twin.redraw(2)
    assert torch.equal(fmap.projection, FavorPlus(4, seed=1).projection)


@pytest.mark.parametrize("num_features", [0, -2, 7])
def test_number_of_features_must_be_positive_and_even(num_features: int) -> None:
    with pytest.raises(ValueError, match=f"num_features={num_features}: expected a positive even number"):
        FavorPlus(4, num_features=num_features)

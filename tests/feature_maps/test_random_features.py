"""Random projections: how they are drawn, what their error is, and how they travel."""

import copy
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close

from linrope import LinearRoPEAttention, feature_maps
from linrope.feature_maps.random_features import orthogonal_gaussian
from tests.support.maps import plain
from tests.support.oracle import randoms


def layer(seed: int) -> LinearRoPEAttention:
    return LinearRoPEAttention(8, 2, feature_map=feature_maps.make("favor+", 4, seed=seed))


@pytest.mark.parametrize(("d", "m"), [(8, 8), (8, 16), (8, 12), (16, 4), (5, 12)])
def test_rows_are_orthogonal_within_each_block_of_d(d: int, m: int) -> None:
    rows = orthogonal_gaussian(m, d, torch.Generator().manual_seed(1))
    assert rows.shape == (m, d)
    for block in rows.split(d):
        directions = block / block.norm(dim=-1, keepdim=True)
        assert_close(directions @ directions.T, torch.eye(len(block)).to(directions), atol=1e-14, rtol=0)


def test_rows_are_as_long_and_as_isotropic_as_gaussian_ones() -> None:
    d = 8
    w = orthogonal_gaussian(8000, d, torch.Generator().manual_seed(0))
    # Squared lengths are chi^2(d): mean d, variance 2d; the bounds are 5 standard errors.
    assert abs(float(w.square().sum(-1).mean()) - d) < 5 * (2 * d / 8000) ** 0.5
    # Without the sign correction after QR the means are some 0.2 off.
    assert float(w.mean(0).abs().max()) < 5 * 8000**-0.5
    second = w.T @ w / 8000 - torch.eye(d).to(w)
    assert float(second.abs().max()) < 5 * (2 / 8000) ** 0.5


def test_products_estimate_the_kernel_with_an_error_that_falls_as_the_root_of_m() -> None:
    d, seeds, generator = 8, 150, torch.Generator().manual_seed(7)
    q, k = 0.3 * torch.randn(2, d, generator=generator, dtype=torch.float64, device="cpu")
    exact = torch.exp(q @ k / d**0.5)

    def errors(m: int) -> Tensor:
        maps = [
            feature_maps.make("favor+", d, num_features=m, seed=seed).cpu().double() for seed in range(seeds)
        ]
        return torch.stack([plain(phi.queries(q)) @ plain(phi.keys(k)) / exact - 1 for phi in maps])

    few, many = errors(16), errors(256)
    for relative in (few, many):  # unbiased: the mean lies within 4 standard errors
        assert abs(float(relative.mean())) < 4 * float(relative.std()) / seeds**0.5
    # The blocks of d rows are independent: sqrt(256 / 16) = 4. Each spread is known to 7 to 14 % of itself.
    ratio = float(few.square().mean().sqrt() / many.square().mean().sqrt())
    assert 4 / 1.3 < ratio < 4 * 1.3
    assert float(many.square().mean().sqrt()) < 0.15


def test_a_seed_leaves_torch_s_generator_alone_which_the_default_follows() -> None:
    def draw(**seed: int) -> Tensor:
        return feature_maps.make("favor+", 4, **seed).projection

    torch.manual_seed(3)
    by_seed, before = draw(seed=5), torch.get_rng_state()
    assert torch.equal(draw(seed=5), by_seed)
    assert torch.equal(torch.get_rng_state(), before)
    first, second = draw(), draw()
    torch.manual_seed(3)
    assert torch.equal(draw(), first)
    assert not torch.equal(second, first)


def test_projection_and_seed_travel_through_a_file(tmp_path) -> None:
    saved, loaded = layer(1), layer(2)
    assert saved.feature_map.identity != loaded.feature_map.identity
    save_file(saved.state_dict(), tmp_path / "layer.safetensors")
    loaded.load_state_dict(load_file(tmp_path / "layer.safetensors"))
    assert loaded.feature_map.identity == saved.feature_map.identity
    assert loaded.feature_map.seed == 1
    assert torch.equal(loaded.feature_map.projection, saved.feature_map.projection)
    x = torch.ones(1, 3, 8)
    _, state = saved(x, return_state=True)
    assert torch.equal(loaded(x, state=state), saved(x, state=state))


def test_redraw_changes_the_identity_and_makes_old_states_invalid() -> None:
    attention, x = layer(1), torch.ones(1, 3, 8)
    fmap = attention.feature_map
    _, state = attention(x, return_state=True)
    before, projection = fmap.identity, fmap.projection.clone()
    fmap.redraw(2)
    assert fmap.identity != before
    assert not torch.equal(fmap.projection, projection)
    with pytest.raises(ValueError, match=r"made with .*#.*expected .*#"):
        attention(x, state=state)
    fmap.redraw(1)
    assert torch.equal(fmap.projection, projection)
    attention(x, state=state)


def test_an_odd_number_of_features_is_followed_by_a_feature_that_is_0() -> None:
    fmap = feature_maps.make("favor+", 4, num_features=7, seed=0)
    assert fmap.feature_dim == 8
    assert fmap.projection.shape == (7, 4)
    features = plain(fmap.queries(torch.ones(3, 4)))
    assert torch.equal(features[:, 7], torch.zeros(3))
    assert bool(features[:, :7].all())


def test_a_loaded_projection_makes_the_map_that_it_came_from_and_accepts_its_states() -> None:
    first, x = layer(1), torch.ones(1, 3, 8)
    second, again = copy.deepcopy(first), feature_maps.make("favor+", 4, seed=3)
    second.feature_map.redraw(2)
    second.feature_map.load_projection(first.feature_map.projection.double())
    again.load_state_dict(second.feature_map.state_dict())
    for fmap in (second.feature_map, again):
        assert fmap.seed is None
        assert fmap.identity == first.feature_map.identity
    _, state = first(x, return_state=True)
    assert torch.equal(second(x, state=state), first(x, state=state))


@pytest.mark.parametrize(
    ("projection", "error", "message"),
    [
        (torch.zeros(8, 4), ValueError, r"projection: got shape \(8, 4\), expected \(4, 8\)"),
        (torch.full((4, 8), float("nan")), ValueError, "projection: got inf or nan, expected finite"),
        (torch.ones(4, 8).double() * 1e300, ValueError, "expected finite numbers of torch.float32"),
        (torch.zeros(4, 8, dtype=torch.int64), TypeError, "projection: got torch.int64, expected a floating"),
        ([[0.0] * 8] * 4, TypeError, "projection: got list, expected a floating tensor"),
    ],
)
def test_a_projection_that_does_not_fit_is_refused(projection: Any, error: Any, message: str) -> None:
    fmap = feature_maps.make("favor+", 8, num_features=4, seed=0)
    before = fmap.identity
    with pytest.raises(error, match=message):
        fmap.load_projection(projection)
    assert fmap.identity == before


def test_with_kernel_epsilon_no_product_of_far_inputs_is_0() -> None:
    q, k, _ = randoms(1, 50, 1, 64, scale=6, dtype=torch.float32)
    fmap = feature_maps.make("favor+", 64, seed=0, kernel_epsilon=1e-4)
    phi, psi = fmap.queries(q)[0][0, :, 0], fmap.keys(k)[0][0, :, 0]
    assert float((phi @ psi.T).min()) > 1e-4

"""Random projections: how they are drawn, what their error is, and how they travel."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close

from linrope import LinearRoPEAttention, feature_maps
from linrope.feature_maps.random_features import orthogonal_gaussian
from tests.feature_maps.table import RANDOM, plain

names = pytest.mark.parametrize("name", RANDOM)


def layer(name: str, seed: int) -> LinearRoPEAttention:
    fmap = feature_maps.make(name, 4, seed=seed)
    return LinearRoPEAttention(8, 2, feature_map=fmap, normalize=fmap.positive)


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


def softmax_kernel(q: Tensor, k: Tensor) -> Tensor:
    return torch.exp(q @ k / len(q) ** 0.5)


def gaussian_kernel(q: Tensor, k: Tensor) -> Tensor:
    return torch.exp(-(q - k).square().sum() / len(q) ** 0.5 / 2)


@pytest.mark.parametrize(("name", "kernel"), list(zip(RANDOM[:4], [softmax_kernel] * 3 + [gaussian_kernel])))
def test_products_estimate_the_kernel_with_an_error_that_falls_as_the_root_of_m(
    name: str, kernel: Callable[[Tensor, Tensor], Tensor]
) -> None:
    d, seeds = 8, 300
    q, k = 0.3 * torch.randn(
        2, d, generator=torch.Generator().manual_seed(7), dtype=torch.float64, device="cpu"
    )

    def errors(m: int) -> Tensor:
        maps = [feature_maps.make(name, d, num_features=m, seed=seed).cpu().double() for seed in range(seeds)]
        return torch.stack([plain(phi.queries(q)) @ plain(phi.keys(k)) / kernel(q, k) - 1 for phi in maps])

    few, many = errors(16), errors(256)
    for relative in (few, many):  # unbiased: the mean lies within 4 standard errors
        assert abs(float(relative.mean())) < 4 * float(relative.std()) / seeds**0.5
    # The blocks of d rows are independent: sqrt(256 / 16) = 4. Each spread is known to 5 to 10 % of itself.
    ratio = float(few.square().mean().sqrt() / many.square().mean().sqrt())
    assert 4 / 1.3 < ratio < 4 * 1.3
    assert float(many.square().mean().sqrt()) < 0.15


@names
def test_the_default_seed_follows_torch_s_generator(name: str) -> None:
    torch.manual_seed(3)
    first, second = feature_maps.make(name, 4), feature_maps.make(name, 4)
    torch.manual_seed(3)
    assert torch.equal(feature_maps.make(name, 4).projection, first.projection)
    assert not torch.equal(second.projection, first.projection)


@names
def test_a_seed_leaves_torch_s_generator_alone(name: str) -> None:
    before = torch.get_rng_state()
    first, second = (feature_maps.make(name, 4, seed=5).projection for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)


@names
@pytest.mark.parametrize("through_file", [False, True])
def test_projection_and_seed_travel_through_the_state_dict(name: str, through_file: bool, tmp_path) -> None:
    saved, loaded = layer(name, 1), layer(name, 2)
    if name == "favor++":
        saved.feature_map.fit(*torch.ones(2, 1, 3, 2, 4))
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


@names
def test_redraw_changes_the_identity_and_makes_old_states_invalid(name: str) -> None:
    attention, x = layer(name, 1), torch.ones(1, 3, 8)
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


@names
@pytest.mark.parametrize("num_features", [0, -2])
def test_number_of_features_must_be_positive(name: str, num_features: int) -> None:
    with pytest.raises(ValueError, match=f"num_features={num_features}: expected a positive (even )?number"):
        feature_maps.make(name, 4, num_features=num_features)


@pytest.mark.parametrize("name", ["favor+hyperbolic", "rff"])
def test_maps_with_two_features_for_each_direction_take_even_numbers(name: str) -> None:
    with pytest.raises(ValueError, match="num_features=7: expected a positive even number"):
        feature_maps.make(name, 4, num_features=7)


@pytest.mark.parametrize("name", ["favor+", "favor++", "generalized"])
def test_an_odd_number_of_features_is_followed_by_a_feature_that_is_0(name: str) -> None:
    fmap = feature_maps.make(name, 4, num_features=7, seed=0)
    assert fmap.feature_dim == 8
    assert fmap.projection.shape == (7, 4)
    features = plain(fmap.queries(torch.ones(3, 4)))
    assert torch.equal(features[:, 7], torch.zeros(3))
    assert bool(features[:, :7].all())


@names
def test_a_projection_can_be_loaded_and_makes_the_map_that_it_came_from(name: str) -> None:
    fmap, other = (feature_maps.make(name, 4, seed=seed) for seed in (1, 2))
    fmap.load_projection(other.projection.double())
    assert fmap.identity == other.identity
    assert fmap.seed is None
    again = feature_maps.make(name, 4, seed=3)
    again.load_state_dict(fmap.state_dict())
    assert again.seed is None
    assert again.identity == fmap.identity


@pytest.mark.parametrize(
    ("projection", "error", "message"),
    [
        (torch.zeros(8, 4), ValueError, r"projection: got shape \(8, 4\), expected \(4, 8\)"),
        (torch.full((4, 8), float("nan")), ValueError, "projection: got inf or nan, expected finite"),
        (
            torch.full((4, 8), 1e300, dtype=torch.float64),
            ValueError,
            "expected finite numbers of torch.float32",
        ),
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


@names
def test_equal_projections_of_different_seeds_accept_each_other_s_states(name: str) -> None:
    first, x = layer(name, 1), torch.ones(1, 3, 8)
    second = copy.deepcopy(first)
    second.feature_map.load_projection(first.feature_map.projection)
    assert second.feature_map.seed != first.feature_map.seed
    _, state = first(x, return_state=True)
    assert torch.equal(second(x, state=state), first(x, state=state))

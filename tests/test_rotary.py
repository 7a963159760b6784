"""Rotary: RoFormer's rotation, its layouts and its precision."""

import copy
import pickle

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from linrope import LinearRoPEAttention, Rotary
from linrope.rotary import LAYOUTS, MAX_POSITION

positions_up_to_the_last = st.integers(0, MAX_POSITION)


def vectors(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def turn(rotary: Rotary, x: torch.Tensor, position: int) -> torch.Tensor:
    """x (f,) turned to a position."""
    return rotary(x.view(1, 1, 1, -1), torch.tensor([position])).flatten()


def dense(theta: torch.Tensor, position: int) -> torch.Tensor:
    """The block-diagonal matrix of eq. 15."""
    blocks = []
    for angle in (position * theta).tolist():
        c, s = mpmath.cos(angle), mpmath.sin(angle)
        blocks.append(torch.tensor([[c, -s], [s, c]], dtype=torch.float64))
    return torch.block_diag(*blocks)


@settings(deadline=None)
@given(m=st.integers(0, 10**6), n=st.integers(0, 10**6), layout=st.sampled_from(LAYOUTS))
def test_products_depend_on_the_relative_position_alone(m: int, n: int, layout: str) -> None:
    rotary, x, y = Rotary(16, layout=layout), vectors(16, seed=1), vectors(16, seed=2)
    low, high = sorted((m, n))
    # R(m)^T R(n) = R(n - m), and R(n)^T R(m) is its transpose
    x, y = (x, y) if low == m else (y, x)
    relative = x @ turn(rotary, y, high - low)
    # float64 angles of up to 1e6 rad are exact to 1e6 * 2^-53 ~ 1e-10
    assert_close(turn(rotary, x, low) @ turn(rotary, y, high), relative, atol=1e-8, rtol=0)


@settings(deadline=None)
@given(position=positions_up_to_the_last, layout=st.sampled_from(LAYOUTS))
def test_rotation_keeps_the_norm(position: int, layout: str) -> None:
    x = vectors(16)
    assert_close(turn(Rotary(16, layout=layout), x, position).norm(), x.norm(), atol=0, rtol=1e-14)


@pytest.mark.parametrize("position", [0, 1, 7, 1000])
def test_elementwise_form_is_the_dense_matrix_of_eq_15(position: int) -> None:
    rotary, x = Rotary(8), vectors(8)
    matrix = dense(rotary.theta, position)
    assert_close(turn(rotary, x, position), matrix @ x)
    # and of eq. 34: x cos + (-x2, x1, -x4, x3, ..) sin, every cos and sin twice
    angles = (position * rotary.theta).repeat_interleave(2)
    swapped = torch.stack((-x[1::2], x[0::2]), -1).flatten()
    assert_close(matrix @ x, x * angles.cos() + swapped * angles.sin())


@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_layouts_are_equal_up_to_a_permutation_of_the_features(rotary_dim: int) -> None:
    x, positions = vectors(2, 5, 3, 8), torch.tensor([3, 1, 4, 1, 5])
    # half layout's feature number t, t + p are the pair 2t, 2t + 1
    pairs = torch.arange(rotary_dim).view(-1, 2).T.flatten()
    order = torch.cat((pairs, torch.arange(rotary_dim, 8)))
    interleaved, half = (Rotary(8, layout=layout, rotary_dim=rotary_dim) for layout in LAYOUTS)
    assert_close(half(x[..., order], positions), interleaved(x, positions)[..., order], atol=0, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_partial_rotation_turns_the_first_features_and_leaves_the_rest(layout: str) -> None:
    x, positions = vectors(1, 6, 2, 10), torch.arange(6)
    y = Rotary(10, rotary_dim=4, layout=layout)(x, positions)
    assert torch.equal(y[..., 4:], x[..., 4:])
    assert torch.equal(y[..., :4], Rotary(4, layout=layout)(x[..., :4], positions))


def test_theta_is_that_of_eq_15_and_base_changes_it() -> None:
    expected = [float(mpmath.mpf(500) ** (mpmath.mpf(-2 * t) / 6)) for t in range(3)]
    assert_close(Rotary(8, base=500.0, rotary_dim=6).theta, torch.tensor(expected, dtype=torch.float64))


def test_query_heads_that_share_a_key_head_share_its_theta() -> None:
    theta = torch.tensor([[1.0, 0.5], [0.3, 0.1]], dtype=torch.float64)
    x, positions = vectors(2, 5, 6, 4), torch.randint(0, 99, (2, 5), generator=torch.Generator())
    y = Rotary(4, theta=theta)(x, positions)
    for head in range(6):
        alone = Rotary(4, theta=theta[head // 3])(x[:, :, head : head + 1], positions)
        assert torch.equal(y[:, :, head : head + 1], alone)


def test_whole_model_rotation_turns_d_model_before_the_split_into_heads() -> None:
    x, positions = vectors(2, 7, 4 * 6), torch.arange(7)
    before = Rotary(24, base=100.0)(x.unsqueeze(2), positions).view(2, 7, 4, 6)
    after = Rotary.whole_model(4, 6, base=100.0)(x.view(2, 7, 4, 6), positions)
    assert_close(after, before, atol=0, rtol=0)


def test_layer_takes_whole_model_rotation() -> None:
    layer = LinearRoPEAttention(8, 2, rotary=Rotary.whole_model(2, 4))
    assert layer(torch.ones(1, 3, 8)).shape == (1, 3, 8)


def test_angles_are_exact_to_1e_6_rad_up_to_the_last_position() -> None:
    """Against 60 digits: theta itself, the angle modulo 2 pi, and cos and sin."""
    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(0, MAX_POSITION, (12,), generator=generator)
    positions = torch.cat((positions, torch.tensor([0, 1, 10**6, MAX_POSITION])))
    rotary = Rotary(64)
    angles = rotary.angles(positions)[:, 0]
    cos, sin = (x[:, 0] for x in rotary.cos_sin(positions, torch.float64))
    with mpmath.workdps(60):
        for i, position in enumerate(positions.tolist()):
            for t in range(0, 32, 3):
                exact = position * mpmath.mpf(10000) ** (mpmath.mpf(-2 * t) / 64)
                difference = (mpmath.mpf(angles[i, t].item()) - exact) % (2 * mpmath.pi)
                assert min(difference, 2 * mpmath.pi - difference) <= 1e-6
                assert abs(mpmath.cos(exact) - cos[i, t].item()) <= 1e-6
                assert abs(mpmath.sin(exact) - sin[i, t].item()) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_cos_sin_are_formed_in_float64_and_then_cast(dtype: torch.dtype) -> None:
    positions = torch.tensor([5, MAX_POSITION])
    cos, sin = Rotary(8).cos_sin(positions, dtype)
    assert cos.dtype == sin.dtype == dtype
    assert cos.shape == sin.shape == (2, 1, 4)
    angles = Rotary(8).angles(positions)
    assert angles.dtype == torch.float64
    assert torch.equal(cos, angles.cos().to(dtype))
    assert torch.equal(sin, angles.sin().to(dtype))


def test_cos_sin_default_to_float32() -> None:
    assert Rotary(8).cos_sin(torch.arange(3))[0].dtype == torch.float32


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_turns_in_float32(dtype: torch.dtype, layout: str) -> None:
    x, positions, rotary = vectors(1, 9, 2, 8).to(dtype), torch.arange(9) + 12345, Rotary(8, layout=layout)
    y = rotary(x, positions)
    assert y.dtype == dtype
    assert torch.equal(y, rotary(x.float(), positions).to(dtype))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_integer_positions_of_every_width_give_the_same_angles(dtype: torch.dtype) -> None:
    positions = torch.arange(100)
    assert torch.equal(Rotary(4).angles(positions.to(dtype)), Rotary(4).angles(positions))


@pytest.mark.parametrize(("distance", "mean"), [(0, 32.5), (8, 19.8), (50, 12.6), (100, 10.2), (250, 6.55)])
def test_long_term_decay_has_the_published_figures(distance: int, mean: float) -> None:
    """Mean of |S_i| over the partial sums S_i of exp(i distance theta_t): RoFormer section 3.4.3."""
    angles = Rotary(128).angles(torch.tensor([distance])).flatten()
    partial_sums = torch.polar(torch.ones_like(angles), angles).cumsum(0)
    assert float(partial_sums.abs().mean()) == pytest.approx(mean, rel=5e-3)  # of figures with 3 digits


def test_casting_a_layer_to_bfloat16_leaves_theta_in_float64() -> None:
    layer = LinearRoPEAttention(16, 2).bfloat16()
    assert layer.rotary is not None
    assert torch.equal(layer.rotary.theta, Rotary(8).theta)
    assert layer.rotary.theta.dtype == torch.float64


def test_later_changes_of_the_given_theta_do_not_reach_in() -> None:
    theta = torch.ones(2, dtype=torch.float64)
    rotary = Rotary(4, theta=theta)
    theta.zero_()
    assert torch.equal(rotary.theta, torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda rotary: pickle.loads(pickle.dumps(rotary))])
@pytest.mark.parametrize("rotary", [Rotary(8, base=7.0, layout="half"), Rotary.whole_model(2, 4)])
def test_copies_turn_alike_and_have_the_same_identity(rotary: Rotary, copied) -> None:
    x, positions, twin = vectors(1, 3, 2, rotary.dim), torch.arange(3), copied(rotary)
    assert torch.equal(twin(x, positions), rotary(x, positions))
    assert twin.identity == rotary.identity


def test_identity_tells_rotations_apart() -> None:
    different = [
        Rotary(8),
        Rotary(8, base=9999.0),
        Rotary(8, layout="half"),
        Rotary(8, rotary_dim=4),
        Rotary(10),
        Rotary.whole_model(2, 8),
        Rotary(8, theta=torch.ones(4)),
        Rotary(8, theta=torch.ones(4).double() + 1e-15),
    ]
    assert len({rotary.identity for rotary in different}) == len(different)
    assert Rotary(8).identity == Rotary(8, base=10000).identity == repr(Rotary(8, rotary_dim=8))

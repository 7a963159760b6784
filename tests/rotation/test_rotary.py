"""Rotary: RoFormer's rotation, its layouts and its precision."""

import math
from typing import Any

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from linrope import LinearRoPEAttention, Rotary, linear_rope_attention
from linrope.rotation.rotary import LAYOUTS, MAX_POSITION, cos_sin_of_turns, grid_positions
from tests.support.scalings import SCALINGS, scaled


def vectors(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def turn(rotary: Rotary, x: Tensor, position: int) -> Tensor:
    """x (f,) turned to a position."""
    return rotary(x.view(1, 1, 1, -1), torch.tensor([position])).flatten()


ROTATIONS = [*(Rotary(16, layout=layout) for layout in LAYOUTS), *map(scaled, SCALINGS)]


@settings(deadline=None)
@given(m=st.integers(0, 10**6), n=st.integers(0, 10**6), rotary=st.sampled_from(ROTATIONS))
def test_products_depend_on_the_relative_position_and_lengths_on_none(m: int, n: int, rotary: Rotary) -> None:
    x, y, (low, high) = vectors(16, seed=1), vectors(16, seed=2), sorted((m, n))
    # R(m)^T R(n) = R(n - m), and R(n)^T R(m) is its transpose
    x, y = (x, y) if low == m else (y, x)
    relative = x @ turn(rotary, y, high - low)
    # float64 angles of up to 1e6 rad are exact to 1e6 * 2^-53 ~ 1e-10
    assert_close(turn(rotary, x, low) @ turn(rotary, y, high), relative, atol=1e-8, rtol=0)
    for position in (m, MAX_POSITION - m):  # however rounded an angle is, it keeps the length
        assert_close(turn(rotary, x, position).norm(), x.norm(), atol=0, rtol=1e-14)


@pytest.mark.parametrize("position", [0, 1, 7, 1000])
def test_elementwise_form_is_the_dense_matrix_of_eq_15(position: int) -> None:
    rotary, x = Rotary(8), vectors(8)
    cos_sin = [(math.cos(angle), math.sin(angle)) for angle in (position * rotary.theta).tolist()]
    blocks = [torch.tensor([[c, -s], [s, c]], dtype=torch.float64) for c, s in cos_sin]
    assert_close(turn(rotary, x, position), torch.block_diag(*blocks) @ x)


@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_layouts_are_equal_up_to_a_permutation_of_the_features(rotary_dim: int) -> None:
    x, positions = vectors(2, 5, 3, 8), torch.tensor([3, 1, 4, 1, 5])
    # half layout's feature number t, t + p are the pair 2t, 2t + 1
    pairs = torch.arange(rotary_dim).view(-1, 2).T.flatten()
    order = torch.cat((pairs, torch.arange(rotary_dim, 8)))
    interleaved, half = (Rotary(8, layout=layout, rotary_dim=rotary_dim) for layout in LAYOUTS)
    assert_close(half(x[..., order], positions), interleaved(x, positions)[..., order], atol=0, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", [Rotary, Rotary.axial])
def test_partial_rotation_turns_the_first_features_and_leaves_the_rest(make, layout: str) -> None:
    x, how = vectors(1, 6, 2, 14), {"base": 100.0, "layout": layout}
    positions = torch.arange(6) if make is Rotary else grid_positions(2, 3)
    y = make(14, rotary_dim=10, **how)(x, positions)
    assert torch.equal(y[..., 10:], x[..., 10:])
    assert torch.equal(y[..., :10], make(10, **how)(x[..., :10], positions))


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


@pytest.mark.parametrize(("axes", "heads", "head_dim"), [(None, 4, 6), (None, 3, 2), (2, 4, 6), (3, 2, 10)])
def test_whole_model_rotation_turns_d_model_before_the_split_into_heads(
    axes: int | None, heads: int, head_dim: int
) -> None:
    d_model, positions = heads * head_dim, torch.arange(7) if axes is None else grid_positions(*[3] * axes)
    whole = Rotary(d_model, base=100.0) if axes is None else Rotary.axial(d_model, axes, base=100.0)
    x = vectors(2, len(positions), d_model)
    before = whole(x.unsqueeze(2), positions).unflatten(-1, (heads, -1))
    rotary = Rotary.whole_model(heads, head_dim, base=100.0, axes=axes)
    assert rotary.theta.shape == (heads, *([] if axes is None else [axes]), head_dim // 2)
    assert torch.equal(rotary(x.unflatten(-1, (heads, -1)), positions), before.squeeze(2))


@pytest.mark.parametrize("pairs", [None, [4, 1]])
def test_axial_rotation_is_that_of_each_axis_on_its_own_share(pairs: list[int] | None) -> None:
    x, positions = vectors(2, 7, 3, 10), torch.randint(0, 99, (2, 7, 2), generator=torch.Generator())
    rows, columns = pairs or (3, 2)
    y = Rotary.axial(10, base=100.0, pairs=pairs)(x, positions)
    for axis, (n, own) in enumerate(((rows, slice(2 * rows)), (columns, slice(2 * rows, None)))):
        assert torch.equal(y[..., own], Rotary(2 * n, base=100.0)(x[..., own], positions[..., axis]))


def test_a_grid_is_numbered_row_by_row_from_0_or_behind_class_tokens_at_0_from_1() -> None:
    places = grid_positions(2, 3)
    assert places.dtype == torch.int64
    assert places.tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    video = grid_positions(4, 3, 5)
    assert video.shape == (60, 3)
    assert torch.equal(video @ torch.tensor([15, 5, 1]), torch.arange(60))
    assert grid_positions(3).tolist() == [[0], [1], [2]]
    behind_two = grid_positions(2, 3, class_tokens=2)
    assert torch.equal(behind_two, torch.cat((torch.zeros(2, 2).long(), places + 1)))


def test_axial_rotation_divides_the_pairs_evenly() -> None:
    video = Rotary.axial(16, 3)
    assert video.theta.shape == (3, 8)
    assert (video.theta > 0).sum(1).tolist() == [3, 3, 2]
    assert ((video.theta > 0).sum(0) == 1).all()
    assert video.theta[:, [0, 3, 6]].amax(0).tolist() == [1.0] * 3  # every axis starts with 1 rad


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [None, 2])
def test_rotations_on_a_grid_depend_on_the_relative_position(layout: str, heads: int | None) -> None:
    """With any theta, axial or not: a pair may turn with several axes at once."""
    shape = (3, 4) if heads is None else (heads, 3, 4)
    rotary = Rotary(8, theta=vectors(*shape), axes=3, layout=layout)
    x, y = vectors(1, 6, 4, 8, seed=1), vectors(1, 6, 4, 8, seed=2)
    places = torch.randint(0, 999, (2, 6, 3), generator=torch.Generator().manual_seed(0))
    m, n = places.sort(0).values
    products = (rotary(x, m) * rotary(y, n)).sum(-1)
    assert_close(products, (x * rotary(y, n - m)).sum(-1), atol=1e-8, rtol=0)


def test_one_axis_is_no_grid() -> None:
    theta, x, positions = vectors(2, 4), vectors(1, 6, 4, 8), torch.arange(6)
    one_axis = Rotary(8, theta=theta[:, None], axes=1)(x, positions[:, None])
    assert torch.equal(one_axis, Rotary(8, theta=theta)(x, positions))


TURNING = {
    "base": Rotary(16),
    "small base": Rotary(16, base=2.0),
    "large base": Rotary(16, base=1e7),
    "theta of each head": Rotary(16, theta=vectors(2, 8)),
    "axes": Rotary(16, theta=vectors(3, 8), axes=3),
    "axes of each head": Rotary(16, theta=vectors(2, 3, 8), axes=3),
}


@pytest.mark.parametrize("rotary", TURNING.values(), ids=TURNING)
def test_turns_wrap_to_the_angles(rotary: Rotary) -> None:
    positions = torch.randint(0, MAX_POSITION, (40,), generator=torch.Generator().manual_seed(0))
    positions = torch.cat((positions, positions // 2000, torch.tensor([0, 1, 2, 10**6, MAX_POSITION])))
    where = positions if rotary.axes is None else (positions[:, None] - torch.tensor([0, 7, 9])).clamp_min(0)
    turns, theta = rotary.turns_per_position(torch.device("cpu")), rotary.frequencies
    assert turns.dtype == torch.int64
    assert turns.shape == theta.shape == (rotary.axes or 1, rotary.heads, 8)
    places = where.view(len(positions), -1, 1, 1)
    found = cos_sin_of_turns((places * turns).sum(1), torch.float64)  # int64, modulo 2^64
    # theta / 2 pi and position * theta are rounded, each by at most 2^-52 of the angle, of 2^31 rad by 1e-6;
    # and theta to a whole number of 2^-64 turns
    allowed = (2.0**-51 * places * theta.abs() + 2.0**-62 * places).sum(1) + 1e-15
    for x, exact in zip(found, rotary.cos_sin(where, torch.float64)):
        assert bool(((x - exact).abs() <= allowed).all())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_turns_first_read_in_inference_mode_can_be_saved_for_gradients(device: str) -> None:
    with torch.inference_mode():
        rotary = Rotary(4)
        turns = rotary.turns_per_position(torch.device(device))
    assert not turns.is_inference()
    assert rotary.turns_per_position(torch.device(device)) is turns


def test_turns_read_in_fake_tensor_mode_are_not_kept() -> None:
    rotary, meta = Rotary(4), torch.device("meta")
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert type(rotary.turns_per_position(meta)) is not torch.Tensor
    assert type(rotary.turns_per_position(meta)) is torch.Tensor


@pytest.mark.parametrize("backend", ["reference", "eager"])
@pytest.mark.parametrize("make", [Rotary, Rotary.axial, lambda f: Rotary(f, theta=torch.ones(f // 2))])
def test_a_rotation_made_and_used_in_inference_mode_can_be_trained_with(make, backend: str) -> None:
    q = vectors(1, 6, 1, 4)
    with torch.inference_mode():
        rotary = make(4)
        where = grid_positions(2, 3) if rotary.axes else torch.arange(6)
        linear_rope_attention(q, q, q, rotary=rotary, positions=where, backend=backend)
    where, q = where.clone(), q.requires_grad_()
    linear_rope_attention(q, q, q, rotary=rotary, positions=where, backend=backend).sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_xpos_fades_each_pair_by_its_own_rate(layout: str) -> None:
    rotary = Rotary(8, rotary_dim=6, xpos=512, layout=layout)
    rates = [math.log((2 * t / 6 + 0.4) / 1.4) / 512 for t in range(3)]
    order = (0, 0, 1, 1, 2, 2) if layout == "interleaved" else (0, 1, 2, 0, 1, 2)
    expected = torch.tensor([*(rates[t] for t in order), 0.0, 0.0], dtype=torch.float64)
    assert rotary.xpos_log_decay is not None
    assert_close(rotary.xpos_log_decay, expected)
    assert rotary.xpos_log_decay.max() <= 0  # zeta_t <= 1: nothing grows
    # the rotation itself is the same
    x = vectors(1, 3, 1, 8)
    assert torch.equal(rotary(x, torch.arange(3)), Rotary(8, rotary_dim=6, layout=layout)(x, torch.arange(3)))
    assert Rotary(8).xpos_log_decay is None


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
    assert Rotary(8).cos_sin(positions)[0].dtype == torch.float32


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


def test_casting_a_layer_to_bfloat16_leaves_theta_in_float64() -> None:
    layer = LinearRoPEAttention(16, 2).bfloat16()
    assert layer.rotary is not None
    assert torch.equal(layer.rotary.theta, Rotary(8).theta)
    assert layer.rotary.theta.dtype == torch.float64


def test_attention_factor_is_kept_and_the_rotation_leaves_it_out() -> None:
    rotary, x, positions = scaled("yarn"), vectors(1, 5, 1, 16), torch.arange(5)
    assert rotary.attention_factor == 0.1 * math.log(4) + 1
    assert torch.equal(rotary(x, positions), Rotary(16, theta=rotary.theta)(x, positions))
    assert Rotary(16).attention_factor == Rotary(16, theta=rotary.theta).attention_factor == 1.0
    assert Rotary(16, theta=rotary.theta, attention_factor=2).attention_factor == 2.0


def test_frequencies_are_copied_to_a_device_once() -> None:
    """A copy from the host in every call would forbid CUDA graphs."""
    rotary, positions = Rotary(16), torch.arange(4, device="meta")
    rotary.angles(positions)
    copied: list[torch.device] = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            copied.extend(x.device for x in args if isinstance(x, Tensor) and x.device.type == "cpu")
            return func(*args, **(kwargs or {}))

    with Copies():
        rotary.angles(positions)
    assert copied == []

"""The rotation of pairs, and angles as integers that wrap."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from linrope.rotation.angles import cos_sin
from linrope.rotation.rotary import LAYOUTS, cos_sin_of_turns, rotate, to_turns

angles_of_some_turns = st.floats(-100.0, 100.0)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("features", [8, 11])
def test_each_pair_is_multiplied_with_its_complex_number(layout: str, features: int) -> None:
    x, angle = normal(3, 5, features), normal(3, 5, 4, seed=1)
    half = layout == "half"
    first, second = (slice(0, 4), slice(4, 8)) if half else (slice(0, 8, 2), slice(1, 8, 2))
    y = rotate(x, angle.cos(), angle.sin(), layout)
    product = torch.complex(x[..., first], x[..., second]) * torch.polar(torch.ones_like(angle), angle)
    assert_close((y[..., first], y[..., second]), (product.real, product.imag))
    assert torch.equal(y[..., 8:], x[..., 8:])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("features", [4, 6])
@pytest.mark.parametrize(("x_rows", "angle_rows"), [((2, 1, 5), (3, 1)), ((5,), (2, 3, 5)), ((2, 3, 5), ())])
def test_shapes_broadcast(layout: str, features: int, x_rows, angle_rows) -> None:
    x, angle = normal(*x_rows, features), normal(*angle_rows, 2, seed=1)
    shape = torch.broadcast_shapes(x_rows, angle_rows)
    spread = angle.expand(*shape, 2)
    expected = rotate(x.expand(*shape, features), spread.cos(), spread.sin(), layout)
    assert torch.equal(rotate(x, angle.cos(), angle.sin(), layout), expected)


@given(radians=st.lists(angles_of_some_turns, min_size=1, max_size=20), data=st.data())
def test_sums_of_turns_are_the_same_however_they_are_grouped(radians: list[float], data) -> None:
    turns = to_turns(torch.tensor(radians, dtype=torch.float64))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(radians)), max_size=4)))
    pieces = [piece.sum() for piece in turns.tensor_split(cuts)]
    assert torch.equal(torch.stack(pieces).sum(), turns.sum())
    assert torch.equal(turns.cumsum(0)[-1], turns.flip(0).sum())


@given(radians=angles_of_some_turns)
def test_an_angle_survives_the_way_to_turns_and_back(radians: float) -> None:
    cos, sin = cos_sin_of_turns(to_turns(torch.tensor(radians, dtype=torch.float64)), torch.float64)
    # 16 turns and 2 roundings of 2^-53 each, in rad
    assert (float(cos), float(sin)) == pytest.approx((math.cos(radians), math.sin(radians)), abs=1e-13)


def test_quarter_turns_are_exact() -> None:
    quarters = torch.arange(-8, 9)
    turns = to_turns(quarters.double() * (math.pi / 2))
    assert turns.dtype == torch.int64
    assert torch.equal(turns, quarters * 2**62)  # wraps
    cos, sin = cos_sin_of_turns(turns, torch.float64)
    # float64's pi/2 is off by 6e-17, and its pi by twice that
    exact = torch.tensor([[1, 0, -1, 0], [0, 1, 0, -1]], dtype=torch.float64)[:, quarters % 4]
    assert_close(torch.stack((cos, sin)), exact, rtol=0, atol=1.3e-16)


def test_half_a_turn_wraps_whichever_side_it_comes_from() -> None:
    below, above = math.nextafter(math.pi, 0), math.nextafter(math.pi, 4)
    turns = to_turns(torch.tensor([-math.pi, below, math.pi, above, 3 * math.pi], dtype=torch.float64))
    lowest = -(2**63)
    assert turns[0] == turns[2] == turns[4] == lowest
    assert turns[1] > 0 > turns[3] > lowest


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_angles_of_every_dtype_are_converted_in_float64(dtype: torch.dtype) -> None:
    radians = normal(3, 4).to(dtype)
    assert torch.equal(to_turns(radians), to_turns(radians.double()))


def test_an_angle_that_is_not_finite_raises_nothing() -> None:
    turns = to_turns(torch.tensor([math.nan, math.inf, -math.inf, 1.0]))
    assert turns[3] == to_turns(torch.tensor(1.0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_cos_and_sin_of_turns_are_formed_in_float64(dtype: torch.dtype) -> None:
    turns = to_turns(normal(50))
    wide, cast = cos_sin_of_turns(turns, torch.float64), cos_sin_of_turns(turns, dtype)
    for x, y in zip(wide, cast):
        assert y.dtype == dtype
        assert torch.equal(y, x.to(dtype))


@given(st.floats(-(2.0**31), 2.0**31))
def test_onnx_gets_cosines_of_float32_that_are_as_exact(angle: float) -> None:
    angles = torch.tensor([angle], dtype=torch.float64)
    expected = angles.cos(), angles.sin()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
        found = cos_sin(angles, torch.float32)
        assert torch.equal(cos_sin(angles, torch.float64)[0], expected[0])
    own = abs(angle) * 2.0**-52  # what reducing a float64 to one turn costs
    for x, exact in zip(found, expected, strict=True):
        assert x.dtype == torch.float32
        assert_close(x.double(), exact, rtol=0, atol=1.5 * 2.0**-24 + own)  # else 2^-23

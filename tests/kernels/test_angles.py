"""Angles from integers that wrap, against float64."""

import math

import pytest
import torch
import triton
import triton.language as tl
from linrope_kernels.angles import cos_sin, make_tables
from linrope_kernels.pieces import operand

from linrope import Rotary
from linrope.recurrence.call import Call
from linrope.rotation.rotary import MAX_POSITION

pytestmark = pytest.mark.gpu


@triton.jit
def _cos_sin_kernel(X, COS, SIN, N: tl.constexpr):
    i = tl.arange(0, N)
    cos, sin = cos_sin(tl.load(X + i))
    tl.store(COS + i, cos)
    tl.store(SIN + i, sin)


def test_cos_and_sin_are_exact_to_two_units_all_around() -> None:
    number = 2**16
    generator = torch.Generator().manual_seed(0)
    phase = torch.randint(-(2**63), 2**63 - 1, (number,), generator=generator, device="cpu")
    phase[:9] = torch.arange(-4, 5) * 2**61  # eighths of a turn; the largest wraps
    phase = phase.to(torch.get_default_device())
    cos, sin = torch.empty(2, number)
    _cos_sin_kernel[(1,)](phase, cos, sin, number)
    angle = phase.double() * (2 * math.pi * 2.0**-64)
    assert (cos - angle.cos()).abs().max() <= 2 * 2.0**-24
    assert (sin - angle.sin()).abs().max() <= 2 * 2.0**-24


def rotated(q: torch.Tensor, rotary: Rotary, positions: torch.Tensor) -> Call:
    """A call whose table has the cosines in front of the sines."""
    turns = rotary.turns_per_position(q.device)
    return Call(q=q, k=q, v=q, theta_turns=turns, positions=positions, layout="half", feature_map="elu+1")


@pytest.mark.parametrize("base", [10_000.0, 500_000.0, 1.5])
def test_the_table_is_exact_at_any_position(base: float) -> None:
    rotary = Rotary(16, base=base)
    positions = torch.tensor([[0, 1, 63, 10**6, 10**9, MAX_POSITION]])
    q = torch.zeros(1, 6, 1, 16)
    table, _ = make_tables(rotated(q, rotary, positions), None)
    cos, sin = rotary.cos_sin(positions[0], torch.float64)
    for part, expected in zip(table[0, 0].split(8, -1), (cos[:, 0], sin[:, 0]), strict=True):
        torch.testing.assert_close(part.double(), expected, rtol=0, atol=1e-6)


def test_consecutive_positions_are_spelled_out_by_the_kernel() -> None:
    rotary = Rotary.whole_model(2, 16)
    q = torch.zeros(3, 70, 2, 16)
    first = torch.tensor([[0], [5], [10**9]])
    one, _ = make_tables(rotated(q, rotary, first), None)
    all_of_them, _ = make_tables(rotated(q, rotary, first + torch.arange(70)), None)
    assert one.shape == (3, 2, 70, 16)
    assert torch.equal(one, all_of_them)


@triton.jit
def _operand_kernel(X, OUT, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(OUT + i, operand(tl.load(X + i), "tf32"))


def test_tf32_operands_are_rounded_to_nearest() -> None:
    x = torch.randn(1024)
    x[:4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 3e38])
    out = torch.empty(1024)
    _operand_kernel[(1,)](x, out, 1024)
    assert out[0].isnan()
    assert out[1:3].tolist() == [float("inf"), -float("inf")]
    assert torch.equal(out.view(torch.int32)[1:] & 0x1FFF, torch.zeros(1023, dtype=torch.int32))
    assert ((out - x).abs()[3:] <= 2.0**-11 * x.abs()[3:]).all()

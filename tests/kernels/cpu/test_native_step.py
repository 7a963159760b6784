"""The native operators where they write to the given state: a step, and the rows of a pool."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.cpu.cases import CASES, UNIT, assert_within, make
from tests.kernels.cpu.oracle import Case, attend

pytestmark = pytest.mark.usefixtures("isa")


@pytest.mark.parametrize("name", ["half", "angle steps and decay", "packed", "cut into segments"])
def test_slots_of_a_pool_are_read_and_written_in_place(native, name):
    case = make(**CASES[name])
    out, kv, z = case.forward(native)
    rows = case.kv.shape[0]
    slots = torch.randperm(rows + 3)[:rows]
    pool = {
        "kv": torch.randn(rows + 3, *case.kv.shape[1:]),
        "z": torch.rand(rows + 3, *case.z.shape[1:]).double(),
    }
    if case.angle is not None:
        pool["angle"] = torch.randint(-9, 9, (rows + 3, *case.angle.shape[1:]))
    before = {name_: x.clone() for name_, x in pool.items()}
    for name_, x in pool.items():
        x[slots] = getattr(case, name_)
    pooled, *none = replace(case, **pool).forward(native, slots=slots)
    assert torch.equal(pooled, out)
    assert [x.numel() for x in none] == [0, 0]
    assert torch.equal(pool["kv"][slots], kv)
    assert torch.equal(pool["z"][slots], z)
    others = [i for i in range(rows + 3) if i not in slots]
    assert all(torch.equal(x[others], before[name_][others]) for name_, x in pool.items())
    if case.angle is not None:
        last = last_angle(case)
        assert (
            int((pool["angle"][slots] - last).abs().max()) < 2**20
        )  # of 2^64: rounding of the oracle's radians


def last_angle(case: Case) -> Tensor:
    """The sums of the steps, in 2^-64 turns."""
    turns = case.angle_steps.double() * (1 / (2 * math.pi))
    turns = ((turns - turns.round()) * 2.0**64).to(torch.int64)
    if case.cu_seqlens is None:
        return case.angle + turns.sum(1)
    bounds = case.cu_seqlens.tolist()
    return case.angle + torch.stack([turns[0, a:b].sum(0) for a, b in pairwise(bounds)])


STEPS: dict[str, dict[str, Any]] = {
    "plain": {"layout": 0},
    "half": {},
    "interleaved, odd": {"f": 7, "e": 3, "pairs": 2, "layout": 1},
    "whole vectors": {"f": 64, "e": 64, "h": 4, "g": 2, "theta_heads": 2},
    "wide values": {"e": 85},
    "decay": {"decay": 0.3},
    "strong decay": {"decay": 60.0},
    "angle steps": {"steps": True, "decay": 0.1, "h": 4, "g": 2},
    "axes": {"axes": 2},
    "mask": {"mask": True, "b": 8},
    "eps added": {"add_eps": True, "eps": 0.5},
    "no normalizer": {"feature_map": 5, "normalize": False},
}


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_a_call_of_one_token_in_place(native, name, pooled):
    case = make(n=1, **STEPS[name])
    expected, kv64, z64, bound = attend(case.double())
    state = {"kv": case.kv.clone(), "z": case.z.clone()}
    if case.angle is not None:
        state["angle"] = case.angle.clone()
    slots, rows = None, slice(None)
    if pooled:
        slots = torch.randperm(len(case.kv) + 2)[: len(case.kv)]
        pool = {n: torch.zeros(len(x) + 2, *x.shape[1:], dtype=x.dtype) for n, x in state.items()}
        for n, x in pool.items():
            x[slots] = state[n]
        state, rows = pool, slots
    given = replace(case, **state).inputs()
    out = native.step(*given[:11], *given[12:14], slots, given[14], *given[16:])
    assert_within(out, expected, UNIT[torch.float32] * bound + 1e-30, "out")
    assert_within(state["kv"][rows], kv64, 2e-6 * float(kv64.abs().max()), "kv")
    assert_within(state["z"][rows], z64, 1e-6 * float(z64.abs().max()), "z")
    if case.angle is not None:
        assert int((state["angle"][rows] - last_angle(case)).abs().max()) < 2**20

"""Decoding steps in a new state, in one that is given away and in rows of a pool; states without queries."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from linrope import LinearAttentionState, Rotary, linear_rope_attention, linear_rope_state
from tests.support.contract import (
    TABLE,
    Contract,
    assert_within,
    computed,
    every_contract,
    narrow,
)
from tests.support.equation import Equation
from tests.support.options import Row, draw, problem
from tests.support.oracle import (
    BACKENDS,
    DATA,
    NATIVE,
    every_kernel,
    everything,
    random_state,
    randoms,
)

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # NumPy's
OF_TOKENS = ("key_mask", "positions", "key_positions")
IN_STEPS = {
    "tokens": ["four"], "causal": ["causal"], "cu_seqlens": ["none"], "state": ["some"],
    "feature_map": ["elu+1", "relu", "silu", "identity", "features"],
}  # fmt: skip
ROTATIONS = ["none", "interleaved", "half", "partial", "partial, half", "theta per head", "two axes"]


WAYS = ("new", "given away", "pool")  # where the state lies


def every_step() -> list[Any]:
    """(contract, row, ways): rows in which every value of every option occurs that a step can have.

    Each row with all ways; in the slow interpreter with one after the other.
    """
    found = []
    for contract in TABLE:
        more = (
            ["yarn", "xpos", "before the map", "before the map, theta per head"]
            if contract.dtype == torch.float64
            else []
        )
        chosen = IN_STEPS | {"rotary": ROTATIONS + more} | computed(contract.backend)
        for i, row in enumerate(draw(0, chosen, together=1)):
            if row["key_positions"] != "none" and row["positions"] == "none":
                row = row | {
                    "positions": "rising"
                }  # a next step's default position comes after the last key's
            ways = WAYS if contract.backend != "triton" else WAYS[i % 3 :][:1]
            found.append(pytest.param(contract, row, ways, id=f"{contract.name}-{i}", marks=contract.marks))
    return found


def at_step(t: int, of_tokens: dict[str, Tensor], axes: int) -> dict[str, Tensor]:
    """What the token t has. Positions may be those of all rows: (n,), or (n, axes)."""
    of_all_rows = {
        x for x in ("positions", "key_positions") if x in of_tokens and of_tokens[x].ndim == 1 + axes
    }
    return {name: x[t : t + 1] if name in of_all_rows else x[:, t : t + 1] for name, x in of_tokens.items()}


def with_pool(state: LinearAttentionState) -> tuple[LinearAttentionState, Tensor]:
    """A pool of two more rows, which hold NaN, and the state's rows in it."""
    slots, pool = torch.tensor([3, 0, 4])[: len(state.kv)], {}
    for name, x in state.tensors().items():
        fill = torch.nan if x.is_floating_point() else -1
        pool[name] = torch.full((5, *x.shape[1:]), fill, dtype=x.dtype)
        pool[name][slots] = x.detach()
    return replace(state, **pool), slots


@pytest.mark.parametrize(("contract", "row", "ways"), every_step())
@torch.no_grad()
def test_steps_are_one_call_wherever_their_state_lies(
    contract: Contract, row: Row, ways: tuple[str, ...]
) -> None:
    (q, k, v), start, how = problem(row, contract.dtype, d=16, e=40)
    assert start is not None
    wide = torch.promote_types(contract.dtype, torch.float32)
    start = replace(start.detach(), kv=start.kv.detach().to(wide))
    of_tokens = {x: narrow(how.pop(x), wide) for x in (*DATA, *OF_TOKENS) if how.get(x) is not None}
    axes = 0 if row["rotary"] != "two axes" else 1
    if contract.dtype == torch.float64 and (row["log_decay"] == "strong" or row["rotary"] == "xpos"):
        contract = replace(contract, out=1e-10, sums=1e-10)  # sums of logs as large as 1e5
    equation, exact = Equation(), {name: narrow(x, torch.float64) for name, x in of_tokens.items()}
    expected, last = equation(
        q.double(), k.double(), v.double(), state=replace(start, kv=start.kv.double()), **exact, **how
    )
    for way, backend in product(ways, contract.backends):
        pool, slots = with_pool(start)
        before, state = pool.clone(), start.clone()
        for t in range(q.shape[1]):
            step = at_step(t, of_tokens, axes)
            given = {"new": state, "given away": state.donate(), "pool": pool.at(slots)}[way]
            out, after = linear_rope_attention(
                *(x[:, t : t + 1] for x in (q, k, v)), state=given, return_state=True,
                backend=backend, **step, **how,
            )  # fmt: skip
            if way != "pool":
                for key in ("kv", "z", "position"):
                    shared = getattr(after, key).data_ptr() == getattr(state, key).data_ptr()
                    assert shared == (way == "given away")
                assert not after.donated
                state = after
            size = equation.sizes.out[:, t : t + 1]
            assert_within(contract, "out", out, expected[:, t : t + 1], size, False)
        state = pool.reorder(slots) if way == "pool" else state
        for name_of, x in last.tensors().items():
            assert_within(contract, name_of, getattr(state, name_of), x, equation.sizes.out, False)
        others = torch.tensor([1, 2])
        for x, y in zip(pool.tensors().values(), before.tensors().values()):
            assert torch.equal(x[others].nan_to_num(), y[others].nan_to_num())


@every_kernel
@torch.no_grad()
def test_a_packed_prefill_writes_its_rows_of_a_pool(backend: str) -> None:
    q, k, v = randoms(1, 70, 2, 16, dtype=torch.float32)
    how: dict[str, Any] = {"rotary": Rotary(16), "cu_seqlens": torch.tensor([0, 20, 30, 70])}
    start = random_state(k, v, how).detach()
    pool, slots = with_pool(start)
    out = linear_rope_attention(q, k, v, state=pool.at(slots), backend=backend, **how)
    widened = replace(start, kv=start.kv.double())
    expected, last = Equation()(q.double(), k.double(), v.double(), state=widened, **how)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(pool.kv[slots].double(), last.kv.double(), rtol=0, atol=1e-5)
    assert bool(pool.kv[[1, 2]].isnan().all())


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "gates, steps, state": {"start": True, "gates": True, "n": 200, "mask": True},
    "packed gates, state": {"start": True, "gates": True, "n": 190, "packed": True},
    "packed": {"packed": True, "n": 190, "mask": True},
}


@every_contract(case=CASES, interpreted=["plain", "packed gates, state"])
@pytest.mark.usefixtures("short_segments")
def test_the_state_alone_and_its_gradients_are_the_equation_s(contract, case) -> None:
    packed, n = case.get("packed", False), case.get("n", 70)
    b, generator = 1 if packed else 2, torch.Generator().manual_seed(3)
    q, k, v = (narrow(x, contract.dtype) for x in randoms(b, n, 1, 8, e=16))
    wide = torch.promote_types(contract.dtype, torch.float32)
    how: dict[str, Any] = {"rotary": Rotary(8)}
    if packed:
        how["cu_seqlens"] = torch.tensor([0, 130, 130, n])
    state = random_state(k, v, how) if case.get("start") else None
    if state is not None:
        state = replace(state, kv=state.kv.detach().to(wide))
    if case.get("mask"):
        how["key_mask"] = torch.arange(n).expand(b, n) % 5 > 0
    if case.get("gates"):
        log = -torch.rand(b, n, 1, generator=generator, dtype=torch.float64) / 9
        log[:, 100] = -30.0
        steps = torch.randn(b, n, 1, 4, generator=generator, dtype=torch.float64)
        how |= {"log_decay": log.to(wide), "angle_steps": steps.to(wide)}

    def alone(q: Tensor, k: Tensor, v: Tensor, *, return_state: bool, **how: Any) -> Any:
        return k.new_zeros(0), linear_rope_state(k, v, **how)

    def exactly(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Any:
        return k.new_zeros(0), Equation()(q, k, v, **how)[1]

    exact = {name: narrow(x, torch.float64) for name, x in how.items()}
    widened = None if state is None else replace(state, kv=state.kv.double())
    expected = everything(q.double(), k.double(), v.double(), widened, call=exactly, **exact)
    for backend in contract.backends:
        actual = everything(q, k, v, state, call=alone, backend=backend, **how)
        assert actual.keys() == expected.keys()
        for key, x in actual.items():
            assert_within(contract.in_use(), key, x, expected[key], torch.zeros(()), False)


@pytest.mark.parametrize("backend", [*BACKENDS, NATIVE])
def test_a_step_with_steps_per_head_goes_on_from_steps_that_all_heads_share(backend: str) -> None:
    q, k, v = randoms(3, 6, 2, 4, dtype=torch.float32)
    shared, per_head = torch.randn(3, 5, 1, 2), torch.randn(3, 1, 2, 2)
    how: dict[str, Any] = {"rotary": Rotary(4), "backend": backend}
    state = linear_rope_state(k[:, :5], v[:, :5], angle_steps=shared, **how)
    out = linear_rope_attention(*(x[:, 5:] for x in (q, k, v)), angle_steps=per_head, state=state, **how)
    steps = torch.cat((shared.expand(-1, -1, 2, -1), per_head), 1)
    torch.testing.assert_close(out, linear_rope_attention(q, k, v, angle_steps=steps, **how)[:, 5:])

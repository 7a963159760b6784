"""States, and decoding token by token, in place and in the rows of a pool."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from linrope import Rotary, linear_rope_attention, linear_rope_state
from tests.kernels import comparison
from tests.kernels.comparison import TOLERANCE, every_dtype
from tests.oracle import both_directions, random_state, randoms

pytestmark = comparison.marks


@both_directions
def test_cut_anywhere_and_resumed_is_one_call(causal: bool) -> None:
    q, k, v = randoms(2, 70, 2, 16, dtype=torch.float32)
    how: dict[str, Any] = {"rotary": Rotary(16), "backend": "triton"}
    if not causal:  # the state of one call serves the next as context
        q = q[:, :3]
        how |= {"causal": False, "positions": torch.arange(3), "key_positions": torch.arange(70)}
    out, last = linear_rope_attention(q, k, v, return_state=True, **how)
    for cut in (1, 13, 64, 69):
        if causal:
            a, state = linear_rope_attention(*(x[:, :cut] for x in (q, k, v)), return_state=True, **how)
            b, state = linear_rope_attention(
                *(x[:, cut:] for x in (q, k, v)), state=state, return_state=True, **how
            )
            torch.testing.assert_close(torch.cat((a, b), 1), out, rtol=0, atol=1e-6)
        else:
            one, two = (how | {"key_positions": x} for x in (torch.arange(cut), torch.arange(cut, 70)))
            _, state = linear_rope_attention(q, k[:, :cut], v[:, :cut], return_state=True, **one)
            b, state = linear_rope_attention(q, k[:, cut:], v[:, cut:], state=state, return_state=True, **two)
            torch.testing.assert_close(b, out, rtol=0, atol=1e-6)
        torch.testing.assert_close(state.kv, last.kv, rtol=0, atol=1e-5)
        torch.testing.assert_close(state.z, last.z, rtol=1e-6, atol=0)


@every_dtype
@pytest.mark.parametrize(
    ("rotary", "normalize", "decay"),
    [
        (None, True, None),
        (None, False, 0.9),
        (Rotary(16), True, 0.9),
        (Rotary(16), False, None),
        (Rotary(16, layout="half", rotary_dim=6), True, None),
    ],
    ids=str,
)
def test_decoding(rotary: Rotary | None, normalize: bool, decay: float | None, dtype: torch.dtype) -> None:
    b, n, d, e = 3, 5, 16, 40
    q, k, v = randoms(b, n, 4, d, g=2, e=e, dtype=dtype)
    how: dict[str, Any] = {"rotary": rotary, "normalize": normalize}
    if decay is not None:
        how["decay"] = torch.tensor([decay, 0.5])
    start = random_state(k, v, how)  # a position of its own for each sequence
    mask = torch.tensor([[True, False, True, True, True]]).expand(b, n).clone()
    mask[1, 3] = False
    oracle, last = linear_rope_attention(
        *(x.double() for x in (q, k, v)), state=start, key_mask=mask, return_state=True,
        backend="reference", **how,
    )  # fmt: skip
    for donate in (False, True):
        state = start.clone().detach()
        for t in range(n):
            step, before = [x[:, t : t + 1] for x in (q, k, v)], state
            out, state = linear_rope_attention(
                *step, state=before.donate() if donate else before, key_mask=mask[:, t : t + 1],
                return_state=True, backend="triton", **how,
            )  # fmt: skip
            assert (state.kv.data_ptr() == before.kv.data_ptr()) == donate
            assert (state.z.data_ptr() == before.z.data_ptr()) == donate
            error = (out.double() - oracle[:, t : t + 1]).abs().max()
            assert error <= TOLERANCE[dtype] * oracle.abs().max().clamp(min=1)
        assert state.position.tolist() == last.position.tolist()
        torch.testing.assert_close(state.kv.double(), last.kv.double(), rtol=0, atol=1e-5)
        torch.testing.assert_close(state.z, last.z.double(), rtol=1e-6, atol=0)


def test_decoding_with_positions_of_its_own() -> None:
    q, k, v = randoms(2, 1, 2, 16, dtype=torch.float32)
    where = {"positions": torch.tensor([[10**9], [3]]), "key_positions": torch.tensor([7])}
    how: dict[str, Any] = {"rotary": Rotary(16)} | where
    start = random_state(k, v, {"rotary": Rotary(16)}).detach()
    actual = linear_rope_attention(q, k, v, state=start, backend="triton", **how)
    oracle = linear_rope_attention(
        q.double(), k.double(), v.double(), state=start, backend="reference", **how
    )
    torch.testing.assert_close(actual.double(), oracle, rtol=0, atol=1e-5)


def test_the_normalizer_does_not_stall_in_decoding() -> None:
    x = torch.full((1, 1, 1, 16), 0.25)
    how: dict[str, Any] = {"feature_map": None, "backend": "triton"}
    _, state = linear_rope_attention(x, x, x, return_state=True, **how)
    state = replace(state, z=torch.full_like(state.z, 2.0**25))
    for _ in range(20):
        _, state = linear_rope_attention(x, x, x, state=state, return_state=True, **how)
    torch.testing.assert_close(state.z - 2.0**25, torch.full_like(state.z, 5.0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("decay", [None, 0.8])
def test_a_step_reads_and_writes_the_rows_of_a_pool(decay: float | None) -> None:
    q, k, v = randoms(5, 1, 4, 16, g=2, e=40, dtype=torch.float32)
    how: dict[str, Any] = {"rotary": Rotary(16), "backend": "triton"}
    if decay is not None:
        how["decay"] = torch.tensor([decay, 0.5])
    pool = random_state(k, v, {"rotary": Rotary(16)}).detach()
    before, memory, slots = pool.clone(), pool.kv.data_ptr(), torch.tensor([3, 0, 4])
    out = linear_rope_attention(q[:3], k[:3], v[:3], state=pool.at(slots), **how)
    expected, after = linear_rope_attention(
        q[:3], k[:3], v[:3], state=before.reorder(slots), return_state=True, **how
    )
    assert torch.equal(out, expected)
    assert pool.kv.data_ptr() == memory
    for name in ("kv", "z", "position"):
        rows, old, new = (getattr(state, name) for state in (pool, before, after))
        assert torch.equal(rows[slots], new)
        assert torch.equal(rows[[1, 2]], old[[1, 2]])


def test_a_packed_prefill_writes_its_rows_of_a_pool() -> None:
    q, k, v = randoms(1, 70, 2, 16, dtype=torch.float32)
    how: dict[str, Any] = {"rotary": Rotary(16), "cu_seqlens": torch.tensor([0, 30, 70])}
    pool, slots = (
        random_state(k.expand(4, -1, -1, -1), v.expand(4, -1, -1, -1), {}).detach(),
        torch.tensor([2, 0]),
    )
    pool = replace(pool, identity=linear_rope_state(k, v, rotary=Rotary(16)).identity)
    rows = pool.reorder(slots)
    with torch.no_grad():
        out = linear_rope_attention(q, k, v, state=pool.at(slots), backend="triton", **how)
        oracle, last = linear_rope_attention(
            *(x.double() for x in (q, k, v)), state=rows, return_state=True, backend="reference", **how
        )
    torch.testing.assert_close(out.double(), oracle, rtol=0, atol=1e-5)
    torch.testing.assert_close(pool.kv[slots].double(), last.kv.double(), rtol=0, atol=1e-5)


def test_steps_that_turn_by_data_are_one_call() -> None:
    b, n = 2, 5
    q, k, v = randoms(b, n, 4, 16, g=2, dtype=torch.float32)
    how: dict[str, Any] = {"rotary": Rotary(16), "backend": "triton"}
    data = {"angle_steps": torch.randn(b, n, 2, 8), "log_decay": -torch.rand(b, n, 1)}
    expected, last = linear_rope_attention(q, k, v, return_state=True, **data, **how)
    state = linear_rope_state(k[:, :0], v[:, :0], angle_steps=data["angle_steps"][:, :0], rotary=Rotary(16))
    outs = []
    for t in range(n):
        step = {name: x[:, t : t + 1] for name, x in data.items()}
        q1, k1, v1 = (x[:, t : t + 1] for x in (q, k, v))
        out, state = linear_rope_attention(q1, k1, v1, state=state.donate(), return_state=True, **step, **how)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 1), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(state.kv, last.kv, rtol=0, atol=1e-5)
    assert torch.equal(state.angle, last.angle)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.usefixtures("short_segments")
def test_the_state_alone(with_state: bool, packed: bool) -> None:
    _, k, v = randoms(1 if packed else 2, 190, 2, 16, e=8, dtype=torch.float32)
    how: dict[str, Any] = {"rotary": Rotary(16), "log_decay": -torch.rand(len(k), 190, 2) / 9}
    if packed:
        how["cu_seqlens"] = torch.tensor([0, 130, 130, 190])
    state = random_state(k, v, how).detach() if with_state else None
    actual = linear_rope_state(k, v, state=state, backend="triton", **how)
    oracle = linear_rope_state(k.double(), v.double(), state=state, backend="reference", **how)
    for x, expected in ((actual.kv, oracle.kv), (actual.z, oracle.z)):
        torch.testing.assert_close(
            x.double(), expected.double(), rtol=0, atol=1e-5 * float(expected.abs().max())
        )

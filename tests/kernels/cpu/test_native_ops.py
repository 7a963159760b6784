"""The native operators against the equation written out in float64, within the numerics contract."""

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))  # no package: tests import by file
from oracle import Case, attend, gradients  # noqa: E402

UNIT = {torch.float32: 16 * 2.0**-24, torch.bfloat16: 4 * 2.0**-8, torch.float16: 4 * 2.0**-11}


@pytest.fixture(autouse=True, params=["v4", "v3", "baseline"])
def isa(request, native):
    """Every test runs on every instruction set that this machine has."""
    if request.param not in native.isas().split(","):
        pytest.skip(f"no {request.param} on this machine")
    native.set_isa(request.param)
    return request.param


def turns(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Frequencies of up to 0.16 turns per position."""
    return (torch.rand(shape, generator=generator, dtype=torch.float64) * 0.16 * 2.0**64).to(torch.int64)


def make(
    b: int = 2, n: int = 70, h: int = 2, g: int = 1, f: int = 12, e: int = 10, *, m: int | None = None,
    layout: int = 2, pairs: int | None = None, axes: int = 1, theta_heads: int = 1, state: bool = True,
    decay: float | None = None, steps: bool = False, mask: bool = False, packed: list[int] | None = None,
    dtype: torch.dtype = torch.float32, seed: int = 0, **more: Any,
) -> Case:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    m = n if m is None else m
    pairs = f // 2 if pairs is None else pairs
    rows = b if packed is None else len(packed) - 1
    how: dict[str, Any] = {"layout": layout}
    if layout:
        how["theta"] = turns((axes, theta_heads, pairs), generator)
        how["positions"] = (
            torch.randint(0, 1000, (b, n, axes), generator=generator) if axes > 1 else torch.tensor([[5]])
        )
        if m != n:
            how["key_positions"] = torch.randint(0, 1000, (b, m), generator=generator)
    if decay is not None:
        how["log_decay"] = -decay * torch.rand(b, m, g, generator=generator)
    if steps:
        how["angle_steps"] = normal(b, n, g, pairs)
        how["angle"] = turns((rows, g, pairs), generator)
    if mask:
        how["key_mask"] = torch.rand(b, m, generator=generator) < 0.7
    if packed is not None:
        how["cu_seqlens"] = torch.tensor(packed)
    if state:
        how["kv"] = normal(rows, g, f, e)
        how["z"] = torch.rand(rows, g, f, generator=generator, dtype=torch.float64) + 0.5
    q, k, v = normal(b, n, h, f), normal(b, m, g, f), normal(b, m, g, e)
    q, k, v = (x + 0.05 * x.sign() for x in (q, k, v))  # no number near the kink of relu
    return Case(q.to(dtype), k.to(dtype), v.to(dtype), **how | more)


CASES: dict[str, dict[str, Any]] = {
    "plain": {"layout": 0, "state": False},
    "interleaved": {"layout": 1, "state": False},
    "half": {"layout": 2},
    "whole vectors": {"f": 64, "e": 64, "layout": 1},
    "odd sizes": {"f": 7, "e": 3, "pairs": 2, "layout": 1},
    "partial rotation": {"f": 40, "e": 33, "pairs": 9},
    "one feature": {"f": 1, "e": 1, "layout": 0, "normalize": False},  # with it, dq is 0 and all rounding
    "large": {"b": 1, "f": 256, "e": 200, "n": 40},
    "grouped heads": {"h": 6, "g": 2, "theta_heads": 2},
    "one token": {"n": 1},
    "no token": {"n": 0},
    "relu": {"feature_map": 2},
    "relu2": {"feature_map": 3},
    "exp": {"feature_map": 4},
    "silu, no normalizer": {"feature_map": 5, "normalize": False},
    "identity, no normalizer": {"feature_map": 0, "normalize": False},
    "eps added": {"add_eps": True, "eps": 0.5},
    "large eps": {"eps": 30.0, "state": False},
    "decay": {"decay": 0.3},
    "gates": {"decay": 3.0, "h": 4, "g": 2},
    "strong gates": {"decay": 60.0},
    "decay, eps added": {"decay": 0.3, "add_eps": True, "eps": 0.5},
    "decay, no normalizer": {"decay": 1.0, "normalize": False},
    "decay, large eps": {"decay": 0.3, "eps": 20.0},
    "angle steps": {"steps": True},
    "angle steps and decay": {"steps": True, "decay": 0.5, "h": 4, "g": 2},
    "axes": {"axes": 2},
    "mask": {"mask": True, "decay": 0.1},
    "mask without state": {"mask": True, "state": False},
    "packed": {"b": 1, "packed": [0, 3, 3, 40, 70], "decay": 0.2, "steps": True},
    "packed without state": {"b": 1, "packed": [0, 33, 70], "state": False},
    "cut into segments": {"b": 1, "n": 2100, "h": 1, "f": 6, "e": 5, "decay": 0.02, "steps": True},
    "cut into segments, undecayed": {"b": 1, "n": 2100, "h": 2, "f": 6, "e": 5},
    "bidirectional": {"causal": False},
    "bidirectional, more keys": {"causal": False, "m": 90, "mask": True, "h": 4, "g": 2},
    "bidirectional, angle steps": {"causal": False, "steps": True, "state": False},
    "bidirectional, packed": {"causal": False, "b": 1, "packed": [0, 3, 40, 40, 70]},
    "bidirectional, cut": {"causal": False, "b": 1, "n": 1100, "m": 2100, "h": 1, "f": 6, "e": 5},
    "causal, key positions": {"key_positions": torch.arange(70)[None] * 2},
}


def random_like(x: Tensor, seed: int) -> Tensor:
    """Weights of few digits: exact in every type."""
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(x.dtype)


def assert_within(actual: Tensor, expected: Tensor, bound: Tensor | float, name: str = "") -> None:
    error = (actual.double() - expected).abs()
    assert actual.shape == expected.shape
    excess = float((error / bound).nan_to_num(nan=0.0).max()) if error.numel() else 0.0
    assert not bool((error > bound).any()), (
        f"{name}: off by {float(error.max()):.3g}, {excess:.2g} times the bound"
    )
    assert not bool(error.isnan().any()), f"{name}: NaN"


@pytest.mark.parametrize("name", CASES)
def test_forward_is_the_equation(native, name):
    case = make(**CASES[name])
    out, kv, z = case.forward(native)
    expected, kv64, z64, bound = attend(case.double())
    assert_within(out, expected, UNIT[torch.float32] * bound + 1e-30, "out")
    largest = lambda x: float(x.abs().max()) if x.numel() else 0.0  # noqa: E731
    assert_within(kv, kv64, 2e-6 * largest(kv64), "kv")
    assert_within(z, z64, 1e-6 * largest(z64), "z")


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_autograd(native, name):
    case = make(**CASES[name])
    out, kv, z = case.forward(native)
    weights = [random_like(x, i) for i, x in enumerate((out, kv, z))]
    actual, expected = case.backward(native, *weights), gradients(case, *weights)
    for name_, x in expected.items():
        # 1e-5 of the largest entry: the contract's floor for gradients
        assert_within(actual[name_], x, 1e-5 * (float(x.abs().max()) if x.numel() else 0.0) + 1e-30, name_)


@pytest.mark.parametrize(
    "name", ["half", "decay", "angle steps and decay", "packed", "bidirectional", "cut into segments"]
)
@pytest.mark.parametrize("which", ["out alone", "state alone", "no queries"])
def test_gradients_of_a_part_of_the_results(native, name, which):
    case = make(**CASES[name])
    out, kv, z = case.forward(native)
    weights = [random_like(x, i) for i, x in enumerate((out, kv, z))]
    if which == "no queries":
        case = replace(case, q=None)
        empty, kv_alone, z_alone = case.forward(native)
        assert empty.numel() == 0
        torch.testing.assert_close(kv_alone, kv, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(z_alone, z)
    given = [weights[0], None, None] if which == "out alone" else [None, *weights[1:]]
    actual, expected = case.backward(native, *given), gradients(case, *given)
    for name_, x in expected.items():
        assert_within(actual[name_], x, 1e-5 * float(x.abs().max()) + 1e-30, name_)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name", ["interleaved", "half", "odd sizes", "whole vectors", "gates", "bidirectional, more keys"]
)
def test_half_precision_keeps_the_contract(native, name, dtype):
    case = make(**CASES[name] | {"dtype": dtype})
    out, kv, z = case.forward(native)
    assert (out.dtype, kv.dtype, z.dtype) == (dtype, torch.float32, torch.float64)
    expected, *_, bound = attend(case.double())
    # sums are in float32: beside the contract's bound on cancelling terms, half an ulp of the result's type
    assert_within(out, expected, UNIT[dtype] * bound, "out")
    assert_within(
        out, expected, UNIT[dtype] / 4 * expected.abs() + UNIT[torch.float32] * bound + 1e-7, "rounded once"
    )
    g_out = random_like(out, 3)
    actual, wanted = case.backward(native, g_out, None, None), gradients(case, g_out, None, None)
    for name_, x in wanted.items():
        if name_ in ("q", "k", "v"):
            assert actual[name_].dtype == dtype
        assert_within(actual[name_], x, UNIT[dtype] / 4 * x.abs() + 2e-5 * float(x.abs().max()), name_)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_goes_in_and_out_unchanged(native, dtype):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    v = bits.view(dtype).reshape(1, -1, 1, 256).expand(1, -1, 1, 256).contiguous()
    v = v.reshape(-1, 1, 1, 256)  # each row is a sequence of one token: out = v where <q, k> = den
    one = torch.ones(len(v), 1, 1, 1, dtype=dtype)
    case = Case(one, one, v, feature_map=0, normalize=False)
    out, *_ = case.forward(native)
    same = out.view(torch.int16) == v.view(torch.int16)
    # a zero keeps its magnitude, a NaN stays some NaN
    assert bool((same | (out.isnan() & v.isnan()) | ((out == 0) & (v == 0))).all())


def test_large_positions_turn_exactly(native):
    positions = torch.tensor([[2**31 - 100, 5, 2**31 - 1, 2**31 - 90]])
    for start in (positions, torch.tensor([[2**31 - 40]])):
        case = make(b=1, n=4, f=64, e=16, state=False, positions=start)
        out, *_ = case.forward(native)
        expected, *_, bound = attend(case.double())
        assert_within(out, expected, UNIT[torch.float32] * bound)


@pytest.mark.parametrize("strength", [-20.0, -1e4, -1e30, -math.inf])
def test_a_gate_that_forgets_all_leaves_nothing(native, strength):
    case = make(b=1, n=50, decay=0.1)
    decay = case.log_decay.clone()
    decay[:, 7::9] = strength
    case = replace(case, log_decay=decay)
    out, kv, z = case.forward(native)
    expected, kv64, z64, bound = attend(case.double())
    assert_within(out, expected, UNIT[torch.float32] * bound + 1e-30)
    assert_within(kv, kv64, 1e-6 * float(kv64.abs().max()))
    grads = case.backward(native, torch.ones_like(out), torch.ones_like(kv), torch.ones_like(z))
    assert all(bool(x.isfinite().all()) for x in grads.values())


def test_no_decay_and_decay_of_zero_agree_to_the_bit(native):
    plain = make(n=100)
    for x, y in zip(
        plain.forward(native), replace(plain, log_decay=torch.zeros(1, 100, 1)).forward(native), strict=True
    ):
        assert torch.equal(x, y)


def test_shared_gates_and_positions_are_those_spelled_out(native):
    case = make(h=4, g=2, steps=True, decay=0.4)
    shared = replace(
        case, log_decay=case.log_decay[:1, :, :1], angle_steps=case.angle_steps[:1, :, :1].bfloat16()
    )
    full = replace(
        shared, log_decay=shared.log_decay.expand(2, -1, 2).double(),
        angle_steps=shared.angle_steps.expand(2, -1, 2, -1).contiguous().float(),
        positions=torch.arange(5, 75).expand(2, -1).contiguous(),
    )  # fmt: skip
    for x, y in zip(shared.forward(native), full.forward(native), strict=True):
        assert torch.equal(x, y)


def test_strided_inputs_are_read_where_they_lie(native):
    case = make(f=16, e=16, h=2, g=2)
    qkv = torch.cat((case.q, case.k, case.v), 2).transpose(1, 2).contiguous().transpose(1, 2)
    q, k, v = qkv.split(2, 2)
    for x, y in zip(case.forward(native), replace(case, q=q, k=k, v=v).forward(native), strict=True):
        assert torch.equal(x, y)


FUTURES = [
    "plain",
    "whole vectors",
    "gates",
    "strong gates",
    "angle steps and decay",
    "grouped heads",
    "axes",
]


@pytest.mark.parametrize("name", FUTURES)
@pytest.mark.parametrize("what", ["other numbers", "nan", "inf"])
def test_the_future_changes_no_bit_of_what_came_before(native, name, what):
    case, cut = make(**CASES[name]), 43  # inside a chunk, and a block of rows
    before, *_ = case.forward(native)
    changed = {}
    for field in ("q", "k", "v", "log_decay", "angle_steps"):
        x = getattr(case, field)
        if x is None or (what != "other numbers" and field == "angle_steps"):
            continue
        x = x.clone()
        if what == "other numbers":
            x[:, cut:] = x[:, cut:] * 7 - (0 if field == "log_decay" else 0.1)
        elif field == "log_decay":
            x[:, cut:] = math.nan if what == "nan" else -math.inf
        else:
            x[:, cut:] = math.nan if what == "nan" else math.inf
        changed[field] = x
    after, *_ = replace(case, **changed).forward(native)
    assert torch.equal(after[:, :cut], before[:, :cut])
    assert not torch.equal(after[:, cut:], before[:, cut:])


@pytest.mark.parametrize("name", ["half", "gates", "packed", "bidirectional"])
def test_a_nan_stays_in_its_sequence_and_head(native, name):
    case = make(**CASES[name] | {"h": 4, "g": 2, "b": 1 if "packed" in CASES[name] else 2})
    out, kv, z = case.forward(native)
    weights = random_like(out, 1)
    grads = case.backward(native, weights, None, None)
    v = case.v.clone()
    row, token = (0, 20) if case.cu_seqlens is not None else (1, 20)
    v[row, token, 1] = math.nan
    bad = replace(case, v=v)
    bad_out, *_ = bad.forward(native)
    bad_grads = bad.backward(native, weights, None, None)
    assert torch.equal(bad_out[:, :, :2], out[:, :, :2])
    assert torch.equal(bad_grads["k"][:, :, 0], grads["k"][:, :, 0])
    if case.cu_seqlens is not None:
        other = slice(40, 70)
        assert torch.equal(bad_out[:, other], out[:, other])
        assert torch.equal(bad_grads["q"][:, other], grads["q"][:, other])
    else:
        assert torch.equal(bad_out[0], out[0])
        assert torch.equal(bad_grads["q"][0], grads["q"][0])
    assert bool(bad_out[row, token : token + 5, 2:].isnan().all())


def test_what_masked_tokens_hold_is_never_used(native):
    case = make(mask=True, decay=0.2)
    hidden = ~case.key_mask[:, :, None, None]
    poisoned = replace(case, k=case.k.masked_fill(hidden, math.nan), v=case.v.masked_fill(hidden, math.inf))
    results = case.forward(native), poisoned.forward(native)
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)
    weights = [random_like(x, i) for i, x in enumerate(results[0])]
    one, other = case.backward(native, *weights), poisoned.backward(native, *weights)
    for name in one:
        assert torch.equal(one[name], other[name]), name
    assert not bool(one["k"].masked_select(hidden).any())
    assert not bool(one["v"].masked_select(hidden).any())


def test_a_query_that_sees_no_key_gets_exactly_zero_and_finite_gradients(native):
    mask = torch.ones(2, 70, dtype=torch.bool)
    mask[:, :9] = False
    case = make(key_mask=mask, state=False)
    out, *_ = case.forward(native)
    assert not bool(out[:, :9].any())
    assert all(
        bool(x.isfinite().all()) for x in case.backward(native, torch.ones_like(out), None, None).values()
    )


def test_tokens_of_no_packed_sequence_get_zero_and_bounds_are_clamped(native):
    case = make(b=1, state=False, cu_seqlens=torch.tensor([5, 20, 10, 60]))
    out, *_ = case.forward(native)
    assert not bool(out[:, :5].any() | out[:, 60:].any())
    sane = replace(case, cu_seqlens=torch.tensor([5, 20, 20, 60], dtype=torch.int32))
    assert torch.equal(out, sane.forward(native)[0])
    wild = replace(case, cu_seqlens=torch.tensor([-(2**60), 20, 2**60]))
    assert torch.equal(
        wild.forward(native)[0], replace(case, cu_seqlens=torch.tensor([0, 20, 70])).forward(native)[0]
    )


@pytest.mark.parametrize(
    "name", ["half", "angle steps and decay", "packed", "cut into segments", "bidirectional"]
)
def test_any_number_of_threads_gives_the_same_bits(native, name):
    case = make(**CASES[name] | {"h": 8, "g": 4})
    weights = [random_like(x, i) for i, x in enumerate(case.forward(native))]
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append([*case.forward(native), *case.backward(native, *weights).values()])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for x, y in zip(found[0], other, strict=True):
            assert torch.equal(x, y)


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
    return case.angle + torch.stack(
        [turns[0, a:b].sum(0) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
    )


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


def test_long_undecayed_sums_stay_exact(native):
    """z counts in float64: a count of tokens in float32 stalls at 2^24, and rounds long before."""
    n = 300_000
    k = torch.full((1, n, 1, 1), 0.1)
    case = Case(None, k, k, feature_map=0)
    _, _, z = case.forward(native)
    torch.testing.assert_close(z, torch.full_like(z, float(k[0, 0]) * n), rtol=1e-6, atol=0)


def test_errors_name_the_argument_what_came_and_what_was_expected(native):
    case = make(steps=True, decay=0.1, mask=True)
    wrong = {
        "k: got": {"k": case.k.double()},
        "q: got shape": {"q": case.q[:, :-1]},
        "q: got 3 heads": {
            "q": torch.zeros(2, 70, 3, 12),
            "k": torch.zeros(2, 70, 2, 12),
            "v": torch.zeros(2, 70, 2, 10),
        },
        "v: got shape": {"v": case.v[:1]},
        "v: got stride": {"v": case.v.transpose(1, 3).contiguous().transpose(1, 3)},
        "feature_map: got 9": {"feature_map": 9},
        "layout: got 0 beside": {"layout": 0},
        "layout: got 7": {"layout": 7},
        "theta: got": {"theta": case.theta.double()},
        "positions: got shape": {"positions": torch.zeros(1, 7, dtype=torch.int64)},
        "positions: got none": {"positions": None},
        "log_decay: got shape": {"log_decay": torch.zeros(1, 1, 1)},
        "log_decay: got another dtype": {"log_decay": case.log_decay.half()},
        "log_decay: got it with causal": {"causal": False},
        "angle_steps: got shape": {"angle_steps": torch.zeros(2, 70, 1, 5)},
        "angle: got shape": {"angle": torch.zeros(3, 1, 6, dtype=torch.int64)},
        "key_mask: got another dtype": {"key_mask": torch.zeros(2, 70)},
        "kv: got shape": {"kv": case.kv[:1]},
        "z: got another dtype": {"z": case.z.float()},
        "kv, z: got one": {"z": None},
        "cu_seqlens: got a batch": {"cu_seqlens": torch.tensor([0, 70])},
        "eps: got": {"eps": -1.0},
    }
    for message, change in wrong.items():
        with pytest.raises(RuntimeError, match=message):
            replace(case, **change).forward(native)
    with pytest.raises(RuntimeError, match=r"slots: got 2, expected 0 \.\. 1"):
        case.forward(native, slots=torch.tensor([0, 2]))
    with pytest.raises(RuntimeError, match="g_out: got shape"):
        case.backward(native, torch.zeros(2, 70, 2, 11), None, None)
    with pytest.raises(RuntimeError, match="isa: got z80, expected one of"):
        native.set_isa("z80")

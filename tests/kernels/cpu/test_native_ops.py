"""The native operators against the equation written out in float64, within the numerics contract."""

import math
from dataclasses import replace

import pytest
import torch

from tests.kernels.cpu.cases import CASES, UNIT, assert_within, make, random_like
from tests.kernels.cpu.oracle import Case, attend, gradients

pytestmark = pytest.mark.usefixtures("isa")


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
    expected, kv64, _, bound = attend(case.double())
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
    out, *_ = case.forward(native)
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

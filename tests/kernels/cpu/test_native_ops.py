"""What the native operators alone promise; tests/backends compares them with the equation."""

import math
import re
from dataclasses import replace

import pytest
import torch

from linrope import Rotary, linear_rope_attention
from linrope.backends import library
from linrope.backends import native as backend
from linrope.feature_maps.elementwise import ELEMENTWISE
from linrope.feature_maps.unit import EPS
from linrope.layer.config import WRITE_GATES
from linrope.rotation.rotary import LAYOUTS, MAX_POSITION
from tests.kernels.cpu.cases import CASES, Case, error_of, make, on_one_isa, random_like, with_threads

pytestmark = pytest.mark.usefixtures("isa")


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_parts_of_the_results_add_up(native, name):
    case = make(**CASES[name])
    results = case.forward(native)
    weights = [random_like(x, i) for i, x in enumerate(results)]
    whole, of_out, of_state = (
        case.backward(native, *x) for x in (weights, (weights[0], None, None), (None, *weights[1:]))
    )
    for key, x in whole.items():
        torch.testing.assert_close(of_out[key] + of_state[key], x, rtol=0, atol=2e-5 * float(x.abs().max()))
    alone = replace(case, q=None)
    empty, *state = alone.forward(native)
    assert empty.numel() == 0
    torch.testing.assert_close(state, list(results[1:]), rtol=1e-5, atol=1e-5)
    for key, x in alone.backward(native, None, *weights[1:]).items():
        torch.testing.assert_close(x, of_state[key], rtol=0, atol=1e-5 * float(x.abs().max()))


@pytest.mark.parametrize("strength", [-20.0, -1e4, -1e30, -math.inf])
def test_a_gate_that_forgets_all_leaves_nothing(native, strength):
    case = make(b=1, n=50, decay=0.1, state=False)
    case.log_decay[:, 25] = strength
    out, kv, z = case.forward(native)
    late = {key: getattr(case, key)[:, 25:] for key in ("q", "k", "v", "log_decay")}
    alone = replace(case, **late, positions=case.positions + 25).forward(native)
    kept = 1e-8 if strength == -20 else 0  # e^-20 = 2e-9
    torch.testing.assert_close((out[:, 25:], kv, z), alone, rtol=1e-5, atol=1e-6 + 100 * kept)
    grads = case.backward(native, *(torch.ones_like(x) for x in (out, kv, z)))
    assert all(bool(x.isfinite().all()) for x in grads.values())


# rows.h stores the features that do not rotate as pairs of angle 0, or after the pairs if that makes rows no longer.
@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("f", "rotated"), [(10, 2), (12, 2), (18, 2), (24, 6), (32, 8), (40, 2), (64, 16)])
def test_a_part_of_the_features_rotates(f: int, rotated: int, dtype: torch.dtype, layout: str) -> None:
    q, k, v = (random_like(torch.empty(2, 37, 2, size, dtype=dtype), size) for size in (f, f, 5))
    gates = {"log_decay": -torch.rand(2, 37, 2), "angle_steps": torch.rand(2, 37, 2, rotated // 2)}
    token = {name: x[:, :1] for name, x in gates.items()}

    def results(backend: str) -> list[torch.Tensor]:
        options = {"rotary": Rotary(f, layout=layout, rotary_dim=rotated), "backend": backend}
        inputs = [x.clone().requires_grad_() for x in (q, k, v, *gates.values())]
        how = dict(zip(gates, inputs[3:], strict=True))
        out, state = linear_rope_attention(*inputs[:3], return_state=True, **how, **options)
        grads = torch.autograd.grad([out, state.kv], inputs, [random_like(out, 1), random_like(state.kv, 2)])
        with torch.no_grad():
            step = linear_rope_attention(
                *(x[:, :1] for x in (q, k, v)), state=state.detach().clone().donate(), **token, **options
            )
        return [out, state.kv, step, *grads]

    for got, expected in zip(results("native"), results("eager"), strict=True):
        error = 1e-4 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(got, expected, rtol=0, atol=error * float(expected.detach().abs().max()))


LATER = {
    "values of infinity": lambda case: {"v": case.v.new_tensor(math.inf)},
    "values of NaN": lambda case: {"v": case.v.new_tensor(math.nan)},
    "keys of NaN": lambda case: {"k": case.k.new_tensor(math.nan)},
    "large numbers": lambda case: {"q": 30 * case.q, "k": 30 * case.k, "v": 30 * case.v},
    "a gate that ends the chunk": lambda case: {"log_decay": torch.tensor(-1e4)},
}


@pytest.mark.parametrize("name", LATER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("f", "e"), [(40, 36), (6, 16)])
def test_later_tokens_change_no_bit_of_earlier_results(native, f, e, dtype, name):
    n, cut = 150, 75  # within a chunk
    case = make(b=1, n=n, h=2, f=f, e=e, decay=0.3, dtype=dtype)
    changed = {key: getattr(case, key).clone() for key in LATER[name](case)}
    for key, x in LATER[name](case).items():
        changed[key][:, cut:] = x.expand_as(changed[key])[:, cut:]
    results = []
    for x in (case, replace(case, **changed)):
        out, *_ = x.forward(native)
        grads = x.backward(native, random_like(out, 1), None, None)
        results.append(torch.cat((out[:, :cut], grads["q"][:, :cut]), -1))
    assert bool(results[0].isfinite().all())
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [0x7FFF, 0x7F81, -1])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_no_nan_gets_lost_whatever_its_bits(native, dtype, bits, name):
    case = make(b=1, n=70, h=1, f=32, e=32, layout=0, dtype=dtype, feature_map=0, normalize=False)
    x = getattr(case, name).clone()
    x[0, 40, 0, 3] = torch.tensor(bits, dtype=torch.int16).view(dtype)
    if not bool(x.isnan().any()):
        pytest.skip("no NaN in this type")
    out, *_ = replace(case, **{name: x}).forward(native)
    missing = ~out.isnan()
    assert bool(missing[0, :40].all())
    assert not bool(missing[0, 40, 0, 3 if name == "v" else slice(None)].any())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_goes_in_and_out_unchanged(native, dtype):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    v = bits.view(dtype).reshape(1, -1, 1, 256).expand(1, -1, 1, 256).contiguous()
    v = v.reshape(-1, 1, 1, 256)  # each row is a sequence of one token: out = v where <q, k> = den
    one = torch.ones(len(v), 1, 1, 1, dtype=dtype)
    case = Case(one, one, v, feature_map=0, normalize=False)
    out, *_ = case.forward(native)
    same = out.view(torch.int16) == v.view(torch.int16)
    # a zero keeps its magnitude, a NaN stays some NaN, and what float32 cannot hold as a normal number may become 0
    zero = (out == 0) & (v.float().abs() < torch.finfo(torch.float32).smallest_normal)
    assert bool((same | (out.isnan() & v.isnan()) | zero).all())


@pytest.mark.parametrize("erase", [False, True])
@pytest.mark.parametrize("units", [False, True])
def test_strong_gates_leave_no_subnormal_numbers(native, units, erase):
    """Which take many times as long: a call with gates of e^-3 took nine times as long as one with gates of e^-1."""
    case = make(1, 200, 2, 2, f=20, layout=0, feature_map=0, normalize=False, state=False)
    gates = torch.full((1, 200, 2, 20) if units else (1, 200, 2), -3.0)
    b = torch.full((1, 200, 2), 1e-3) if erase else None
    k = case.k.clone()
    k[:, 1:] = 0  # the first token's value decays, through subnormal numbers from the 30th token on
    case = replace(case, log_decay=gates, erase=b, k=k, z=None if erase else case.z)
    out, kv, _ = case.forward(native)
    for x in (out, kv):
        assert not bool(((x != 0) & (x.abs() < torch.finfo(torch.float32).smallest_normal)).any())
    assert bool(out[:, :25].any())


def test_no_decay_and_decay_of_zero_agree_to_the_bit(native):
    plain = make(n=100)
    faded = replace(plain, log_decay=torch.zeros(1, 100, 1))
    assert all(map(torch.equal, plain.forward(native), faded.forward(native)))


def test_shared_gates_and_positions_are_those_spelled_out(native):
    case = make(h=4, g=2, steps=True, decay=0.4, write=True)
    shared = replace(
        case, log_decay=case.log_decay[:1, :, :1], angle_steps=case.angle_steps[:1, :, :1].bfloat16(),
        write=case.write[:1, :, :1].bfloat16(),
    )  # fmt: skip
    full = replace(
        shared, log_decay=shared.log_decay.expand(2, -1, 2).double(),
        angle_steps=shared.angle_steps.expand(2, -1, 2, -1).contiguous().float(),
        write=shared.write.expand(2, -1, 2).double().mT.contiguous().mT,
        positions=torch.arange(5, 75).expand(2, -1).contiguous(),
    )  # fmt: skip
    assert all(map(torch.equal, shared.forward(native), full.forward(native)))


def test_tokens_of_no_packed_sequence_get_zero_and_bounds_are_clamped(native):
    def out(*bounds, dtype=torch.int64):
        return make(b=1, state=False, cu_seqlens=torch.tensor(bounds, dtype=dtype)).forward(native)[0]

    found = out(5, 20, 10, 60)
    assert not bool(found[:, :5].any() | found[:, 60:].any())
    assert torch.equal(found, out(5, 20, 20, 60, dtype=torch.int32))
    assert torch.equal(out(-(2**60), 20, 2**60), out(0, 20, 70))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in CASES if name != "decay"])
def test_any_number_of_threads_gives_the_same_bits(native, name, dtype):
    case = make(**CASES[name] | {"h": 8, "g": 4, "dtype": dtype})
    weights = [random_like(x, i) for i, x in enumerate(case.forward(native))]
    one, *others = with_threads(lambda: [*case.forward(native), *case.backward(native, *weights).values()])
    assert all(all(map(torch.equal, one, x)) for x in others)


@pytest.mark.parametrize(("b", "g", "value_heads"), [(1, 2, 24), (2, 4, 48)])  # 3 and 12 heads are added up
def test_any_number_of_threads_adds_the_gradients_of_shared_heads_in_the_same_order(
    native, b, g, value_heads
):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(b, 150, g, 8, generator=generator).requires_grad_() for _ in range(2))
    v = torch.randn(b, 150, value_heads, 8, generator=generator)
    strength = torch.arange(1.0, 13).repeat(value_heads // 12)
    gates = -torch.rand(b, 150, value_heads, generator=generator) * strength

    def gradients():
        options = {"feature_map": None, "normalize": False, "log_decay": gates, "backend": "native"}
        return torch.autograd.grad(linear_rope_attention(q, k, v, **options).square().sum(), (q, k))

    one, *others = with_threads(gradients)
    assert all(all(map(torch.equal, one, x)) for x in others)


def test_long_undecayed_sums_stay_exact(native):
    """z counts in float64: a count of tokens in float32 stalls at 2^24, and rounds long before."""
    n = 300_000
    k = torch.full((1, n, 1, 1), 0.1)
    case = Case(None, k, k, feature_map=0)
    _, _, z = case.forward(native)
    torch.testing.assert_close(z, torch.full_like(z, float(k[0, 0]) * n), rtol=1e-6, atol=0)


@on_one_isa
def test_what_python_states_for_all_backends_is_what_the_library_states(native):
    assert library.FACTS["unit_eps"] == EPS
    assert library.FACTS["max_position"] == MAX_POSITION
    assert {*backend.MAPS} <= {*ELEMENTWISE}
    assert [*backend.LAYOUTS] == ["none", *LAYOUTS]
    assert {*backend.WRITE_FACTORS} == {"none", *WRITE_GATES, "erased"}


def test_errors_name_the_argument_what_came_and_what_was_expected(native):
    case = make(steps=True, decay=0.1, mask=True)
    q, k, v = ([torch.zeros(2, 70, heads, size) for heads in range(5)] for size in (12, 12, 10))
    wrong = {
        r"k: got another dtype, expected float32 or bfloat16 or float16": {"k": case.k.double()},
        "q: got another dtype, expected k's": {"q": case.q.double()},
        r"k: got shape \(2, 70, 12\), expected \(batch, length": {"k": case.k[:, :, 0]},
        "k: got batch 2, expected q's 1": {"q": case.q[:1]},
        "q, k: got head dims 11, 12": {"q": case.q[..., :11]},
        "k: got length 70, expected q's 69 with causal=True": {"q": case.q[:, :-1]},
        "k: got 2 heads, expected a divisor of q's 3": {"q": q[3], "k": k[2], "v": v[2]},
        r"k, v: got .*, expected \(b, m, g, d\), \(b, m, a multiple of g, e\)": {"k": k[2], "v": v[3]},
        "v: got 4 heads, expected k's 2; .* q to have 2 heads too, not 4": {"q": q[4], "k": k[2], "v": v[4]},
        r"k, v: got \(2, 70, 1, 12\), \(1, 70, 1, 10\)": {"v": case.v[:1]},
        "v: got stride": {"v": case.v.transpose(1, 3).contiguous().transpose(1, 3)},
        "feature_map: got 9": {"feature_map": 9},
        "layout: got 0, expected 1 or 2 with theta": {"layout": 0},
        "layout: got 7": {"layout": 7},
        "theta: got another dtype": {"theta": case.theta.double()},
        "positions: got shape": {"positions": torch.zeros(1, 7, dtype=torch.int64)},
        "positions: got None": {"positions": None},
        r"log_decay: got shape \(1, 1, 1\), expected \(b or 1, n, g or 1\) = \(2, 70, 1\)": {
            "log_decay": torch.zeros(1, 1, 1)
        },
        "log_decay: got another dtype": {"log_decay": case.log_decay.half()},
        "log_decay: got causal=False, expected causal=True": {"causal": False},
        r"write: got shape \(2, 70\), expected \(b or 1, m, g or 1\)": {"write": torch.zeros(2, 70)},
        "write: got another dtype": {"write": torch.zeros(2, 70, 1, dtype=torch.int64)},
        "angle_steps: got 5 pairs, expected 6": {"angle_steps": torch.zeros(2, 70, 1, 5)},
        r"angle_steps: got shape \(2, 69, 1, 6\)": {"angle_steps": torch.zeros(2, 69, 1, 6)},
        "angle: got shape": {"angle": torch.zeros(3, 1, 6, dtype=torch.int64)},
        "key_mask: got another dtype": {"key_mask": torch.zeros(2, 70)},
        "kv: got shape": {"kv": case.kv[:1]},
        "z: got another dtype": {"z": case.z.float()},
        "kv, z: got one": {"z": None},
        "cu_seqlens: got a batch": {"cu_seqlens": torch.tensor([0, 70])},
        "eps: got": {"eps": -1.0},
        "query_factor: got -1": {"query_factor": -1.0},
        "query_factor: got inf": {"query_factor": torch.inf},
        "query_factor: got nan": {"query_factor": torch.nan},
    }
    for message, change in wrong.items():
        with pytest.raises(error_of(message), match=message):
            replace(case, **change).forward(native)
    with pytest.raises(ValueError, match=r"slots: got 2, expected 0 \.\. 1"):
        case.forward(native, slots=torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="g_out: got shape"):
        case.backward(native, torch.zeros(2, 70, 2, 11), None, None)
    with pytest.raises(RuntimeError, match="name: got 'z80', expected one of"):
        backend.use_instruction_set("z80")


REFUSED = [
    ("k, v", {"v": torch.zeros(1, 1, 1, 10)}),
    ("k", {"q": torch.zeros(1, 1, 2, 12)}),
    ("q, k", {"q": torch.zeros(2, 1, 2, 11)}),
    ("k", {"k": torch.zeros(2, 1, 3, 12), "v": torch.zeros(2, 1, 3, 10)}),
    ("k", {"q": torch.zeros(2, 2, 2, 12)}),
    ("q", {"q": torch.zeros(2, 1, 12)}),
    ("v", {"q": torch.zeros(2, 1, 4, 12), "k": torch.zeros(2, 1, 2, 12), "v": torch.zeros(2, 1, 4, 10)}),
    ("log_decay", {"log_decay": torch.tensor([[[-1.0]], [[0.12345]]])}),
    ("log_decay", {"log_decay": torch.zeros(2, 1, 3)}),
    ("log_decay", {"log_decay": torch.zeros(2)}),
    ("write", {"write": torch.zeros(2, 2, 1)}),
    ("angle_steps", {"angle_steps": torch.zeros(2, 2, 1, 6)}),
    ("angle_steps", {"angle_steps": torch.zeros(2, 1, 1, 5)}),
    ("positions", {"positions": torch.tensor([[2**31]])}),
    ("positions", {"positions": torch.tensor([[7], [-1]])}),
]


@on_one_isa
@pytest.mark.parametrize(("named", "change"), REFUSED)
def test_a_step_refuses_in_the_operation_s_words_and_writes_nothing(native, named, change):
    case = make(n=1, decay=0.1, steps=True, write=True)
    written = [case.kv, case.z, case.angle, case.positions]
    before = [x.clone() for x in written]
    tokens = {
        name: change.get(name, getattr(case, name))
        for name in ("q", "k", "v", "log_decay", "write", "angle_steps")
    }
    positions = {"positions": change["positions"]} if "positions" in change else {}
    with pytest.raises(ValueError, match=f"^{named}: got") as error:
        linear_rope_attention(**tokens, **positions, rotary=Rotary(12), backend="reference")
    with pytest.raises(ValueError, match=f"^{re.escape(str(error.value))}$"):
        replace(case, **change).step(native)
    assert all(map(torch.equal, written, before))


@pytest.mark.parametrize("position", [2**31, -1])
def test_a_step_that_advances_refuses_a_state_s_position_in_the_operation_s_words(native, position):
    case = make(n=1, steps=True, positions=torch.tensor([[3], [position]]))
    before = [x.clone() for x in (case.kv, case.z, case.angle)]
    words = rf"^state: got positions \[3, {position}\] and 1 more tokens, expected 0 \.\. {2**31 - 1}$"
    with pytest.raises(ValueError, match=words):
        case.step(native, advance=True)
    assert all(map(torch.equal, (case.kv, case.z, case.angle), before))
    assert case.positions.tolist() == [[3], [position]]
    last = replace(case, positions=torch.tensor([[3], [2**31 - 1]]))
    last.step(native, advance=True)
    assert last.positions.tolist() == [[4], [2**31]]

"""mixer_step and the operators beside it against their equations in float64, and the checks that precede a write."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from linrope.backends import library
from tests.kernels.cpu.cases import Case, by_equation, error_of, on_one_isa
from tests.support.contract import narrow

pytestmark = pytest.mark.usefixtures("isa")

WRITTEN = ("inputs", "kv", "z", "positions")
ONES, OWN, FORGOTTEN, ERASED = range(4)  # the factors of values
CASES: dict[str, dict[str, Any]] = {
    "all": {},
    "odd sizes": {"b": 3, "h": 3, "g": 1, "d": 7, "e": 9, "pairs": 2, "taps": 3},
    "one row, wide": {"b": 1, "h": 8, "g": 8, "d": 32, "e": 64, "pairs": 16},
    "half": {"layout": 2},
    "no rotation": {"theta": None, "layout": 0},
    "no convolution": {"weight": None, "bias": None, "inputs": None},
    "no bias, no silu": {"bias": None, "silu": False},
    "independent write gate": {"factor": OWN},
    "no write gate": {"factor": ONES},
    "fixed decay alone": {"factor": ONES, "forget": None},
    "no fixed decay": {"decay": None},
    "no decay": {"factor": ONES, "forget": None, "decay": None},
    "gates per feature": {"factor": ONES, "rank": 5},
    "gates per feature, partly rotated": {"factor": OWN, "rank": 3, "pairs": 2, "layout": 2, "decay": None},
    "gates per feature, no rotation": {"factor": ONES, "rank": 19, "theta": None, "layout": 0, "normalize": True},
    "bounded gates per feature": {"factor": ONES, "rank": 5, "bound": 5.0, "d": 37, "e": 5},
    "erase, tied": {"factor": ERASED, "largest": 1.0},
    "erase up to 2, tied": {"factor": ERASED, "largest": 2.0, "forget": None, "decay": None},
    "erase beside a tied write gate": {"largest": 2.0},
    "erase beside a write gate": {"factor": OWN, "largest": 1.0, "b": 1, "h": 8, "g": 8, "d": 32, "e": 64},
    "erase alone": {"factor": ONES, "largest": 2.0, "weight": None, "bias": None, "inputs": None},
    "erase, gates per feature": {"factor": ERASED, "largest": 2.0, "rank": 5, "pairs": 2},
    "values of more heads": {"h": 2, "g": 6},
    "values of more heads, erase, gates per feature": {"h": 1, "g": 3, "factor": OWN, "largest": 1.0, "rank": 5},
    "normalizer": {"normalize": True, "norm": None},
    "silu map": {"feature_map": 5},
    "unit": {"query_factor": 0.5, "feature_map": 5},
    "unit, erase": {
        "query_factor": 2.0,
        "feature_map": 0,
        "factor": ERASED,
        "largest": 2.0,
        "d": 7,
        "pairs": 2,
    },
    "norm over heads": {"over_heads": True, "norm": "heads"},
    "norm and skip before": {"skip_first": True},
    "gate before": {"gate_first": True},
    "no gate, no skip": {"gate": None, "skip": None},
}  # fmt: skip


def make(
    b: int = 2, h: int = 4, g: int = 2, d: int = 12, e: int = 20, pairs: int = 6, taps: int = 4, rank: int = 0,
    **changes: Any
) -> dict[str, Any]:  # fmt: skip
    """The operator's arguments by name. rank: of forget gates per feature, which there are if it is not 0."""
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    out_heads, c = max(h, g), (h + min(h, g)) * d + g * e
    arguments = {
        "h": h, "qkv": normal(b, c), "gate": normal(b, out_heads * e), "forget": 2 * normal(b, g), "write": None,
        "erase": None, "up": None, "up_bias": None, "bound": 0.0, "factor": FORGOTTEN, "largest": 0.0,
        "weight": normal(c, taps), "bias": normal(c), "inputs": normal(b, taps - 1, c), "silu": True,
        "decay": -torch.rand(g, generator=generator, dtype=torch.float64),
        "kv": normal(b, g, d, e), "z": torch.rand(b, g, d, generator=generator, dtype=torch.float64) + 0.5,
        "positions": torch.arange(100, 100 + b),
        "theta": torch.randint(-(2**62), 2**62, (1, 1, pairs), generator=generator), "layout": 1,
        "feature_map": 1, "query_factor": 0.0, "normalize": False, "eps": 1e-6, "norm": normal(e), "norm_eps": 1e-6,
        "over_heads": False, "gate_first": False, "skip": normal(out_heads), "skip_first": False,
    }  # fmt: skip
    if changes.get("factor") == OWN:
        changes["write"] = normal(b, g)
    if changes.get("largest"):
        changes |= {"erase": 2 * normal(b, g), "z": None}
    if changes.get("norm") is not None:
        changes["norm"] = normal(out_heads, e)
    arguments |= changes
    if rank:
        units = d if arguments["theta"] is None else d - pairs
        arguments |= {"forget": normal(b, rank), "up": normal(g, units, rank), "up_bias": normal(g, units)}
    return arguments


def run(native: Any, arguments: dict[str, Any]) -> Tensor:
    """The operator's result, with the projections as columns of one tensor or, if it has them, of the input x."""
    parts = {name: arguments[name] for name in ("qkv", "gate", "forget", "write", "erase")}
    renamed = {"heads": arguments["h"], "write": arguments["factor"], "erase": arguments["largest"]}
    renamed |= {name: arguments[name] is not None for name in ("gate", "forget")}
    columns = torch.cat([x for x in parts.values() if x is not None], 1)
    given = {"x": columns} | arguments | renamed
    return native.mixer_step(*[given.get(name) for name in library.argument_names("mixer_step")])


def projected(arguments: dict[str, Any], dim: int = 24) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments with an input and projections, and those with the columns that these make of it."""
    generator = torch.Generator().manual_seed(1)
    normal = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    (b, g, d, e), h = arguments["kv"].shape, arguments["h"]
    x = normal(b, dim)
    whole, columns = arguments | {"x": x}, dict(arguments)

    def project(name: str, n: int, bias: bool = True) -> Tensor:
        weight, offset = normal(n, dim) / dim**0.5, normal(n) if bias else None
        whole.update({f"{name}_proj": weight, f"{name}_bias": offset})
        return F.linear(x.double(), weight.double(), None if offset is None else offset.double())

    qkv = [project(name, n) for name, n in (("q", h * d), ("k", min(h, g) * d), ("v", g * e))]
    columns["qkv"] = torch.cat(qkv, 1)
    for name in ("gate", "forget", "write", "erase"):
        if arguments[name] is not None:
            columns[name] = project(name, arguments[name].shape[1], bias=name != "gate")
    whole |= {"o_proj": normal(dim, max(h, g) * e), "o_bias": normal(dim)}
    return whole, columns


def make_pools(arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Pools of seven rows for the tensors that the step overwrites. Rows 5, 0 and 3 are the sequences of the call."""
    pools = {}
    for key in WRITTEN:
        if (x := arguments[key]) is not None:
            pools[key] = x[[i % len(x) for i in range(7)]].clone()
            for row, own in zip((5, 0, 3), x):
                pools[key][row] = own
    return pools


def copied(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: x.clone() if isinstance(x, Tensor) else x for name, x in arguments.items()}


def reference(arguments: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor | None]]:
    """y in float64, and the tensors that the operator writes."""
    a = type("Arguments", (), {name: narrow(x, torch.float64) for name, x in arguments.items()})
    b, g, d, e = a.kv.shape
    h, keys, out_heads = a.h, min(a.h, g), max(a.h, g)
    x, inputs = a.qkv, a.inputs
    if a.weight is not None:
        window = torch.cat((inputs, x[:, None]), 1)
        x = (window * a.weight.T).sum(1) + (0 if a.bias is None else a.bias)
        x, inputs = F.silu(x) if a.silu else x, window[:, 1:]
    q, k, v = (
        y.unflatten(-1, (-1, size)) for y, size in zip(x.split([h * d, keys * d, g * e], -1), (d, d, e))
    )
    if a.up is None:
        gates = torch.zeros(b, g, 1).double() if a.forget is None else F.logsigmoid(a.forget)[..., None]
    else:
        y = torch.einsum("br,gur->bgu", a.forget, a.up) + a.up_bias
        gates = F.logsigmoid(y) if a.bound == 0 else -a.bound * (-y).sigmoid()
    log_decay = gates + (0 if a.decay is None else a.decay[:, None])
    erased = None if a.erase is None else a.largest * a.erase.sigmoid()
    w = {
        ONES: lambda: torch.ones(b, g),
        OWN: lambda: a.write.sigmoid(),
        FORGOTTEN: lambda: -torch.expm1(gates[..., 0]),
        ERASED: lambda: erased,
    }[a.factor]()
    numbers = {"log_decay": log_decay, "write": w, "erase": erased, "positions": a.positions}
    token = {name: None if x is None else x[:, None] for name, x in numbers.items()}
    case = Case(
        q[:, None], k[:, None], v[:, None], a.feature_map, a.query_factor, **token, theta=a.theta, kv=a.kv, z=a.z,
        layout=a.layout, normalize=a.normalize, eps=a.eps,
    )  # fmt: skip
    out, state, _ = by_equation(case)
    out, v = out[:, 0], v.repeat_interleave(out_heads // g, 1)
    skip = 0 if a.skip is None else a.skip[:, None] * v
    factor = 1 if a.gate is None else F.silu(a.gate).unflatten(-1, (out_heads, e))
    out = (out + skip * a.skip_first) * (factor if a.gate_first else 1)
    if a.norm is not None:
        size = out.square().mean((-2, -1) if a.over_heads else -1, keepdim=True).reshape(b, -1, 1)
        out = out * (size + a.norm_eps).rsqrt() * a.norm
    out = (out + (0 if a.skip_first else skip)) * (1 if a.gate_first else factor)
    z = None if a.z is None else state.z
    return out.flatten(1), {"inputs": inputs, "kv": state.kv, "z": z, "positions": state.position}


def compare(arguments: dict[str, Any], written: dict[str, Tensor | None], precision: float) -> None:
    for key, x in written.items():
        if x is not None:
            got, size = arguments[key], float(x.abs().max())
            torch.testing.assert_close(got, x.to(got.dtype), rtol=precision, atol=precision * size)


@pytest.mark.parametrize("name", CASES)
def test_it_computes_its_equations_in_rows_of_a_pool_and_with_projections_too(native, name):
    arguments = make(**CASES[name])
    pools = make_pools(arguments)
    whole, columns = projected(arguments)
    expected, written = reference(arguments)
    y = run(native, arguments)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    compare(arguments, written, 1e-6)

    before, slots = copied(pools), torch.tensor([5, 0, 3][: len(y)])
    own = make(**CASES[name]) | pools
    assert torch.equal(run(native, own | {"slots": slots}), y)
    others = [row for row in range(7) if row not in slots]
    for key, x in pools.items():
        assert torch.equal(x[slots], arguments[key])
        assert torch.equal(x[others], before[key][others])

    middle, written = reference(columns)
    weight = whole["o_proj"].double()
    expected, largest = (
        F.linear(middle, weight, whole["o_bias"].double()),
        F.linear(middle.abs(), weight.abs()),
    )
    tokens = copied(whole) | {"x": whole["x"][:, None]}
    rows = torch.stack((whole["x"], torch.zeros_like(whole["x"])), 1)[:, 0]  # which are apart in memory
    y = run(native, whole)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5 * float(largest.max()))
    compare(whole, written, 1e-5)
    assert torch.equal(run(native, tokens | {"x": rows[:, None]}), y[:, None])


@on_one_isa
def test_any_number_of_threads_gives_the_same_bits(native):
    whole, _ = projected(make(b=3, h=8, g=8, d=32, e=64, rank=40, factor=ONES), dim=500)
    found = []
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        arguments = copied(whole)
        found.append([run(native, arguments), *(arguments[key] for key in WRITTEN)])
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


@pytest.mark.parametrize("logit", [-math.inf, -1e4, 1e4, math.inf])
def test_gates_at_their_bounds_keep_all_or_nothing(native, logit):
    arguments = make(decay=None)
    before = copied(arguments)
    arguments["forget"][:] = logit
    y = run(native, arguments)
    assert bool(y.isfinite().all())
    if logit > 0:
        assert torch.equal(arguments["kv"], before["kv"])
    else:
        fresh = before | {"kv": torch.zeros_like(before["kv"]), "forget": arguments["forget"]}
        run(native, fresh)
        assert torch.equal(arguments["kv"], fresh["kv"])


@pytest.mark.parametrize("bound", [0.0, 5.0])
def test_gates_per_feature_are_exact_from_open_to_closed(native, bound):
    logits = torch.cat(
        (torch.linspace(-30, 30, 241), torch.tensor([-math.inf, -1e4, -200, 200, 1e4, math.inf]))
    )
    d = len(logits)
    arguments = make(b=1, h=1, g=1, d=d, e=4, pairs=0, theta=None, layout=0, feature_map=0, rank=1, factor=ONES,
                     bound=bound, decay=None, weight=None, bias=None, inputs=None, silu=False)  # fmt: skip
    arguments["qkv"][:, d : 2 * d] = 0  # the key
    arguments["kv"][:] = 1
    arguments |= {"forget": torch.zeros(1, 1), "up": torch.zeros(1, d, 1), "up_bias": logits[None]}
    run(native, arguments)
    exact = logits.double()
    log_decay = F.logsigmoid(exact) if bound == 0 else -bound * (-exact).sigmoid()
    allowed = 3e-7 * (1 - log_decay.clamp(min=-104)) * log_decay.exp() + 1e-44
    assert ((arguments["kv"][0, 0, :, 0] - log_decay.exp()).abs() <= allowed).all()


def test_a_nan_in_a_gate_stays_visible(native):
    arguments = make(factor=ERASED, largest=1.0, rank=5)
    arguments["up_bias"][0, 3] = math.nan
    y = run(native, arguments).unflatten(1, (4, 20))
    assert bool(y[:, :2].isnan().all() & y[:, 2:].isfinite().all())
    arguments = make()
    arguments["forget"][1, 0] = math.nan
    y = run(native, arguments).unflatten(1, (4, 20))
    assert bool(y[1, :2].isnan().all() & y[0].isfinite().all() & y[1, 2:].isfinite().all())


TIED = {"largest": 1.0, "erase": torch.zeros(2, 2), "z": None}
WRONG = {
    "x, kv: got": {"x": torch.zeros(2)},
    r"x: got shape \(2, 193\), expected \(2, 194\)": {"x": torch.zeros(2, 193)},
    "x: got another dtype": {"x": torch.zeros(2, 194).double()},
    "x: got a tensor that is not contiguous": {"x": torch.zeros(194, 2).T},
    "heads: got 0": {"h": 0},
    "heads: got -1": {"h": -1},
    r"x: got shape \(2, 194\)": {"h": 6},
    "write: got 2, 1 - f, without a forget gate per head": {"forget": None},
    "write: got 4, expected 0 .. 3": {"factor": 4},
    "write: got -1": {"factor": -1},
    "write: got 3, b, without erase": {"factor": ERASED},
    "erase: got -1, expected": {"largest": -1.0},
    "erase: got nan, expected": {"largest": math.nan},
    "bound: got 5, expected 0 without up": {"bound": 5.0},
    "z: got a tensor with erase, expected none": TIED | {"z": torch.zeros(2, 2, 12).double()},
    "erase: got None for a state without z": {"z": None},
    "normalize: got true with erase": TIED | {"normalize": True},
    r"x: got shape \(2, 194\), expected \(2, 196\)": {"largest": 1.0, "z": None},
    r"decay: got shape \(4,\)": {"decay": torch.zeros(4).double()},
    "decay: got another dtype": {"decay": torch.zeros(2)},
    "weight, inputs: got one": {"weight": None},
    r"weight: got shape \(111, 4\)": {"weight": torch.zeros(111, 4)},
    r"bias: got shape \(111,\)": {"bias": torch.zeros(111)},
    r"before: got shape \(3, 3, 112\)": {"inputs": torch.zeros(3, 3, 112)},
    "before: got another dtype": {"inputs": torch.zeros(2, 3, 112).double()},
    r"kv: got shape \(1, 2, 12, 20\)": {"kv": torch.zeros(1, 2, 12, 20)},
    "kv: got another dtype": {"kv": torch.zeros(2, 2, 12, 20).double()},
    "z: got another dtype": {"z": torch.zeros(2, 2, 12)},
    r"positions: got shape \(2, 1\), expected \(2,\)": {"positions": torch.zeros(2, 1, dtype=torch.int64)},
    r"positions: got shape \(3,\), expected \(2,\)": {"positions": torch.zeros(3, dtype=torch.int64)},
    "positions: got another dtype": {"positions": torch.zeros(2)},
    r"state: got positions \[0, -1\] and 1 more tokens, expected 0": {"positions": torch.tensor([0, -1])},
    "theta: got 7 pairs": {"theta": torch.zeros(1, 1, 7, dtype=torch.int64)},
    "layout: got 0": {"layout": 0},
    "feature_map: got 6": {"feature_map": 6},
    "query_factor: got -1, expected 0 or": {"query_factor": -1.0},
    "query_factor: got inf": {"query_factor": math.inf},
    "eps: got": {"normalize": True, "eps": 0.0},
    r"weight: got shape \(19,\)": {"norm": torch.zeros(19)},
    r"weight: got shape \(2, 20\)": {"norm": torch.zeros(2, 20)},
    "eps: got 0": {"norm_eps": 0.0},
    r"skip: got shape \(3,\)": {"skip": torch.zeros(3)},
    "slots: got 1 twice, expected different rows 0 .. 1": {"slots": torch.tensor([1, 1])},
    "slots: got 2, expected different rows 0 .. 1": {"slots": torch.tensor([0, 2])},
    "slots: got -1, expected": {"slots": torch.tensor([-1, 0])},
    r"slots: got shape \(3,\)": {"slots": torch.tensor([0, 1, 2])},
    "slots: got another dtype": {"slots": torch.tensor([0, 1], dtype=torch.int32)},
    "slots: got a tensor that is not contiguous": {"slots": torch.tensor([0, 0, 1, 1])[::2]},
}


# Of a forget gate per feature with 6 units of 2 heads
WRONG_PER_FEATURE = {
    "write: got 2, 1 - f": {"factor": FORGOTTEN},
    "up: got a tensor without forget": {"forget": None},
    "up, up_bias: got one": {"up_bias": None},
    r"up: got shape \(12, 5\), expected \(g, units, rank\)": {"up": torch.zeros(12, 5)},
    r"up: got shape \(4, 6, 5\), expected \(2, 6, 5\)": {"up": torch.zeros(4, 6, 5)},
    r"x: got shape \(2, 197\), expected \(2, 198\)": {"up": torch.zeros(2, 6, 6)},
    r"log_decay: got shape \(2, 1, 2, 7\), .* \(2, 1, 2, 6\): per pair": {
        "up": torch.zeros(2, 7, 5), "up_bias": torch.zeros(2, 7)
    },
    r"log_decay: got shape \(2, 1, 2, 0\)": {"up": torch.zeros(2, 0, 5), "up_bias": torch.zeros(2, 0)},
    "up: got another dtype": {"up": torch.zeros(2, 6, 5).double()},
    "up: got a tensor that is not contiguous": {"up": torch.zeros(2, 5, 6).mT},
    r"up_bias: got shape \(2, 7\), expected \(2, 6\)": {"up_bias": torch.zeros(2, 7)},
    "up_bias: got another dtype": {"up_bias": torch.zeros(2, 6).double()},
    "bound: got -1, expected": {"bound": -1.0},
    "bound: got nan, expected": {"bound": math.nan},
    "bound: got inf, expected": {"bound": math.inf},
}  # fmt: skip
# Of a step with its projections, from 24 numbers to 194 columns
WRONG_PROJECTIONS = {
    r"x, kv: got 1 and 4": {"x": torch.zeros(24)},
    r"x, kv: got 3 and 4": {"x": torch.zeros(2, 2, 24)},
    "x: got another dtype": {"x": torch.zeros(2, 24).double()},
    "x: got stride 2 in the last dimension": {"x": torch.zeros(2, 48)[:, ::2]},
    r"q_proj: got shape \(48, 24\), expected \(48, 23\)": {"x": torch.zeros(2, 23)},
    r"k_proj: got shape \(25, 24\), expected \(24, 24\)": {"k_proj": torch.zeros(25, 24)},
    "v_proj: got None, expected a tensor": {"v_proj": None},
    "gate_proj: got a tensor, expected None": {"gate": None},
    "write_proj: got a tensor, expected None": {"write_proj": torch.zeros(2, 24)},
    "forget_proj: got another dtype": {"forget_proj": torch.zeros(2, 24).half()},
    "q_proj: got a tensor that is not contiguous": {"q_proj": torch.zeros(24, 48).T},
    r"q_bias: got shape \(47,\), expected \(48,\)": {"q_bias": torch.zeros(47)},
    "o_proj: got None": {"o_proj": None},
    r"o_proj: got shape \(24, 79\), expected \(24, 80\)": {"o_proj": torch.zeros(24, 79)},
    r"o_proj: got shape \(\)": {"o_proj": torch.tensor(1.0)},
}
CHECKS: dict[str, tuple[Callable[[], dict[str, Any]], dict[str, Any]]] = {
    "a gate per head": (make, WRONG),
    "gates per feature": (partial(make, factor=ONES, rank=5), WRONG_PER_FEATURE),
    "projections": (lambda: projected(make())[0], WRONG_PROJECTIONS),
}


@on_one_isa
@pytest.mark.parametrize("kind", CHECKS)
def test_wrong_arguments_are_refused_and_nothing_is_written(native, kind):
    right, wrong = CHECKS[kind]
    for message, changes in wrong.items():
        arguments = right() | changes
        before = copied(arguments)
        with pytest.raises(error_of(message), match=message):
            run(native, arguments)
        assert all(x is None or torch.equal(arguments[key], x) for key in WRITTEN for x in [before[key]]), (
            message
        )


@pytest.mark.parametrize("up", [torch.zeros(2, 6, 0), torch.zeros(2, 6, 5)])
def test_gates_per_feature_may_be_of_the_bias_alone(native, up):
    arguments = make(factor=ONES, rank=5)
    arguments |= {"up": up, "forget": arguments["forget"][:, : up.shape[2]]}
    expected, _ = reference(arguments)
    torch.testing.assert_close(run(native, arguments).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("b", "n"), [(1, 256), (3, 37), (200, 5)])
def test_add_norm_computes_its_equations(native, b, n):
    x, y, weight = torch.randn(b, n), torch.randn(b, n), torch.randn(n)
    total = x.double() + y.double()
    expected = total * (total.square().mean(1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    for addend in (y, None):
        normed = native.add_norm(x, addend, weight, 1e-6)
        torch.testing.assert_close(normed.double(), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(x, total.float())


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("b", "n"), [(1, 448), (3, 37), (8, 5), (0, 3)])
def test_swiglu_computes_its_equation(native, b, n, biased):
    x, (w1, w3), w2 = torch.randn(b, 24), torch.randn(2, n, 24), torch.randn(7, n)
    biases = (torch.randn(n), torch.randn(n), torch.randn(7)) if biased else (None, None, None)
    exact = [y if y is None else y.double() for y in biases]
    inner = F.silu(F.linear(x.double(), w1.double(), exact[0])) * F.linear(x.double(), w3.double(), exact[1])
    expected = F.linear(inner, w2.double(), exact[2])
    largest = float(F.linear(inner.abs(), w2.double().abs()).max()) if b else 1.0
    y = native.swiglu(x, w1, biases[0], w3, biases[1], w2, biases[2])
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6 * largest)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 5), (27, 33), (128, 256), (1544, 37)])
def test_linear_computes_its_equation_and_a_row_has_the_same_bits_beside_others(native, n, k):
    x, weight, bias = torch.randn(9, k), torch.randn(n, k), torch.randn(n)
    y = native.linear(x, weight, bias)
    exact = F.linear(x.double(), weight.double(), bias.double())
    terms = F.linear(x.double().abs(), weight.double().abs(), bias.double().abs())
    assert ((y - exact).abs() <= 4e-7 * terms).all()
    torch.testing.assert_close(native.linear(x, weight, None) + bias, y, rtol=1e-5, atol=1e-5)
    for rows in (1, 2, 3, 5, 6):
        assert torch.equal(native.linear(x[:rows], weight, bias), y[:rows])


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_linear_of_nothing(native, shape):
    rows, n, k = shape
    y = native.linear(torch.ones(rows, k), torch.ones(n, k), torch.ones(n))
    assert torch.equal(y, torch.full((rows, n), 1.0 + k))


def refuses(operator, wrong):
    for message, arguments in wrong.items():
        with pytest.raises(error_of(message), match=message):
            operator(*arguments)


def test_linear_refuses_what_does_not_fit(native):
    x, weight, bias = torch.randn(2, 4), torch.randn(3, 4), torch.randn(3)
    wrong = {
        r"x: got shape \(4,\), expected 2 dimensions": (x[0], weight, bias),
        r"weight: got shape \(3,\), expected \(3, 4\)": (x, weight[:, 0], bias),
        r"weight: got shape \(3, 3\)": (x, weight[:, :3].contiguous(), bias),
        "weight: got a tensor that is not contiguous": (x[:, :3].contiguous(), weight[:, :3], bias),
        "weight: got another dtype": (x, weight.double(), bias),
        r"bias: got shape \(2,\)": (x, weight, bias[:2]),
    }
    refuses(native.linear, wrong)


def test_wrong_rows_are_refused_and_nothing_is_written(native):
    x, y, weight = torch.randn(2, 8), torch.randn(2, 8), torch.randn(8)
    before = x.clone()
    wrong = {
        r"y: got shape \(1, 8\)": (x, y[:1], weight, 1e-6),
        "y: got another dtype": (x, y.double(), weight, 1e-6),
        r"weight: got shape \(7,\)": (x, y, weight[:7], 1e-6),
        "eps: got 0": (x, y, weight, 0.0),
        "x: got a tensor that is not contiguous": (x.T, y.T.contiguous(), weight[:2], 1e-6),
        r"x: got shape \(8,\)": (x[0], None, weight, 1e-6),
    }
    refuses(native.add_norm, wrong)
    assert torch.equal(x, before)
    given = lambda w1, w3: (y, torch.zeros(w1), None, torch.zeros(w3), None, y, None)  # noqa: E731
    wrong = {
        r"w1: got shape \(3, 7\), expected \(3, 8\)": given((3, 7), (3, 8)),
        r"w3: got shape \(4, 8\), expected \(3, 8\)": given((3, 8), (4, 8)),
        r"w2: got shape \(2, 8\), expected \(2, 3\)": given((3, 8), (3, 8)),
    }
    refuses(native.swiglu, wrong)

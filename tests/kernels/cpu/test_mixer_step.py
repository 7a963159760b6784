"""mixer_step and the operators beside it against their equations in float64, and the checks that precede a write."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.kernels.cpu.cases import error_of
from tests.support.contract import narrow
from tests.support.equation import _rotated

pytestmark = pytest.mark.usefixtures("isa")

ORDER = (
    "heads", "has_gate", "has_forget", "has_write", "tied", "weight", "bias", "inputs", "silu", "decay", "kv", "z",
    "positions", "theta", "layout", "feature_map", "normalize", "eps", "norm", "norm_eps", "over_heads", "gate_first",
    "skip", "skip_first",
)  # fmt: skip
WRITTEN = ("inputs", "kv", "z", "positions")
MAPS = {1: lambda x: F.elu(x) + 1, 2: torch.relu, 5: F.silu}
CASES: dict[str, dict[str, Any]] = {
    "all": {},
    "odd sizes": {"b": 3, "h": 3, "g": 1, "d": 7, "e": 9, "pairs": 2, "taps": 3},
    "one row, wide": {"b": 1, "h": 8, "g": 8, "d": 32, "e": 64, "pairs": 16},
    "half": {"layout": 2},
    "no rotation": {"theta": None, "layout": 0},
    "no convolution": {"weight": None, "bias": None, "inputs": None},
    "no bias, no silu": {"bias": None, "silu": False},
    "independent write gate": {"tied": False, "write": True},
    "no write gate": {"tied": False},
    "fixed decay alone": {"tied": False, "forget": None},
    "no fixed decay": {"decay": None},
    "no decay": {"tied": False, "forget": None, "decay": None},
    "normalizer": {"normalize": True, "norm": None},
    "silu map": {"feature_map": 5},
    "norm over heads": {"over_heads": True, "norm": "heads"},
    "norm and skip before": {"skip_first": True},
    "gate before": {"gate_first": True},
    "no gate, no skip": {"gate": None, "skip": None},
}


def make(
    b: int = 2, h: int = 4, g: int = 2, d: int = 12, e: int = 20, pairs: int = 6, taps: int = 4, **changes: Any
) -> dict[str, Any]:  # fmt: skip
    """The operator's arguments by name."""
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    c = (h + g) * d + g * e
    arguments = {
        "h": h, "qkv": normal(b, c), "gate": normal(b, h * e), "forget": 2 * normal(b, g), "write": None,
        "weight": normal(c, taps), "bias": normal(c), "inputs": normal(b, taps - 1, c), "silu": True,
        "decay": -torch.rand(g, generator=generator, dtype=torch.float64), "tied": True,
        "kv": normal(b, g, d, e), "z": torch.rand(b, g, d, generator=generator, dtype=torch.float64) + 0.5,
        "positions": torch.arange(100, 100 + b)[:, None],
        "theta": torch.randint(-(2**62), 2**62, (1, 1, pairs), generator=generator), "layout": 1,
        "feature_map": 1, "normalize": False, "eps": 1e-6, "norm": normal(e), "norm_eps": 1e-6, "over_heads": False,
        "gate_first": False, "skip": normal(h), "skip_first": False,
    }  # fmt: skip
    if changes.get("write"):
        changes["write"] = normal(b, g)
    if changes.get("norm") is not None:
        changes["norm"] = normal(h, e)
    return arguments | changes


def run(native: Any, arguments: dict[str, Any]) -> Tensor:
    """The operator's result, with the projections as columns of one tensor."""
    parts = {name: arguments[name] for name in ("qkv", "gate", "forget", "write")}
    more = {f"has_{name}": x is not None for name, x in parts.items()} | {"heads": arguments["h"]}
    x = arguments.get("x", torch.cat([x for x in parts.values() if x is not None], 1))
    values = [(arguments | more)[name] for name in ORDER]
    return native.mixer_step.default(x, *values, arguments.get("slots"))


def copied(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: x.clone() if isinstance(x, Tensor) else x for name, x in arguments.items()}


def reference(arguments: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor | None]]:
    """y in float64, and the tensors that the operator writes."""
    a = type("Arguments", (), {name: narrow(x, torch.float64) for name, x in arguments.items()})
    b, g, d, e = a.kv.shape
    h = a.h
    x, inputs = a.qkv, a.inputs
    if a.weight is not None:
        window = torch.cat((inputs, x[:, None]), 1)
        x = (window * a.weight.T).sum(1) + (0 if a.bias is None else a.bias)
        x, inputs = F.silu(x) if a.silu else x, window[:, 1:]
    q, k, v = (y.unflatten(-1, (-1, size)) for y, size in zip(x.split([h * d, g * d, g * e], -1), (d, d, e)))
    phi, psi = MAPS[a.feature_map](q), MAPS[a.feature_map](k)
    phi_hat, psi_hat = phi, psi
    if a.theta is not None:
        turns, layout = (
            (a.positions * a.theta[0])[:, None, None],
            ("interleaved", "half")[a.layout - 1],
        )  # wraps
        phi_hat, psi_hat = (_rotated(x[:, None], turns, None, layout)[:, 0] for x in (phi, psi))
    gates = torch.zeros(b, g).double() if a.forget is None else F.logsigmoid(a.forget)
    w = -torch.expm1(gates) if a.tied else 1 if a.write is None else a.write.sigmoid()
    kept = (gates + (0 if a.decay is None else a.decay)).exp()
    written = v * (w[..., None] if isinstance(w, Tensor) else 1)
    kv = a.kv * kept[..., None, None] + psi_hat[..., None] * written[:, :, None]
    z = a.z * kept[..., None] + psi
    shared = [y.repeat_interleave(h // g, 1) for y in (kv, z, v)]
    out = (phi_hat[:, :, None] @ shared[0])[:, :, 0]
    if a.normalize:
        out = out / (phi * shared[1]).sum(-1, keepdim=True).clamp(min=a.eps)
    skip = 0 if a.skip is None else a.skip[:, None] * shared[2]
    factor = 1 if a.gate is None else F.silu(a.gate).unflatten(-1, (h, e))
    out = (out + skip * a.skip_first) * (factor if a.gate_first else 1)
    if a.norm is not None:
        size = out.square().mean((-2, -1) if a.over_heads else -1, keepdim=True).reshape(b, -1, 1)
        out = out * (size + a.norm_eps).rsqrt() * a.norm
    out = (out + (0 if a.skip_first else skip)) * (1 if a.gate_first else factor)
    return out.flatten(1), {"inputs": inputs, "kv": kv, "z": z, "positions": a.positions + 1}


@pytest.mark.parametrize("name", CASES)
def test_it_computes_its_equations(native, name):
    arguments = make(**CASES[name])
    expected, written = reference(arguments)
    y = run(native, arguments)
    assert y.shape == expected.shape
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    for key, x in written.items():
        if x is not None:
            got = arguments[key]
            torch.testing.assert_close(got, x.to(got.dtype), rtol=1e-6, atol=1e-6 * float(x.abs().max()))


@pytest.mark.parametrize("name", CASES)
def test_rows_of_a_pool_get_the_bits_that_they_get_alone_and_the_others_stay(native, name):
    arguments = make(**CASES[name])
    b = len(arguments["kv"])
    slots = [5, 0, 3][:b]
    pools = {key: x[[i % b for i in range(7)]] for key in WRITTEN if (x := arguments[key]) is not None}
    before = copied(pools)
    alone = arguments | {key: x[slots] for key, x in pools.items()}
    expected = run(native, alone)
    assert torch.equal(run(native, arguments | pools | {"slots": torch.tensor(slots)}), expected)
    others = [row for row in range(7) if row not in slots]
    for key, x in pools.items():
        assert torch.equal(x[slots], alone[key])
        assert torch.equal(x[others], before[key][others])


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


def test_a_nan_in_a_gate_stays_visible(native):
    arguments = make()
    arguments["forget"][1, 0] = math.nan
    y = run(native, arguments).unflatten(1, (4, 20))
    assert bool(y[1, :2].isnan().all())
    assert bool(y[0].isfinite().all() & y[1, 2:].isfinite().all())


WRONG = {
    "x, kv: got": {"x": torch.zeros(2)},
    r"x: got shape \(2, 193\), expected \(2, 194\)": {"x": torch.zeros(2, 193)},
    "x: got another dtype": {"x": torch.zeros(2, 194).double()},
    "x: got a tensor that is not contiguous": {"x": torch.zeros(194, 2).T},
    "heads: got 0": {"h": 0},
    "heads: got -1": {"h": -1},
    r"x: got shape \(2, 194\)": {"h": 6},
    "tied: got true without forget": {"forget": None},
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
    r"positions: got shape \(2,\)": {"positions": torch.zeros(2, dtype=torch.int64)},
    "positions: got another dtype": {"positions": torch.zeros(2, 1)},
    r"state: got positions \[0, -1\] and 1 more tokens, expected 0": {"positions": torch.tensor([[0], [-1]])},
    "theta: got 7 pairs": {"theta": torch.zeros(1, 1, 7, dtype=torch.int64)},
    "layout: got 0": {"layout": 0},
    "feature_map: got 6": {"feature_map": 6},
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


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_refused_and_nothing_is_written(native, message):
    arguments = make() | WRONG[message]
    before = copied(arguments)
    with pytest.raises(error_of(message), match=message):
        run(native, arguments)
    assert all(torch.equal(arguments[name], before[name]) for name in WRITTEN)


@pytest.mark.parametrize(("b", "n"), [(1, 256), (3, 37), (200, 5)])
def test_add_norm_computes_its_equations(native, b, n):
    x, y, weight = torch.randn(b, n), torch.randn(b, n), torch.randn(n)
    total = x.double() + y.double()
    expected = total * (total.square().mean(1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    for addend in (y, None):
        normed = native.add_norm(x, addend, weight, 1e-6)
        torch.testing.assert_close(normed.double(), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(x, total.float())


@pytest.mark.parametrize(("b", "n"), [(1, 448), (3, 37), (200, 5)])
def test_silu_product_computes_its_equation(native, b, n):
    x = 3 * torch.randn(b, 2 * n)
    expected = F.silu(x[:, :n].double()) * x[:, n:].double()
    torch.testing.assert_close(native.silu_product(x).double(), expected, rtol=1e-5, atol=1e-6)


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
        "x, weight: got 1 and 2 dimensions": (x[0], weight, bias),
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
    with pytest.raises(ValueError, match=r"x: got shape \(2, 7\), expected an even number"):
        native.silu_product(torch.zeros(2, 7))

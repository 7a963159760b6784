"""``erase`` and gates per unit: results and gradients of all inputs are the equation's, on each instruction set."""

from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from linrope import Rotary, linear_rope_attention
from tests.kernels.cpu.cases import make, random_like
from tests.support.equation import Equation
from tests.support.oracle import everything, random_mask, random_state, randoms

pytestmark = pytest.mark.usefixtures("isa")


HALF, FIRST = Rotary(40, rotary_dim=24, layout="half"), Rotary(20, rotary_dim=2)
# With erase and without it. heads: of q, k and v. steps: pairs that the data turns
GRADIENTS: dict[str, dict[str, Any]] = {
    "last chunks of many lengths": {"lengths": (33, 9, 0, 17, 57, 20, 31), "f": 40, "rotary": HALF},
    "two blocks": {"lengths": (289,), "f": 18, "e": 7, "rotary": Rotary(18)},
    "grouped heads": {"lengths": (41,), "b": 3, "heads": (6, 2, 2), "f": 36, "steps": 17, "mask": True},
    "values that share keys": {"lengths": (63,), "b": 3, "heads": (1, 1, 3), "f": 20, "rotary": FIRST, "mask": True},
    "keys alike": {"lengths": (52,), "f": 33, "e": 16, "alike": 0.01},
    "one vector": {"lengths": (61,), "heads": (4, 2, 2), "f": 4, "e": 3, "rotary": Rotary(4, layout="half")},
}  # fmt: skip


def problem(
    erases: bool, by_unit: bool, *, lengths: tuple[int, ...], f: int, e: int = 33, b: int = 1,
    heads: tuple[int, int, int] = (2, 2, 2), rotary: Rotary | None = None, steps: int = 0, mask: bool = False,
    alike: float = 1.0,
) -> tuple[list[Tensor], dict[str, Any]]:  # fmt: skip
    """q, k, v and options in float32, with gates from open to closed."""
    (h, keys, g), n, generator = heads, sum(lengths), torch.Generator().manual_seed(1)
    share = lambda *shape: torch.rand(b, n, *shape, generator=generator)  # noqa: E731
    q, k, v = randoms(b, n, h, f, g=keys, e=e, dtype=torch.float32)
    v = v if g == keys else share(g, e)
    pairs = steps if rotary is None else rotary.rotary_dim // 2
    units = [f - pairs] if by_unit else []
    gates = -(10 ** (7 * share(g, *units) - 6))
    gates[:, 5::11, :1], gates[:, ::17] = -1e4, -1e-6
    gates[:, 64:96, 1:] = -2
    how: dict[str, Any] = {"log_decay": gates, "write": share(g), "rotary": rotary, "normalize": not erases}
    if steps:
        how["angle_steps"] = 2 * share(g, steps)
    if mask:
        how["key_mask"] = random_mask(b, n)
    if len(lengths) > 1:
        how["cu_seqlens"] = torch.tensor([0, *accumulate(lengths)])
    if erases:
        how |= {"feature_map": None, "erase": 2 * share(g)}
        k = F.normalize(k[:, :1] + alike * k if alike < 1 else k, dim=-1)
    return [q, k, v], how


@cache
def expected(case: str, *kinds: bool) -> dict[str, Tensor]:
    qkv, how = problem(*kinds, **GRADIENTS[case])
    wide = {
        name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in how.items()
    }
    state = random_state(*qkv[1:], how, h=qkv[0].shape[2])
    state = replace(state, kv=state.kv.double())
    return everything(*(x.double() for x in qkv), state, call=Equation(), **wide)


@pytest.mark.parametrize("by_unit", [False, True], ids=["per head", "per unit"])
@pytest.mark.parametrize("erases", [False, True], ids=["normalizer", "erase"])
@pytest.mark.parametrize("case", GRADIENTS)
def test_results_and_gradients_are_the_equation_s(case, erases, by_unit):
    """The gradient of log_decay is as exact in each head and unit as others are in all."""
    qkv, how = problem(erases, by_unit, **GRADIENTS[case])
    state = random_state(*qkv[1:], how, h=qkv[0].shape[2])
    found = everything(*qkv, state, backend="native", **how)
    for name, x in expected(case, erases, by_unit).items():
        axes = (0, 1) if name == "dlog_decay" else tuple(range(x.ndim))
        error = (found[name].double() - x).abs().amax(axes)
        assert bool((error <= 1e-5 * x.abs().amax(axes) + 2.0**-126).all()), name


@pytest.mark.parametrize("erases", [False, True], ids=["normalizer", "erase"])
@pytest.mark.parametrize(("f", "e"), [(21, 150), (5, 3)])
def test_steps_give_the_whole(native, f, e, erases):
    qkv, how = problem(erases, True, lengths=(9,), f=f, e=e)
    out, last = linear_rope_attention(*qkv, **how, return_state=True, backend="native")
    state, outs = None, []
    for t in range(9):
        row = {name: x[:, t : t + 1] if torch.is_tensor(x) else x for name, x in how.items()}
        inputs = [x[:, t : t + 1] for x in qkv]
        one, state = linear_rope_attention(*inputs, **row, state=state, return_state=True, backend="native")
        outs.append(one)
    torch.testing.assert_close(torch.cat(outs, 1), out, rtol=0, atol=1e-5)
    torch.testing.assert_close(state.kv, last.kv, rtol=0, atol=1e-5)


def test_rounding_of_a_gate_does_not_add_up_over_chunks(native):
    """Each chunk multiplies the state by the same factor per unit, which would be off by the same rounding."""
    case = make(1, 8192, 1, f=20, layout=0)
    case = replace(case, v=0 * case.v, log_decay=-torch.linspace(1e-6, 1e-4, 20).expand(1, 8192, 1, 20))
    _, kv, _ = case.forward(native)
    expected = case.kv * (8192 * case.log_decay[:, 0].double()).exp()[..., None]
    assert float(((kv - expected) / expected).abs().max()) <= 64 * 2.0**-24  # else 148


def test_gates_of_units_in_float64_are_not_rounded(native):
    case = make(1, 1, 1, f=20, layout=0, feature_map=0, normalize=False)
    gates = torch.full((1, 1, 1, 20), -70 - 2.0**-18, dtype=torch.float64)  # between two numbers of float32
    out, *_ = replace(case, v=0 * case.v, log_decay=gates).forward(native)
    terms = case.q[0, 0, 0, :, None] * case.kv[0, 0] * gates[0, 0, 0, :, None].exp()
    error = (out[0, 0, 0] - terms.sum(0)).abs()
    assert bool((error <= 16 * 2.0**-24 * terms.abs().sum(0)).all())


def test_gates_of_units_may_have_any_strides(native):
    (q, k, v), how = problem(True, True, lengths=(61,), f=20)
    other = how | {"log_decay": how["log_decay"].transpose(1, 3).contiguous().transpose(1, 3)}
    one, two = (linear_rope_attention(q, k, v, **x, backend="native") for x in (how, other))
    assert torch.equal(one, two)


@pytest.mark.parametrize("by_unit", [False, True], ids=["per head", "per unit"])
def test_gradients_of_a_state_that_no_query_has_read(native, by_unit):
    (q, k, v), how = problem(True, by_unit, lengths=(61,), f=20)
    names = ("log_decay", "write", "erase")
    found = []
    for call, dtype in ((linear_rope_attention, torch.float32), (Equation(), torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in (k, v, *(how[name] for name in names))]
        options = (
            how | dict(zip(names, leaves[2:])) | ({"backend": "native"} if dtype == torch.float32 else {})
        )
        _, state = call(q.to(dtype), *leaves[:2], **options, return_state=True)
        found.append(torch.autograd.grad(state.kv, leaves, random_like(state.kv, 1)))
    for x, y in zip(*found, strict=True):
        assert float((x - y).abs().max()) <= 1e-5 * float(y.abs().max())


def test_what_earlier_calls_left_in_memory_changes_no_bit(native):
    qkv, how = problem(True, True, lengths=(61,), f=30, e=20)
    first = everything(*qkv, backend="native", **how)
    everything(*(torch.full((1, 64, 2, 64), torch.nan) for _ in qkv), feature_map="relu", backend="native")
    again = everything(*qkv, backend="native", **how)
    assert all(torch.equal(x, again[name]) for name, x in first.items())


@pytest.mark.parametrize("by_unit", [False, True], ids=["per head", "per unit"])
def test_what_is_no_number_in_the_gradient_of_an_output_reaches_no_later_token(native, by_unit):
    qkv, how = problem(True, by_unit, lengths=(61,), f=20)
    leaves = [x.requires_grad_() for x in (*qkv, how["log_decay"], how["write"], how["erase"])]
    out = linear_rope_attention(*qkv, **how, backend="native")
    weights = random_like(out, 1)
    clean = torch.autograd.grad(out, leaves, weights, retain_graph=True)
    weights[:, 43] = torch.nan
    for x, y in zip(torch.autograd.grad(out, leaves, weights), clean, strict=True):
        assert torch.equal(x[:, 44:], y[:, 44:])
        assert bool(x[:, 43].isnan().any())

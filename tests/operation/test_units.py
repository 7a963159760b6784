"""log_decay per unit: one number per pair of features that turns, then one per feature that does not."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from linrope import Rotary, linear_rope_attention
from linrope.conformance.bounds import BOUNDS
from tests.support.contract import of_backends
from tests.support.equation import Equation
from tests.support.oracle import assert_same, everything, randoms

B, N, H, G, D, E = 2, 70, 4, 2, 6, 3
BACKENDS = ("reference", "eager")
computing = pytest.mark.parametrize("backend", BACKENDS)
delta_rule = pytest.mark.parametrize("erase", [False, True], ids=["normalizer", "erase"])
# How features turn and decay: (rotary, whether the data turns them further, units)
ROTATIONS: dict[str, tuple[Rotary | None, bool, int]] = {
    "none": (None, False, 6),
    "interleaved": (Rotary(D), True, 3),
    "partial": (Rotary(D, rotary_dim=4), False, 4),
    "partial, half": (Rotary(D, rotary_dim=4, layout="half"), True, 4),
    "steps alone": (None, True, 4),
}
Made = tuple[list[Tensor], dict[str, Any]]


def gates(kind: str, *shape: int) -> Tensor:
    """log decays from 1e-6 to 1e4, as -a."""
    share = torch.rand(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    if kind == "kda":  # as in Kimi Linear
        return -5 * (8 * share - 4).sigmoid()
    if kind == "of all sizes":
        return -(10 ** (10 * share - 6))
    if kind == "closed in some units":
        return torch.where(share < 0.3, -1e4, -share / 10)
    return torch.full(shape, {"open": -1e-6, "closed": -20.0, "nothing kept": -1e4}[kind]).double()


KINDS = ("open", "kda", "of all sizes", "closed in some units", "closed", "nothing kept")


def problem(kind: str, name: str, *, erase: bool, b: int = B, n: int = N) -> Made:
    """q, k, v and the options of a call: with the delta rule, or with the normalizer."""
    rotary, has_steps, units = ROTATIONS[name]
    q, k, v = randoms(b, n, H, D, g=G, e=E)
    generator = torch.Generator().manual_seed(1)
    how: dict[str, Any] = {"rotary": rotary, "log_decay": gates(kind, b, n, G, units)}
    if has_steps:
        how["angle_steps"] = (
            2 * torch.rand(b, n, G, 2 if name != "interleaved" else 3, generator=generator).double()
        )
    if erase:
        k = F.normalize(k, dim=-1)
        how |= {"feature_map": None, "normalize": False}
        how["erase"] = 2 * torch.rand(b, n, G, generator=generator, dtype=torch.float64)
    return [q, k, v], how


def cut(made: Made, where: slice) -> Made:
    data = {name: x[:, where] if isinstance(x, Tensor) else x for name, x in made[1].items()}
    return [x[:, where] for x in made[0]], data


@delta_rule
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_equation_for_gates_of_any_strength(kind: str, erase: bool) -> None:
    """Outputs, states and all gradients, also those of one gate for all rows and heads."""
    for name in [*ROTATIONS][(KINDS.index(kind) + erase) % 3 :: 3]:
        qkv, how = problem(kind, name, erase=erase)
        how["log_decay"] = how["log_decay"][:1, :, :1] if name == "partial" else how["log_decay"]
        expected = everything(*qkv, call=Equation(), **how)
        for backend in BACKENDS:
            assert_same(everything(*qkv, **how, backend=backend), expected, 1e-12)


OF_KINDS = [*product(KINDS, (False, True))]


@of_backends(
    "kind erase", reference=OF_KINDS, eager=OF_KINDS, native=OF_KINDS,
    triton=[("of all sizes", True), ("closed in some units", False)],
)  # fmt: skip
def test_float32_stays_within_the_bound(backend: str, kind: str, erase: bool) -> None:
    """out within 16 u M, gradients to 1e-5 of the largest entry; but in reference those of log_decay per unit."""
    short = backend == "triton"  # whose interpreter is slow
    qkv, how = problem(kind, "partial", erase=erase, b=1, n=20 if short else 100)
    if kind in ("closed", "nothing kept"):  # with the normalizer out would be v, and gradients 0
        how["normalize"] = False
    qkv = [x.float() for x in qkv]
    narrow = {name: x.float() if isinstance(x, Tensor) else x for name, x in how.items()}
    wide = {name: x.double() if isinstance(x, Tensor) else x for name, x in narrow.items()}
    equation = Equation()
    exact = everything(*(x.double() for x in qkv), call=equation, **wide)
    found = everything(*qkv, **narrow, backend=backend)
    assert ((found["out"].double() - exact["out"]).abs() <= BOUNDS[torch.float32] * equation.sizes.out).all()
    for name, x in exact.items():
        axes = (0, 1) if name == "dlog_decay" and backend != "reference" else tuple(range(x.ndim))
        error = (found[name].double() - x).abs().amax(axes)
        assert (error <= 1e-5 * x.abs().amax(axes) + 2.0**-126).all(), name


@computing
@pytest.mark.parametrize("where", [0, 1, 50, N])
@delta_rule
def test_pieces_give_the_whole_with_a_fixed_decay_in_every_unit(
    erase: bool, where: int, backend: str
) -> None:
    """A piece of one token has one row of gates, whose heads must not be taken for units."""
    made, decay = problem("kda", "interleaved", erase=erase), torch.tensor([0.5, 0.9], dtype=torch.float64)
    logs = made[1]["log_decay"] + decay.log()[:, None]
    more: dict[str, Any] = {"return_state": True, "backend": backend}
    out, last = linear_rope_attention(*made[0], **made[1] | {"log_decay": logs}, **more)
    state, outs = None, []
    for piece in (slice(where), slice(where, None)):
        qkv, how = cut(made, piece)
        one, state = linear_rope_attention(*qkv, **how, decay=decay, state=state, **more)
        outs.append(one)
    torch.testing.assert_close(torch.cat(outs, 1), out, rtol=0, atol=1e-12)
    assert state is not None
    torch.testing.assert_close(state.kv, last.kv, rtol=0, atol=1e-12)
    torch.testing.assert_close(state.z, last.z, rtol=0, atol=1e-12)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_triton_s_tiles_share_the_units(layout: str) -> None:
    q, k, v = (x.float() for x in randoms(1, 20, 1, 40, e=4))
    how: dict[str, Any] = {"rotary": Rotary(40, rotary_dim=8, layout=layout), "normalize": False}
    how["log_decay"] = gates("kda", 1, 20, 1, 36).float()
    found, expected = (everything(q, k, v, **how, backend=backend) for backend in ("triton", "eager"))
    assert_same(found, {name: x.to(found[name].dtype) for name, x in expected.items()}, 1e-5)


@pytest.mark.parametrize("backend", [*BACKENDS, "triton"])
def test_a_gate_that_is_not_a_number_shows_from_its_token_on(backend: str) -> None:
    n, t = (20, 9) if backend == "triton" else (N, 40)
    qkv, how = problem("kda", "interleaved", erase=False, n=n)
    how["log_decay"][0, t, 0, 1] = torch.nan
    qkv = [x.float() for x in qkv] if backend == "triton" else qkv
    out = linear_rope_attention(*qkv, **how, backend=backend).unflatten(2, (G, -1))
    assert out[0, t:, 0].isnan().all()
    assert out[0, :t].isfinite().all()
    assert out[0, :, 1].isfinite().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_calls_take_gates_of_any_dtype(dtype: torch.dtype) -> None:
    qkv, how = problem("kda", "interleaved", erase=False)
    qkv = [x.to(dtype) for x in qkv]
    for gate_dtype in (dtype, torch.float32, torch.float64):
        how["log_decay"] = how["log_decay"].to(gate_dtype)
        found, equation = everything(*qkv, **how, backend="eager"), Equation()
        wide = {name: x.double() if isinstance(x, Tensor) else x for name, x in how.items()}
        exact = everything(*(x.double() for x in qkv), call=equation, **wide)
        assert ((found["out"] - exact["out"]).abs() <= torch.finfo(dtype).eps * equation.sizes.out).all()
        assert found["dlog_decay"].dtype == gate_dtype

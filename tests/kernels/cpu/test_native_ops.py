"""The native operators against the equation written out in float64, within the numerics contract."""

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
    assert not bool((error > bound).any()), f"{name}: off by {float(error.max()):.3g}, bound {bound}"


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

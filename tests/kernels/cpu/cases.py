"""Random arguments of the native operators of every kind, and bounds on what they give."""

from typing import Any

import torch
from torch import Tensor

from tests.kernels.cpu.oracle import Case

UNIT = {torch.float32: 16 * 2.0**-24, torch.bfloat16: 4 * 2.0**-8, torch.float16: 4 * 2.0**-11}


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

"""Runs the convolution, the gates and the norm in the emulator: python -m tests.kernels.ptx.check_operators CAPABILITY
DTYPE [NAME ..]

Prints a line of JSON for each case: errors over what is allowed, and what the emulator found.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from linrope_kernels import convolution, norm
from torch import Tensor

from linrope.ops import convolve_parts, forget_and_write_gates, gated_norm, gates
from linrope.ops.convolution import _Convolution
from tests.kernels.ptx.cases import DTYPES
from tests.kernels.ptx.check import Ratios, emulated
from tests.kernels.ptx.launcher import install
from tests.ops.cases import Call, Tensors, differentiate, numbers


def compare(inputs: Tensors, run: Callable[..., Call]) -> Ratios:
    """The result and all gradients, rounded once: half a unit of each number, and 4e-6 of the largest for the sums."""
    exact = differentiate(inputs, run("eager"), torch.float64)
    ratios = {}
    for name, x, y in zip(("y", *inputs), differentiate(inputs, run("triton")), exact, strict=False):
        half = 0.0 if x.dtype == torch.float32 else torch.finfo(x.dtype).eps / 2
        allowed = 1.01 * half * y.abs() + 4e-6 * y.abs().max() + 1e-30
        ratios[name] = float(((x.double() - y).abs().nan_to_num(nan=torch.inf) / allowed).max())
    return ratios


def of_norm(dtype: torch.dtype, h: int, g: int, e: int, **options: Any) -> Ratios:
    inputs: Tensors = {
        "out": (0.01 * numbers(2, 5, h, e)).to(dtype),
        "weight": numbers(h * e if options.get("over") == "all" else e, seed=2),
        "gate": (4 * numbers(2, 5, h * e, seed=3)).to(dtype),
        "v": numbers(2, 5, g, e, seed=4).to(dtype),
        "skip": numbers(h, seed=5),
    }
    return compare(inputs, lambda backend: lambda x: gated_norm(**x, **options, backend=backend))


def of_gates(dtype: torch.dtype, heads: int, kind: str = "both") -> Ratios:
    weight = (numbers(heads, 70, seed=2) / 8).to(dtype)
    inputs: Tensors = {
        "x": numbers(2, 40, 70).to(dtype),
        "weight": weight,
        "bias": 3 * numbers(heads, seed=3),
    }

    def run(backend: str) -> Call:
        if kind == "both":
            return lambda x: torch.cat(forget_and_write_gates(**x, backend=backend), -1)
        return lambda x: gates(**x, activation=kind, backend=backend)

    return compare(inputs, run)


def of_convolution(
    dtype: torch.dtype, sizes: tuple[int, ...] = (40, 8, 24), b: int = 2, n: int = 40, taps: int = 4,
    cuts: list[int] | None = None,
) -> Ratios:  # fmt: skip
    """Parts that are slices of a projection's result."""
    bounds, c = None if cuts is None else torch.tensor(cuts), sum(sizes)
    s = b if bounds is None else len(bounds) - 1
    inputs: Tensors = {
        "x": (3 * numbers(b, n, c + 8)).to(dtype),
        "weight": numbers(c, taps, seed=2).to(dtype),
    }
    inputs |= {"bias": numbers(c, seed=3), "before": numbers(s, taps - 1, c, seed=4).to(dtype)}

    def run(backend: str) -> Call:
        def call(inputs: Tensors) -> Tensor:
            x, *others = inputs.values()
            how = {"before": others.pop(), "cu_seqlens": bounds, "silu": True, "backend": backend}
            return torch.cat(convolve_parts(x[..., 8:].split(sizes, -1), *others, **how), -1)

        return call

    return compare(inputs, run)


def of_several_programs(dtype: torch.dtype) -> Ratios:
    """Programs that share their channels."""
    convolution.SHORTEST = 1
    return of_convolution(dtype, sizes=(16, 16), b=1, n=150)


def of_any_bounds(dtype: torch.dtype) -> Ratios:
    """Nothing is read or written out of bounds, whatever cu_seqlens holds; the emulator would raise."""
    for cuts in ([0, 99, 5, 40], [-5, 1000], [40, 0, 3], [2**31 - 1, -(2**31), 7]):
        x, before = torch.zeros(1, 40, 16, dtype=dtype), torch.zeros(len(cuts) - 1, 3, 16, dtype=dtype)
        bounds, weight = torch.tensor(cuts, dtype=torch.int32), torch.zeros(16, 4)
        record = _Convolution(x, None, None, weight, None, before, bounds, True, "triton")
        convolution.convolve_fwd(record)
        convolution.convolve_bwd(record, x)
    return {"y": 0.0}


CASES: dict[str, Callable[[torch.dtype], Ratios]] = {
    "norm": partial(of_norm, h=16, g=16, e=128),
    "norm, heads share v": partial(of_norm, h=6, g=2, e=40),
    "norm over all": partial(of_norm, h=6, g=2, e=40, over="all", gate_order="before", skip_order="before"),
    "norm over all, in blocks": partial(of_norm, h=18, g=18, e=256, over="all", gate_order="before"),
    "norm of one head, in blocks": partial(of_norm, h=1, g=1, e=9000, gate_activation="sigmoid"),
    "gates": partial(of_gates, heads=5),
    "gates of many heads": partial(of_gates, heads=70),
    "sigmoid": partial(of_gates, heads=20, kind="sigmoid"),
    "convolution": of_convolution,
    "convolution, packed": partial(of_convolution, b=1, n=21, cuts=[0, 0, 3, 4, 12, 21, 21]),
    "convolution of two taps": partial(of_convolution, taps=2, sizes=(20,)),
    "convolution, several programs": of_several_programs,
    "convolution, any bounds": of_any_bounds,
}


def main(capability: str, dtype: str, *names: str) -> None:
    torch.use_deterministic_algorithms(True)  # fresh memory holds NaN
    torch.set_num_threads(1)
    emulator = install(int(capability))
    norm.WARPS = 16  # few programs, which sum over several tiles
    for name in names or CASES:
        line = emulated(emulator.report, partial(CASES[name], DTYPES[dtype]))
        print(json.dumps({"case": name} | line), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

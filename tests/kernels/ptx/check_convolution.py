"""Runs the convolution in the emulator: python -m tests.kernels.ptx.check_convolution CAPABILITY DTYPE [NAME ..]

Prints a line of JSON for each case: errors over what is allowed, and what the emulator found.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from linrope_kernels import convolution
from torch import Tensor

from linrope.backends import triton as backend
from linrope.ops import convolve_parts
from linrope.ops.convolution import _Convolution
from tests.kernels.ptx.cases import DTYPES
from tests.kernels.ptx.launcher import install


def error(actual: Tensor, exact: Tensor) -> float:
    """Rounded once: half a unit of each number, and 2e-6 of the largest for the sums."""
    half = 0.0 if actual.dtype == torch.float32 else torch.finfo(actual.dtype).eps / 2
    allowed = 1.01 * half * exact.abs() + 2e-6 * exact.abs().max() + 1e-30
    return float(((actual.double() - exact).abs().nan_to_num(nan=torch.inf) / allowed).max())


def compare(
    dtype: torch.dtype,
    sizes: tuple[int, ...] = (40, 8, 24),
    b: int = 2,
    n: int = 40,
    taps: int = 4,
    cuts: list[int] | None = None,
) -> dict[str, float]:
    """Parts, slices of a projection's result: their results and all gradients."""
    bounds, c = None if cuts is None else torch.tensor(cuts), sum(sizes)
    s = b if bounds is None else len(bounds) - 1
    torch.manual_seed(0)
    inputs = [*(3 * torch.randn(b, n, c + 8)).to(dtype)[..., 8:].split(sizes, -1)]
    inputs += [torch.randn(c, taps).to(dtype), torch.randn(c), torch.randn(s, taps - 1, c).to(dtype)]
    gradients = [torch.randn(b, n, size).to(dtype) for size in sizes]
    results = []
    for name, wide in (("triton", None), ("eager", torch.float64)):
        leaves = [x.to(wide or x.dtype).detach().requires_grad_() for x in inputs]
        *parts, weight, bias, before = leaves
        ys = convolve_parts(parts, weight, bias, before=before, cu_seqlens=bounds, silu=True, backend=name)
        found = torch.autograd.grad(ys, leaves, [g.to(y.dtype) for g, y in zip(gradients, ys)])
        results.append([*(y.detach() for y in ys), *found])
    names = [f"y{i}" for i in range(len(sizes))] + [f"d{i}" for i in range(len(sizes))]
    return dict(zip([*names, "weight", "bias", "before"], map(error, *results), strict=True))


def several_programs(dtype: torch.dtype) -> dict[str, float]:
    """Programs that share their channels."""
    convolution.SHORTEST = 1
    return compare(dtype, sizes=(16, 16), b=1, n=150)


def any_bounds(dtype: torch.dtype) -> dict[str, float]:
    """Nothing is read or written out of bounds, whatever cu_seqlens holds; the emulator would raise."""
    for cuts in ([0, 99, 5, 40], [-5, 1000], [40, 0, 3], [2**31 - 1, -(2**31), 7]):
        x, before = torch.zeros(1, 40, 16, dtype=dtype), torch.zeros(len(cuts) - 1, 3, 16, dtype=dtype)
        bounds = torch.tensor(cuts, dtype=torch.int32)
        weight = torch.zeros(16, 4)
        record = _Convolution(x, None, None, weight, None, before, bounds, True, "triton")
        convolution.convolve_fwd(record)
        convolution.convolve_bwd(record, x)
    return {"y": 0.0}


CASES: dict[str, Callable[[torch.dtype], dict[str, float]]] = {
    "parts": compare,
    "packed": partial(compare, b=1, n=21, cuts=[0, 0, 3, 4, 12, 21, 21]),
    "two taps": partial(compare, taps=2, sizes=(20,)),
    "any bounds": any_bounds,
    "several programs": several_programs,
}


def main(capability: str, dtype: str, *names: str) -> None:
    torch.use_deterministic_algorithms(True)  # fresh memory holds NaN
    torch.set_num_threads(1)
    emulator = install(int(capability))
    backend.why_not_on = lambda _: None
    for name in names or CASES:
        emulator.report.findings.clear()
        ratios, fault = {}, None
        try:
            ratios = CASES[name](DTYPES[dtype])
        except Exception as problem:
            fault = f"{type(problem).__name__}: {problem}"
        findings: list[Any] = [[*key, count] for key, count in emulator.report.findings.items()]
        print(json.dumps({"case": name, "ratios": ratios, "fault": fault, "findings": findings}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

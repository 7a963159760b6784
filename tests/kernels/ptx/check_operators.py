"""Runs the layer's operators in the emulator: python -m tests.kernels.ptx.check_operators CAPABILITY DTYPE [NAME ..]

Prints a line of JSON for each case: errors over what is allowed, and what the emulator found.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from linrope.ops import convolve, convolve_step, gated_norm, triton
from tests.kernels.ptx.cases import DTYPES
from tests.kernels.ptx.launcher import install

Tensors = dict[str, Tensor]


def compare(inputs: Tensors, call: Callable[..., Tensor]) -> dict[str, float]:
    """The output and all gradients, rounded once: half a unit of each number, and 2e-6 of the largest for the sums."""
    results = []
    for backend, dtype in (("triton", None), ("eager", torch.float64)):
        leaves = {name: x.to(dtype or x.dtype).detach().requires_grad_() for name, x in inputs.items()}
        y = call(**leaves, backend=backend)
        torch.manual_seed(1)
        g = torch.randn(y.shape).bfloat16().to(y.dtype)
        results.append({"y": y.detach()} | dict(zip(leaves, torch.autograd.grad(y, leaves.values(), g))))
    actual, exact = results
    return {name: error(actual[name], exact[name]) for name in exact}


def error(actual: Tensor, exact: Tensor) -> float:
    half = 0.0 if actual.dtype == torch.float32 else torch.finfo(actual.dtype).eps / 2
    allowed = 1.01 * half * exact.abs() + 2e-6 * exact.abs().max() + 1e-30
    return (
        float(((actual.double() - exact).abs().nan_to_num(nan=torch.inf) / allowed).max())
        if exact.numel()
        else 0
    )


def convolution(
    dtype: torch.dtype, b: int = 2, n: int = 40, c: int = 72, taps: int = 4, cuts: Any = None
) -> dict[str, float]:
    bounds = None if cuts is None else torch.tensor(cuts)
    s = b if cuts is None else len(cuts) - 1
    torch.manual_seed(0)
    inputs = {
        "x": (3 * torch.randn(b, n, 2 * c)).to(dtype)[..., c:],
        "weight": torch.randn(c, taps),
        "bias": torch.randn(c),
        "before": torch.randn(s, taps - 1, c).to(dtype),
    }
    return compare(inputs, partial(convolve, cu_seqlens=bounds, silu=True))


def steps(dtype: torch.dtype) -> dict[str, float]:
    """Token by token in rows of a pool: the bits of the whole call."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 5, 48).to(dtype), torch.randn(48, 4), torch.randn(48)
    pool, slots = torch.zeros(4, 3, 48, dtype=dtype), torch.tensor([3, 1])
    whole = convolve(x, weight, bias, silu=True, backend="triton")
    for i in range(5):
        y = convolve_step(x[:, i : i + 1], weight, bias, pool, silu=True, slots=slots, backend="triton")
        assert torch.equal(y, whole[:, i : i + 1])
    assert torch.equal(pool[slots], x[:, 2:])
    return {"y": 0.0}


def any_bounds(dtype: torch.dtype) -> dict[str, float]:
    """Nothing is read or written out of bounds, whatever cu_seqlens holds; the emulator would raise."""
    for cuts in ([0, 99, 5, 40], [-5, 1000], [40, 0, 3], [2**31 - 1, -(2**31), 7]):
        x, before = torch.zeros(1, 40, 16, dtype=dtype), torch.zeros(len(cuts) - 1, 3, 16, dtype=dtype)
        arguments = x, torch.zeros(16, 4), None, before, torch.tensor(cuts, dtype=torch.int32), True
        triton.convolve(*arguments)
        triton.convolve_backward(x, *arguments)
    return {"y": 0.0}


def norm(dtype: torch.dtype, h: int = 6, g: int = 2, e: int = 40, **options: Any) -> dict[str, float]:
    torch.manual_seed(0)
    inputs = {
        "out": (0.01 * torch.randn(2, 5, h, e)).to(dtype),
        "weight": torch.randn(h * e if options.get("over") == "all" else e),
        "gate": (4 * torch.randn(2, 5, h * e)).to(dtype),
        "v": torch.randn(2, 5, g, e).to(dtype),
        "skip": torch.randn(h),
    }
    return compare(inputs, partial(gated_norm, **options))


CASES: dict[str, Callable[[torch.dtype], dict[str, float]]] = {
    "convolution": convolution,
    "packed": partial(convolution, b=1, n=21, cuts=[0, 0, 3, 4, 12, 21, 21]),
    "two taps": partial(convolution, taps=2, c=20),
    "steps": steps,
    "any bounds": any_bounds,
    "norm": norm,
    "norm over all": partial(norm, over="all", gate_order="before", skip_order="before"),
    "norm in blocks": partial(norm, h=18, g=18, e=256, over="all", gate_order="before"),
}


def main(capability: str, dtype: str, *names: str) -> None:
    torch.use_deterministic_algorithms(True)  # fresh memory holds NaN
    torch.set_num_threads(1)
    emulator = install(int(capability))
    triton.why_not_tensors = lambda *_, **__: None
    for name in names or CASES:
        begin, fault, ratios = time.perf_counter(), None, {}
        emulator.report.findings.clear()
        emulator.report.launches.clear()
        try:
            ratios = CASES[name](DTYPES[dtype])
        except Exception as problem:
            fault = f"{type(problem).__name__}: {problem}"
        line = {
            "case": name, "ratios": ratios, "fault": fault,
            "findings": [[*key, count] for key, count in emulator.report.findings.items()],
            "kernels": sorted({launch.kernel for launch in emulator.report.launches}),
            "instructions": sum(launch.instructions for launch in emulator.report.launches),
            "seconds": round(time.perf_counter() - begin, 1),
        }  # fmt: skip
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

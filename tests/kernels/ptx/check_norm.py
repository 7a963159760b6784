"""Runs the gated norm in the emulator: python -m tests.kernels.ptx.check_norm CAPABILITY DTYPE

Prints a line of JSON for each case: errors over what is allowed, and what the emulator found.
"""

import json
import sys
import time
from functools import partial
from typing import Any

import torch
from linrope_kernels import norm
from torch import Tensor

from linrope.ops import gated_norm
from tests.kernels.ptx.cases import DTYPES
from tests.kernels.ptx.launcher import install
from tests.ops.cases import Tensors, differentiate, numbers

CASES: dict[str, dict[str, Any]] = {
    "usual": {"h": 16, "g": 16, "e": 128},
    "heads that share v": {"h": 6, "g": 2, "e": 40},
    "over all": {"h": 6, "g": 2, "e": 40, "over": "all", "gate_order": "before", "skip_order": "before"},
    "over all, in blocks": {"h": 18, "g": 18, "e": 256, "over": "all", "gate_order": "before"},
    "one head, in blocks": {"h": 1, "g": 1, "e": 9000, "gate_activation": "sigmoid"},
}


def error(actual: Tensor, exact: Tensor) -> float:
    """Rounded once: half a unit of each number, and 4e-6 of the largest for the sums."""
    half = 0.0 if actual.dtype == torch.float32 else torch.finfo(actual.dtype).eps / 2
    allowed = 1.01 * half * exact.abs() + 4e-6 * exact.abs().max() + 1e-30
    return float(((actual.double() - exact).abs().nan_to_num(nan=torch.inf) / allowed).max())


def compare(dtype: torch.dtype, h: int, g: int, e: int, **options: Any) -> dict[str, float]:
    inputs: Tensors = {
        "out": (0.01 * numbers(2, 5, h, e)).to(dtype),
        "weight": numbers(h * e if options.get("over") == "all" else e, seed=2),
        "gate": (4 * numbers(2, 5, h * e, seed=3)).to(dtype),
        "v": numbers(2, 5, g, e, seed=4).to(dtype),
        "skip": numbers(h, seed=5),
    }
    run = partial(gated_norm, **options)
    exact = differentiate(inputs, lambda x: run(**x, backend="eager"), torch.float64)
    actual = differentiate(inputs, lambda x: run(**x, backend="triton"))
    return {name: error(*found) for name, *found in zip(("y", *inputs), actual, exact, strict=True)}


def main(capability: str, dtype: str) -> None:
    torch.use_deterministic_algorithms(True)  # fresh memory holds NaN
    torch.set_num_threads(1)
    emulator = install(int(capability))
    norm.WARPS = 16  # few programs, which sum over several tiles
    for name, case in CASES.items():
        begin, fault, ratios = time.perf_counter(), None, {}
        emulator.report.findings.clear()
        emulator.report.launches.clear()
        try:
            ratios = compare(DTYPES[dtype], **case)
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

"""Runs cases in the emulator: python -m tests.kernels.ptx.check CAPABILITY DTYPE SIZE [NAME ..]

Prints a line of JSON for each, and for kernels that do not finish the fault.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from linrope_kernels import tiles
from torch import Tensor

from linrope import linear_rope_attention, linear_rope_state
from linrope.conformance.bounds import BOUNDS, cancelling, error_in_bounds, moved
from tests.kernels.ptx.cases import CASES, DTYPES, Problem
from tests.kernels.ptx.launcher import install
from tests.support.equation import Equation
from tests.support.oracle import everything

Ratios = dict[str, float]  # error over what is allowed


@contextmanager
def short_segments(wanted: bool) -> Iterator[None]:
    names = ("SHORTEST_SEGMENT", "SEGMENT_MULTIPLE", "most_segments")
    before = {name: getattr(tiles, name) for name in names}
    if wanted:
        tiles.SHORTEST_SEGMENT, tiles.SEGMENT_MULTIPLE, tiles.most_segments = 64, 64, lambda *_: 3
    try:
        yield
    finally:
        for name, x in before.items():
            setattr(tiles, name, x)


def largest(x: Tensor) -> float:
    """NaN is infinitely far off."""
    return float(x.nan_to_num(nan=float("inf")).max()) if x.numel() else 0.0


def of_output(p: Problem, out: Tensor, oracle: Tensor, rows: slice = slice(None)) -> float:
    return error_in_bounds(out.nan_to_num(nan=float("inf")), oracle, p.magnitude()[:, rows])


def of_sums(p: Problem, actual: dict[str, Tensor], oracle: dict[str, Tensor]) -> Ratios:
    # With a log decay per unit z is a product of features with values of 1; without, a sum of float32 or wider.
    by_unit = "log_decay" in p.how and p.how["log_decay"].ndim == 4
    found = {}
    for name, allowed in (("kv", 2 * BOUNDS[p.dtype]), ("z", BOUNDS[p.dtype] if by_unit else 1e-6)):
        x, y = actual[name].double(), oracle[name].double()
        found[name] = largest((x - y).abs()) / (allowed * max(1.0, largest(y.abs())))
    return found


def rounded_equation(p: Problem) -> dict[str, Tensor]:
    """The equation, with features, scores and states changed by up to 2 u, as docs/numerics.md allows.

    "reference" has float32 features of "unit", and rounds none of them.
    """
    generator, u, state = torch.Generator().manual_seed(0), torch.finfo(p.dtype).eps, None
    if p.case.before:
        first, how = p.for_equation(slice(0, p.case.before))
        _, state = Equation()(*first, **how)
    second, how = p.for_equation(slice(p.case.before, None))
    return everything(*second, state, call=Equation(rounded=lambda x: moved(x, generator, u)), **how)


def attend(p: Problem) -> Ratios:
    """Output, last state and all gradients; a first piece makes the state."""
    results = []
    for wide, backend in ((False, "triton"), (False, "reference"), (True, "reference")):
        state = None
        if p.case.before:
            first, how = p.piece(slice(0, p.case.before), wide, backend)
            with torch.no_grad():
                _, state = linear_rope_attention(*first, return_state=True, **how)
        second, how = p.piece(slice(p.case.before, None), wide, backend)
        results.append(everything(*second, state, **how))
    actual, *others, oracle = results
    if p.how.get("feature_map") == "unit" and p.dtype != torch.float32:
        others.append(rounded_equation(p))
    found = {"out": of_output(p, actual["out"], oracle["out"])}
    for name in (name for name in oracle if name.startswith("d")):
        error, *most = (largest((x[name].double() - oracle[name]).abs()) for x in (actual, *others))
        other = max(most)
        # The gradient of log_decay is a difference of sums as large as outputs and states.
        lost = BOUNDS[torch.float32] * float(cancelling(oracle)) if name == "dlog_decay" else 0.0
        found[name] = error / (3 * other + 1e-5 * largest(oracle[name].abs()) + lost + 1e-30)
    return found | of_sums(p, actual, oracle)


def steps(p: Problem) -> Ratios:
    """Token by token, each in a state of its own, in one that is given away, or in the rows of a pool."""
    wide, how = p.piece(slice(None), True, "reference")
    oracle, last = linear_rope_attention(*wide, return_state=True, **how)
    found: Ratios = {}
    slots = torch.arange(p.case.b).flip(0)
    for way in ("new", "donated", "pool"):
        state, outs = None, []
        for t in range(p.case.n):
            token, how = p.piece(slice(t, t + 1), False, "triton")
            if state is not None:
                state = state.donate() if way == "donated" else state
                state = state.reorder(slots).at(slots) if way == "pool" else state
            out, state = linear_rope_attention(*token, state=state, return_state=True, **how)
            state = state.rows()
            outs.append(out)
        found[f"out, {way}"] = of_output(p, torch.cat(outs, 1), oracle)
        found |= {f"{name}, {way}": x for name, x in of_sums(p, state.tensors(), last.tensors()).items()}
    return found


def state_alone(p: Problem) -> Ratios:
    states = []
    for wide, backend in ((False, "triton"), (True, "reference")):
        (_, k, v), how = p.piece(slice(None), wide, backend)
        how.pop("normalize", None)
        states.append(linear_rope_state(k, v, **how))
    return of_sums(p, *(x.tensors() for x in states))


def output_alone(p: Problem) -> Ratios:
    outs = []
    for wide, backend in ((False, "triton"), (True, "reference")):
        qkv, how = p.piece(slice(None), wide, backend)
        outs.append(linear_rope_attention(*qkv, **how))
    return {"out": of_output(p, *outs)}


KINDS = {"attend": attend, "output": output_alone, "step": steps, "state": state_alone}


def usual(size: int) -> list[str]:
    """The names of the cases for a size of heads; of small ones all that leave some of it."""
    return [x for x, case in CASES.items() if size in case.sizes or max(case.less) < size < 64]


def emulated(report: Any, run: Callable[[], Ratios]) -> dict[str, Any]:
    """The ratios that run() returns or the fault that it ends with, and what the emulator saw meanwhile."""
    begin, ratios, fault = time.perf_counter(), {}, None
    report.findings.clear()
    report.launches.clear()
    try:
        ratios = run()
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
    return {
        "ratios": ratios, "fault": fault, "findings": [[*key, count] for key, count in report.findings.items()],
        "kernels": sorted({launch.kernel for launch in report.launches}),
        "copies": sum(x.reads_of_copies for x in report.launches if x.kernel != "states_kernel"),
        "instructions": sum(launch.instructions for launch in report.launches),
        "seconds": round(time.perf_counter() - begin, 1),
    }  # fmt: skip


def main(capability: str, dtype: str, size: str, *names: str) -> None:
    torch.use_deterministic_algorithms(True)  # fresh memory holds NaN
    torch.set_num_threads(1)
    emulator = install(int(capability))
    for name in names or usual(int(size)):
        case = CASES[name]
        with short_segments(case.segments), torch.set_grad_enabled(case.kind == "attend"):
            line = emulated(
                emulator.report, lambda case=case: KINDS[case.kind](Problem(case, DTYPES[dtype], int(size)))
            )
        about = {"case": name, "capability": int(capability), "dtype": dtype, "size": int(size)}
        print(json.dumps(about | line), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The host's share of a call: its time to launch one, with and without launching, the launches, and what one costs."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from linrope_kernels import start

from benchmarks.gpu.machine import MODES, Machine, Row, Shape, each
from benchmarks.gpu.operation import case_of

ROOT = Path(__file__).parents[2]
CALLS = 100
ROUNDS = 3  # in which the versions of linrope take turns


def host(on: Machine) -> Iterator[Row]:
    yield from each([on.sizes((b, 512, 16, 64), (b, 40, 2, 64)) for b in (1, 8)], partial(host_row, on))
    yield from each(["roads"], lambda _: roads(on))
    if on.before is not None:
        yield from each(["before and now"], lambda _: in_turn(on, on.before))


def microseconds(on: Machine, run: Callable[[], Any]) -> float:
    """The time until a call returns, without waiting for the GPU: the mean of many calls."""
    run()
    on.wait()
    calls = on.sizes(CALLS, 1)
    begun = time.perf_counter()
    for _ in range(calls):
        run()
    return 1e6 * (time.perf_counter() - begun) / calls


def host_row(on: Machine, shape: Shape) -> Row:
    case, row = case_of(on, shape), Row()
    for mode in MODES:
        run = partial(getattr(case, mode), case.linrope)
        row[f"{mode} us"] = microseconds(on, run)
        row[f"{mode} launches"] = len(on.kernels(run))
        with without_launches():
            row[f"{mode} us without launches"] = microseconds(on, run)
    return row


class Nothing:
    """A compiled kernel that does nothing."""

    def __getitem__(self, grid: Any) -> Callable[..., "Nothing"]:
        return lambda *_, **__: self


@contextmanager
def without_launches() -> Iterator[None]:
    """Makes every launch of a linrope kernel do nothing, so that only the time of Python and PyTorch is left."""
    from linrope_kernels.forward import scan_fwd_kernel

    kind, nothing = type(scan_fwd_kernel), Nothing()
    before, launches = kind.__getitem__, dict(start._LAUNCHES)
    kind.__getitem__ = lambda kernel, grid: nothing[grid]
    start._LAUNCHES.clear()
    try:
        yield
    finally:
        kind.__getitem__ = before
        start._LAUNCHES.clear()
        start._LAUNCHES.update(launches)


@triton.jit
def empty_kernel(X, Y, Z, n, N: tl.constexpr):  # type: ignore[no-untyped-def]
    pass


def roads(on: Machine) -> Row:
    """The microseconds that it takes to launch an empty kernel in different ways, and to call PyTorch."""
    x = torch.zeros(16, device=on.device)
    ways: dict[str, Callable[[], Any]] = {
        "triton": lambda: empty_kernel[(1,)](x, x, x, 5, N=16),
        "start_kernel": lambda: start.start_kernel(empty_kernel, 1, x, x, x, 5, N=16),
        "torch, one operation": lambda: torch.neg(x, out=x),
        "torch, new memory": lambda: torch.empty_like(x),
    }
    if (compiled := empty_kernel[(1,)](x, x, x, 5, N=16)) is not None:  # the interpreter compiles nothing
        ways["compiled kernel"] = lambda: compiled[(1, 1, 1)](x, x, x, 5, 16)
    return {f"{name} us": microseconds(on, run) for name, run in ways.items()}


def in_turn(on: Machine, before: Path) -> Row:
    """Host times of this version of linrope and of the one in another folder, in processes that take turns."""
    row: Row = {}
    for _ in range(on.sizes(ROUNDS, 1)):
        for name, folder in (("before", before), ("now", ROOT)):
            command = [sys.executable, str(Path(__file__).with_name("host_times.py")), on.device]
            path = f"{folder}:{folder / 'kernels'}"
            environment = os.environ | {"PYTHONPATH": path}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{name}: {done.stderr[-500:]}")
            for key, x in json.loads(done.stdout).items():
                row[f"{name}, {key}"] = min(x, row.get(f"{name}, {key}", x))
    return row

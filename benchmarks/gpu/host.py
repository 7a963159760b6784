"""The host's share of a call: its time to launch one, with and without launching, the launches, and what one costs."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from linrope_kernels import start

from benchmarks.gpu.host_times import in_turn, without_launches
from benchmarks.gpu.machine import MODES, Machine, Row, Shape, each
from benchmarks.gpu.operation import case_of

CALLS = 100


def host(on: Machine) -> Iterator[Row]:
    yield from each([on.sizes((b, 512, 16, 64), (b, 40, 2, 64)) for b in (1, 8)], partial(host_row, on))
    yield from each(["roads"], lambda _: roads(on))
    if on.before is not None:
        yield from each(["before and now"], lambda _: Row(in_turn(on.before, on.device, small=on.small)))


def microseconds(on: Machine, run: Callable[[], Any]) -> float:
    """The time until a call returns, without waiting for the GPU: the mean of many calls."""
    for _ in range(on.sizes(3, 1)):  # the second call records its passes
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

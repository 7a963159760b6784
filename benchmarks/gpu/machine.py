"""The GPU that the steps measure, or the CPU that takes its place in a dry run; times, graphs, errors."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from linrope.cuda_graphs import GraphedStep, Recorder

Row = dict[str, Any]
Shape = tuple[int, int, int, int]  # batch, length, heads, dim
T = TypeVar("T")
MODES = ("forward", "training")
TOLERANCE = {torch.bfloat16: 4 * 2.0**-8, torch.float16: 4 * 2.0**-11, torch.float32: 1e-4}
WINDOW = 512  # tokens per comparison
L2_CACHE = 100e6  # bytes, more than any GPU has


@dataclass(frozen=True)
class Machine:
    """Where a step runs.

    small: sizes that take a second, with the same code and most of the same compiled kernels. limit: seconds. before:
    a folder with another version of linrope, for the steps that compare the two. backend: what the steps measure; tests
    of the steps themselves take one that is faster on a CPU.
    """

    device: str = "cuda"  # or "cpu", where Triton's interpreter runs the kernels
    small: bool = False
    limit: float = 600.0
    before: Path | None = None
    backend: str = "triton"

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def has_graphs(self) -> bool:
        """False for a CPU that a test passes off as a GPU."""
        return self.device == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """Triton's interpreter has no bfloat16."""
        return torch.bfloat16 if self.on_gpu else torch.float16

    @property
    def layer_dtype(self) -> torch.dtype:
        """Gradients of size 1 leave the range of float16 in the norm of the default block."""
        return torch.bfloat16 if self.on_gpu else torch.float32

    def sizes(self, full: T, small: T) -> T:
        return small if self.small else full

    def timed(self, run: Callable[[], Any], flush: bool = False) -> Row:
        """The times of a call in ms: by events on a GPU, of one call by the wall clock on a CPU."""
        if not self.on_gpu:
            start = time.perf_counter()
            run()
            times = [1e3 * (time.perf_counter() - start)]
        elif self.small:
            times = self._times_by_events(run, 1, flush)
        else:
            run()  # compiles
            (once,) = self._times_by_events(run, 1, flush)
            runs = 1 if once > 200 else max(10, min(100, int(200 / once)))
            # The GPU's clocks are low in the first runs.
            times = self._times_by_events(run, runs + runs // 2, flush)[runs // 2 :]
        median = statistics.median(times)
        return {"median_ms": median, "min_ms": min(times), "max_ms": max(times), "runs": len(times)}

    def _times_by_events(self, run: Callable[[], Any], runs: int, flush: bool) -> list[float]:
        """flush: reads another tensor before each run, which empties the L2 cache."""
        other = torch.zeros(2**26 if flush and not self.small else 1, device=self.device)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
        for start, end in events:
            other.sum()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]

    def captured(self, run: Callable[[], T]) -> Callable[[], T]:
        """A call in a CUDA graph, without the time to launch each kernel: it returns the same tensors each time.

        run is called once before. On a CPU, which has no graphs, the result is run itself.
        """
        if not self.on_gpu:
            run()
            return run
        recorder = Recorder(torch.device("cuda", torch.cuda.current_device()))
        recorder.run(run)
        return recorder.record(run)

    def graphed(self, step: Callable[..., T]) -> Callable[..., T]:
        """The step as a GraphedStep; on a CPU, the step itself."""
        return GraphedStep(step) if self.has_graphs else step

    def both_times(self, name: str, run: Callable[[], Any], flush: bool = False) -> Row:
        """The times of a call by name: launched from Python, and in a CUDA graph. A failure to capture is reported."""
        row = {name: self.timed(run, flush)}
        try:
            return row | {f"{name} graph": self.timed(self.captured(run), flush)}
        except RuntimeError as error:
            return row | {"failure": f"{name}: no CUDA graph: {error}"[:1000]}

    def kernels(self, run: Callable[[], Any], repeats: int = 1) -> list[tuple[str, float]]:
        """The name and the milliseconds of each kernel that a call starts, copies included."""
        kinds = torch.profiler.ProfilerActivity
        activity = kinds.CUDA if self.on_gpu else kinds.CPU
        with torch.profiler.profile(activities=[activity], acc_events=True) as profile:
            for _ in range(repeats):
                run()
            self.wait()
        wanted = torch.autograd.DeviceType.CUDA if self.on_gpu else torch.autograd.DeviceType.CPU
        return [(x.name, x.device_time / 1e3) for x in profile.events() if x.device_type == wanted]

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def copy_rate(self) -> Row:
        """The best rate of a copy: bytes read and written per second."""
        source = torch.randn(self.sizes(2**30, 1000), device=self.device, dtype=torch.bfloat16)
        times = self.timed(partial(torch.empty_like(source).copy_, source))
        return times | {"rate": 2e3 * source.nbytes / times["median_ms"], "unit": "byte/s"}


def each(cases: Iterable[Any], row_of: Callable[[Any], Row]) -> Iterator[Row]:
    """A row for each case. A case that fails is a row with the failure; the others go on."""
    for case in cases:
        row = {"shape": list(case)} if isinstance(case, tuple) else {"case": case}
        try:
            row |= row_of(case)
        except Exception as error:
            row["failure"] = f"{type(error).__name__}: {error}"[:1000]
        yield row


def compare(name: str, actual: Tensor, expected: Tensor, tolerance: float) -> float:
    """The largest |actual - expected| / |expected| of all windows of tokens, in the 2-norm. Windows, because
    later tokens have far smaller outputs and gradients. AssertionError: it exceeds the tolerance."""
    pairs = (x.detach().double().split(WINDOW, 1) for x in (actual, expected))
    error = float(torch.stack([(x - y).norm() / y.norm() for x, y in zip(*pairs)]).max())  # NaN if one is
    assert error <= tolerance, f"{name} is off: {error:.3g} of its size, expected at most {tolerance:.3g}"
    return error


def whole(name: str, actual: Tensor, expected: Tensor, tolerance: float) -> float:
    """|actual - expected| / |expected| in the 2-norm. AssertionError: it exceeds the tolerance."""
    return compare(name, actual.reshape(1, 1, -1), expected.reshape(1, 1, -1), tolerance)


def finite(*tensors: Tensor) -> None:
    assert all(bool(x.isfinite().all()) for x in tensors), "not finite"

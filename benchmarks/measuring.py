"""How benchmarks measure: time and peak memory of calls, the machine they ran on, and their result files."""

import ctypes
import datetime
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import linrope
from linrope.backends import native
from linrope.common.files import replace_file

NOISY = 0.15  # if the noise is larger, further rounds are measured; if it remains, a warning is printed
WALL = "wall time, medians"


class Timing(NamedTuple):
    seconds: float  # the typical time of a call
    noise: float  # half the interquartile range of the rounds' typical times, divided by seconds


def measured(
    functions: Mapping[str, Callable[[], Any]],
    rounds: int = 5,
    budget: float = 2.0,
    device: str = "cpu",
    wall: bool = False,
) -> dict[str, Timing]:
    """The time of each function. They take turns, so that a busy machine slows all of them alike.

    Times are medians of the wall time. With one thread they are minima of the thread's CPU time, since other
    processes can only lengthen it. If the rounds differ (``NOISY``), as many rounds again are measured.

    Args:
        functions: the functions by name.
        rounds: the number of turns.
        budget: seconds per function over these rounds, with at least one call a round.
        device: where the functions compute.
        wall: take the wall time with one thread too.
    """
    one_thread = not wall and clock_name(device) != WALL
    typical: Callable[[Sequence[float]], float] = min if one_thread else statistics.median
    times: dict[str, list[list[float]]] = {name: [] for name in functions}

    def timings() -> dict[str, Timing]:
        return {name: _timing(of_rounds, typical) for name, of_rounds in times.items()}

    for turn in range(2 * rounds):
        if turn == rounds and max(timing.noise for timing in timings().values()) <= NOISY:
            break
        for name, function in functions.items():
            times[name].append(_one_round(function, times[name], budget / rounds, one_thread, device))
    return timings()


def _one_round(
    function: Callable[[], Any],
    earlier_rounds: list[list[float]],
    seconds: float,
    one_thread: bool,
    device: str,
) -> list[float]:
    """The times of the function's calls in one round, after a warm-up, unless the calls are long."""
    clock = time.thread_time if one_thread else time.perf_counter
    if not earlier_rounds or earlier_rounds[-1][-1] < 1:
        function()
    _wait(device)
    times: list[float] = []
    end = clock() + seconds
    while True:
        start = clock()
        function()
        _wait(device)
        now = clock()
        times.append(now - start)
        if now >= end or len(times) >= 200:
            return times


def _timing(of_rounds: list[list[float]], typical: Callable[[Sequence[float]], float]) -> Timing:
    seconds = typical([x for times in of_rounds for x in times])
    if len(of_rounds) < 2:
        return Timing(seconds, 0.0)
    low, _, high = statistics.quantiles(map(typical, of_rounds), method="inclusive")
    return Timing(seconds, (high - low) / 2 / max(seconds, 1e-12))


def clock_name(device: str = "cpu") -> str:
    """Names the clock. A thread's CPU time is the cost of a call even if other processes use the machine."""
    on_cpu = torch.device(device).type == "cpu"
    return "thread CPU time, minima" if on_cpu and torch.get_num_threads() == 1 else WALL


def _wait(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(function: Callable[[], Any], device: str = "cpu") -> int | None:
    """The peak memory of a call of function, in bytes, including its result.

    On a CPU it is the growth of the process (Linux only), on a GPU PyTorch's allocations.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        start = torch.cuda.memory_allocated(device)
        result = function()
        del result
        return torch.cuda.max_memory_allocated(device) - start
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not status.exists():
        return None

    def read(key: str) -> int:
        line = next(line for line in status.read_text().splitlines() if line.startswith(key))
        return int(line.split()[1]) * 1024

    try:
        ctypes.CDLL(None).malloc_trim(0)  # otherwise the call could reuse memory freed before, unnoticed
        clear.write_text("5")  # resets the peak to the current size
    except (OSError, AttributeError):
        return None
    size = read("VmRSS:")
    result = function()
    peak = read("VmHWM:")
    del result
    return peak - size


def machine(device: str = "cpu") -> dict[str, Any]:
    """Describes the machine and the software of a measurement."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return {
        "cpu": model,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else device,
        "clock": clock_name(device),
        "instruction_set": native.instruction_set(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "linrope": linrope.__version__,
        "commit": _commit(),
    }


def _commit() -> str | None:
    """The commit of the checkout that linrope runs from; None if it is not a checkout."""
    command = ["git", "-C", str(Path(linrope.__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def save(path: Path, result: Mapping[str, Any]) -> None:
    """Writes a result as JSON, after the date and the description of this machine."""
    whole = {"date": datetime.date.today().isoformat(), "machine": machine()} | dict(result)
    replace_file(path, lambda temporary: temporary.write_text(json.dumps(whole, indent=1) + "\n"))


def save_new(folder: Path, name: str, result: Mapping[str, Any]) -> Path:
    """``save`` to a new file, name-date.json or, if that or its plot exists, name-date-2.json and so on."""
    stem = f"{name}-{datetime.date.today().isoformat()}"
    path, number = folder / f"{stem}.json", 2
    while path.exists() or path.with_suffix(".png").exists():
        path, number = folder / f"{stem}-{number}.json", number + 1
    save(path, result)
    return path

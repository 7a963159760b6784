"""Times functions that take turns, and says how much the rounds differ."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

NOISY = 0.15  # if the noise is larger, further rounds are measured; if it remains, a warning is printed
WALL = "wall time, medians"


class Timing(NamedTuple):
    seconds: float  # the typical time of a call
    noise: float  # half the interquartile range of the rounds' typical times, divided by seconds


def measured(
    functions: Mapping[str, Callable[[], Any]], rounds: int = 5, budget: float = 2.0, device: str = "cpu"
) -> dict[str, Timing]:
    """The time of each function. They take turns, so that a busy machine slows all of them alike.

    Times are medians of the wall time. With one thread they are minima of the thread's CPU time, since other
    processes can only lengthen it. If the rounds differ (``NOISY``), as many rounds again are measured.

    Args:
        functions: the functions by name.
        rounds: the number of turns.
        budget: seconds per function over these rounds, with at least one call a round.
        device: where the functions compute.
    """
    one_thread = clock_name(device) != WALL
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


def typical_seconds(
    functions: Mapping[str, Callable[[], Any]], rounds: int = 5, budget: float = 2.0, device: str = "cpu"
) -> dict[str, float]:
    """``measured`` without the noise."""
    return {name: timing.seconds for name, timing in measured(functions, rounds, budget, device).items()}


def clock_name(device: str = "cpu") -> str:
    """Names the clock. A thread's CPU time is the cost of a call even if other processes use the machine."""
    on_cpu = torch.device(device).type == "cpu"
    return "thread CPU time, minima" if on_cpu and torch.get_num_threads() == 1 else WALL


def _wait(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)

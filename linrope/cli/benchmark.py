"""Measures the cases of cases.py: time in turns, memory, and what they come to."""

import ctypes
import math
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import linrope
from linrope.cli.cases import AttentionCase, DecodeCase

CHUNK = 64  # C of the operation count
_STEPS = 20  # decoding steps per measurement


def flop_per_token_head(d: int, e: int) -> int:
    """2CD + 2CE + 4DE + 2CD with C = 64: scores, values, state, normalizer."""
    return 2 * CHUNK * d + 2 * CHUNK * e + 4 * d * e + 2 * CHUNK * d


def median_seconds(
    functions: Mapping[str, Callable[[], Any]], rounds: int = 5, budget: float = 2.0
) -> dict[str, float]:
    """Median wall time of each function; they take turns, so that a busy machine hits all alike.

    budget: seconds per function over all rounds; at least one call a round.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            if not times[name] or times[name][-1] < 1:  # warm-up, which long calls can do without
                function()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            end = time.perf_counter() + budget / rounds
            while True:
                start = time.perf_counter()
                function()
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                now = time.perf_counter()
                times[name].append(now - start)
                if now >= end or len(times[name]) >= 200:
                    break
    return {name: statistics.median(values) for name, values in times.items()}


def peak_memory(function: Callable[[], Any]) -> int | None:
    """Bytes that the process grows by at most while function runs, its result included (Linux)."""
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not status.exists():
        return None

    def read(key: str) -> int:
        line = next(line for line in status.read_text().splitlines() if line.startswith(key))
        return int(line.split()[1]) * 1024

    try:
        ctypes.CDLL(None).malloc_trim(0)  # or memory freed earlier would be used again, and not seen
        clear.write_text("5")  # sets the peak back to the present size
    except (OSError, AttributeError):
        return None
    before = read("VmRSS:")
    result = function()
    peak = read("VmHWM:")
    del result
    return peak - before


def matmul_case() -> Callable[[], Tensor]:
    a, b, out = torch.randn(1024, 1024), torch.randn(1024, 1024), torch.empty(1024, 1024)
    return lambda: torch.mm(a, b, out=out)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return {
        "cpu": model,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "linrope": linrope.__version__,
        "commit": _commit(),
    }


def _commit() -> str | None:
    """Of the checkout that linrope runs from, if it is one."""
    command = ["git", "-C", str(Path(linrope.__file__).parent), "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return found.stdout.strip() or None


def attention_row(
    n: int, previous: dict[str, Any] | None, softmax_limit: float, budget: float, rounds: int
) -> dict[str, Any]:
    """All figures at length n. Softmax attention is left out where one call would take longer than
    softmax_limit seconds, judged by the previous row: its time grows with the square of n."""
    case = AttentionCase(n)
    case.check()
    row: dict[str, Any] = {"n": n, "softmax_backend": case.softmax_backend()}
    runs: dict[str, Callable[[], Any]] = {"matmul": matmul_case()}
    for mode, run in (("forward", case.forward), ("training", case.training)):
        runs[f"linrope_{mode}"] = partial(run, case.linrope)
        growth = 0.0
        if previous is not None:
            growth = (n / previous["n"]) ** 2 * (previous[mode]["softmax_seconds"] or math.inf)
        if growth <= softmax_limit:
            runs[f"softmax_{mode}"] = partial(run, case.softmax)
    if "softmax_forward" in runs:
        case.check_softmax()
    seconds = median_seconds(runs, rounds, budget)
    row["matmul_flops"] = 2 * 1024**3 / seconds["matmul"]
    for mode, run in (("forward", case.forward), ("training", case.training)):
        fast, slow = seconds[f"linrope_{mode}"], seconds.get(f"softmax_{mode}")
        row[mode] = {
            "linrope_seconds": fast,
            "softmax_seconds": slow,
            "linrope_tokens_per_second": case.tokens / fast,
            "softmax_tokens_per_second": slow and case.tokens / slow,
            "ratio": slow and slow / fast,
            "linrope_bytes": peak_memory(partial(run, case.linrope)),
            "softmax_bytes": slow and peak_memory(partial(run, case.softmax)),
        }
    flop = case.tokens * case.heads * flop_per_token_head(case.dim, case.dim)
    row["flop_fraction"] = flop / seconds["linrope_forward"] / row["matmul_flops"]
    tensor = case.inputs[0].numel() * case.inputs[0].element_size()
    used = row["training"]["linrope_bytes"]
    # Beyond inputs, outputs and gradients: q, k, v, out and their gradients are 8 tensors, 4 of them new.
    row["extra_memory_fraction"] = None if used is None else max(0, used - 4 * tensor) / (8 * tensor)
    return row


def overtaking(rows: list[dict[str, Any]], mode: str) -> int | None:
    """The smallest length from which on linrope is the faster one."""
    length = None
    for row in reversed(rows):
        ratio = row[mode]["ratio"]
        if ratio is not None and ratio < 1:
            break
        length = row["n"]
    return length


def growth(short: int, long: int, budget: float, rounds: int) -> dict[str, Any]:
    """Time per token at length long over that at length short, in turns: 1 is linear."""
    cases = {n: AttentionCase(n) for n in (short, long)}
    ratios = {}
    for mode in ("forward", "training"):
        runs = {str(n): partial(getattr(case, mode), case.linrope) for n, case in cases.items()}
        seconds = median_seconds(runs, rounds * 2, budget * 2)
        ratios[mode] = seconds[str(long)] / long / (seconds[str(short)] / short)
    return {"short": short, "long": long, **ratios}


def decode_rows(positions: list[int], budget: float, rounds: int) -> list[dict[str, Any]]:
    """Time per token at each position; linrope's steps take turns, so that their ratio means something."""
    cases = [DecodeCase(position) for position in positions]
    for case in cases:
        case.check()
    linrope_seconds = median_seconds(
        {str(case.position): partial(_repeat, case.linrope) for case in cases}, rounds * 20, budget * 4
    )
    rows = []
    for case in cases:
        case.fill_cache()
        case.check_softmax()
        softmax = median_seconds({"softmax": case.softmax}, rounds, budget)["softmax"]
        assert case.cache is not None
        cache = sum(x.numel() * x.element_size() for x in case.cache)
        case.cache = None
        fast = linrope_seconds[str(case.position)] / _STEPS
        state = sum(x.numel() * x.element_size() for x in (case.state.kv, case.state.z))
        rows.append({
            "position": case.position,
            "linrope_seconds": fast,
            "softmax_seconds": softmax,
            "ratio": softmax / fast,
            "state_bytes": state,
            "cache_bytes": cache,
        })  # fmt: skip
    return rows


def _repeat(function: Callable[[], Any]) -> None:
    for _ in range(_STEPS):
        function()

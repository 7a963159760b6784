"""Measures the cases of cases.py: times, memory, and figures derived from them."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.bench.cases import AttentionCase, Case, DecodeCase
from benchmarks.bench.peers import peers_of
from benchmarks.measuring import Timing, measured, peak_memory

CHUNK = 32  # C of the operation count
_STEPS = 20  # decoding steps per measurement


def flop_per_token_head(f: int, e: int) -> int:
    """2 C f + C e + 4 f e, C = 32: scores of whole tiles, values of half tiles, state read and written."""
    return 2 * CHUNK * f + CHUNK * e + 4 * f * e


def matmul_case(case: Case) -> Callable[[], Tensor]:
    a, b, out = torch.randn(3, 1024, 1024).to(case.device, case.dtype)
    return lambda: torch.mm(a, b, out=out)


@dataclass(frozen=True)
class Effort:
    """How long to measure: seconds for one call of softmax attention, seconds per figure, and rounds."""

    softmax_limit: float
    budget: float
    rounds: int

    def measured(
        self, runs: Mapping[str, Callable[[], Any]], device: str, times: int = 1
    ) -> dict[str, Timing]:
        return measured(runs, self.rounds * times, self.budget * times, device)

    def seconds(self, runs: Mapping[str, Callable[[], Any]], device: str, times: int = 1) -> dict[str, float]:
        return {name: timing.seconds for name, timing in self.measured(runs, device, times).items()}


def attention_row(
    sizes: Case, n: int, previous: dict[str, Any] | None, effort: Effort
) -> tuple[dict[str, Any], dict[str, str]]:
    """All figures at length n, and for each peer without figures the reason.

    Leaves out softmax attention if one call would take longer than the effort allows. The estimate comes from
    the previous row, since the time grows with the square of n.
    """
    case = AttentionCase(n, **vars(sizes))
    case.check()
    case.check(case.eager)
    peers, reasons = peers_of(case)
    row: dict[str, Any] = {"n": n, "softmax_backend": case.softmax_backend()}
    runs: dict[str, Callable[[], Any]] = {"matmul": matmul_case(sizes)}
    for mode, run in (("forward", case.forward), ("training", case.training)):
        runs[f"linrope_{mode}"] = partial(run, case.linrope)
        runs[f"eager_{mode}"] = partial(run, case.eager)
        for name, (plain, attend) in peers.items():
            runs[f"{name}_{mode}"] = partial(getattr(plain, mode), attend)
        if _softmax_seconds(sizes, n, previous, mode) <= effort.softmax_limit:
            runs[f"softmax_{mode}"] = partial(run, case.softmax)
    if "softmax_forward" in runs:
        case.check_softmax()
    timings = effort.measured(runs, sizes.device)
    seconds = {name: timing.seconds for name, timing in timings.items()}
    row["matmul_flops"], row["matmul_spread"] = 2 * 1024**3 / seconds["matmul"], timings["matmul"].noise
    for mode, run in (("forward", case.forward), ("training", case.training)):
        fast, slow = seconds[f"linrope_{mode}"], seconds.get(f"softmax_{mode}")
        row[mode] = {
            "linrope_seconds": fast,
            "softmax_seconds": slow,
            "eager_seconds": seconds[f"eager_{mode}"],
            "peer_seconds": {name: seconds[f"{name}_{mode}"] for name in peers},
            "linrope_tokens_per_second": case.tokens / fast,
            "softmax_tokens_per_second": slow and case.tokens / slow,
            "ratio": slow and slow / fast,
            "linrope_spread": timings[f"linrope_{mode}"].noise,
            "softmax_spread": slow and timings[f"softmax_{mode}"].noise,
            "linrope_bytes": peak_memory(partial(run, case.linrope), sizes.device),
            "softmax_bytes": slow and peak_memory(partial(run, case.softmax), sizes.device),
        }
    flop = case.tokens * case.heads * flop_per_token_head(case.options["feature_map"].feature_dim, case.dim)
    row["flop_fraction"] = flop / seconds["linrope_forward"] / row["matmul_flops"]
    used = row["training"]["linrope_bytes"]
    # A training call must allocate out (as large as g_out) and the gradients of q, k and v: the rest is
    # extra.
    inputs, out = sum(x.nbytes for x in case.inputs), case.g_out.nbytes
    extra = None if used is None else max(0, used - inputs - out)
    row["extra_memory_fraction"] = None if extra is None else extra / (2 * inputs + 2 * out)
    return row, reasons


def _softmax_seconds(sizes: Case, n: int, previous: dict[str, Any] | None, mode: str) -> float:
    """Estimates the time of softmax attention from the previous row; infinite if that left it out."""
    if previous is not None:
        seconds = float(previous[mode]["softmax_seconds"] or math.inf)
        return seconds * (n / int(previous["n"])) ** 2
    if n <= 1024:
        return 0.0
    case = AttentionCase(1024, **vars(sizes))
    run = {"": partial(getattr(case, mode), case.softmax)}
    return (n / 1024) ** 2 * measured(run, 1, 0.1, sizes.device)[""].seconds


def overtaking(rows: list[dict[str, Any]], mode: str) -> int | None:
    """The smallest measured length from which linrope is not slower at any measured length; None: there is none.

    Lengths without a ratio were not measured: softmax attention would have taken too long there.
    """
    length = None
    for row in reversed(rows):
        if (ratio := row[mode]["ratio"]) is None:
            continue
        if ratio < 1:
            break
        length = row["n"]
    return length


def growth(sizes: Case, short: int, long: int, effort: Effort) -> dict[str, Any]:
    """The time per token at length long divided by that at length short: 1 is linear growth."""
    cases = {n: AttentionCase(n, **vars(sizes)) for n in (short, long)}
    ratios = {}
    for mode in ("forward", "training"):
        runs = {str(n): partial(getattr(case, mode), case.linrope) for n, case in cases.items()}
        seconds = effort.seconds(runs, sizes.device, times=2)
        ratios[mode] = seconds[str(long)] / long / (seconds[str(short)] / short)
    return {"short": short, "long": long, **ratios}


def extra_costs(n: int, effort: Effort) -> dict[str, Any]:
    """Times with decay, gates, steps, erase, packing, in bfloat16, with two threads, divided by the plain call's."""
    case, half = AttentionCase(n), AttentionCase(n, dtype=torch.bfloat16)
    half.check()
    variants: dict[str, tuple[AttentionCase, Callable[[], Tensor]]] = {"plain": (case, case.linrope)}
    for name, options in case.variants().items():
        variants[name] = case, partial(case.linrope, **options)
        with torch.no_grad():
            out, expected = case.linrope(**options), case.linrope(**options, backend="eager")
        torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4)
    variants["bfloat16"] = half, half.linrope
    costs: dict[str, Any] = {"n": n}
    for mode in ("forward", "training"):
        runs = {name: partial(getattr(inputs, mode), attend) for name, (inputs, attend) in variants.items()}
        seconds = effort.seconds(runs, "cpu")
        costs[mode] = {name: x / seconds["plain"] for name, x in seconds.items() if name != "plain"}
        if (os.cpu_count() or 1) > 1:
            costs[mode]["two threads"] = _two_threads(partial(getattr(case, mode), case.linrope), effort)
    return costs


def _two_threads(call: Callable[[], Any], effort: Effort) -> float:
    """The time of a call with two threads divided by that with one, both in wall time."""

    def run(threads: int) -> None:
        torch.set_num_threads(threads)
        call()

    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # with one, the thread's CPU time would be measured
    try:
        seconds = effort.seconds({str(count): partial(run, count) for count in (1, 2)}, "cpu")
    finally:
        torch.set_num_threads(threads)
    return seconds["2"] / seconds["1"]


def decode_rows(sizes: Case, positions: list[int], effort: Effort) -> list[dict[str, Any]]:
    """The time per token at each position. linrope's steps at all positions take turns, to be comparable."""
    cases = [DecodeCase(position, **vars(sizes)) for position in positions]
    for case in cases:
        case.check()
    kinds = ("linrope", "linrope_donated", "linrope_layer")
    runs = {
        f"{kind} {case.position}": partial(_repeat, getattr(case, kind)) for kind in kinds for case in cases
    }
    timings = measured(runs, effort.rounds * 10, effort.budget * 2, sizes.device)
    seconds = {name: timing.seconds / _STEPS for name, timing in timings.items()}
    rows = []
    for case in cases:
        case.fill_cache()
        case.check_softmax()
        others = effort.measured({"step": case.softmax, "layer": case.softmax_layer}, sizes.device)
        softmax, softmax_layer = others["step"].seconds, others["layer"].seconds
        assert case.cache is not None
        cache = sum(x.numel() * x.element_size() for x in case.cache)
        case.cache = None
        fast, donated, layer = (seconds[f"{kind} {case.position}"] for kind in kinds)
        state = sum(x.numel() * x.element_size() for x in (case.state.kv, case.state.z))
        rows.append(
            {
                "position": case.position,
                "linrope_seconds": fast,
                "linrope_donated_seconds": donated,
                "prepared": case.step is not None,
                "softmax_seconds": softmax,
                "ratio": softmax / fast,
                "linrope_layer_seconds": layer,
                "softmax_layer_seconds": softmax_layer,
                "layer_ratio": softmax_layer / layer,
                "linrope_spread": max(timings[f"{kind} {case.position}"].noise for kind in kinds),
                "softmax_spread": max(timing.noise for timing in others.values()),
                "state_bytes": state,
                "cache_bytes": cache,
            }
        )
    return rows


def _repeat(function: Callable[[], Any]) -> None:
    for _ in range(_STEPS):
        function()

"""Measures transformers' own models with and without linrope: ``linrope bench --transformers``."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.bench import plots
from benchmarks.bench.report import noise_warning, times
from benchmarks.bench.run import stages
from benchmarks.configurations import FAMILIES, WIDE, model_of, options_of
from benchmarks.measuring import machine, measured, peak_memory, save_new
from linrope.cli.console import plain_table
from linrope.common.argument_checks import check_name
from linrope.integrations import transformers as linrope_transformers
from linrope.integrations.transformers.families import KIMI_DELTA_ATTENTION

LENGTHS = [512, 2048, 8192]
KINDS = ("prefill", "training", "decoding")
SIDES = ("transformers", "linrope")
# The largest allowed difference of a logit, as a fraction of the largest logit. In half precision the sides round
# differently in every layer.
TOLERANCE = {"float32": 2e-5, "bfloat16": 0.05, "float16": 0.01}
# transformers' own Kimi Delta Attention takes 32 KB of memory per token and head of 128 features, and with gradients a
# multiple of that in each layer
LONGEST = {family: {"prefill": 2048, "training": 512, "decoding": 2048} for family in KIMI_DELTA_ATTENTION}
_STEPS = 10  # decoding steps per call
SIZE = WIDE


class FamilyBenchmark:
    """A model of a family with random weights, and the calls that are measured."""

    def __init__(self, family: str, dtype: str = "float32") -> None:
        import transformers

        quiet: Any = transformers.logging
        quiet.set_verbosity_error()  # its fallback says that it is slow
        torch.manual_seed(0)
        self.family, self.dtype = family, dtype
        self.model: Any = model_of(family, SIZE).to(getattr(torch, dtype))

    def tokens(self, batch: int, length: int) -> Tensor:
        return torch.randint(3, options_of(self.family, SIZE)["vocab_size"], (batch, length))

    def call(self, kind: str, batch: int, length: int) -> Callable[[], Tensor]:
        """Returns a function that computes, and returns the logits of the last token."""
        self.model.train(kind == "training")
        ids = self.tokens(batch, length)

        def prefill() -> Tensor:
            with torch.no_grad():
                result: Tensor = self.model(ids, use_cache=True, logits_to_keep=1).logits
            return result

        def training() -> Tensor:
            self.model.zero_grad(set_to_none=True)
            result = self.model(ids, labels=ids, use_cache=False)
            result.loss.backward()
            last: Tensor = result.logits[:, -1:].detach()
            return last

        return {"prefill": prefill, "training": training}.get(kind) or self._decoding(ids)

    def _decoding(self, ids: Tensor) -> Callable[[], Tensor]:
        with torch.no_grad(), linrope_transformers.enable(self.family):
            result = self.model(ids, use_cache=True, logits_to_keep=1)
        name = next(x for x in ("cache", "cache_params", "past_key_values") if x in result)  # by version
        start, following = result[name], self.tokens(len(ids), _STEPS)

        def decoding() -> Tensor:
            cache = copy.deepcopy(start)  # each call starts from the same token
            with torch.no_grad():
                for i in range(_STEPS):
                    options = {name: cache, "use_cache": True, "logits_to_keep": 1}
                    logits: Tensor = self.model(following[:, i : i + 1], **options).logits
            return logits

        return decoding


def measure(
    benchmark: FamilyBenchmark, kind: str, batch: int, length: int, rounds: int, budget: float
) -> dict[str, Any]:
    """Both sides of one case: seconds per call (or step), peak bytes, and the difference of their outputs."""
    run = benchmark.call(kind, batch, length)

    def with_linrope() -> Tensor:
        with linrope_transformers.enable(benchmark.family):
            return run()

    functions = dict(zip(SIDES, (run, with_linrope), strict=True))
    peaks = {side: peak_memory(function) for side, function in functions.items()}
    expected, got = run(), with_linrope()
    difference = float((got - expected).abs().max() / expected.abs().max())
    if not difference <= TOLERANCE[benchmark.dtype]:
        raise RuntimeError(
            f"{benchmark.family}, {kind}, {length} tokens: outputs differ by {difference:.2g} of the largest logit, "
            f"expected at most {TOLERANCE[benchmark.dtype]}"
        )
    timings = measured(functions, rounds, budget)
    steps = _STEPS if kind == "decoding" else 1
    return {
        "kind": kind,
        "batch": batch,
        "length": length,
        "seconds": {side: timing.seconds / steps for side, timing in timings.items()},
        "spread": max(timing.noise for timing in timings.values()),
        "bytes": peaks,
        "difference": difference,
    }


def compare(
    family: str,
    dtype: str,
    lengths: list[int] | None,
    rounds: int,
    budget: float,
    out: Path,
    console: Console,
) -> Path:
    """Measures a family, prints a table, and writes transformers-<family>-<date>.json and .png.

    A dtype other than float32 and a number of threads other than 1 are part of the files' names. lengths: None for
    those of ``LENGTHS`` that transformers' own code can take.
    """
    check_name("--transformers", family, tuple(sorted(FAMILIES)))
    benchmark = FamilyBenchmark(family, dtype)
    longest = LONGEST.get(family, {}) if lengths is None else {}
    lengths = lengths or LENGTHS
    cases = [(kind, 1, n) for kind in KINDS for n in lengths if n <= longest.get(kind, n)]
    cases.append(("decoding", 8, lengths[0]))
    rows = []
    with stages(console, len(cases)) as begin:
        for kind, batch, n in cases:
            begin(f"{family}: {kind}, {n:,} tokens")
            rows.append(measure(benchmark, kind, batch, n, rounds, budget))
    parameters = sum(x.numel() for x in benchmark.model.parameters())
    result = {"machine": machine(), "family": family, "dtype": dtype, "parameters": parameters, "rows": rows}
    console.print(table(result), soft_wrap=False)
    noise = {f"{row['kind']} {row['length']:,}": row["spread"] for row in rows}
    for line in noise_warning(noise):
        console.print(line)
    name = f"transformers-{family}"
    if dtype != "float32":
        name += f"-{dtype}"
    if (threads := torch.get_num_threads()) > 1:
        name += f"-{threads}-threads"
    path = save_new(out, name, result)
    plots.plot_family(result, path.with_suffix(".png"))
    console.print(f"written: {path}, {path.with_suffix('.png')}")
    return path


def table(result: dict[str, Any]) -> Table:
    """A line for each case."""
    model = f"{result['family']} of transformers, {result['parameters'] / 1e6:.0f} M parameters"
    made = plain_table(f"{model}, {result['dtype']}, ms and MB")
    columns = ("", "batch", "tokens", "before", "linrope", "faster", "±", "MB before", "MB linrope", "diff")
    for column in columns:
        made.add_column(column, justify="left" if not column else "right")
    for row in result["rows"]:
        (slow, fast), peaks = row["seconds"].values(), row["bytes"].values()
        memory = ["" if x is None else f"{x / 1e6:,.0f}" for x in peaks]
        made.add_row(
            row["kind"],
            str(row["batch"]),
            f"{row['length']:,}",
            f"{slow * 1e3:,.1f}",
            f"{fast * 1e3:,.1f}",
            times(slow / fast),
            f"{row['spread']:.0%}",
            *memory,
            f"{row['difference']:.0e}",
        )
    return made

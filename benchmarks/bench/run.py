"""Runs the benchmark: measures all cases, prints the tables, and writes the JSON file and the plot."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.bench import plots, report, rows
from benchmarks.bench.cases import Case, shape_of
from benchmarks.bench.rows import Effort
from benchmarks.measuring import machine, save_new
from linrope.cli.training import Lines, progress_bar


@contextmanager
def stages(console: Console, total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar, and the function that begins a stage. Where there is no terminal, stages are lines."""
    say = Lines(console)
    with progress_bar(console) as progress:
        task = progress.add_task("", total=total, completed=-1)

        def begin(description: str) -> None:
            progress.update(task, description=description, advance=1)
            say(f"measuring {description}")

        yield begin


def measure(
    case: Case,
    lengths: list[int],
    positions: list[int],
    effort: Effort,
    out: Path,
    name: str,
    console: Console,
) -> None:
    """Runs the benchmark, prints the results, and writes name-date.json and .png into out."""
    attention: list[dict[str, Any]] = []
    peers: dict[str, str] = {}
    scaling = costs = None
    with stages(console, len(lengths) + 3) as begin:
        for n in lengths:
            begin(f"N = {n:,}")
            row, reasons = rows.attention_row(case, n, attention[-1] if attention else None, effort)
            attention.append(row)
            peers |= reasons
        if lengths[-1] > 4096:
            begin("growth")
            scaling = rows.growth(case, 4096, lengths[-1], effort)
        if case == Case():
            begin("extra costs")
            costs = rows.extra_costs(min(4096, max(128, lengths[-1])), effort)
        begin("decoding")
        decode = rows.decode_rows(case, positions, effort) if positions else []
    result = {
        "machine": machine(case.device),
        "case": shape_of(case),
        "attention": attention,
        "peers_not_run": peers,
        "overtaking": {mode: rows.overtaking(attention, mode) for mode in ("forward", "training")},
        "growth": scaling,
        "costs": costs,
        "decode": decode,
    }
    report.show(result, console)
    path = save_new(out, name, result)
    plots.plot(result, path.with_suffix(".png"))
    console.print(f"written: {path}, {path.with_suffix('.png')}")

"""Runs the benchmark: measures all cases, prints the tables, and writes the JSON file and the plot."""

import datetime
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from linrope.cli.bench import benchmark, plots, report
from linrope.cli.bench.benchmark import Effort
from linrope.cli.bench.cases import Case, shape_of
from linrope.cli.training import Lines, progress_bar
from linrope.common.files import replace_file, unused


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
    rows: list[dict[str, Any]] = []
    peers: dict[str, str] = {}
    say = Lines(console)
    with progress_bar(console) as progress:
        task = progress.add_task("benchmark", total=len(lengths) + 1)

        def stage(description: str) -> None:
            progress.update(task, description=description)
            say(f"measuring {description}")

        for n in lengths:
            stage(f"N = {n:,}")
            row, reasons = benchmark.attention_row(case, n, rows[-1] if rows else None, effort)
            rows.append(row)
            peers |= reasons
            progress.advance(task)
        scaling = costs = None
        if lengths[-1] > 4096:
            stage("growth")
            scaling = benchmark.growth(case, 4096, lengths[-1], effort)
        if case == Case():
            stage("extra costs")
            costs = benchmark.extra_costs(min(4096, max(128, lengths[-1])), effort)
        stage("decoding")
        decode = benchmark.decode_rows(case, positions, effort) if positions else []
        progress.advance(task)
    today = datetime.date.today().isoformat()
    result = {
        "date": today,
        "machine": benchmark.machine(case.device),
        "case": shape_of(case),
        "attention": rows,
        "peers_not_run": peers,
        "overtaking": {mode: benchmark.overtaking(rows, mode) for mode in ("forward", "training")},
        "growth": scaling,
        "costs": costs,
        "decode": decode,
    }
    report.show(result, console)
    path = unused(out, f"{name}-{today}")
    replace_file(path, lambda temporary: temporary.write_text(json.dumps(result, indent=1) + "\n"))
    picture = path.with_suffix(".png")
    plots.plot(result, picture)
    console.print(f"written: {path}, {picture}")

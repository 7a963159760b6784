"""``linrope plot``: the losses of runs of ``linrope train`` by step."""

from itertools import accumulate
from pathlib import Path
from typing import Any

from linrope.cli.charts import LINES, charts, labels, legend_below, save
from linrope.common.files import parse_json


def plot(runs: list[Path], out: Path) -> None:
    """Draws the training loss, smoothed, and the held-out loss of each run into an SVG or PNG file.

    Raises:
        FileNotFoundError, ValueError: a run has no metrics, or comes twice.
    """
    named = dict(zip(labels(runs, "RUN"), map(read, runs), strict=True))
    figure, axes = charts(10, 6)
    for index, (name, rows) in enumerate(named.items()):
        color = LINES[index % len(LINES)]
        steps = [row["step"] for row in rows]
        losses, marker = smoothed([row["bits_per_byte"] for row in rows]), "o" if len(rows) == 1 else ""
        axes.plot(steps, losses, marker=marker, color=color, label=f"{name}, training")
        held_out = [
            (row["step"], row["held_out_bits_per_byte"]) for row in rows if "held_out_bits_per_byte" in row
        ]
        if held_out:
            axes.plot(*zip(*held_out, strict=True), "o:", color=color, label=f"{name}, held out")
    axes.set(xlabel="step", ylabel="bits per byte")
    axes.grid()
    legend_below(figure, 2)
    save(figure, out)


def read(run: Path) -> list[dict[str, Any]]:
    """The metrics of each step, without a last line that is not complete: the run was killed or still writes it."""
    path = run / "metrics.jsonl"
    if run.is_file():
        raise ValueError(f"RUN={run}: got a file, expected the folder of a run")
    if not path.is_file():
        raise FileNotFoundError(f"{run}: has no metrics.jsonl; expected the folder of a run of linrope train")
    lines = enumerate(path.read_text().splitlines(keepends=True), 1)
    rows = [parse_json(line, f"{path}, line {number}") for number, line in lines if line.endswith("}\n")]
    if not rows or not all(isinstance(row, dict) and {"step", "bits_per_byte"} <= row.keys() for row in rows):
        raise ValueError(f"{path}: expected the metrics of at least one step, with step and bits_per_byte")
    return rows


def smoothed(losses: list[float]) -> list[float]:
    """Means around each step, over up to 4% of the steps, of as many before it as after it: so no curve lags behind.

    >>> from linrope.cli.plotting import smoothed
    >>> smoothed([3.0 * step for step in range(100)])[50], smoothed([4.0, 2.0])
    (150.0, [4.0, 2.0])
    """
    sums, last = [0.0, *accumulate(losses)], len(losses) - 1
    sides = [min(last // 50, step, last - step) for step in range(len(losses))]
    return [(sums[step + side + 1] - sums[step - side]) / (2 * side + 1) for step, side in enumerate(sides)]

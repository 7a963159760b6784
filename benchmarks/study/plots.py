"""Plots, from the lines of the results alone: few curves in each, those that a question compares."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.study.report import Rows, counted

# Curves of bits per byte by position, a panel each.
PANELS: dict[str, list[str]] = {
    "positions": ["softmax-rope", "softmax-none", "softmax-sinusoidal", "linear", "eq19", "rope-before"],
    "decay and gate": ["eq19", "retnet", "spread", "learned", "gate-rope", "gate"],
    "beside others": ["softmax-rope", "llama", "mamba-2", "gate-rope", "block-quarter", "block-softmax"],
}


def plots(folder: Path, out: Path) -> list[Path]:
    """The pictures that the folder's results suffice for, written into out.

    Raises:
        ValueError: as in report.counted.
    """
    import matplotlib

    matplotlib.use("Agg")
    found = counted(folder)
    out.mkdir(parents=True, exist_ok=True)
    drawn = []
    for task, rows in found.items():
        if task.startswith("language"):
            height = 1 + 0.21 * len(rows)
            drawn.append(_draw(out / f"{task}.png", 1, partial(_bits, rows), (7, height)))
            drawn.append(_draw(out / f"{task}-positions.png", 3, partial(_positions, rows), (12, 4)))
        else:
            drawn.append(
                _draw(out / f"{task}.png", 1, partial(_shares, task, rows), (max(7, 0.8 * len(rows)), 4))
            )
    sizes = {task: rows for task, rows in found.items() if task.removeprefix("recall-").isdecimal()}
    if len(sizes) > 1:
        drawn.append(_draw(out / "recall.png", 1, partial(_recall, sizes), (7, 4)))
    return drawn


def _draw(path: Path, panels: int, draw: Callable[[Any], None], size: tuple[float, float]) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, panels, figsize=size, sharey=True, layout="constrained")
    draw(axes)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)
    return path


def _results(rows: Rows, model: str) -> list[dict[str, Any]]:
    """The values of the model's runs that did not diverge."""
    return [line["results"] for line in rows.get(model, []) if line["results"] is not None]


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean, and how far the least and the largest are from it."""
    middle = mean(values)
    return middle, middle - min(values), max(values) - middle


def _bits(rows: Rows, axes: Any) -> None:
    """A row per model, the best one on top."""
    bits = {model: _spread([x["bits"] for x in found]) for model in rows if (found := _results(rows, model))}
    names = sorted(bits, key=lambda model: -bits[model][0])
    values, low, high = zip(*(bits[name] for name in names))
    axes.errorbar(values, names, xerr=(low, high), fmt="o", markersize=4, capsize=3)
    axes.set(xlabel="bits per byte: mean, least and largest seed", ylim=(-0.7, len(names) - 0.3))
    axes.grid(alpha=0.3)


def _positions(rows: Rows, panels: Any) -> None:
    """Bits per byte by position beyond those on the same bytes with no more than the trained length."""
    for axes, (title, names) in zip(panels, PANELS.items()):
        for model in names:
            found = _results(rows, model)
            if not found:
                continue
            whole, alone = (
                [mean(x) for x in zip(*(result[key] for result in found))]
                for key in ("by position", "by position, 1x")
            )
            gaps = [x - y for x, y in zip(whole, alone)]
            # Over whole windows of the trained length, at whose beginnings the shorter context is shortest.
            parts = [mean(gaps[i : i + 8]) for i in range(0, len(gaps), 8)]
            axes.plot([i + 0.5 for i in range(len(parts))], parts, label=model, marker=".")
        axes.axhline(0, color="gray", linewidth=0.8)
        axes.set(title=title, xlabel="position / trained length")
        axes.grid(alpha=0.3)
        if axes.get_lines()[:-1]:
            axes.legend(fontsize="small", ncols=2, loc="upper left")
    low, high = panels[0].get_ylim()  # which all share; room for the legends
    panels[0].set(
        ylabel="bits per byte beyond those with\nno more than the trained length",
        ylim=(low, high + 0.3 * (high - low)),
    )


def _shares(task: str, rows: Rows, axes: Any) -> None:
    """Bars: the share of right answers by length, a group per model."""
    names = [model for model in rows if _results(rows, model)]
    lengths = list(_results(rows, names[0])[0]) if names else []
    width = 0.8 / max(1, len(lengths))
    for i, length in enumerate(lengths):
        at = [x + (i - (len(lengths) - 1) / 2) * width for x in range(len(names))]
        values, low, high = zip(*(_spread([x[length] for x in _results(rows, name)]) for name in names))
        axes.bar(at, values, width, label=length, yerr=(low, high), capsize=2)
    floor = next(iter(next(iter(rows.values()))[0]["floor"].values()))
    axes.axhline(floor, color="gray", linestyle=":", label="guessing")
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right", rotation_mode="anchor")
    axes.set(
        title=f"{task}: mean of the seeds, least and largest", ylabel="share of right answers", ylim=(0, 1.03)
    )
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))


def _recall(sizes: dict[str, Rows], axes: Any) -> None:
    """Over the most pairs trained on, for models of several sizes.

    Softmax attention is drawn at the state size of linear attention with the same heads.
    """
    count = Counter(model for rows in sizes.values() for model in rows)
    models = [model for model in count if count[model] > 1 or model == "softmax-rope"]
    # Models with equal results stand side by side. On a logarithmic axis a factor is a distance.
    beside = {model: 1.025 ** (i - (len(models) - 1) / 2) for i, model in enumerate(models)}
    ticks = set()
    for model in models:
        points = []
        for task, rows in sizes.items():
            if found := _results(rows, model):
                line = rows[model][0]
                pairs, layers = max(line["settings"]["trained_pairs"]), line["settings"]["layers"]
                size = (line["state_numbers"] or int(task.removeprefix("recall-")) * layers) // layers
                points.append((size, *_spread([x[f"{pairs} pairs"] for x in found])))
        if points:
            x, values, low, high = zip(*sorted(points))
            ticks.update(x)
            places = [size * beside[model] for size in x]
            axes.errorbar(places, values, yerr=(low, high), label=model, marker="o", markersize=4, capsize=2)
    axes.set(xscale="log", ylim=(0, 1.03), ylabel="share of pairs recalled")
    axes.set_title("recall: mean of the seeds, least and largest")
    axes.set_xlabel("numbers in a layer's state (of linear attention; softmax has as many heads)")
    axes.set_xticks(sorted(ticks), [f"{size:,}" for size in sorted(ticks)])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))

"""The charts of docs/evidence.md, from the results alone: few models in each, of one colour in all of them."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.lines import Line2D

from benchmarks.study import steps
from benchmarks.study.report import DEFAULT, Rows, counted
from linrope.cli.charts import GREY, LINROPE, PINK, SOFTMAX, YELLOW, charts, legend_below, save

# What the charts call the models, and their colours. Bars and points have the colours of KINDS alone.
MODELS: dict[str, tuple[str, str]] = {
    DEFAULT: ("default block", LINROPE),
    "block-all-rotated": ("default block, all rotated", LINROPE),
    "block-unrotated": ("default block, none rotated", LINROPE),
    "block-mixers": ("default block, no feed-forward", LINROPE),
    "block-feature": ("with a gate per feature", LINROPE),
    "block-erase-elu": ("with erase", LINROPE),
    "block-hybrid": ("last layer softmax", YELLOW),
    "block-softmax": ("softmax in the block", SOFTMAX),
    "block-softmax-all-rotated": ("softmax in the block, all rotated", SOFTMAX),
    "softmax-rope": ("softmax alone, RoPE", SOFTMAX),
    "eq19": ("equation 19 alone", LINROPE),
    "mamba-2": ("Mamba-2", GREY),
    "gated-deltanet": ("Gated DeltaNet", GREY),
    "kimi-linear": ("Kimi Linear's KDA", GREY),
    "minimax": ("MiniMax", GREY),
}
KINDS = {
    LINROPE: "linear attention in the default block",
    SOFTMAX: "softmax attention in the block",
    YELLOW: "both",
    GREY: "models of transformers",
}
PRICE = [
    DEFAULT,
    "block-mixers",
    "block-feature",
    "block-erase-elu",
    "block-hybrid",
    "block-softmax-all-rotated",
]
PRICE += ["mamba-2", "gated-deltanet", "kimi-linear", "minimax"]
POSITIONS = ["softmax-rope", "eq19", "block-softmax-all-rotated", "mamba-2", DEFAULT]
LOOK_UP = [
    DEFAULT,
    "block-all-rotated",
    "block-unrotated",
    "block-erase-elu",
    "block-hybrid",
    "block-softmax",
    "mamba-2",
    "gated-deltanet",
    "kimi-linear",
]


def plots(folder: Path, out: Path) -> list[Path]:
    """The charts that the folder's results suffice for, written into out.

    Raises:
        ValueError: as in report.counted.
    """
    found, times = counted(folder), steps.read(folder)
    drawn = []
    if "language" in found and times:
        drawn.append(_draw(out / "price.svg", 2, partial(_price, found, times), (11.5, 6)))
    if "language" in found:
        drawn.append(_draw(out / "positions.svg", 1, partial(_positions, found["language"]), (11, 5.2)))
    panels = [panel for panel in _LOOK_UP_PANELS if panel[0] in found]
    if panels:
        draw = partial(_look_up, found, panels)
        drawn.append(_draw(out / "look-up.svg", len(panels), draw, (6 + 1.7 * len(panels), 5.6)))
    return drawn


def _draw(path: Path, panels: int, draw: Callable[[Any], None], size: tuple[float, float]) -> Path:
    figure, axes = charts(*size, panels, sharey=True, squeeze=False)
    draw(axes[0])
    save(figure, path)
    return path


def _kinds(panels: Any, more: Sequence[Any] = ()) -> None:
    """A legend of the colours of KINDS below the panels, and of these handles."""
    points = [
        Line2D([], [], linestyle="", marker="o", color=color, label=kind) for color, kind in KINDS.items()
    ]
    legend_below(panels[0].figure, 2, [*points, *more])


def _results(rows: Rows, model: str) -> list[dict[str, Any]]:
    """The values of the model's runs that did not diverge."""
    return [line["results"] for line in rows.get(model, []) if line["results"] is not None]


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean, and how far the least and the largest are from it."""
    middle = mean(values)
    return middle, middle - min(values), max(values) - middle


def _price(found: dict[str, Rows], times: dict[str, Any], panels: Any) -> None:
    """Bits per byte, and the time of the training in units of the default block's; hollow: in plain PyTorch."""
    seconds = times["seconds"]
    unit = seconds.get(DEFAULT, next(iter(seconds.values())))["fastest"]
    rows = [
        (*MODELS[model], results, {side: x / unit for side, x in seconds[model].items()})
        for model in PRICE
        if model in seconds and (results := _results(found["language"], model))
    ]
    if longer := found.get("language-equal-time", {}).get(DEFAULT):
        name, color = MODELS[DEFAULT]
        steps = [line["settings"]["steps"] for line in (longer[0], next(iter(found["language"].values()))[0])]
        results = _results(found["language-equal-time"], DEFAULT)
        rows.append((f"{name}, {steps[0]} steps", color, results, {"fastest": steps[0] / steps[1]}))
    rows.sort(key=lambda row: -mean(x["bits"] for x in row[2]))
    for at, (_, color, results, sides) in enumerate(rows):
        bits, low, high = _spread([x["bits"] for x in results])
        panels[0].errorbar(bits, at, xerr=([low], [high]), fmt="o", color=color, capsize=4, markersize=9)
        panels[1].plot(list(sides.values()), [at] * len(sides), ":", color=color, linewidth=2)
        for side, x in sides.items():
            full = color if side == "fastest" else "none"
            panels[1].plot(x, at, "o", color=color, markersize=9, markerfacecolor=full, markeredgewidth=2)
    panels[0].set_yticks(range(len(rows)), [row[0] for row in rows])
    panels[0].set(xlabel="bits per byte (less is better)")
    panels[1].set(xscale="log", xlabel="training time, default block = 1\nhollow: in plain PyTorch")
    ticks = [0.5, 1, 2, 4, 8, 16]
    panels[1].set_xticks(ticks, [f"{x:g}" for x in ticks])
    panels[1].minorticks_off()
    for axes in panels:
        axes.grid()
    _kinds(panels)


def _positions(rows: Rows, axes: Any) -> None:
    """Bits per byte by position beyond those on the same bytes with no more than the trained length."""
    curves: dict[str, list[float]] = {}
    for model in POSITIONS:
        found = _results(rows, model)
        if not found:
            continue
        whole, alone = (
            [mean(x) for x in zip(*(result[key] for result in found))]
            for key in ("by position", "by position, 1x")
        )
        gaps = [x - y for x, y in zip(whole, alone)]
        # Over whole windows of the trained length, at whose beginnings the shorter context is shortest.
        curves[model] = parts = [mean(gaps[i : i + 8]) for i in range(0, len(gaps), 8)]
        # Dotted: without the block. Mamba-2 lies on the default block.
        style = {"eq19": ":", "softmax-rope": ":", "mamba-2": "--"}.get(model, "-")
        order = 3 if model == "mamba-2" else 2
        middles, color = [i + 0.5 for i in range(len(parts))], MODELS[model][1]
        axes[0].plot(middles, parts, style, marker="o", color=color, zorder=order)
    at = math.inf
    for model, parts in sorted(curves.items(), key=lambda curve: -curve[1][-1]):
        name, color = MODELS[model]
        at = min(at - 0.11, parts[-1])  # the labels of near curves one below the other
        axes[0].text(7.8, at, name, color=color, weight="bold", va="center")
    axes[0].axhline(0, color=GREY, linewidth=1)
    axes[0].set(xlim=(0.3, 7.7), ylim=min(at, 0.0) - 0.1)
    axes[0].set(xlabel="position / trained length", ylabel="change in bits per byte\nfrom the longer context")
    axes[0].grid()


_Panel = tuple[str, str, str, float | None]
# A task, a result, the title of its panel, and what a model gets that knows nothing but a row's values
_LOOK_UP_PANELS: list[_Panel] = [
    ("recall-256", "6 pairs", "recall of 6 pairs,\nstate of 256 numbers", 0.17),
    ("copying", "1x", "copying,\ntrained length", None),
    ("copying", "2x", "copying,\ntwice the length", None),
    ("distant", "8,192 bytes", "recall over\n8,192 bytes", 0.41),
]


def _look_up(found: dict[str, Rows], shown: Sequence[_Panel], panels: Any) -> None:
    """Bars: the share of right answers, a panel per task; no bar: not run."""
    names = LOOK_UP[::-1]
    for axes, (task, key, title, bare) in zip(panels, shown):
        for at, model in enumerate(names):
            if results := _results(found[task], model):
                value, low, high = _spread([x[key] for x in results])
                color = MODELS[model][1]
                axes.barh(at, value, color=color, alpha=0.5, height=0.7)
                axes.errorbar(value, at, xerr=([low], [high]), color=color, capsize=3)
            else:
                axes.text(0.45, at, "not run", va="center", fontsize=14)
        floor = next(iter(found[task].values()))[0]["floor"][key]
        axes.axvline(floor if bare is None else bare, color=PINK, linestyle=":", zorder=3)
        axes.set(xlim=(0, 1.03), xticks=(0, 0.5, 1))
        axes.set_title(title, fontsize=14)
        axes.grid(axis="x")
    panels[0].set_xlabel("share of right answers", fontsize=14)
    panels[0].set_yticks(range(len(names)), [MODELS[model][0] for model in names])
    guessing = Line2D(
        [], [], linestyle=":", color=PINK, label="guessing; in recall, one of the values of the row"
    )
    _kinds(panels, [guessing])

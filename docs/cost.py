"""Draws docs/assets/cost.svg for docs/tables.py: the time of both attentions by length, from ``linrope bench``."""

from typing import Any

import matplotlib.ticker

from docs.drawing import save
from linrope.cli.charts import LINROPE, SOFTMAX, charts


def panel(axes: Any, title: str, across: str, points: dict[str, list[tuple[int, float]]]) -> None:
    """Both sides, microseconds by tokens; the last pair of points is labelled with its ratio."""
    for name, color in (("linrope", LINROPE), ("softmax", SOFTMAX)):
        axes.loglog(*zip(*points[name], strict=True), "o-", color=color)
    last, slow = points["softmax"][-1]
    ratio = float(f"{slow / dict(points['linrope'])[last]:.2g}")
    axes.annotate(
        f"{ratio:,g}x", (last, slow), (-10, 0), textcoords="offset points", ha="right", color=SOFTMAX
    )
    ticks = [n for n, _ in points["linrope"]]
    ticks = ticks if len(ticks) < 6 else ticks[::3]
    axes.set_xticks(ticks, [f"{n // 1024}k" if n >= 1024 else str(n) for n in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 3)))
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:,g}")
    axes.set(title=title, xlabel=across)


def main(result: dict[str, Any]) -> None:
    figure, (left, right) = charts(9.6, 4.6, 2)
    sides = ("linrope", "softmax")
    rows = [(row["n"], row["training"]) for row in result["attention"]]
    training = {
        side: [(n, 1e6 * row[f"{side}_seconds"] / n) for n, row in rows if row[f"{side}_seconds"]]
        for side in sides
    }
    longest = rows[-1][0]  # both panels end there
    decode = [row for row in result["decode"] if row["position"] <= longest]
    steps = {
        side: [(row["position"], 1e6 * row[f"{side}_layer_seconds"]) for row in decode] for side in sides
    }
    panel(left, "training, per token", "tokens", training)
    panel(right, "decoding, per token", "tokens before it", steps)
    left.set_ylabel("microseconds")
    for name, color, up in (("softmax attention", SOFTMAX, 0.88), ("linrope", LINROPE, 0.78)):
        right.text(0.04, up, name, color=color, weight="bold", transform=right.transAxes)
    save(figure, "cost")

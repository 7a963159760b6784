"""Draws docs/assets/families.svg for docs/tables.py: what ``linrope bench --transformers`` found for each family."""

from typing import Any

from docs.drawing import save
from linrope.cli.charts import GREY, LINROPE, charts

MODELS = {
    "mamba2": "Mamba-2",
    "granitemoehybrid": "Granite 4.0-H",
    "nemotron_h": "Nemotron-H",
    "qwen3_5": "Qwen3.5",
    "kimi_linear": "Kimi Linear",
}
CASES = [("prefill", 1), ("training", 1), ("decoding", 1), ("decoding", 8)]  # kind, batch
PANELS = {"a prompt": 0, "a training step": 1, "a token of 8 sequences": 3}


def longest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each of CASES the row with the most tokens, at most 2,048."""
    short = [row for row in rows if row["length"] <= 2048]
    found = ([row for row in short if (row["kind"], row["batch"]) == case] for case in CASES)
    return [max(each, key=lambda row: row["length"]) for each in found]


def main(results: dict[str, list[dict[str, Any]]]) -> None:
    """results: the rows by family."""
    figure, axes = charts(9.6, 3.7, len(PANELS), sharex=True, sharey=True)
    for panel, (title, case) in zip(axes, PANELS.items(), strict=True):
        seconds = [longest(results[family])[case]["seconds"] for family in MODELS]
        found = [x["transformers"] / x["linrope"] for x in seconds]
        bars = panel.barh(list(MODELS.values()), found, color=LINROPE)
        panel.bar_label(bars, [f"{x:.1f}x" for x in found], padding=4)
        panel.axvline(1, color=GREY, linestyle=":", linewidth=2)
        panel.set_title(title)
        panel.set_xticks([1], ["transformers = 1"], ha="left")
        panel.tick_params(length=0)
        panel.spines[:].set_visible(False)
    axes[0].set_xlim(0, 1.3 * axes[0].get_xlim()[1])  # the panels share their limits; the numbers need room
    axes[0].invert_yaxis()
    save(figure, "families")

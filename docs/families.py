"""Draws docs/assets/families.svg: what ``linrope bench --transformers`` found for each family.

    python docs/families.py benchmarks/results/transformers-*.json

The background is transparent, and all colors are legible on white and on black pages.
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

GREY, LINROPE = "#7f838a", "#16a085"
MODELS = {
    "mamba2": "Mamba-2",
    "granitemoehybrid": "Granite 4.0-H",
    "nemotron_h": "Nemotron-H",
    "qwen3_5": "Qwen3.5",
    "kimi_linear": "Kimi Linear",
}
PANELS = {  # kind, batch
    "a prompt": ("prefill", 1),
    "a training step": ("training", 1),
    "a token of 8 sequences": ("decoding", 8),
}


def speedup(rows: list[dict[str, Any]], kind: str, batch: int) -> float:
    """transformers' time divided by linrope's, for the longest measured case with at most 2,048 tokens."""
    found = [x for x in rows if (x["kind"], x["batch"]) == (kind, batch) and x["length"] <= 2048]
    seconds = max(found, key=lambda x: x["length"])["seconds"]
    return float(seconds["transformers"] / seconds["linrope"])


def main(files: list[Path]) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    results = {
        result["family"]: result["rows"] for result in (json.loads(file.read_text()) for file in files)
    }
    plt.rcParams.update({"svg.hashsalt": "families", "font.size": 16, "text.color": GREY})
    figure, axes = plt.subplots(1, len(PANELS), figsize=(9.6, 3.4), layout="constrained", sharey=True)
    for panel, (title, case) in zip(axes, PANELS.items(), strict=True):
        found = [speedup(results[family], *case) for family in MODELS]
        bars = panel.barh(list(MODELS.values()), found, color=LINROPE)
        panel.bar_label(bars, [f"{x:.1f}x" for x in found], padding=4, color=GREY)
        panel.axvline(1, color=GREY, linestyle=":")
        panel.set(xlim=(0, 1.35 * max(found)), xticks=[])
        panel.set_title(title, color=GREY, fontsize=16)
        panel.tick_params(colors=GREY, length=0)
        panel.spines[:].set_visible(False)
    axes[0].invert_yaxis()
    figure.savefig(
        Path(__file__).parent / "assets" / "families.svg", transparent=True, metadata={"Date": None}
    )
    plt.close(figure)


if __name__ == "__main__":
    main([Path(x) for x in sys.argv[1:]])

"""Draws docs/assets/layers.svg: the packages of the code, in the order that tests/test_layers.py checks."""

import re
from pathlib import Path
from typing import Any

from docs.drawing import GREEN, INK, ORANGE, PALE, arrow, box, canvas, save
from tests.test_layers import FLOORS

ROOT = Path(__file__).parents[1]
WORDS = {
    "cli": "commands",
    "first_use": "tries kernels",
    "integrations": "transformers, fla",
    "models": "models, training",
    "versions": "show_versions",
    "conformance": "the bounds",
    "decode": "generation, serving",
    "distributed": "several processes",
    "layer": "LinearRoPEAttention and its options",
    "ops": "convolution, gates, norm",
    "operation": "linear_rope_attention: checks, plan",
    "backends": "native, triton, eager and others",
    "feature_maps": "from q and k to features",
    "recurrence": "call, state, packing, decay",
    "cuda_graphs": "records and replays steps",
    "rotation": "rotates pairs of features",
    "common": "checks, files, locks",
}
WIDTH, LEFT, ROW, GAP = 9.6, 0.75, 0.78, 0.14


def exported() -> set[str]:
    """The packages from which linrope/__init__.py takes names."""
    return set(
        re.findall(r"from linrope(?:\.| import )(\w+)", (ROOT / "linrope" / "__init__.py").read_text("utf-8"))
    )


def package(axes: Any, left: float, right: float, y: float, words: tuple[str, str], color: str) -> None:
    box(axes, left, right, y, ROW - GAP, color)
    name, about = words
    text = {"color": INK, "va": "center_baseline"}
    if right - left > 5:
        axes.text(left + 0.2, y, name, weight="bold", **text)
        axes.text(left + 2.2, y, about, **text)
    else:
        middle = {"ha": "center"} | text
        axes.text((left + right) / 2, y + 0.14, name, weight="bold", fontsize=15, **middle)
        axes.text((left + right) / 2, y - 0.15, about, fontsize=14, **middle)


def main() -> None:
    table, public = [sorted(floor) for floor in FLOORS if floor != {"__main__"}], exported()
    assert WORDS.keys() == {name for floor in table for name in floor}
    height = ROW * (len(table) + 0.6)
    axes = canvas(WIDTH, height)
    for row, floor in enumerate(table):
        y = height - ROW * (row + 0.5)
        boxes = [(name, WORDS[name], GREEN if name in public else PALE) for name in floor]
        if floor == ["backends"]:
            boxes.append(("kernels/", "C++ and Triton", ORANGE))
        width = (WIDTH - LEFT + GAP - 0.02) / len(boxes)
        for place, (name, about, color) in enumerate(boxes):
            left = LEFT + place * width
            package(axes, left, left + width - GAP, y, (name, about), color)
    arrow(axes, (0.5, height - 0.2), (0.5, ROW))
    axes.text(0.2, (height + ROW) / 2, "imports", rotation=90, ha="center", va="center")
    axes.text(LEFT, 0.3 * ROW, "green: exported by import linrope", va="center")
    save(axes.figure, "layers")


if __name__ == "__main__":
    main()

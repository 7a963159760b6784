"""Functions that the scripts of the diagrams share: colours, axes, boxes, arrows, saving.

``python -m docs.block`` draws docs/assets/block.svg; docs.chunk, docs.layers, docs.rotation_order and docs.state draw
the pictures of their names. ``python -m docs.tables`` draws cost and families, by docs/cost.py and docs/families.py.
CONTRIBUTING.md says when to draw each picture again.

The background is transparent. Text stands on light blocks, and the grey of all other text is legible on white and on
black pages.
"""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import FancyBboxPatch

GREY, INK = "#7f838a", "#15181c"
LINROPE, SOFTMAX = "#16a085", "#d9732a"  # lines
GREEN, ORANGE, BLUE, PALE = "#8fd0bd", "#f3bd83", "#a5c5ef", "#d6dae0"  # blocks
PINK, PURPLE, YELLOW = "#f0c9dc", "#d3b1ea", "#efe08c"


def canvas(width: float, height: float) -> Any:
    """Axes without ticks, measured in inches from the lower left corner."""
    plt.rcParams.update({"mathtext.fontset": "stix", "font.size": 16, "text.color": GREY})
    figure, axes = plt.subplots(figsize=(width, height))
    figure.subplots_adjust(0, 0, 1, 1)
    axes.set_axis_off()
    axes.set(xlim=(0, width), ylim=(0, height))
    return axes


def charts(width: float, height: float, columns: int = 1, **options: Any) -> tuple[Any, Any]:
    """A figure, and the axes of its panels, side by side."""
    plt.rcParams.update({"font.size": 16, "text.color": GREY})
    return plt.subplots(1, columns, figsize=(width, height), layout="constrained", **options)


def label(axes: Any, across: str, up: str = "") -> None:
    """Names both axes, and makes all grey."""
    axes.set_xlabel(across, color=GREY)
    axes.set_ylabel(up, color=GREY)
    axes.tick_params(colors=GREY)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)


def box(axes: Any, left: float, right: float, y: float, height: float, color: str) -> None:
    """A block with round corners, centred at y."""
    axes.add_patch(
        FancyBboxPatch(
            (left, y - height / 2),
            right - left,
            height,
            boxstyle="round,pad=0,rounding_size=0.1",
            facecolor=color,
            edgecolor=GREY,
            linewidth=1.5,
            zorder=1,
        )
    )


def arrow(axes: Any, *points: tuple[float, float]) -> None:
    """A line through the points, with a head at the last one."""
    *start, before, end = points
    axes.plot(*zip(*start, before, end), color=GREY, linewidth=2, zorder=0)
    style = {"arrowstyle": "-|>,head_width=0.3,head_length=0.5", "color": GREY, "linewidth": 2}
    axes.annotate("", end, before, arrowprops=style | {"shrinkA": 0, "shrinkB": 0}, zorder=0)


def save(figure: Any, name: str) -> None:
    """Writes docs/assets/<name>.svg: the same bytes each time."""
    with matplotlib.rc_context({"svg.hashsalt": name}):
        file = Path(__file__).parent / "assets" / f"{name}.svg"
        figure.savefig(file, transparent=True, metadata={"Date": None})
    plt.close(figure)

"""Functions that the scripts of the diagrams share: boxes, arrows, saving. linrope/cli/charts.py has the style.

``python -m docs.block`` draws docs/assets/block.svg; docs.chunk, docs.layers, docs.long_term_decay,
docs.rotation_order, docs.state and docs.weights draw the pictures of their names. ``python -m docs.tables`` draws cost
and families, by docs/cost.py and docs/families.py.
CONTRIBUTING.md says when to draw each picture again.

Text inside a block is dark, and blocks are light.
"""

from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.patches import FancyBboxPatch

from linrope.cli import charts
from linrope.cli.charts import GREY

INK = "#15181c"
GREEN, ORANGE, BLUE, PALE = "#8fd0bd", "#f3bd83", "#a5c5ef", "#d6dae0"  # blocks
PINK, PURPLE, YELLOW = "#f0c9dc", "#d3b1ea", "#efe08c"


def canvas(width: float, height: float) -> Any:
    """Axes without ticks, measured in inches from the lower left corner."""
    plt.rcParams.update(charts.STYLE)
    figure, axes = plt.subplots(figsize=(width, height))
    figure.subplots_adjust(0, 0, 1, 1)
    axes.set_axis_off()
    axes.set(xlim=(0, width), ylim=(0, height))
    return axes


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
    """Writes docs/assets/<name>.svg."""
    charts.save(figure, Path(__file__).parent / "assets" / f"{name}.svg")

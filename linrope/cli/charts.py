"""The style of all charts and diagrams: colors, axes, files. docs/drawing.py and the commands draw in it.

The background is transparent, and the grey of all text is legible on white and on black pages.
"""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from linrope.common.files import replace_file

GREY = "#7f838a"
LINROPE, SOFTMAX, BLUE = "#16a085", "#d9732a", "#4a8fdc"
PURPLE, YELLOW, PINK = "#a06cd5", "#b59a1a", "#d1588f"
LINES = (LINROPE, SOFTMAX, BLUE, PURPLE, YELLOW, PINK)
STYLE: Any = {
    "font.size": 16, "mathtext.fontset": "stix", "text.color": GREY, "legend.frameon": False,
    "axes.titlecolor": GREY, "axes.titlesize": 16, "axes.labelcolor": GREY, "axes.edgecolor": GREY,
    "xtick.color": GREY, "ytick.color": GREY, "axes.spines.top": False, "axes.spines.right": False,
    "grid.color": GREY, "grid.alpha": 0.3, "lines.linewidth": 3, "lines.markersize": 6,
}  # fmt: skip


def charts(width: float, height: float, columns: int = 1, **options: Any) -> tuple[Any, Any]:
    """A figure, and the axes of its panels, side by side."""
    plt.rcParams.update(STYLE)
    return plt.subplots(1, columns, figsize=(width, height), layout="constrained", **options)


def labels(runs: list[Path], option: str) -> list[str]:
    """The shortest ends of the paths that tell them apart.

    Raises:
        ValueError: two paths are the same.
    """
    parts = [run.resolve().parts for run in runs]
    if len(set(parts)) < len(parts):
        raise ValueError(f"{option}: got {', '.join(map(str, runs))}, expected each once")
    for count in range(1, max(map(len, parts)) + 1):
        ends = ["/".join(part[-count:]) for part in parts]
        if len(set(ends)) == len(ends):
            break
    return ends


def legend_below(figure: Any, columns: int, handles: list[Any] | None = None, size: float = 14) -> None:
    """A legend below the axes, where it hides neither curves nor ticks: of all panels, or of these handles."""
    options = {} if handles is None else {"handles": handles}
    figure.legend(loc="outside lower center", ncols=columns, fontsize=size, **options)


def save(figure: Any, path: Path) -> None:
    """Writes an .svg, the same bytes each time, or a .png."""
    kind = path.suffix.lstrip(".")
    metadata = {"Date": None} if kind == "svg" else {"Software": None}

    def write(temporary: Path) -> None:
        figure.savefig(temporary, format=kind, dpi=100, transparent=True, metadata=metadata)

    with matplotlib.rc_context({"svg.hashsalt": path.stem}):
        replace_file(path, write)
    plt.close(figure)

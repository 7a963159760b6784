"""Draws docs/assets/chunk.svg: the three matrix equations of a chunk, with blocks in the shapes of their matrices."""

from typing import Any

from matplotlib.patches import Polygon

from docs.drawing import BLUE, GREEN, GREY, INK, ORANGE, PALE, PINK, PURPLE, YELLOW, canvas, save

SIDES = {"C": 2.8, "f": 2.1, "e": 1.6}  # lengths in the drawing: a chunk's tokens, features, values
STATE, KEYS, QUERIES, SCORES, VALUES, WRITTEN, OUT = GREEN, ORANGE, BLUE, PALE, PINK, PURPLE, YELLOW


class Line:
    """An equation: blocks and signs from left to right, centred at one height."""

    def __init__(self, axes: Any, y: float, title: str) -> None:
        self.axes, self.x, self.y = axes, 0.0, y
        axes.text(0, y + SIDES["C"] / 2 + 0.5, title, color=GREY, fontsize=16, va="center", weight="bold")

    def sign(self, sign: str) -> "Line":
        self.axes.text(self.x + 0.35, self.y, sign, color=GREY, fontsize=26, ha="center", va="center")
        self.x += 0.85
        return self

    def block(self, label: str, rows: str, columns: str, color: str) -> "Line":
        x, width, height = self.x, SIDES[columns], SIDES[rows]
        left, right, bottom, top = x, x + width, self.y - height / 2, self.y + height / 2
        self._draw([(left, bottom), (left, top), (right, top), (right, bottom)], color)
        self._write(left + width / 2, self.y, label, rows, columns)
        return self

    def triangle(self, label: str) -> "Line":
        x, side = self.x, SIDES["C"]
        bottom, top = self.y - side / 2, self.y + side / 2
        self._draw([(x, top), (x, bottom), (x + side, bottom)], SCORES)
        self._write(x + side / 3, bottom + side / 3, label, "C", "C")
        return self

    def _draw(self, corners: list[tuple[float, float]], color: str) -> None:
        self.axes.add_patch(
            Polygon(corners, facecolor=color, edgecolor=GREY, linewidth=1.5, joinstyle="round")
        )
        self.x = max(x for x, _ in corners) + 0.15

    def _write(self, x: float, y: float, label: str, rows: str, columns: str) -> None:
        self.axes.text(x, y + 0.05, label, color=INK, fontsize=20, ha="center", va="baseline")
        size = rf"${rows} \times {columns}$"
        self.axes.text(x, y - 0.25, size, color=INK, fontsize=14, ha="center", va="top")


def main() -> None:
    axes = canvas(9.2, 9.2)
    axes.set(aspect="equal", xlim=(-0.1, 12.4), ylim=(-1.6, 10.9))

    line = Line(axes, 8.6, "1.  What the tokens write: with erase, a triangular system")
    line.triangle("$I + A$").block("$U$", "C", "e", WRITTEN).sign("=")
    line.block("$w V$", "C", "e", VALUES).sign("−")
    line.block(r"$b\,e^{D}\,\hat\Psi$", "C", "f", KEYS).block("$S_r$", "f", "e", STATE)

    line = Line(axes, 4.3, "2.  What the queries read: the state and the chunk")
    line.block(r"$\mathrm{num}$", "C", "e", OUT).sign("=")
    line.block(r"$e^{D}\,\hat\Phi$", "C", "f", QUERIES).block("$S_r$", "f", "e", STATE).sign("+")
    line.triangle("$B$").block("$U$", "C", "e", WRITTEN)

    line = Line(axes, 0.0, "3.  The state after the chunk")
    line.block(r"$S_{\mathrm{end}}$", "f", "e", STATE).sign("=")
    line.block(r"$e^{D_{\mathrm{end}}} S_r$", "f", "e", STATE).sign("+")
    line.block(r"$(e^{D_{\mathrm{end}} - D}\,\hat\Psi)^\top$", "f", "C", KEYS).block("$U$", "C", "e", WRITTEN)
    save(axes.figure, "chunk")


if __name__ == "__main__":
    main()

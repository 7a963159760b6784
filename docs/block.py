"""Draws docs/assets/block.svg: the default block, in the order in which the code computes it.

tests/models/test_block.py computes what it shows.
"""

from typing import Any

from docs.drawing import BLUE, GREEN, GREY, INK, ORANGE, PALE, PINK, PURPLE, YELLOW, arrow, box, canvas, save

WIDTH, HEIGHT, TALL, HALF = 9.6, 11.5, 0.62, 0.68  # a box's height, and half of its width
STREAM, F, Q, K, V, G = 0.45, 2.1, 3.85, 5.4, 6.95, 8.75  # x of the columns
OUT, SKIP = (Q + K) / 2, (V + G) / 2
TOP, NORM, PROJECT, MIX, MAP, ROTATE, STATE, OUT_NORM, ADD, GATE, PROJECT_OUT, NETWORK, BOTTOM = (
    11.4, 10.7, 9.7, 8.7, 7.65, 6.75, 5.35, 4.2, 3.45, 2.75, 2.0, 1.1, 0.4
)  # fmt: skip
BOXES = [  # from column, to column, y, colour, text
    (F, G, NORM, PALE, "RMS norm"),
    (F, F, PROJECT, PURPLE, "$W_f,\\ b_f$"),
    (Q, Q, PROJECT, BLUE, "$W_q$"),
    (K, K, PROJECT, ORANGE, "$W_k$"),
    (V, V, PROJECT, PINK, "$W_v$"),
    (G, G, PROJECT, YELLOW, "$W_g$"),
    (F, F, MIX, PURPLE, "sigmoid"),
    (Q, V, MIX, PALE, "convolution over 4 tokens, SiLU"),
    (G, G, MIX, YELLOW, "SiLU"),
    (Q, K, MAP, PALE, "feature map: elu + 1"),
    (Q, K, ROTATE, PALE, "RoPE on 1/4 of features"),
    (F, V, STATE, GREEN, ""),
    (Q, K, OUT_NORM, PALE, "RMS norm of each head"),
    (Q, K, PROJECT_OUT, PALE, "$W_o$"),
    (F, F, NETWORK, PALE, "RMS norm"),
    (Q, K, NETWORK, PALE, "SwiGLU"),
]
DEEP = 0.6  # half of the state's height


def sign(axes: Any, x: float, y: float, text: str) -> None:
    axes.plot(x, y, "o", markersize=24, markerfacecolor=PALE, markeredgecolor=GREY, markeredgewidth=1.5)
    axes.text(x, y, text, color=INK, ha="center", va="center_baseline", fontsize=20)


def main() -> None:
    axes, edge = canvas(WIDTH, HEIGHT), TALL / 2
    # the residual stream, and what leaves and joins it
    arrow(axes, (STREAM, TOP), (STREAM, 0.02))
    arrow(axes, (STREAM, NORM), (F - HALF, NORM))
    arrow(axes, (OUT, PROJECT_OUT), (STREAM + 0.17, PROJECT_OUT))
    arrow(axes, (STREAM, NETWORK), (F - HALF, NETWORK))
    arrow(axes, (F, NETWORK), (Q - HALF, NETWORK))
    arrow(axes, (OUT, NETWORK), (OUT, BOTTOM), (STREAM + 0.17, BOTTOM))
    # from the norm to the state
    for column in (F, Q, K, V, G):
        arrow(axes, (column, NORM), (column, PROJECT + edge))
        arrow(axes, (column, PROJECT), (column, MIX + edge))
    for column in (Q, K):
        arrow(axes, (column, MIX), (column, MAP + edge))
        arrow(axes, (column, MAP), (column, ROTATE + edge))
    for column in (F, Q, K, V):
        arrow(axes, (column, MIX if column in (F, V) else ROTATE), (column, STATE + DEEP))
    # from the state to the output
    for above, below in ((STATE, OUT_NORM), (OUT_NORM, PROJECT_OUT)):
        arrow(axes, (OUT, above), (OUT, below + edge))
    arrow(axes, (V, MAP), (SKIP, MAP), (SKIP, ADD), (OUT + 0.17, ADD))
    arrow(axes, (G, MIX), (G, GATE), (OUT + 0.17, GATE))
    # the state is read and written at each token
    left, loop = F - HALF, F - HALF - 0.3
    arrow(axes, (left, STATE - 0.3), (loop, STATE - 0.3), (loop, STATE + 0.3), (left, STATE + 0.3))
    for first, last, y, color, text in BOXES:
        box(axes, first - HALF, last + HALF, y, TALL if text else 2 * DEEP, color)
        size = 20 if "$" in text else 16
        axes.text((first + last) / 2, y, text, color=INK, ha="center", va="center_baseline", fontsize=size)
    middle = (F + V) / 2
    formula = {"color": INK, "ha": "center", "va": "center_baseline", "fontsize": 19}
    axes.text(middle, STATE + 0.26, r"state  $S \leftarrow f\,S + (1 - f)\,\hat\psi\,v^\top$", **formula)
    axes.text(middle, STATE - 0.28, r"$\mathrm{out} = S^\top \hat\phi$", **formula)
    for x, y, text in ((STREAM, PROJECT_OUT, "+"), (STREAM, BOTTOM, "+"), (OUT, ADD, "+"), (OUT, GATE, "×")):
        sign(axes, x, y, text)
    after_mix, before_state = (MIX + MAP) / 2, STATE + DEEP + 0.23
    for x, y, text in (
        (STREAM, TOP - 0.1, "$x$"),
        (F, (MIX + STATE + DEEP) / 2, "forget\ngate $f$"),
        (Q, after_mix, "$q$"),
        (K, after_mix, "$k$"),
        (V, after_mix, "$v$"),
        (Q, before_state, r"$\hat\phi$"),
        (K, before_state, r"$\hat\psi$"),
        (V - 0.7, ADD + 0.2, "skip $D\\,v$"),
        (V - 0.7, GATE + 0.2, "output gate"),
        (K + HALF, PROJECT_OUT, "output projection"),
        (K + HALF, NETWORK, "feed-forward network"),
    ):
        axes.text(x + 0.1, y, text, va="center_baseline", fontsize=20 if text[0] == "$" else 16)
    save(axes.figure, "block")


if __name__ == "__main__":
    main()

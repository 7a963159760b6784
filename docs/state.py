"""Draws docs/assets/state.svg: the bytes that decoding keeps for a sequence, by the tokens before it.

The sizes are those of states of real layers, of 4 layers of 512 with 8 heads of 64 in float32.
"""

from typing import Any

import torch
from torch import nn

from docs.drawing import save
from linrope import LinearRoPEAttention
from linrope.cli.charts import GREY, LINROPE, SOFTMAX, charts
from linrope.layer.softmax_attention import SoftmaxAttention

LAYERS, WIDTH, HEADS = 4, 512, 8
LONGEST = 2**20


def kept(layer: nn.Module, tokens: int, *names: str) -> int:
    """The bytes of these tensors, or of all, in the states after that many tokens."""
    with torch.no_grad():
        tensors = layer(torch.randn(1, tokens, WIDTH), return_state=True)[1].tensors()
    return LAYERS * sum(x.nbytes for name, x in tensors.items() if not names or name in names)


def sizes() -> tuple[int, int]:
    """The bytes of linrope's states, and the bytes that each token adds to a key/value cache."""
    block, softmax = LinearRoPEAttention.block(WIDTH, HEADS), SoftmaxAttention(WIDTH, HEADS)
    assert kept(block, 1) == kept(block, 100)
    return kept(block, 100), kept(softmax, 101, "k", "v") - kept(softmax, 100, "k", "v")


def in_words(size: float) -> str:
    """1.2 MB"""
    power = next(x for x in (9, 6, 3, 0) if size >= 10**x)
    return f"{float(f'{size:.2g}') / 10**power:g} {['B', 'kB', 'MB', 'GB'][power // 3]}"


def draw(state: int, token: int) -> Any:
    figure, axes = charts(9.6, 5.4)
    axes.loglog([1, LONGEST], [token, LONGEST * token], color=SOFTMAX)
    axes.loglog([1, LONGEST], [state, state], color=LINROPE)
    equal = state / token
    axes.plot(equal, state, "o", color=GREY, markersize=11)
    axes.annotate(f"equal at {equal:.0f} tokens", (equal, state), (12, -26), textcoords="offset points")
    bold = {"weight": "bold", "ha": "right"}
    axes.text(
        LONGEST / 20, LONGEST / 9 * token, "key/value cache of softmax attention", color=SOFTMAX, **bold
    )
    axes.text(LONGEST, 1.6 * state, f"linrope's state: {in_words(state)}", color=LINROPE, **bold)
    axes.set_xticks([10**i for i in range(7)], ["1", "10", "100", "1k", "10k", "100k", "1M"])
    axes.set_yticks([10**i for i in range(4, 11, 2)], [in_words(10**i) for i in range(4, 11, 2)])
    axes.minorticks_off()
    axes.set(xlabel="tokens of context", ylabel="kept per sequence")
    return figure


if __name__ == "__main__":
    save(draw(*sizes()), "state")

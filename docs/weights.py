"""Draws docs/assets/weights.svg: the weights of values for random queries and keys, the mean over many heads."""

from typing import Any

import numpy as np
import torch
from matplotlib.colors import LinearSegmentedColormap, to_rgba

from docs.drawing import save
from linrope import Rotary, linear_rope_attention
from linrope.cli.charts import GREY, LINROPE, charts

TOKENS, HEAD_DIM, HEADS = 16, 8, 256
CALLS: dict[str, dict[str, Any]] = {
    "equation 18": {},
    "equation 19": {"rotary": Rotary(HEAD_DIM)},
    "with decay": {"rotary": Rotary(HEAD_DIM), "decay": torch.full((HEADS,), 0.8)},
}


def weights(**options: Any) -> Any:
    """(TOKENS, TOKENS): row i has the weights of the values in output i, since value j is the unit vector j."""
    q, k = torch.randn(2, 1, TOKENS, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    values = torch.eye(TOKENS)[None, :, None].expand(1, -1, HEADS, -1)
    return linear_rope_attention(q, k, values, **options)[0].mean(1).numpy()


def main() -> None:
    colors = LinearSegmentedColormap.from_list("", [to_rgba(LINROPE, 0.0), LINROPE])
    figure, axes = charts(9.6, 3.9, len(CALLS), sharey=True)
    future = np.triu(np.ones((TOKENS, TOKENS), dtype=bool), 1)
    for panel, (title, options) in zip(axes, CALLS.items(), strict=True):
        found = weights(**options)
        shown = np.ma.array(found / found.max(1, keepdims=True), mask=future)
        picture = panel.imshow(shown, cmap=colors, vmin=0, vmax=1, interpolation="nearest")
        panel.set(title=title, xlabel="key", xticks=[], yticks=[])
    axes[0].set_ylabel("query")
    bar = figure.colorbar(picture, ax=axes, ticks=[0, 1], shrink=0.8)
    bar.set_label("weight / largest of the row", color=GREY)
    save(figure, "weights")


if __name__ == "__main__":
    main()

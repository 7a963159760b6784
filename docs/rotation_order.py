"""Draws docs/assets/rotation_order.svg: the score of a query and a key while both move along the sequence.

The key is 3 positions before the query. With the rotation after the feature map the score does not change.
"""

from typing import Any

import torch
from torch import Tensor

from docs.drawing import save
from linrope import Rotary, feature_maps
from linrope.cli.charts import LINROPE, SOFTMAX, charts

HEAD_DIM, DISTANCE, SHIFTS = 64, 3, 129


def scores() -> tuple[Tensor, Tensor]:
    """The scores for each shift, with the rotation after and before the map: (SHIFTS,) float64 each."""
    rotary, fmap = Rotary(HEAD_DIM), feature_maps.make("elu+1", HEAD_DIM)
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(2, 1, 1, 1, HEAD_DIM, generator=generator, dtype=torch.float64)
    keys = torch.arange(SHIFTS)

    def moved(x: Tensor, positions: Tensor) -> Tensor:
        return rotary(x.expand(1, SHIFTS, 1, HEAD_DIM), positions)

    def products(x: Any, y: Any) -> Tensor:
        result: Tensor = (x * y).sum((0, 2, 3))
        return result

    after = products(moved(fmap.queries(q), keys + DISTANCE), moved(fmap.keys(k), keys))
    before = products(fmap.queries(moved(q, keys + DISTANCE)), fmap.keys(moved(k, keys)))
    return after, before


def main() -> None:
    after, before = scores()
    assert after.std() < 1e-10 < 1 < before.std()  # what the picture says
    figure, axes = charts(9.2, 4.8)
    for values, color in ((before, SOFTMAX), (after, LINROPE)):
        axes.plot(values, color=color)
    bold = {"ha": "center", "weight": "bold"}
    axes.text(
        64, 1.03 * before.max(), "rotated before the map: absolute positions count", color=SOFTMAX, **bold
    )
    axes.text(64, 0.8 * after[0], "rotated after the map: only the distance counts", color=LINROPE, **bold)
    axes.set(xlim=(0, SHIFTS - 1), ylim=(0, 1.18 * before.max()), xticks=range(0, SHIFTS, 32))
    axes.set(xlabel="shift of query and key, in positions", ylabel=f"score, {DISTANCE} positions apart")
    save(figure, "rotation_order")


if __name__ == "__main__":
    main()

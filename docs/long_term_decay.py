"""Draws docs/assets/long_term_decay.svg."""

import torch

from docs.drawing import save
from docs.examples.position_encodings import long_term_decay
from linrope.cli.charts import BLUE, LINROPE, charts

PUBLISHED = {0: 32.5, 8: 19.8, 50: 12.6, 100: 10.2, 250: 6.55}  # RoFormer section 3.4.3


def main() -> None:
    distances = torch.arange(257)
    figure, axes = charts(9.6, 4.8)
    for base, color, at, more in ((5e5, BLUE, 18, ""), (1e4, LINROPE, 3.5, "; dots: published values")):
        axes.plot(distances, long_term_decay(distances, 128, base), color=color)
        axes.text(256, at, f"base {base:,.0f}{more}", color=color, weight="bold", ha="right")
    axes.plot(list(PUBLISHED), list(PUBLISHED.values()), "o", color=LINROPE, markersize=9)
    axes.set(xlabel="relative distance", ylabel="mean of |$S_i$|, dim 128", xlim=(-3, 256), ylim=0)
    save(figure, "long_term_decay")


if __name__ == "__main__":
    main()

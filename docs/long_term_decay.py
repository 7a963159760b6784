"""Draws docs/assets/long_term_decay.png."""

from pathlib import Path

import matplotlib
import torch

from linrope.position_encodings import long_term_decay

PUBLISHED = {0: 32.5, 8: 19.8, 50: 12.6, 100: 10.2, 250: 6.55}  # RoFormer section 3.4.3


def main() -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    distances = torch.arange(257)
    figure, axis = plt.subplots(figsize=(7, 3.8), layout="constrained")
    for base, name, color in ((1e4, "10000", "#0b6e4f"), (5e5, "500000", "#c1440e")):
        axis.plot(distances, long_term_decay(distances, 128, base), label=f"base {name}", color=color)
    axis.plot(list(PUBLISHED), list(PUBLISHED.values()), "o", label="published figures", color="#0b6e4f")
    axis.set_xlabel("relative distance")
    axis.set_ylabel("mean of |S_i|, dim 128")
    axis.set_ylim(0)
    axis.grid(True, alpha=0.3)
    axis.legend()
    figure.savefig(Path(__file__).parent / "assets" / "long_term_decay.png", dpi=150)


if __name__ == "__main__":
    main()

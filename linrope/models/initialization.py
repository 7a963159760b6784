"""The initial weights of a language model."""

from collections.abc import Iterable

import torch
from torch import nn

INITIALIZATIONS = ("fan-in", "gpt-2")


@torch.no_grad()
def initialize(parameters: Iterable[tuple[str, nn.Parameter]], scheme: str, branches: int) -> None:
    """Draws the initial values of the matrices: embeddings, projections and gates.

    It leaves the weights of feature maps and of angle steps, and biases, as they are.

        "fan-in": normal with standard deviation 1/sqrt(columns); in a matrix that ends a residual branch, uniform in
                  -1/sqrt(columns) .. 1/sqrt(columns)
        "gpt-2":  normal with standard deviation 0.02; in a matrix that ends a branch, 0.02/sqrt(branches)

    branches: the number of residual branches, whose sum is the model's last vector.
    """
    for name, weight in parameters:
        kept = ".angle_steps." in name or ".feature_map." in name or name.endswith("bias")
        if weight.ndim != 2 or kept:
            continue
        ends_branch = name.endswith(("o_proj.weight", "w2.weight"))
        bound = weight.shape[1] ** -0.5
        if scheme == "gpt-2":
            nn.init.normal_(weight, std=0.02 / branches**0.5 if ends_branch else 0.02)
        elif ends_branch:
            nn.init.uniform_(weight, -bound, bound)
        else:
            nn.init.normal_(weight, std=bound)

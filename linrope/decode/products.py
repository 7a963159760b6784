"""The matrix products of a decoding step, of a few rows."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from linrope.backends import library


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch.nn.functional.linear of contiguous float32 tensors.

    Up to eight rows are computed by the native library, which is faster for so few.
    """
    y: Tensor = library.run("linear", x, weight, bias) if len(x) <= _FEW_ROWS else F.linear(x, weight, bias)
    return y


_FEW_ROWS = 8
# Elements of a joined weight: for a larger one, the time saved is not worth the copy's memory.
_MOST_COPIED = 2**22


class Joined:
    """Several projections of the same vector, their results side by side. Small ones become a single product.

    Arguments are modules, weights without a bias, or None, which is skipped. If several of them become one product, its
    weight is a copy of theirs.
    """

    @torch.no_grad()
    def __init__(self, *modules: Any) -> None:
        self.parts = [_weight_and_bias(module) for module in modules if module is not None]
        self.size: int = self.parts[0][0].shape[1]  # numbers in x
        if len(self.parts) > 1 and sum(weight.numel() for weight, _ in self.parts) <= _MOST_COPIED:
            biased = any(bias is not None for _, bias in self.parts)
            biases = [weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in self.parts]
            weight = torch.cat([weight for weight, _ in self.parts])
            self.parts = [(weight, torch.cat(biases) if biased else None)]

    def __call__(self, x: Tensor) -> Tensor:
        products = [linear(x, *part) for part in self.parts]
        return products[0] if len(products) == 1 else torch.cat(products, -1)


def _weight_and_bias(module: Any) -> tuple[Tensor, Tensor | None]:
    if isinstance(module, Tensor):
        return module.detach(), None
    return module.weight.detach(), None if module.bias is None else module.bias.detach()

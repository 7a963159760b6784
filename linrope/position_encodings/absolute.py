"""Absolute position encodings: one vector per position, added to the input."""

import torch
from torch import Tensor, nn

from linrope.common.argument_checks import check_integers, check_sizes
from linrope.common.tracing import values_readable
from linrope.rotation.rotary import Rotary


class Sinusoidal(nn.Module):
    """Adds sines and cosines of the position, with wavelengths that grow geometrically.

        x_i + s(p_i),   s(p)_(2t) = sin(p / base^(2t/embed_dim)),   s(p)_(2t+1) = cos(p / base^(2t/embed_dim))

    x is (b, n, embed_dim), positions p (n,) or (b, n) integers. Nothing is learned, and positions have no
    limit. Angles are computed in float64.

    Raises:
        TypeError: embed_dim is not an integer, or base is not a number.
        ValueError: embed_dim is not even, or base <= 0.

    Source: Vaswani et al. 2017, arXiv 1706.03762, section 3.5.

    >>> from linrope.position_encodings import Sinusoidal
    >>> Sinusoidal(4)(torch.zeros(1, 2, 4), torch.tensor([0, 1]))
    tensor([[[0.0000, 1.0000, 0.0000, 1.0000],
             [0.8415, 0.5403, 0.0100, 0.9999]]])
    """

    def __init__(self, embed_dim: int, base: float = 10000.0) -> None:
        super().__init__()
        check_integers(embed_dim=embed_dim)
        if embed_dim < 2 or embed_dim % 2:
            raise ValueError(f"embed_dim={embed_dim}: expected a positive even number")
        self.rotary = Rotary(embed_dim, base=base)  # RoPE has the same frequencies

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self.rotary.cos_sin(positions, x.dtype)
        return x + torch.stack((sin, cos), -1).flatten(-3)

    def extra_repr(self) -> str:
        return f"{self.rotary.dim}, base={self.rotary.base}"


class LearnedAbsolute(nn.Module):
    """Adds a learned vector per position.

        x_i + table_(p_i),   p_i < max_length

    x is (b, n, embed_dim), positions p (n,) or (b, n) integers.

    Raises:
        TypeError: a size is not an integer.
        ValueError: a size is below 1; in forward, a position is outside 0 .. max_length - 1. On a GPU
            PyTorch's own assertion checks positions, since reading them would stall the GPU.

    Source: Devlin et al. 2018, arXiv 1810.04805 (BERT); GPT-2.

    >>> from linrope.position_encodings import LearnedAbsolute
    >>> LearnedAbsolute(8, max_length=100)(torch.zeros(1, 3, 8), torch.arange(97, 100)).shape
    torch.Size([1, 3, 8])
    """

    def __init__(self, embed_dim: int, max_length: int) -> None:
        super().__init__()
        check_sizes(embed_dim=embed_dim, max_length=max_length)
        self.table = nn.Embedding(max_length, embed_dim)
        nn.init.normal_(self.table.weight, std=0.02)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        last = self.table.num_embeddings - 1
        if values_readable(positions) and positions.numel():
            low, high = int(positions.min()), int(positions.max())
            if low < 0 or high > last:
                raise ValueError(f"positions: got {low} .. {high}, expected 0 .. {last}, below max_length")
        p: Tensor = self.table(positions)
        return x + p


ABSOLUTE: dict[str, type[nn.Module]] = {"sinusoidal": Sinusoidal, "learned": LearnedAbsolute}

"""A causal convolution of a few taps over the tokens of each sequence."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from linrope.sequence.packing import owners, rising_bounds


class ShortConvolution(nn.Module):
    """Each channel's weighted sum over the last few tokens, which the next tokens go on from.

        y_i = sum_t weight_(taps - 1 - t) x_(i - t)       t = 0 .. taps - 1;  x = 0 before a sequence

    Tokens that key_mask hides are skipped, as if they were not there (their own y is some finite number), and
    packed sequences do not see each other. The weight starts as the identity, 1 at the token itself: a layer
    starts as it would without, and zeros learn at once, since each tap has an input of its own.

    Args:
        channels: c.
        taps: of the weight, (channels, 1, taps), which lies as torch.nn.Conv1d's does.

    Raises:
        ValueError: taps under 2.

    Source: the convolution of H3 (arXiv 2212.14052) and Mamba (arXiv 2312.00752), without its nonlinearity.

    >>> from linrope.layer.short_convolution import ShortConvolution
    >>> y, last = ShortConvolution(8, taps=4)(torch.randn(2, 10, 8))
    >>> y.shape, last.shape
    (torch.Size([2, 10, 8]), torch.Size([2, 3, 8]))
    """

    def __init__(
        self, channels: int, taps: int = 4, *,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if isinstance(taps, bool) or not isinstance(taps, int) or taps < 2:
            raise ValueError(f"short_conv={taps!r}: expected the number of taps, at least 2, or None")
        self.channels, self.taps = channels, taps
        self.weight = nn.Parameter(torch.empty(channels, 1, taps, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.zero_()
        self.weight[..., -1] = 1

    def forward(
        self, x: Tensor, before: Tensor | None = None, key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """x (b, n, c) -> y of the same shape and dtype, and the last taps - 1 inputs of each sequence.

        before: (s, taps - 1, c), such inputs of the tokens before; None: there were none.
        """
        width = self.taps - 1
        if key_mask is None and cu_seqlens is None:
            first = x.new_zeros(x.shape[0], width, self.channels) if before is None else before.to(x.dtype)
            line = torch.cat((first, x), 1)
            return self._sums(line), line[:, x.shape[1] :].clone()  # or the whole line would stay in memory
        places = _Places.of(x, key_mask, cu_seqlens, width)
        flat = x.flatten(0, 1)
        if key_mask is not None:  # what padding holds may be infinite
            flat = flat.masked_fill(~key_mask.flatten()[:, None], 0)
        line = x.new_zeros(places.length + 1, self.channels).index_copy(0, places.writes, flat)
        if before is not None:
            line = line.index_copy(0, places.begins.flatten(), before.to(x.dtype).flatten(0, 1))
        y = self._sums(line[None])[0].index_select(0, places.reads)
        return y.view(x.shape), line[places.ends]

    def _sums(self, line: Tensor) -> Tensor:
        """(.., taps - 1 + n, c) -> (.., n, c); as shifts, since a CPU's depthwise conv1d is slow."""
        n, weight = line.shape[1] - self.taps + 1, self.weight[:, 0]
        y: Tensor = line[:, self.taps - 1 :] * weight[:, -1]
        for tap in range(self.taps - 1):
            y = y + line[:, tap : tap + n] * weight[:, tap]
        return y.to(line.dtype)

    def extra_repr(self) -> str:
        return f"{self.channels}, taps={self.taps}"


class _Places(NamedTuple):
    """Where tokens go in one line: of each sequence the inputs before it, then its visible tokens."""

    length: int  # of the line; one row more takes what is hidden
    writes: Tensor  # (b n,): the row of each token
    reads: Tensor  # (b n,): its sum, which begins taps - 1 rows earlier; of hidden tokens that of one before
    begins: Tensor  # (s, taps - 1): the rows of the inputs before a sequence
    ends: Tensor  # (s, taps - 1): the last rows of a sequence

    @classmethod
    def of(cls, x: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None, width: int) -> "_Places":
        """Made without asking the device for a number."""
        (b, n, _), device = x.shape, x.device
        tokens = torch.arange(b * n, device=device)
        packed = rising_bounds(cu_seqlens, n)
        bounds = torch.arange(b + 1, device=device) * n if packed is None else packed
        owner = tokens // max(n, 1) if packed is None else owners(packed, n)
        s = b if packed is None else len(packed) - 1  # len() would fix the batch of an exported program
        length = b * n + s * width
        visible = tokens + 1 if key_mask is None else key_mask.flatten().cumsum(0)
        row = visible - 1 + (owner + 1) * width
        writes = row if key_mask is None else row.where(key_mask.flatten(), length)
        count = torch.cat((visible.new_zeros(1), visible))[bounds]  # visible tokens before each bound
        begins = (count[:-1] + torch.arange(s, device=device) * width)[:, None] + torch.arange(
            width, device=device
        )
        ends = begins + count.diff()[:, None]
        return cls(length, writes, (row - width).clamp(min=0), begins, ends)

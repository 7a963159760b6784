"""A causal convolution of a few taps over the tokens of each sequence.

b batch, n tokens, c channels, s sequences.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from linrope.sequence.packing import owners, rising_bounds


class ShortConvolution(nn.Module):
    """A causal depthwise convolution: each channel's weighted sum over its last few tokens.

        y_i = sum_t weight_(taps - 1 - t) x_(i - t)       t = 0 .. taps - 1;  x = 0 before a sequence

    Tokens that key_mask hides are skipped, as if they were absent; their own y is an arbitrary finite number. Packed
    sequences do not see each other. The weight starts as the identity, with 1 at the token itself, so a new layer
    computes the same as one without the convolution. The zeros learn at once, because each tap has its own input.

    Args:
        channels: c.
        taps: number of tokens that y depends on. The weight is (channels, 1, taps), as in torch.nn.Conv1d.

    Raises:
        ValueError: taps is below 2.

    Source: the convolution of H3 (arXiv 2212.14052) and Mamba (arXiv 2312.00752), without its nonlinearity.

    >>> from linrope.layer.short_convolution import ShortConvolution
    >>> y, last = ShortConvolution(8, taps=4)(torch.randn(2, 10, 8))
    >>> y.shape, last.shape
    (torch.Size([2, 10, 8]), torch.Size([2, 3, 8]))
    """

    def __init__(
        self,
        channels: int,
        taps: int = 4,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
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
        self,
        x: Tensor,
        before: Tensor | None = None,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns y in the shape and dtype of x (b, n, c), and the last inputs of each sequence (s, taps - 1, c).

        before: the last inputs of the call whose sequences x continues. None: the sequences begin here.
        """
        width = self.taps - 1
        if key_mask is None and cu_seqlens is None:
            before = x.new_zeros(x.shape[0], width, self.channels) if before is None else before.to(x.dtype)
            inputs = torch.cat((before, x), 1)
            last = inputs[:, x.shape[1] :].clone()  # a view would keep all inputs in memory
            return self._sums(inputs), last
        rows = _Rows.of(x, key_mask, cu_seqlens, width)
        flat = x.flatten(0, 1)
        if key_mask is not None:  # padding may be infinite
            flat = flat.masked_fill(~key_mask.flatten()[:, None], 0)
        inputs = x.new_zeros(rows.length + 1, self.channels).index_copy(0, rows.tokens, flat)
        if before is not None:
            inputs = inputs.index_copy(0, rows.before.flatten(), before.to(x.dtype).flatten(0, 1))
        y = self._sums(inputs[None])[0].index_select(0, rows.sums)
        return y.view(x.shape), inputs[rows.last]

    def _sums(self, inputs: Tensor) -> Tensor:
        """(.., taps - 1 + n, c) -> (.., n, c), computed by shifts because depthwise conv1d is slow on a CPU."""
        n, weight = inputs.shape[1] - self.taps + 1, self.weight[:, 0]
        y: Tensor = inputs[:, self.taps - 1 :] * weight[:, -1]
        for tap in range(self.taps - 1):
            y = y + inputs[:, tap : tap + n] * weight[:, tap]
        return y.to(inputs.dtype)

    def extra_repr(self) -> str:
        return f"{self.channels}, taps={self.taps}"


class _Rows(NamedTuple):
    """Where the inputs lie in one table: for each sequence the taps - 1 inputs before it, then its visible tokens."""

    length: int  # number of rows; one more row takes the hidden tokens
    tokens: Tensor  # (b n,): the row of each token
    sums: Tensor  # (b n,): the first row of each token's sum; a hidden token takes the sum of an earlier row
    before: Tensor  # (s, taps - 1): the rows of the inputs before each sequence
    last: Tensor  # (s, taps - 1): the last rows of each sequence

    @classmethod
    def of(cls, x: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None, width: int) -> "_Rows":
        """Built without a host-device sync."""
        (b, n, _), device = x.shape, x.device
        tokens = torch.arange(b * n, device=device)
        packed = rising_bounds(cu_seqlens, n)
        bounds = torch.arange(b + 1, device=device) * n if packed is None else packed
        owner = tokens // max(n, 1) if packed is None else owners(packed, n)
        s = b if packed is None else len(packed) - 1  # len(bounds) would fix the batch size of an export
        length = b * n + s * width
        visible = tokens + 1 if key_mask is None else key_mask.flatten().cumsum(0)
        row = visible - 1 + (owner + 1) * width
        row_or_spare = row if key_mask is None else row.where(key_mask.flatten(), length)
        count = torch.cat((visible.new_zeros(1), visible))[bounds]  # visible tokens before each bound
        first = count[:-1] + torch.arange(s, device=device) * width
        before = first[:, None] + torch.arange(width, device=device)
        last = before + count.diff()[:, None]
        return cls(length, row_or_spare, (row - width).clamp(min=0), before, last)

"""A causal convolution of a few taps over the tokens of each sequence.

b batch, n tokens, c channels, s sequences.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from linrope.layer.options import ShortConvOptions
from linrope.ops import convolve, convolve_parts
from linrope.recurrence.packing import owners, rising_bounds


class ShortConvolution(nn.Module):
    """A causal depthwise convolution: each channel's weighted sum over its last few tokens.

        y_i = act(bias + sum_t weight_(taps - 1 - t) x_(i - t))       t = 0 .. taps - 1;  x = 0 before a sequence

    Tokens that key_mask hides are skipped, as if they were absent; their own y is an arbitrary finite number. Packed
    sequences do not see each other.

    Args:
        channels: c.
        taps: number of tokens that y depends on. The weight is (channels, 1, taps), as in torch.nn.Conv1d.
        activation: None, or "silu".
        bias: whether there is a bias, which starts at 0.
        start: the weight's initial value. "identity": 1 at the token itself, so that a new layer without an activation
            computes the same as one without the convolution; the taps that start at 0 get gradients from
            the first step, because each multiplies a different input. "uniform": between -1 / sqrt(taps) and
            1 / sqrt(taps), as in torch.nn.Conv1d.

    Raises:
        TypeError: bias is not a bool.
        ValueError: taps is not an integer from 2 to 65536, or a name is unknown.

    Source: the convolution of H3 (arXiv 2212.14052) and, with SiLU, of Mamba (arXiv 2312.00752).

    >>> from linrope.layer.short_convolution import ShortConvolution
    >>> y, last = ShortConvolution(8, taps=4, activation="silu")(torch.randn(2, 10, 8))
    >>> y.shape, last.shape
    (torch.Size([2, 10, 8]), torch.Size([2, 3, 8]))
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        channels: int,
        taps: int = 4,
        *,
        activation: str | None = None,
        bias: bool = False,
        start: str = "identity",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        ShortConvOptions(taps, activation, bias, start)  # raises for bad ones
        self.channels, self.taps, self.activation, self.start = channels, taps, activation, start
        self.weight = nn.Parameter(torch.empty(channels, 1, taps, device=device, dtype=dtype))
        self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.empty(channels, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.start == "identity":
            self.weight.zero_()
            self.weight[..., -1] = 1
        else:
            nn.init.uniform_(self.weight, -(self.taps**-0.5), self.taps**-0.5)
        if self.bias is not None:
            self.bias.zero_()

    def forward(
        self,
        x: Tensor | Sequence[Tensor],
        before: Tensor | None = None,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        want_last: bool = True,
    ) -> tuple[Any, Any]:
        """Returns y in the shape and dtype of x (b, n, c), and the last inputs of each sequence (s, taps - 1, c).

        x: a tensor, or several that together have the channels and are not copied; y is then a list of such parts.
        before: the last inputs of the call whose sequences x continues. None: the sequences begin here.
        want_last: False: the call may return None in place of the last inputs, which takes less time.
        """
        parts = [x] if isinstance(x, Tensor) else [*x]
        sizes = [part.shape[-1] for part in parts]
        if key_mask is not None:
            y, last = self._skip_hidden(torch.cat(parts, -1), before, key_mask, cu_seqlens)
            ys: Sequence[Tensor] = [y]
        else:
            if parts[0].shape[1] == 1:  # a decoding step: one call of the kernel costs less than several
                parts = [torch.cat(parts, -1)]
            if before is not None:
                before = before.to(parts[0].dtype)
            silu = self.activation == "silu"
            ys = convolve_parts(
                parts, self.weight, self.bias, before=before, cu_seqlens=cu_seqlens, silu=silu
            )
            last = self._last_of_parts(parts, before, cu_seqlens) if want_last else None
        if len(ys) < len(sizes):
            ys = ys[0].split(sizes, -1)
        return ys[0] if isinstance(x, Tensor) else [*ys], last

    def _last_of_parts(self, parts: list[Tensor], before: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
        if before is None:
            sequences = parts[0].shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
            before = parts[0].new_zeros(sequences, self.taps - 1, self.channels)
        befores = before.split([x.shape[-1] for x in parts], -1)
        lasts = [_last_inputs(*pair, cu_seqlens) for pair in zip(befores, parts, strict=True)]
        return torch.cat(lasts, -1) if len(lasts) > 1 else lasts[0]

    def _skip_hidden(
        self, x: Tensor, before: Tensor | None, key_mask: Tensor, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """``forward`` with a mask: the visible tokens are copied into one table, where they are neighbours."""
        rows = _Rows.of(x, key_mask, cu_seqlens, self.taps - 1)
        flat = x.flatten(0, 1).masked_fill(~key_mask.flatten()[:, None], 0)  # padding may be infinite
        inputs = x.new_zeros(rows.length + 1, self.channels).index_copy(0, rows.tokens, flat)
        if before is not None:
            inputs = inputs.index_copy(0, rows.before.flatten(), before.to(x.dtype).flatten(0, 1))
        y = convolve(inputs[None], self.weight, self.bias, silu=self.activation == "silu")[0]
        return y.index_select(0, rows.tokens).view(x.shape), inputs[rows.last]

    def extra_repr(self) -> str:
        text = f"{self.channels}, taps={self.taps}"
        text += "" if self.activation is None else f", activation={self.activation!r}"
        return text + ("" if self.bias is None else ", bias=True")


def _last_inputs(before: Tensor, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The last taps - 1 inputs of each sequence, (s, taps - 1, c), from those before this call and x (b, n, c)."""
    width, n = before.shape[1], x.shape[1]
    if cu_seqlens is None:
        # While compiling, n is not compared: that would fix the length of an exported graph.
        if torch.compiler.is_compiling() or n < width:
            return torch.cat((before, x), 1)[:, n:].clone()  # a view would keep all inputs in memory
        return x[:, n - width :].clone()
    bounds = rising_bounds(cu_seqlens, n)
    assert bounds is not None
    slots = torch.arange(width, device=x.device)
    # The token of each last input. An index below its sequence's first token stands for an input before this call.
    index = bounds[1:, None] - width + slots
    # The number of inputs that come from before the sequence.
    missing = (bounds[:-1, None] - index).clamp(min=0)
    old = before.gather(1, (width - missing).clamp(max=width - 1)[..., None].expand_as(before))
    if n == 0:
        return old
    new = x[0].index_select(0, index.clamp(min=0).flatten()).view(before.shape)
    return torch.where((missing > 0)[..., None], old, new)


class _Rows(NamedTuple):
    """Where the inputs lie in one table: for each sequence the taps - 1 inputs before it, then its visible tokens."""

    length: int  # number of rows; one more row takes the hidden tokens
    tokens: Tensor  # (b n,): the row of each token
    before: Tensor  # (s, taps - 1): the rows of the inputs before each sequence
    last: Tensor  # (s, taps - 1): the last rows of each sequence

    @classmethod
    def of(cls, x: Tensor, key_mask: Tensor, cu_seqlens: Tensor | None, width: int) -> "_Rows":
        """Built without a host-device sync."""
        (b, n, _), device = x.shape, x.device
        tokens = torch.arange(b * n, device=device)
        packed = rising_bounds(cu_seqlens, n)
        bounds = torch.arange(b + 1, device=device) * n if packed is None else packed
        owner = tokens // max(n, 1) if packed is None else owners(packed, n)
        s = b if packed is None else len(packed) - 1  # len(bounds) would fix the batch size of an export
        length = b * n + s * width
        visible = key_mask.flatten().cumsum(0)
        row = (visible - 1 + (owner + 1) * width).where(key_mask.flatten(), length)
        count = torch.cat((visible.new_zeros(1), visible))[bounds]  # visible tokens before each bound
        first = count[:-1] + torch.arange(s, device=device) * width
        before = first[:, None] + torch.arange(width, device=device)
        last = before + count.diff()[:, None]
        return cls(length, row, before, last)

"""The short convolution on a shard: one gather of each rank's last inputs, which the next rank continues from.

b batch, n local tokens, c channels; width = taps - 1 inputs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from linrope.distributed.layout import Layout
from linrope.distributed.uncompiled import uncompiled


@uncompiled
def convolve_shard(
    convolution: Callable[..., Any],  # a ShortConvolution
    x: Tensor,
    shard: Layout,
    key_mask: Tensor | None,
    before: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """y of the local x (b, n, c), and the last inputs of all ranks' tokens or, if packed, of each local document."""
    width = convolution.taps - 1  # type: ignore[attr-defined]
    if shard.size == 1:
        shard.check_length("x", x.shape[1])
        y, last = convolution(x, before, key_mask, shard.cu_seqlens)
        return y, last
    shard.agree(lambda: _describe(x, shard, width, before))
    tokens = shard.piece(-1)
    tail, count = last_inputs(x[:, tokens], None if key_mask is None else key_mask[:, tokens], width)
    tails, counts = shard.channel.gather([tail, count], _differentiable(x)).wait()
    packed = shard.cu_seqlens is not None
    if before is None:
        start = x.new_zeros(max(1, len(shard.local_pieces)) if packed else len(x), *tail.shape[1:])
    else:
        start = (before[shard.documents(x.device)] if packed else before).to(x.dtype)
    # Only the first of the local packed sequences can have tokens on earlier ranks.
    first = fold_inputs(tails, counts, shard.ranks_before, start[:1] if packed else start)
    halo = torch.cat((first, start[1:])) if packed else first
    y, last = convolution(x, halo, key_mask, shard.cu_seqlens)
    return y, last if packed else fold_inputs(tails, counts, shard.ranks_with_tokens, start)


def _describe(x: Tensor, shard: Layout, width: int, before: Tensor | None) -> str:
    shard.check_length("x", x.shape[1])
    return (
        f"{x.dtype} inputs of the convolution (b, n, c) = ({x.shape[0]}, n, {x.shape[2]}), taps={width + 1}, "
        f"gradients={_differentiable(x)}, earlier inputs={before is not None}"
    )


def _differentiable(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def last_inputs(x: Tensor, key_mask: Tensor | None, width: int) -> tuple[Tensor, Tensor]:
    """The last visible tokens of x (b, n, c), aligned at the end: (b, width, c). And their number, (b,)."""
    b, n, _ = x.shape
    if key_mask is None:
        count = min(n, width)
        tail = torch.cat((x.new_zeros(b, width - count, x.shape[2]), x[:, n - count :]), 1)
        return tail, torch.full((b,), count, device=x.device)
    if n == 0:
        return x.new_zeros(b, width, x.shape[2]), torch.zeros(b, dtype=torch.int64, device=x.device)
    from_end = key_mask.flip(1).cumsum(1).flip(1)  # counts visible tokens; the last is 1
    numbers = torch.arange(width, 0, -1, device=x.device)
    chosen = (from_end[:, None] == numbers[:, None]) & key_mask[:, None]  # (b, width, n)
    tail = x.gather(1, chosen.int().argmax(2)[..., None].expand(-1, -1, x.shape[2]))
    return tail.masked_fill(~chosen.any(2)[..., None], 0), key_mask.sum(1).clamp(max=width)


def fold_inputs(tails: Tensor, counts: Tensor, chain: Sequence[int], start: Tensor) -> Tensor:
    """The last inputs after the ranks of ``chain``, (b, width, c). start: the last inputs before them."""
    width = start.shape[1]
    last = start + tails[:0].sum(0)  # the empty slice joins the backward pass, as in fold
    slots = torch.arange(width, device=start.device)
    for s in chain:
        index = slots + counts[s][:, None]
        index = torch.where(index < width, index, width + slots)
        last = torch.cat((last, tails[s]), 1).gather(1, index[..., None].expand(-1, -1, start.shape[2]))
    return last

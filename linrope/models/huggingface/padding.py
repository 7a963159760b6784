"""Finds padding in attention masks, and the beginnings of packed sequences in position ids."""

import torch
from torch import Tensor


def count_positions(attention_mask: Tensor) -> Tensor:
    """(b, m) -> (b, m): counts tokens. Padding has the position of the token before it."""
    return (attention_mask.long().cumsum(1) - 1).clamp(min=0)


def may_pad(attention_mask: Tensor, n: int) -> bool:
    """True unless the mask is known to be all ones. A decoding step on a GPU does not wait to read it."""
    unread = torch.compiler.is_compiling() or (n == 1 and attention_mask.device.type != "cpu")
    return unread or not bool(attention_mask.all())


def restarts(position_ids: Tensor) -> Tensor | None:
    """cu_seqlens of the sequences that begin at position 0; None if there is only one."""
    first = (position_ids.flatten() == 0).nonzero()[:, 0]
    end = first.new_full((1,), position_ids.shape[-1])
    return torch.cat((first.new_zeros(1), first[first > 0], end)) if len(first) > 1 else None

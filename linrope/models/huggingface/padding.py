"""Finds padding in attention masks, and the beginnings of packed sequences in position ids."""

import torch
from torch import Tensor

from linrope.operation.checks import check_packing
from linrope.sequence.packing import rising_bounds, sums_so_far


def count_positions(attention_mask: Tensor, bounds: Tensor | None = None) -> Tensor:
    """(b, m) -> (b, m): counts the tokens of each sequence. Padding has the position of the token before it."""
    return (sums_so_far(attention_mask.long(), bounds) - 1).clamp(min=0)


def may_pad(attention_mask: Tensor, n: int) -> bool:
    """True unless the mask is known to be all ones. A decoding step on a GPU does not wait to read it."""
    unread = torch.compiler.is_compiling() or (n == 1 and attention_mask.device.type != "cpu")
    return unread or not bool(attention_mask.all())


def read_mask(
    attention_mask: Tensor, position_ids: Tensor | None, b: int, n: int, seen: int, cu_seqlens: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The positions (None: the default) and the key_mask (None: no padding) of the last n of seen + n tokens."""
    if attention_mask.shape != (b, seen + n):
        raise ValueError(f"attention_mask: got shape {tuple(attention_mask.shape)}, expected {(b, seen + n)}")
    if not may_pad(attention_mask, n):
        return position_ids, None
    check_packing(cu_seqlens, b, n, n, attention_mask.device)
    key_mask = attention_mask[:, seen:].bool()
    counted = count_positions(attention_mask, rising_bounds(cu_seqlens, n))[:, seen:]
    if position_ids is None:
        position_ids = counted
    elif _have_one_axis(position_ids, n):
        # The positions that transformers gives to padding may fall, and decay needs rising ones.
        position_ids = position_ids.where(key_mask, counted)
    return position_ids, key_mask if may_pad(key_mask, n) else None  # the padding may be older than this call


def restarts(position_ids: Tensor, n: int) -> Tensor | None:
    """cu_seqlens of the sequences that begin at position 0; None if there is only one."""
    if not _have_one_axis(position_ids, n):
        return None
    zeros = (position_ids.flatten() == 0).nonzero()[:, 0]
    later = zeros[zeros > 0]
    return torch.cat((later.new_zeros(1), later, later.new_full((1,), n))) if len(later) else None


def _have_one_axis(position_ids: Tensor, n: int) -> bool:
    """False for coordinates on several axes, (n, axes) or (b, n, axes)."""
    return position_ids.ndim < 3 and position_ids.shape[-1] == n

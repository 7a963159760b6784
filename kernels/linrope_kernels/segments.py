"""How sequences are cut into segments, scanned side by side; packed ones without asking the device."""

from typing import NamedTuple

import torch
from torch import Tensor


class Segments(NamedTuple):
    number: int
    length: int
    slots: Tensor | None  # (number, 3) int32 of packed sequences: first token, last + 1, sequence
    firsts: Tensor | None  # (s + 1,) int32: the first slot of each packed sequence


def cut_packed(cu_seqlens: Tensor, n: int, length: int) -> Segments:
    """Segments of at most ``length`` tokens that end where one of the packed sequences does."""
    bounds = rising_bounds(cu_seqlens, n)
    counts = (bounds.diff() + length - 1) // length
    firsts = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    number = n // length + len(counts)  # at least as many as there are; the rest stays empty
    slots = torch.arange(number, device=bounds.device)
    owner = _owner(firsts, slots)
    low = bounds[owner] + (slots - firsts[owner]) * length
    high = torch.minimum(low + length, bounds[owner + 1])
    used = slots < firsts[-1]
    table = torch.stack((torch.where(used, low, 0), torch.where(used, high, 0), owner), 1)
    return Segments(number, length, table.int(), firsts.int())


def rising_bounds(cu_seqlens: Tensor, n: int) -> Tensor:
    """Whatever the device holds: numbers that rise, within the sequence."""
    return cu_seqlens.long().clamp(0, n).cummax(0).values


def _owner(bounds: Tensor, x: Tensor) -> Tensor:
    """In which part each of x lies, for parts that begin at bounds; the last one has all that is beyond."""
    return torch.searchsorted(bounds[1:], x, right=True).clamp_(max=len(bounds) - 2)

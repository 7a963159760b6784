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


def sums_between(x: Tensor, cut: Segments, low: Tensor, high: Tensor) -> Tensor:
    """Running sums of x (b, n, g) within each segment, without the token itself, that lead from low to high.

    low and high (b, segments, g) are the sums before a segment's first token and after its last one. The
    difference between high and low + the sum of x is divided evenly among the tokens. Tokens outside of all
    packed sequences get 0.
    """
    n = x.shape[1]
    tokens = torch.arange(n, device=x.device)
    if cut.slots is None:
        at = tokens // cut.length
        first, end = at * cut.length, ((at + 1) * cut.length).clamp(max=n)
    else:
        ends = cut.slots[:, 1].cummax(0).values
        at = torch.searchsorted(ends, tokens.int(), right=True).clamp_(max=cut.number - 1)
        first, end = cut.slots[at, 0].long(), cut.slots[at, 1].long()
    inside = (first <= tokens) & (tokens < end)
    sums = torch.cat((x.new_zeros(x.shape[0], 1, x.shape[2]), x.cumsum(1)), 1)
    missing = high[:, at] - low[:, at] - (sums[:, end] - sums[:, first])
    part = (tokens - first) / (end - first)
    found = low[:, at] + (sums[:, :-1] - sums[:, first]) + part[:, None] * missing
    return torch.where(inside[:, None], found, 0)


def rising_bounds(cu_seqlens: Tensor, n: int) -> Tensor:
    """Whatever the device holds: numbers that rise, within the sequence."""
    return cu_seqlens.long().clamp(0, n).cummax(0).values


def _owner(bounds: Tensor, x: Tensor) -> Tensor:
    """In which part each of x lies, for parts that begin at bounds; the last one has all that is beyond."""
    return torch.searchsorted(bounds[1:], x, right=True).clamp_(max=len(bounds) - 2)

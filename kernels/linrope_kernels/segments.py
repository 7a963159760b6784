"""Cuts sequences into segments, which are scanned side by side; no host-device sync for packed sequences."""

from typing import NamedTuple

import torch
from torch import Tensor


class Segments(NamedTuple):
    number: int
    length: int
    spans: Tensor | None  # packed: (number, 3) int32, first token, last token + 1, packed sequence
    first_spans: Tensor | None  # packed: (sequences + 1,) int32, the first segment of each packed sequence


def cut_packed(bounds: Tensor, n: int, length: int) -> Segments:
    """Segments of at most ``length`` tokens; none reaches across the end of a packed sequence.

    bounds: they rise within 0 .. n.
    """
    counts = (bounds.diff() + length - 1) // length
    first_spans = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    number = n // length + len(counts)  # the host does not know the lengths; surplus segments stay empty
    index = torch.arange(number, device=bounds.device)
    owner = _owner(first_spans, index)
    first = bounds[owner] + (index - first_spans[owner]) * length
    end = torch.minimum(first + length, bounds[owner + 1])
    used = index < first_spans[-1]
    spans = torch.stack((torch.where(used, first, 0), torch.where(used, end, 0), owner), 1)
    return Segments(number, length, spans.int(), first_spans.int())


class RunningSums:
    """Sums of x (b, n, ..) over any ranges of tokens.

    packed: the rows of x are packed sequences, and one running sum goes over all of them. A NaN or an infinity is left
    out of that sum, so that it does not reach other sequences. The sum of a range that contains one is NaN.
    """

    def __init__(self, x: Tensor, *, packed: bool) -> None:
        self.bad = None
        if packed:
            bad = ~x.isfinite()
            x, self.bad = x.masked_fill(bad, 0), _sums_before(bad.int())
        self.sums = _sums_before(x)

    def between(self, first: Tensor, end: Tensor | slice) -> Tensor:
        """(b, ranges, ..): the sums over the tokens first .. end - 1. first and end have a number for each range."""
        sums = self.sums[:, end] - self.sums[:, first]
        if self.bad is None:
            return sums
        return sums.masked_fill(self.bad[:, end] > self.bad[:, first], torch.nan)


def _sums_before(x: Tensor) -> Tensor:
    """(b, n + 1, ..): x (b, n, ..) summed over the tokens before each one, and over all.

    Along the last axis, because PyTorch sums any other axis on a GPU one token after another.
    """
    sums = x.movedim(1, -1).contiguous().cumsum(-1, dtype=x.dtype)
    return torch.nn.functional.pad(sums, (1, 0)).movedim(-1, 1)


def _owner(bounds: Tensor, x: Tensor) -> Tensor:
    """The index of the interval bounds[i] .. bounds[i + 1] that each x lies in; the last one has no end."""
    return torch.searchsorted(bounds[1:], x, right=True).clamp_(max=len(bounds) - 2)

"""Which tokens belong together: the rows of a batch, or packed sequences one behind the other.

``bounds`` are the (s + 1,) places where packed sequences begin and end (b is then 1); None: each row of the
batch is a sequence. Nothing here asks the device for a number.
"""

import torch
from torch import Tensor


def rising_bounds(cu_seqlens: Tensor | None, n: int) -> Tensor | None:
    """int64 numbers that rise within 0 .. n, whatever the device holds: nothing is read out of bounds."""
    return None if cu_seqlens is None else cu_seqlens.long().clamp(0, n).cummax(0).values


def owners(bounds: Tensor, n: int) -> Tensor:
    """(n,): in which sequence each token lies; tokens beyond the last bound count as the last one's."""
    tokens = torch.arange(n, device=bounds.device)
    return torch.searchsorted(bounds[1:], tokens, right=True).clamp_(max=max(len(bounds) - 2, 0))


def previous(x: Tensor, first: Tensor, bounds: Tensor | None) -> Tensor:
    """x (b or 1, n, ..) at the token before each; first (s or 1, ..): what comes before a sequence."""
    n = x.shape[1]
    if n == 0:
        return x
    if bounds is None:
        rows = max(x.shape[0], first.shape[0])  # not len(), which fixes the batch of an exported program
        return torch.cat(
            (first[:, None].expand(rows, *x[0, :1].shape), x[:, :-1].expand(rows, *x[0, 1:].shape)), 1
        )
    owner = owners(bounds, n)
    begins = torch.arange(n, device=x.device) == bounds[owner]
    return torch.where(begins.view(1, n, *[1] * (x.ndim - 2)), spread(first, n, bounds), x.roll(1, 1))


def at_last(x: Tensor, otherwise: Tensor, bounds: Tensor | None) -> Tensor:
    """(s or 1, ..): x (b or 1, n, ..) at the last token of each sequence; of an empty one ``otherwise``."""
    n = x.shape[1]
    if n == 0:
        return otherwise
    if bounds is None:
        return x[:, -1]
    last = x[0].index_select(0, (bounds[1:] - 1).clamp(min=0))
    return torch.where(bounds.diff().gt(0).view(-1, *[1] * (last.ndim - 1)), last, otherwise)


def spread(x: Tensor, n: int, bounds: Tensor | None) -> Tensor:
    """(b or 1, 1, ..), packed (1, n, ..): what is known per sequence, x (s or 1, ..), at each token."""
    if bounds is None:
        return x[:, None]
    return (x.expand(len(bounds) - 1, *x.shape[1:]) if len(x) == 1 else x)[owners(bounds, n)][None]


def at_first(x: Tensor, n: int, bounds: Tensor | None) -> Tensor:
    """(b or 1, n, ..): x (s or 1, ..) at the first token of each sequence, elsewhere 0."""
    tokens = torch.arange(n, device=x.device)
    begins = tokens == (0 if bounds is None else bounds[owners(bounds, n)])
    return spread(x, n, bounds).where(begins.view(1, n, *[1] * (x.ndim - 1)), 0)


def sums_so_far(x: Tensor, bounds: Tensor | None) -> Tensor:
    """x (b or 1, n, ..) summed from each sequence's first token on; exact for integers, which may wrap."""
    total = x.cumsum(1)
    if bounds is None or x.shape[1] == 0:
        return total
    owner = owners(bounds, x.shape[1])
    before = torch.cat((total.new_zeros(1, 1, *x.shape[2:]), total), 1)[:, bounds[owner]]
    return total - before


def running_maximum(scale: Tensor, log_decay: Tensor | None, first: Tensor, bounds: Tensor | None) -> Tensor:
    """m_i = max(m_(i-1) + a_i, s_i), from scale s (b, n, g), log_decay a (b or 1, n, g or 1), first (.., g).

    In log2(n) steps, each of which doubles how far every token has looked back. No sum of a over the whole
    sequence is formed, so strong decays cost no digits.
    """
    b, n, g = scale.shape
    if n == 0:
        return scale
    a = scale.new_zeros(1, 1, 1) if log_decay is None else log_decay
    a = a.expand(b, n, g).contiguous()
    begins = torch.zeros(n, dtype=torch.bool, device=scale.device)
    begins[0] = True
    if bounds is not None:
        tokens = torch.arange(n, device=scale.device)
        begins = tokens == bounds[owners(bounds, n)]
    # What lies before a sequence joins its first token, which then looks back no further.
    before = first.expand(b, g)[:, None] if bounds is None else spread(first, n, bounds)
    m = torch.where(begins[:, None], torch.maximum(scale, before + a), scale)
    begins = begins[:, None].expand(n, g)
    step = 1
    while step < n:
        earlier = torch.where(begins[step:], scale.new_full((), -torch.inf), m[:, :-step] + a[:, step:])
        m = torch.cat((m[:, :step], torch.maximum(m[:, step:], earlier)), 1)
        a = torch.cat((a[:, :step], torch.where(begins[step:], a[:, step:], a[:, step:] + a[:, :-step])), 1)
        begins = torch.cat((begins[:step], begins[step:] | begins[:-step]), 0)
        step *= 2
    return m

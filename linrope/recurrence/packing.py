"""Which tokens belong together: the rows of a batch, or packed sequences one after the other.

``bounds`` (s + 1,) are the indices at which packed sequences begin and end (b is then 1). None: each row of the
batch is a sequence. No function here reads a value back from the device.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Tokens(NamedTuple):
    """The positions of a call's tokens, and the packing of its sequences."""

    bounds: Tensor | None  # (s + 1,): the bounds of packed sequences
    start: Tensor  # (b or 1,), packed (s,): the default position of each sequence's first token
    positions: Tensor  # (b or 1, n), (b or 1, n, axes), or (b or 1, 1): the first of n consecutive ones
    key_positions: Tensor | None  # the same for keys; None: the queries' positions


def rising_bounds(cu_seqlens: Tensor | None, n: int) -> Tensor | None:
    """cu_seqlens in int64, forced to rise within 0 .. n: unchecked values on a GPU must not index out of bounds."""
    return None if cu_seqlens is None else cu_seqlens.long().clamp(0, n).cummax(0).values


def owners(bounds: Tensor, n: int) -> Tensor:
    """(n,): the sequence of each token. Tokens beyond the last bound belong to the last sequence."""
    tokens = torch.arange(n, device=bounds.device)
    return torch.searchsorted(bounds[1:], tokens, right=True).clamp_(max=max(len(bounds) - 2, 0))


def begins(n: int, bounds: Tensor | None, device: torch.device) -> Tensor:
    """(n,): True at the first token of each sequence."""
    return torch.arange(n, device=device) == (0 if bounds is None else bounds[owners(bounds, n)])


def previous(x: Tensor, first: Tensor, bounds: Tensor | None) -> Tensor:
    """x (b or 1, n, ..) shifted by one token. The first token of each sequence gets ``first`` (s or 1, ..)."""
    n = x.shape[1]
    if n == 0:
        return x
    here = begins(n, bounds, x.device).view(1, n, *[1] * (x.ndim - 2))
    return torch.where(here, per_token(first, n, bounds), x.roll(1, 1))


def at_last(x: Tensor, otherwise: Tensor, bounds: Tensor | None) -> Tensor:
    """(s or 1, ..): x (b or 1, n, ..) at the last token of each sequence; empty sequences take ``otherwise``."""
    n = x.shape[1]
    if n == 0:
        return otherwise
    if bounds is None:
        return x[:, -1]
    last = x[0].index_select(0, (bounds[1:] - 1).clamp(min=0))
    return torch.where(bounds.diff().gt(0).view(-1, *[1] * (last.ndim - 1)), last, otherwise)


def per_token(x: Tensor, n: int, bounds: Tensor | None) -> Tensor:
    """Broadcasts x (s or 1, ..), one value per sequence, to the tokens: (b or 1, 1, ..), packed (1, n, ..)."""
    if bounds is None:
        return x[:, None]
    return (x.expand(len(bounds) - 1, *x.shape[1:]) if len(x) == 1 else x)[owners(bounds, n)][None]


def at_first(x: Tensor, n: int, bounds: Tensor | None) -> Tensor:
    """(b or 1, n, ..): x (s or 1, ..) at the first token of each sequence, elsewhere 0."""
    here = begins(n, bounds, x.device).view(1, n, *[1] * (x.ndim - 1))
    return per_token(x, n, bounds).where(here, 0)


def sums_so_far(x: Tensor, bounds: Tensor | None) -> Tensor:
    """x (b or 1, n, ..) summed from each sequence's first token on; exact for integers, which may wrap.

    With packed sequences x must hold integers, because cumsum would carry one sequence's NaN into all later sequences.
    """
    total = x.cumsum(1)
    if bounds is None or x.shape[1] == 0:
        return total
    owner = owners(bounds, x.shape[1])
    sums_before = torch.cat((total.new_zeros(1, 1, *x.shape[2:]), total), 1)[:, bounds[owner]]
    return total - sums_before


def sums_of_sequences(x: Tensor, bounds: Tensor | None) -> Tensor:
    """(s, ..): x (b or 1, n, ..) summed over each sequence. A NaN stays within its sequence."""
    if bounds is None:
        return x.sum(1)
    tokens = torch.arange(x.shape[1], device=x.device)
    # 0 before the first bound, then 1 .. s for the sequences, s + 1 beyond the last bound
    row = torch.searchsorted(bounds, tokens, right=True)
    return x.new_zeros(len(bounds) + 1, *x.shape[2:]).index_add(0, row, x[0])[1:-1]


def running_maximum(scale: Tensor, log_decay: Tensor | None, first: Tensor, bounds: Tensor | None) -> Tensor:
    """m_i = max(m_(i-1) + a_i, s_i) from scale s (b, n, g), log_decay a (b or 1, n, g or 1) and
    first (s or 1, g), the m before each sequence.

    No gradient passes through it.
    """
    if torch.onnx.is_in_onnx_export() and bounds is None:
        return _maximum_by_table(scale, log_decay, first)
    if torch.compiler.is_compiling():
        m: Tensor = _maximum_operator(scale, log_decay, first, bounds)
        return m
    return _maximum_by_doubling(scale, log_decay, first, bounds)


def _maximum_by_doubling(
    scale: Tensor, log_decay: Tensor | None, first: Tensor, bounds: Tensor | None
) -> Tensor:
    """In log2(n) steps. Each doubles the number of earlier tokens that m_i takes into account.

    The sum of a between two tokens is never the difference of two longer sums, so strong decays do not cancel digits.
    """
    b, n, g = scale.shape
    if n == 0:
        return scale.clone()
    a = scale.new_zeros(1, 1, 1) if log_decay is None else log_decay
    a = a.expand(b, n, g).contiguous()
    cut = begins(n, bounds, scale.device)
    # The value before a sequence joins its first token, which then looks back no further.
    previous_maximum = first.expand(b, g)[:, None] if bounds is None else per_token(first, n, bounds)
    m = torch.where(cut[:, None], torch.maximum(scale, previous_maximum + a), scale)
    cut = cut[:, None].expand(n, g)
    step = 1
    while step < n:
        earlier = torch.where(cut[step:], scale.new_full((), -torch.inf), m[:, :-step] + a[:, step:])
        m = torch.cat((m[:, :step], torch.maximum(m[:, step:], earlier)), 1)
        a = torch.cat((a[:, :step], torch.where(cut[step:], a[:, step:], a[:, step:] + a[:, :-step])), 1)
        cut = torch.cat((cut[:step], cut[step:] | cut[:-step]), 0)
        step *= 2
    return m


# One opaque node in a graph. A traced loop would have a fixed number of steps, so every power of two would need a new
# graph.
_maximum_operator = torch.library.custom_op(
    "linrope::running_maximum",
    _maximum_by_doubling,
    mutates_args=(),
    schema="(Tensor scale, Tensor? log_decay, Tensor first, Tensor? bounds) -> Tensor",
)


@_maximum_operator.register_fake
def _(scale: Tensor, log_decay: Tensor | None, first: Tensor, bounds: Tensor | None) -> Tensor:
    return torch.empty_like(scale, memory_format=torch.contiguous_format)


def _maximum_by_table(scale: Tensor, log_decay: Tensor | None, first: Tensor) -> Tensor:
    """Compares all pairs of tokens. For export: ONNX has these operations, and one graph serves any length."""
    L = torch.zeros_like(scale) if log_decay is None else log_decay.cumsum(1)
    tokens = torch.arange(scale.shape[1], device=scale.device)
    causal = (tokens[:, None] >= tokens)[..., None]
    decayed = (scale[:, None] + L[:, :, None] - L[:, None]).masked_fill(~causal, -torch.inf)
    return torch.maximum(decayed.amax(2), first[:, None] + L)

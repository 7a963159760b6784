"""Sequences in chunks of equal length, and sums that run from chunk to chunk.

b batch, n tokens, s sequences, t chunk, c token in the chunk, g key/value head, r its query head.
"""

from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64  # tokens


class Cut(NamedTuple):
    """The chunks of all sequences. Each sequence has at least one. Built without a host-device sync."""

    tokens: Tensor  # (t, c) int64: the row of each token among all b n
    valid: Tensor  # (t, c): False where a short chunk has no token
    owner: Tensor  # (t,): the sequence of each chunk
    begins: Tensor  # (t,): True for the first chunk of a sequence
    last: Tensor  # (s,): the last chunk of each sequence
    packed: bool  # True if bounds were passed. They may leave out tokens.

    @classmethod
    def of(cls, x: Tensor, bounds: Tensor | None) -> "Cut":
        """Cuts the tokens of x (b, n, ..). bounds are as in ``linrope.recurrence.packing``."""
        (b, n), device = x.shape[:2], x.device
        packed = bounds is not None
        if bounds is None:
            bounds = torch.arange(b + 1, device=device) * n
        s = len(bounds) - 1
        c = min(CHUNK, 1 << max(b * n // s - 1, 0).bit_length())
        counts = ((bounds.diff() + c - 1) // c).clamp(min=1)
        ends = counts.cumsum(0)
        # Packed lengths are unknown on the host: allocate n // c + s chunks; surplus ones stay empty.
        chunks = torch.arange(b * max(-(-n // c), 1) if s == b else n // c + s, device=device)
        owner = torch.searchsorted(ends, chunks, right=True).clamp_(max=s - 1)
        index = chunks - (ends - counts)[owner]
        tokens = (bounds[owner] + index * c)[:, None] + torch.arange(c, device=device)
        valid = tokens < torch.where(chunks < ends[-1], bounds[owner + 1], 0)[:, None]
        begins = (index == 0) | (chunks >= ends[-1])
        return cls(tokens.where(valid, 0), valid, owner, begins, ends - 1, packed)

    def take(self, x: Tensor) -> Tensor:
        """x (b or 1, n, ..) by chunk: (t, c, ..), with arbitrary numbers where there is no token."""
        if x.shape[:2].numel() == 0:
            return x.new_zeros(*self.tokens.shape, *x.shape[2:])
        return x.flatten(0, 1)[self.tokens if len(x) > 1 else self.tokens % x.shape[1]]

    def put(self, x: Tensor, like: Tensor) -> Tensor:
        """x (t, g, r, c, ..) by sequence: (b, n, g r, ..), with the b and n of ``like``; 0 for tokens in no chunk."""
        rows = x.flatten(1, 2).transpose(1, 2)
        # The extra last row takes the padding of short chunks.
        new = rows.new_zeros if self.packed else rows.new_empty
        out = new(like.shape[0] * like.shape[1] + 1, *rows.shape[2:])
        out[self.tokens.where(self.valid, len(out) - 1)] = rows
        return out[:-1].view(*like.shape[:2], *rows.shape[2:])

    def reverse(self) -> "Cut":
        """The chunks from the last to the first. A sequence then begins with its last chunk."""
        ends = torch.cat((self.begins[1:], self.begins.new_ones(1)))
        first = torch.cat((self.last.new_zeros(1), self.last[:-1] + 1))
        tokens, valid, owner, begins = (x.flip(0) for x in (self.tokens, self.valid, self.owner, ends))
        return Cut(tokens, valid, owner, begins, len(ends) - 1 - first, self.packed)


def decay_by(x: Tensor, log: Tensor | None) -> Tensor:
    """x e^log. The factor is its rounded value plus the rest, or every chunk would add the same rounding error."""
    if log is None:
        return x
    factor = log.double().exp()
    high = factor.to(x.dtype)
    return torch.addcmul(x * high, x, (factor - high).to(x.dtype))


def scan(x: Tensor, log: Tensor | None, begins: Tensor) -> Tensor:
    """y_t = x_t + e^(log_t) y_(t-1), or x_t where a sequence begins. Computed over pairs, pairs of pairs, ..

    x (t, ..), log like x with ones for missing axes, begins (t,).
    """
    if len(x) < 2:
        return x
    first, second, rest = slice(0, len(x) // 2 * 2, 2), slice(1, None, 2), slice(2, None, 2)

    def carried(y: Tensor, chunks: slice) -> Tensor:
        starts = begins[chunks].view(-1, *[1] * (x.ndim - 1))
        return decay_by(y, None if log is None else log[chunks]).masked_fill(starts, 0)

    both = None if log is None else log[first] + log[second]
    y = torch.empty_like(x)
    y[second] = scan(x[second] + carried(x[first], second), both, begins[first] | begins[second])
    y[:1] = x[:1]
    y[rest] = x[rest] + carried(y[1 : len(x) - 1 : 2], rest)
    return y


def states_around(x: Tensor, log: Tensor | None, cut: Cut, first: Tensor | None) -> tuple[Tensor, Tensor]:
    """The states before and after each chunk. x is what each chunk adds, log its total log decay.

    first (s, ..): the state before each sequence; None: 0.
    """
    starts = cut.begins.view(-1, *[1] * (x.ndim - 1))
    if first is None:
        incoming = torch.zeros_like(x)
    else:
        incoming = first.to(x.dtype)[cut.owner].masked_fill(~starts, 0)
        x = x + decay_by(incoming, log)
    after = scan(x, log, cut.begins)
    return torch.where(starts, incoming, after.roll(1, 0)), after


def gradients_around(x: Tensor, log: Tensor | None, cut: Cut, last: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradients of the states after and before each chunk: ``states_around``, from the last chunk to the first.

    x is what each chunk adds to the gradient. last (s, ..): the gradient of the last state; None: 0.
    """
    after, before = states_around(x.flip(0), None if log is None else log.flip(0), cut.reverse(), last)
    return after.flip(0), before.flip(0)

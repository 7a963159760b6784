"""Sequences in chunks of equal length, and sums that run from chunk to chunk."""

from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64


class Cut(NamedTuple):
    """The chunks of all sequences, each of which has at least one; made without asking the device."""

    tokens: Tensor  # (t, c) int64: row of the token among all b n
    valid: Tensor  # (t, c): whether there is one; the last chunk of a sequence may be short
    owner: Tensor  # (t,): the chunk's sequence
    begins: Tensor  # (t,): whether it is its first
    last: Tensor  # (s,): the last chunk of each sequence

    @classmethod
    def of(cls, x: Tensor, bounds: Tensor | None) -> "Cut":
        """Of the tokens of x (b, n, ..)."""
        (b, n), device = x.shape[:2], x.device
        if bounds is None:
            bounds = torch.arange(b + 1, device=device) * n
        s = len(bounds) - 1
        c = min(CHUNK, 1 << max(b * n // s - 1, 0).bit_length())
        counts = ((bounds.diff() + c - 1) // c).clamp(min=1)
        ends = counts.cumsum(0)
        # As many as there are, or, as nobody knows how long packed sequences are, some more, which are empty.
        chunks = torch.arange(b * max(-(-n // c), 1) if s == b else n // c + s, device=device)
        owner = torch.searchsorted(ends, chunks, right=True).clamp_(max=s - 1)
        index = chunks - (ends - counts)[owner]
        tokens = (bounds[owner] + index * c)[:, None] + torch.arange(c, device=device)
        valid = tokens < torch.where(chunks < ends[-1], bounds[owner + 1], 0)[:, None]
        return cls(tokens.where(valid, 0), valid, owner, (index == 0) | (chunks >= ends[-1]), ends - 1)

    def take(self, x: Tensor) -> Tensor:
        """(t, c, ..) of x (b or 1, n, ..): of no token, any numbers."""
        if x.shape[:2].numel() == 0:
            return x.new_zeros(*self.tokens.shape, *x.shape[2:])
        return x.flatten(0, 1)[self.tokens if len(x) > 1 else self.tokens % x.shape[1]]

    def put(self, x: Tensor, like: Tensor) -> Tensor:
        """(b, n, g r, ..) of x (t, g, r, c, ..), with b and n like's."""
        rows = x.flatten(1, 2).transpose(1, 2)
        found = rows.new_empty(like.shape[0] * like.shape[1] + 1, *rows.shape[2:])  # the last: of no token
        found[self.tokens.where(self.valid, len(found) - 1)] = rows
        return found[:-1].view(*like.shape[:2], *rows.shape[2:])

    def reverse(self) -> "Cut":
        """The chunks from the last to the first; a sequence begins with its last one."""
        ends = torch.cat((self.begins[1:], self.begins.new_ones(1)))
        first = torch.cat((self.last.new_zeros(1), self.last[:-1] + 1))
        tokens, valid, owner, begins = (x.flip(0) for x in (self.tokens, self.valid, self.owner, ends))
        return Cut(tokens, valid, owner, begins, len(ends) - 1 - first)


def fade(x: Tensor, log: Tensor | None) -> Tensor:
    """x e^log, with the factor in two parts: rounding it once would add the same error at every chunk."""
    if log is None:
        return x
    factor = log.double().exp()
    high = factor.to(x.dtype)
    return torch.addcmul(x * high, x, (factor - high).to(x.dtype))


def scan(own: Tensor, log: Tensor | None, begins: Tensor) -> Tensor:
    """after_t = own_t + e^log_t after_(t-1), where t - 1 is of the same sequence: in pairs, pairs of pairs,
    ..

    own (t, ..), log like it with ones for missing axes, begins (t,).
    """
    if len(own) < 2:
        return own
    first, second, rest = slice(0, len(own) // 2 * 2, 2), slice(1, None, 2), slice(2, None, 2)

    def carried(after: Tensor, chunks: slice) -> Tensor:
        starts = begins[chunks].view(-1, *[1] * (own.ndim - 1))
        return fade(after, None if log is None else log[chunks]).masked_fill(starts, 0)

    both = None if log is None else log[first] + log[second]
    after = torch.empty_like(own)
    after[second] = scan(own[second] + carried(own[first], second), both, begins[first] | begins[second])
    after[:1] = own[:1]
    after[rest] = own[rest] + carried(after[1 : len(own) - 1 : 2], rest)
    return after


def around(own: Tensor, log: Tensor | None, cut: Cut, first: Tensor | None) -> tuple[Tensor, Tensor]:
    """The state before and after each chunk; first (s, ..): what comes before a sequence, None: 0."""
    starts = cut.begins.view(-1, *[1] * (own.ndim - 1))
    before = (
        torch.zeros_like(own) if first is None else first.to(own.dtype)[cut.owner].masked_fill(~starts, 0)
    )
    after = scan(own if first is None else own + fade(before, log), log, cut.begins)
    return torch.where(starts, before, after.roll(1, 0)), after


def around_reversed(own: Tensor, log: Tensor | None, cut: Cut, last: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradient of the state after and before each chunk; last (s, ..): of the last state."""
    after, before = around(own.flip(0), None if log is None else log.flip(0), cut.reverse(), last)
    return after.flip(0), before.flip(0)

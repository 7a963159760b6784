"""How sequences are cut into chunks of equal length.

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

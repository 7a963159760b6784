"""How keys fade with distance in the eager backend: decay per head, and xPos per pair of features."""

import copy
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class Powers(NamedTuple):
    """How keys fade within a block: powers g^distance, of shape (t or 1, b or 1, g or 1, 1, c or 1, ..)."""

    queries: Tensor  # (.., c, 1) from the token before the chunk to each query
    keys: Tensor  # (.., c, 1) from each key to the last of the chunk
    tile: Tensor  # (.., c, c) from key to query, 1 for later keys
    first: Tensor  # (.., 1, 1) from the token before the chunk to its first
    # From the token before the chunk to its last, less 1, which is exact where g is near 1: otherwise the
    # rounding of g^64 would be a bias that every chunk adds to. For z, and for S, where xPos joins in.
    sum_chunk: Tensor  # (t or 1, b or 1, g or 1, 1) float64
    state_chunk: Tensor  # (t or 1, b or 1, g or 1, f or 1, 1) float64


class PairPowers(NamedTuple):
    """xPos: the same for each pair of the numerator, (t or 1, b or 1, 1, 1, c or 1, p or f)."""

    queries: Tensor  # (.., c, p) from the first token of the chunk
    keys: Tensor  # (.., c, p) its inverse
    first: Tensor  # (.., 1, f) from the token before the chunk to its first
    last: Tensor  # (.., 1, f) from its first to its last


MOST = 60.0  # how far e^x may go for the inverse within a chunk: float32 ends at 88


class Fade:
    """The decay of a call, block by block: exponents are integer distances, never absolute positions.

    decay (g,), None: 1; xpos (f,): log zeta of each feature, None: 0. positions (b or 1, n), or (b or 1, 1):
    consecutive; start (b or 1,), of packed sequences (s,): the position after the state's last token.
    """

    def __init__(
        self, decay: Tensor | None, xpos: Tensor | None, interleaved: bool, pairs: int,
        positions: Tensor, start: Tensor, n: int, bounds: list[int] | None, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        rates = start.new_zeros(1, dtype=torch.float64) if decay is None else decay.double().log()
        self.rates, self.xpos, self.dtype = rates.view(-1, 1, 1, 1), xpos, dtype
        if xpos is not None:
            self.pair_rates = xpos[: 2 * pairs : 2] if interleaved else xpos[:pairs]
        self.consecutive = positions.shape[1] == 1 and n > 1  # a single position may be a given one
        if not self.consecutive:
            self.positions, self.before = positions, positions.roll(1, 1)  # the position of the token before
            if bounds is None:
                self.before[:, :1] = start[:, None] - 1
            else:
                firsts = [(low, i) for i, (low, high) in enumerate(pairwise(bounds)) if low < high]
                self.before[0, [low for low, _ in firsts]] = start[[i for _, i in firsts]] - 1

    def select(self, batch: slice, heads: slice) -> "Fade":
        part = copy.copy(self)
        if len(self.rates) > 1:
            part.rates = self.rates[heads]
        if not self.consecutive and len(self.positions) > 1:
            part.positions, part.before = self.positions[batch], self.before[batch]
        return part

    def block(self, start: int, t: int, c: int) -> tuple[Powers, PairPowers | None]:
        """For t chunks of c tokens from start on."""
        if self.consecutive:
            where = torch.arange(c, device=self.rates.device).view(1, 1, c)
            before = where[..., :1] - 1
        else:
            tokens = slice(start, start + t * c)
            where = self.positions[:, tokens].view(-1, t, c)
            before = self.before[:, tokens].view(-1, t, c)[..., :1]
        where, before = (x.transpose(0, 1)[:, :, None, None, :, None] for x in (where, before))
        first, last = where[..., :1, :], where[..., -1:, :]
        state_rates = self.rates if self.xpos is None else self.rates + self.xpos
        powers = Powers(
            self._power(self.rates, where - before),
            self._power(self.rates, last - where),
            self._power(self.rates, (where - where.mT).clamp(min=0)),
            self._power(self.rates, first - before),
            (self.rates * (last - before)).expm1()[..., 0, 0],
            (state_rates * (last - before)).expm1()[..., 0, 0, :, None],
        )
        if self.xpos is None:
            return powers, None
        if float((last - first).max()) * -float(self.pair_rates.min()) > MOST:
            raise RuntimeError(
                f"positions: got {int((last - first).max())} from one token to another {c - 1} further; with "
                "this xpos backend='eager' cannot take them, expected shorter gaps or backend='reference'"
            )
        return powers, PairPowers(
            self._power(self.pair_rates, where - first),
            self._power(self.pair_rates, first - where),
            self._power(self.xpos, first - before),
            self._power(self.xpos, last - first),
        )

    def _power(self, rates: Tensor, distance: Tensor) -> Tensor:
        return (rates * distance).exp().to(self.dtype)

"""How keys fade with distance in the eager backend: decay per head, and xPos per pair of features."""

import copy
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class Powers(NamedTuple):
    """How keys fade within a block: powers g^distance, of shape (t or 1, b or 1, g, 1, c or 1, ..)."""

    queries: Tensor  # (.., c, 1) from the token before the chunk to each query
    keys: Tensor  # (.., c, 1) from each key to the last of the chunk
    tile: Tensor  # (.., c, c) from key to query, 0 for later keys
    first: Tensor  # (.., 1, 1) from the token before the chunk to its first
    chunk: Tensor  # (.., 1, 1) from the token before the chunk to its last, less 1: exact where g is near 1


class PairPowers(NamedTuple):
    """xPos: the same for each pair (p) of the numerator. Its rates are small, so that 1 / power is safe."""

    queries: Tensor  # (t or 1, b or 1, 1, 1, c, p) from the token before the chunk
    keys: Tensor  # its inverse
    chunk: Tensor  # (t or 1, b or 1, 1, f, 1), less 1


class Fade:
    """The decay of a call, block by block: exponents are integer distances, never absolute positions.

    decay (g,), None: 1; xpos (f,): log zeta of each feature, None: 0. positions (b or 1, n), or (b or 1, 1):
    consecutive; start (b or 1,), of packed sequences (s,): the position after the state's last token.
    """

    def __init__(
        self, decay: Tensor | None, xpos: Tensor | None, interleaved: bool, pairs: int,
        positions: Tensor, start: Tensor, n: int, bounds: list[int] | None, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.rates = None if decay is None else decay.double().log().view(-1, 1, 1, 1)
        self.xpos, self.dtype, self.device = xpos, dtype, start.device
        if xpos is not None:
            self.pair_rates = xpos[: 2 * pairs : 2] if interleaved else xpos[:pairs]
        self.consecutive = positions.shape[1] == 1
        if not self.consecutive:
            self.positions, self.before = positions, positions.roll(1, 1)  # the position of the token before
            if bounds is None:
                self.before[:, :1] = start[:, None] - 1
            else:
                firsts = [(low, i) for i, (low, high) in enumerate(pairwise(bounds)) if low < high]
                self.before[0, [low for low, _ in firsts]] = start[[i for _, i in firsts]] - 1

    def select(self, batch: slice, heads: slice) -> "Fade":
        part = copy.copy(self)
        if self.rates is not None:
            part.rates = self.rates[heads]
        if not self.consecutive and len(self.positions) > 1:
            part.positions, part.before = self.positions[batch], self.before[batch]
        return part

    def block(self, start: int, t: int, c: int) -> tuple[Powers | None, PairPowers | None]:
        """For t chunks of c tokens from start on."""
        if self.consecutive:
            where = torch.arange(c, device=self.device).view(1, 1, c)
            before = where[..., :1] - 1
        else:
            tokens = slice(start, start + t * c)
            where = self.positions[:, tokens].view(-1, t, c)
            before = self.before[:, tokens].view(-1, t, c)[..., :1]
        where, before = (x.transpose(0, 1)[:, :, None, None, :, None] for x in (where, before))
        last = where[..., -1:, :]
        powers = pair_powers = None
        if self.rates is not None:
            powers = Powers(
                self._power(where - before),
                self._power(last - where),
                self._power((where - where.mT).clamp(min=0)).tril_(),
                self._power(where[..., :1, :] - before),
                (self.rates * (last - before)).expm1(),
            )
        if self.xpos is not None:
            pair_powers = PairPowers(
                (self.pair_rates * (where - before)).exp().to(self.dtype),
                (self.pair_rates * (before - where)).exp().to(self.dtype),
                (self.xpos * (last - before)).expm1().to(self.dtype)[:, :, :, 0].mT,
            )
        return powers, pair_powers

    def _power(self, distance: Tensor) -> Tensor:
        assert self.rates is not None
        return (self.rates * distance).exp().to(self.dtype)

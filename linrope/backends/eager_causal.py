"""Causal eq. 19 in chunks: scores inside a chunk, a state (S, z) across chunks. O(N) time, O(1) memory.

With decay every product of a query and a key is times g^(p_m - p_n). A state S is as the last token of its
chunk sees it, T as the last token before its block does: a chunk that they pass costs them a power of g.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from linrope.backends.eager_blocks import (
    SUM_CHUNK,
    Angles,
    blocks,
    load_features,
    load_values,
    row_groups,
    rows,
    scratch,
    split,
)
from linrope.backends.eager_fade import Fade, PairPowers, Powers
from linrope.feature_maps import ELEMENTWISE


@dataclass(frozen=True)
class Call:
    """What one call works on."""

    q: Tensor  # (b, n, h, d)
    k: Tensor  # (b, n, g, d)
    v: Tensor  # (b, n, g, e)
    key_mask: Tensor | None  # (b, n)
    q_angles: Angles
    k_angles: Angles
    fade: Fade | None
    bounds: list[int] | None  # of packed sequences
    feature_map: str
    normalize: bool
    eps: float
    dtype: torch.dtype  # of all arithmetic

    @property
    def group(self) -> int:
        """r: query heads per key/value head."""
        return self.q.shape[2] // self.k.shape[2]

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """First and last token + 1 of each."""
        return [(0, self.q.shape[1])] if self.bounds is None else list(pairwise(self.bounds))

    def parts(self) -> Iterator[tuple["Call", tuple[slice, slice], tuple[slice, slice, slice]]]:
        """Calls small enough for the cache; their slices of (b, g, ..) and of (b, n, h, ..) tensors."""
        b, _, g, f = self.k.shape
        longest = max(high - low for low, high in self.sequences)
        groups = list(row_groups(b, g, self.group, longest, f))
        if len(groups) == 1:
            everything = slice(None)
            yield self, (everything, everything), (everything, everything, everything)
            return
        for batch, heads in groups:
            queries = slice(heads.start * self.group, heads.stop * self.group)
            q_angles = k_angles = self.q_angles.select(batch, heads)
            if self.k_angles is not self.q_angles:
                k_angles = self.k_angles.select(batch, heads)
            yield (
                replace(
                    self,
                    q=self.q[batch, :, queries],
                    k=self.k[batch, :, heads],
                    v=self.v[batch, :, heads],
                    key_mask=None if self.key_mask is None else self.key_mask[batch],
                    q_angles=q_angles,
                    k_angles=k_angles,
                    fade=None if self.fade is None else self.fade.select(batch, heads),
                ),
                (batch, heads),
                (batch, slice(None), queries),
            )


class Block:
    """The buffers of one step, all in one piece of memory, and what both passes compute first.

    Matrices for bmm are (x, rows, columns) with x = t b g; the r queries of a key are further rows.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    num: Tensor
    s: Tensor
    scores: Tensor
    weights: Tensor

    def __init__(self, call: Call, t: int, c: int) -> None:
        (b, _, _, f), (_, _, g, e) = call.q.shape, call.v.shape
        r = call.group
        self.call, self.t, self.c, self.g = call, t, c, g
        # Queries that share a key would lie apart in smaller chunks: then the normalizer takes c too.
        self.sum_c = SUM_CHUNK if r == 1 and c % SUM_CHUNK == 0 and call.fade is None else c
        shapes = self.shapes(t, b, g, r, c, f, e)
        # Whole cache lines each: complex views need an even offset, and vector units like it.
        sizes = [-(-math.prod(shape) // 16) * 16 for shape in shapes.values()]
        pieces = scratch(call.q, call.dtype, sum(sizes))[: sum(sizes)].split(sizes)
        for (name, shape), piece in zip(shapes.items(), pieces, strict=True):
            setattr(self, name, piece[: math.prod(shape)].view(shape))

        self.phi, self.phi_hat = rows(self.q[0]), rows(self.q[1])
        self.psi, self.psi_hat = rows(self.k[0]), rows(self.k[1])
        self.values, self.num_rows = rows(self.v), rows(self.num)
        self.s_before, self.s_after = self.s[:t].flatten(0, 2), self.s[1:].flatten(0, 2)
        self.tiles = self.scores.view(-1, c, c)
        self.powers: Powers | None = None
        self.pair_powers: PairPowers | None = None
        # The normalizer's chunks, one order for time: (t', b, g, f) with t' = t c / sum_c.
        keys = self.k[0].view(t, b, g, -1, self.sum_c, f)
        self.sum_keys = keys.permute(0, 3, 1, 2, 4, 5)
        self.sum_phi, self.sum_psi = self.phi.view(-1, r * self.sum_c, f), self.psi.view(-1, self.sum_c, f)
        self.sum_tiles = self.weights.view(-1, self.sum_c, self.sum_c)

    def shapes(self, t: int, b: int, g: int, r: int, c: int, f: int, e: int) -> dict[str, tuple[int, ...]]:
        return {
            "q": (2, t, b, g, r, c, f),  # phi, R phi
            "k": (2, t, b, g, 1, c, f),  # psi, R psi
            "v": (t, b, g, 1, c, e),
            "num": (t, b, g, r, c, e),
            "s": (t + 1, b, g, f, e),  # S before each chunk, and after the last
            "scores": (t * b * g, r * c, c),  # <R phi, R psi>, causal
            "weights": (t * b * g * c // self.sum_c, r * self.sum_c, self.sum_c),  # <phi, psi>
        }

    def cut(self, x: Tensor, start: int) -> Tensor:
        """This block's part of a (b, n, heads, d) tensor, as (t, b, g, r, c, d)."""
        return split(x, self.t, self.c, self.g, start)

    def load(self, start: int) -> None:
        """Features, values, and the states after each chunk; s[0] must hold the one before."""
        call, function = self.call, ELEMENTWISE[self.call.feature_map]
        self.hidden = None
        if call.key_mask is not None:
            self.hidden = ~split(call.key_mask[..., None, None], self.t, self.c, 1, start)
        self.q_turn = call.q_angles.block(start, self.t, self.c)
        self.k_turn = self.q_turn
        if call.k_angles is not call.q_angles:
            self.k_turn = call.k_angles.block(start, self.t, self.c)
        if call.fade is not None:
            self.powers, self.pair_powers = call.fade.block(start, self.t, self.c)
        if self.pair_powers is not None and self.q_turn is not None and self.k_turn is not None:
            self.q_turn = self.q_turn.scaled(self.pair_powers.queries)
            self.k_turn = self.k_turn.scaled(self.pair_powers.keys)
        self.q_in, self.k_in = self.cut(call.q, start), self.cut(call.k, start)
        load_features(self.q_in, function, self.q_turn, None, self.q)
        load_features(self.k_in, function, self.k_turn, self.hidden, self.k)
        load_values(self.cut(call.v, start), self.hidden, self.v)
        # What reads a state, and what goes into one.
        self.phi_state, self.psi_state, values = self.phi_hat, self.psi_hat, self.values
        if self.powers is not None:
            values = rows(self.v * self.powers.keys)
        if self.pair_powers is not None:
            self.phi_state = rows(self.q[1] * self.pair_powers.first)
            self.psi_state = rows(self.k[1] * self.pair_powers.last)
        torch.bmm(self.psi_state.mT, values, out=self.s_after)
        for i, (before, after) in enumerate(pairwise(self.s.unbind())):
            after.add_(self.carried(before, i))

    def carried(self, state: Tensor, chunk: int) -> Tensor:
        """A state, S or z, on the other side of a chunk."""
        if self.powers is None:
            return state
        factors = self.powers.sum_chunk if state.ndim == 3 else self.powers.state_chunk
        return torch.addcmul(state, state, factors[chunk % len(factors)].to(state.dtype))

    def fade_rows(self, x: Tensor, factor: str) -> None:
        """x (t, b, g, r, c, ..): its rows times powers.queries or powers.keys."""
        if self.powers is not None:
            x.mul_(getattr(self.powers, factor))

    def hide(self, scores: Tensor, tiles: Tensor) -> None:
        """Hides later keys from queries and fades the others; tiles: the same memory, c x c each."""
        tiles.tril_()  # whatever they hold: the powers alone would leave NaN
        if self.powers is not None:
            scores.view(*self.num.shape[:-1], self.c).mul_(self.powers.tile)

    def sum_chunks(self) -> Tensor:
        """(t', b, g, f): the sum of psi of each chunk of the normalizer."""
        keys = self.sum_keys
        if self.powers is not None:
            keys = keys * self.powers.keys[:, None, :, :, 0]
        return keys.sum(-2).flatten(0, 1)

    def accumulate(self, first: Tensor, sums: Tensor, reverse: bool = False) -> Tensor:
        """(t' + 1, b, g, f): first plus the sums (t', b, g, f) up to each chunk; or from the last."""
        if self.powers is None:
            return torch.cat((first[None], sums)).cumsum(0)
        found = [first]
        for i, own in enumerate(sums):
            found.append(self.carried(found[-1], self.t - 1 - i if reverse else i) + own)
        return torch.stack(found)

    def fold_normalizer(self, z: Tensor) -> Tensor:
        """Adds z to the first key of each chunk, which all its queries see; returns the next z."""
        z_all = self.accumulate(z, self.sum_chunks())  # z before each chunk, and after the last
        first_keys, z_before = self.sum_keys[..., 0, :], z_all[:-1]
        if self.powers is not None:
            z_before = z_before * self.powers.first[..., 0, 0]
        first_keys.add_(z_before.to(self.call.dtype).view(first_keys.shape))
        return z_all[-1]


def forward(
    call: Call,
    kv: Tensor,  # (b, g, f, e)
    z: Tensor,  # (b, g, f)
    out: Tensor,  # (b, n, h, e), filled here, like the next five
    den: Tensor,  # (b, n, h)
    kv_end: Tensor,
    z_end: Tensor,
    kv_starts: Tensor,  # (s, b, g, f, e) the states before each block; s = 0: not wanted
    z_starts: Tensor,  # (s, b, g, f)
) -> None:
    for part, (batch, heads), queries in call.parts():
        buffers: dict[tuple[int, int], Block] = {}
        first = 0
        for i, tokens in enumerate(call.sequences):
            own = batch if call.bounds is None else slice(i, i + 1), heads
            steps = list(blocks(*tokens))
            starts = kv_starts[first:, batch, heads], z_starts[first:, batch, heads]
            kv_end[own], z_end[own] = _forward(
                part, buffers, steps, kv[own], z[own], out[queries], den[queries], starts
            )
            first += len(steps)


def _forward(
    call: Call,
    buffers: dict[tuple[int, int], Block],
    steps: list[tuple[int, int, int]],
    kv: Tensor,
    z: Tensor,
    out: Tensor,
    den: Tensor,
    starts: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    kv = kv.clone()
    for index, (start, t, c) in enumerate(steps):
        if (t, c) not in buffers:
            buffers[t, c] = Block(call, t, c)
        block = buffers[t, c]
        if len(starts[0]):
            starts[0][index], starts[1][index] = kv, z
        block.s[0] = kv
        block.load(start)
        kv.copy_(block.s[t])  # out of memory that the next block may use
        z = block.fold_normalizer(z) if call.normalize else block.accumulate(z, block.sum_chunks())[-1]
        torch.bmm(block.phi_hat, block.psi_hat.mT, out=block.scores)
        block.hide(block.scores, block.tiles)
        torch.bmm(block.phi_state, block.s_before, out=block.num_rows)
        block.fade_rows(block.num, "queries")
        torch.baddbmm(block.num_rows, block.scores, block.values, out=block.num_rows)
        if call.normalize:
            torch.bmm(block.sum_phi, block.sum_psi.mT, out=block.weights)
            block.hide(block.weights, block.sum_tiles)
            den_now = block.weights.sum(-1).view(*block.num.shape[:-1], 1)
            if len(starts[0]):
                block.cut(den[..., None], start).copy_(den_now)
            torch.div(block.num, den_now.clamp_(min=call.eps), out=block.cut(out, start))
        else:
            block.cut(out, start).copy_(block.num)
    return kv, z

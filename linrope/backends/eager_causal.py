"""Causal eq. 19 in chunks: scores inside a chunk, a state (S, z) across chunks. O(N) time, O(1) memory.

Formulas of the backward pass, with x^ = R x, den the normalizer, g = dL/d out, gb = g / den:

    dphi^_m = sum_{n<=m} (gb_m . v_n) psi^_n          delta_m = -(phi_m . R^T dphi^_m) / den_m
    dphi_m  = R^T dphi^_m + delta_m Z_m               Z_m = sum_{n<=m} psi_n
    T_n     = sum_{m>=n} phi^_m gb_m^T                W_n = sum_{m>=n} delta_m phi_m
    dpsi_n  = R^T T_n v_n + W_n                       dv_n = T_n^T psi^_n

One sweep from the last block to the first computes all of them, from the states saved at the
block starts; delta needs no output: phi . R^T dphi^ = gb . num.
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
    feature_map: str
    normalize: bool
    eps: float
    dtype: torch.dtype  # of all arithmetic

    @property
    def group(self) -> int:
        """r: query heads per key/value head."""
        return self.q.shape[2] // self.k.shape[2]

    def parts(self) -> Iterator[tuple["Call", tuple[slice, slice], tuple[slice, slice, slice]]]:
        """Calls small enough for the cache; their slices of (b, g, ..) and of (b, n, h, ..) tensors."""
        b, n, g, _ = self.k.shape
        groups = list(row_groups(b, g, self.group, n))
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
        self.sum_c = SUM_CHUNK if r == 1 and c % SUM_CHUNK == 0 else c
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
        self.q_in, self.k_in = self.cut(call.q, start), self.cut(call.k, start)
        load_features(self.q_in, function, self.q_turn, None, self.q)
        load_features(self.k_in, function, self.k_turn, self.hidden, self.k)
        load_values(self.cut(call.v, start), self.hidden, self.v)
        torch.bmm(self.psi_hat.mT, self.values, out=self.s_after)
        states = self.s.unbind()
        for before, after in pairwise(states):
            after.add_(before)

    def fold_normalizer(self, z: Tensor) -> Tensor:
        """Adds z to the first key of each chunk, which all its queries see; returns the next z."""
        sums = self.sum_keys.sum(-2).flatten(0, 1)
        z_all = torch.cat((z[None], sums)).cumsum(0)  # z before each chunk, and after the last
        first_keys = self.sum_keys[..., 0, :]
        first_keys.add_(z_all[:-1].to(self.call.dtype).view(first_keys.shape))
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
    for part, rows_, queries in call.parts():
        starts = kv_starts[:, rows_[0], rows_[1]], z_starts[:, rows_[0], rows_[1]]
        kv_end[rows_], z_end[rows_] = _forward(part, kv[rows_], z[rows_], out[queries], den[queries], starts)


def _forward(
    call: Call, kv: Tensor, z: Tensor, out: Tensor, den: Tensor, starts: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    kv = kv.clone()
    buffers: dict[tuple[int, int], Block] = {}
    for index, (start, t, c) in enumerate(blocks(call.q.shape[1])):
        if (t, c) not in buffers:
            buffers[t, c] = Block(call, t, c)
        block = buffers[t, c]
        if len(starts[0]):
            starts[0][index], starts[1][index] = kv, z
        block.s[0] = kv
        block.load(start)
        kv.copy_(block.s[t])  # out of memory that the next block may use
        z = block.fold_normalizer(z) if call.normalize else z + block.k[0].sum((0, -2))[:, :, 0]
        torch.bmm(block.phi_hat, block.psi_hat.mT, out=block.scores)
        block.tiles.tril_()
        torch.bmm(block.scores, block.values, out=block.num_rows)
        torch.baddbmm(block.num_rows, block.phi_hat, block.s_before, out=block.num_rows)
        if call.normalize:
            torch.bmm(block.sum_phi, block.sum_psi.mT, out=block.weights)
            block.sum_tiles.tril_()
            den_now = block.weights.sum(-1).view(*block.num.shape[:-1], 1)
            if len(starts[0]):
                block.cut(den[..., None], start).copy_(den_now)
            torch.div(block.num, den_now.clamp_(min=call.eps), out=block.cut(out, start))
        else:
            block.cut(out, start).copy_(block.num)
    return kv, z


class BackwardBlock(Block):
    dq: Tensor
    dk: Tensor
    dv: Tensor
    ts: Tensor

    def __init__(self, call: Call, t: int, c: int) -> None:
        super().__init__(call, t, c)
        self.dq_rows, self.dk_rows, self.dv_rows = rows(self.dq), rows(self.dk), rows(self.dv)
        self.t_before, self.t_after = self.ts[:t].flatten(0, 2), self.ts[1:].flatten(0, 2)
        self.gb = self.num_rows
        self.ones = self.q.new_ones(self.sum_c, self.sum_c).tril_()

    def shapes(self, t: int, b: int, g: int, r: int, c: int, f: int, e: int) -> dict[str, tuple[int, ...]]:
        return super().shapes(t, b, g, r, c, f, e) | {
            "dq": (t, b, g, r, c, f),
            "dk": (t, b, g, 1, c, f),
            "dv": (t, b, g, 1, c, e),
            "ts": (t + 1, b, g, f, e),  # T before each chunk, and after the last
        }

    def numerator(self) -> None:
        """dv, and R^T dphi^ and R^T dpsi^ in place of the rotated features."""
        torch.bmm(self.phi_hat.mT, self.gb, out=self.t_before)
        states = self.ts.unbind()[::-1]
        for after, before in pairwise(states):
            before.add_(after)
        scores = self.scores
        torch.bmm(self.phi_hat, self.psi_hat.mT, out=scores)
        self.tiles.tril_()
        torch.bmm(scores.mT, self.gb, out=self.dv_rows)
        torch.baddbmm(self.dv_rows, self.psi_hat, self.t_after, out=self.dv_rows)
        torch.bmm(self.gb, self.values.mT, out=scores)
        self.tiles.tril_()
        torch.bmm(scores, self.psi_hat, out=self.dq_rows)
        torch.baddbmm(self.dq_rows, self.gb, self.s_before.mT, out=self.dq_rows)
        torch.bmm(scores.mT, self.phi_hat, out=self.dk_rows)
        torch.baddbmm(self.dk_rows, self.values, self.t_after.mT, out=self.dk_rows)
        if self.q_turn is None or self.k_turn is None:
            self.q[1], self.k[1] = self.dq, self.dk
        else:
            self.q_turn.undo(self.dq, self.q[1])
            self.k_turn.undo(self.dk, self.k[1])

    def denominator(self, den: Tensor, z: Tensor, w: Tensor) -> Tensor:
        """Adds delta Z to dphi and W to dpsi; w: W after the block, returned: W before it."""
        delta = torch.mul(self.q[0], self.q[1], out=self.dq).sum(-1, keepdim=True).div_(den).neg_()
        delta.masked_fill_(den < self.call.eps, 0)  # there max(den, eps) is constant
        self.fold_normalizer(z)
        delta_rows = delta.view(*self.weights.shape[:2], 1)
        torch.mul(delta_rows.view(-1, self.sum_c, 1), self.ones, out=self.sum_tiles)
        dphi, dpsi = self.phi_hat.view(self.sum_phi.shape), self.psi_hat.view(self.sum_psi.shape)
        torch.baddbmm(dphi, self.weights, self.sum_psi, out=dphi)
        torch.baddbmm(dpsi, self.weights.mT, self.sum_phi, out=dpsi)
        # W after each chunk joins every key of the chunk.
        t, s, b, g, _, f = self.sum_keys.shape
        sums = torch.bmm(delta_rows.mT, self.sum_phi).view(t, b, g, s, f).permute(0, 3, 1, 2, 4)
        w_all = torch.cat((w[None], sums.flatten(0, 1).flip(0))).cumsum(0)  # from the last chunk back
        after = w_all[:-1].flip(0).to(self.call.dtype).view(sums.shape).permute(0, 2, 3, 1, 4)
        self.k[1].view(t, b, g, s, -1, f).add_(after[..., None, :])
        return w_all[-1]


def backward(
    call: Call,
    g_out: Tensor,  # (b, n, h, e)
    den: Tensor,  # (b, n, h)
    kv_starts: Tensor,
    z_starts: Tensor,
    dq: Tensor,  # filled here, like the next four
    dk: Tensor,
    dv: Tensor,
    dkv: Tensor,  # (b, g, f, e): on entry the gradient of the last state, on exit of the first
    dz: Tensor,  # (b, g, f), likewise
) -> None:
    for part, rows_, queries in call.parts():
        keys = rows_[0], slice(None), rows_[1]
        starts = kv_starts[:, rows_[0], rows_[1]], z_starts[:, rows_[0], rows_[1]]
        grads = dq[queries], dk[keys], dv[keys]
        dkv[rows_], dz[rows_] = _backward(
            part, g_out[queries], den[queries], starts, grads, dkv[rows_], dz[rows_]
        )


def _backward(
    call: Call,
    g_out: Tensor,
    den: Tensor,
    starts: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor, Tensor],
    dkv: Tensor,
    dz: Tensor,
) -> tuple[Tensor, Tensor]:
    slope = ELEMENTWISE[call.feature_map].slope
    dkv = dkv.clone()
    buffers: dict[tuple[int, int], BackwardBlock] = {}
    for index, (start, t, c) in reversed(list(enumerate(blocks(call.q.shape[1])))):
        if (t, c) not in buffers:
            buffers[t, c] = BackwardBlock(call, t, c)
        block = buffers[t, c]
        block.s[0], block.ts[t] = starts[0][index], dkv
        block.load(start)
        den_now = block.cut(den[..., None], start)
        if call.normalize:
            torch.div(block.cut(g_out, start), den_now.clamp(min=call.eps), out=block.num)
        else:
            block.num.copy_(block.cut(g_out, start))
        block.numerator()
        dkv.copy_(block.ts[0])
        slope(block.k_in, block.k[0], block.dk)  # before z is folded into psi
        if call.normalize:
            dz = block.denominator(den_now, starts[1][index], dz)
        else:
            block.k[1].add_(dz[:, :, None, None])
        slope(block.q_in, block.q[0], block.dq)
        if block.hidden is not None:
            block.dk.masked_fill_(block.hidden, 0)
        dq, dk, dv = (block.cut(grad, start) for grad in grads)
        torch.mul(block.q[1], block.dq, out=dq)
        torch.mul(block.k[1], block.dk, out=dk)
        dv.copy_(block.dv)
    return dkv, dz

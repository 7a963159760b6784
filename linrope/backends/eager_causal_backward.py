"""Gradients of causal eq. 19. With x^ = R x, den the normalizer, g = dL/d out, gb = g / den:

    dphi^_m = sum_{n<=m} (gb_m . v_n) psi^_n          delta_m = -(phi_m . R^T dphi^_m) / den_m
    dphi_m  = R^T dphi^_m + delta_m Z_m               Z_m = sum_{n<=m} psi_n
    T_n     = sum_{m>=n} phi^_m gb_m^T                W_n = sum_{m>=n} delta_m phi_m
    dpsi_n  = R^T T_n v_n + W_n                       dv_n = T_n^T psi^_n

One sweep from the last block to the first computes all of them, from the states saved at the
block starts; delta needs no output: phi . R^T dphi^ = gb . num.
With decay T is as the last token before its chunk sees it.
"""

import torch
from torch import Tensor

from linrope.backends.eager_blocks import blocks, rows
from linrope.backends.eager_causal import Block, Call
from linrope.feature_maps import ELEMENTWISE


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
        gb = self.gb if self.powers is None else rows(self.num * self.powers.queries)
        torch.bmm(self.phi_state.mT, gb, out=self.t_before)
        states = self.ts.unbind()
        for i in reversed(range(self.t)):
            states[i].add_(self.carried(states[i + 1], i))
        scores = self.scores
        torch.bmm(self.phi_hat, self.psi_hat.mT, out=scores)
        self.hide(scores, self.tiles)
        torch.bmm(self.psi_state, self.t_after, out=self.dv_rows)
        self.fade_rows(self.dv, "keys")
        torch.baddbmm(self.dv_rows, scores.mT, self.gb, out=self.dv_rows)
        torch.bmm(self.gb, self.values.mT, out=scores)
        self.hide(scores, self.tiles)
        torch.bmm(self.gb, self.s_before.mT, out=self.dq_rows)
        self.fade_rows(self.dq, "queries")
        if self.pair_powers is not None:
            self.dq.mul_(self.pair_powers.first)
        torch.baddbmm(self.dq_rows, scores, self.psi_hat, out=self.dq_rows)
        torch.bmm(self.values, self.t_after.mT, out=self.dk_rows)
        self.fade_rows(self.dk, "keys")
        if self.pair_powers is not None:
            self.dk.mul_(self.pair_powers.last)
        torch.baddbmm(self.dk_rows, scores.mT, self.phi_hat, out=self.dk_rows)
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
        if self.powers is not None:
            self.weights.view(*delta.shape[:-1], self.c).mul_(self.powers.tile)
        dphi, dpsi = self.phi_hat.view(self.sum_phi.shape), self.psi_hat.view(self.sum_psi.shape)
        torch.baddbmm(dphi, self.weights, self.sum_psi, out=dphi)
        torch.baddbmm(dpsi, self.weights.mT, self.sum_phi, out=dpsi)
        t, s, b, g, _, f = self.sum_keys.shape
        self.fade_rows(delta, "queries")
        sums = torch.bmm(delta_rows.mT, self.sum_phi).view(t, b, g, s, f).permute(0, 3, 1, 2, 4)
        return self.spread(w, sums.flatten(0, 1))

    def spread(self, w: Tensor, sums: Tensor) -> Tensor:
        """Adds to each key the W after its chunk, from w and the chunks' own sums (t', b, g, f)."""
        t, s, b, g, _, f = self.sum_keys.shape
        w_all = self.accumulate(w, sums.flip(0), reverse=True)  # from the last chunk back
        after = (
            w_all[:-1].flip(0).to(self.call.dtype).view(t, s, b, g, f).permute(0, 2, 3, 1, 4)[..., None, :]
        )
        if self.powers is not None:
            after = after * self.powers.keys
        self.k[1].view(t, b, g, s, -1, f).add_(after)
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
    for part, (batch, heads), queries in call.parts():
        keys = batch, slice(None), heads
        buffers: dict[tuple[int, int], BackwardBlock] = {}
        first = 0
        for i, tokens in enumerate(call.sequences):
            own = batch if call.bounds is None else slice(i, i + 1), heads
            steps = list(blocks(*tokens))
            starts = kv_starts[first:, batch, heads], z_starts[first:, batch, heads]
            grads = dq[queries], dk[keys], dv[keys]
            dkv[own], dz[own] = _backward(
                part, buffers, steps, g_out[queries], den[queries], starts, grads, dkv[own], dz[own]
            )
            first += len(steps)


def _backward(
    call: Call,
    buffers: dict[tuple[int, int], BackwardBlock],
    steps: list[tuple[int, int, int]],
    g_out: Tensor,
    den: Tensor,
    starts: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor, Tensor],
    dkv: Tensor,
    dz: Tensor,
) -> tuple[Tensor, Tensor]:
    slope = ELEMENTWISE[call.feature_map].slope
    dkv = dkv.clone()
    for index, (start, t, c) in reversed(list(enumerate(steps))):
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
            dz = block.spread(dz, torch.zeros_like(block.sum_chunks()))
        slope(block.q_in, block.q[0], block.dq)
        if block.hidden is not None:
            block.dk.masked_fill_(block.hidden, 0)
        dq, dk, dv = (block.cut(grad, start) for grad in grads)
        torch.mul(block.q[1], block.dq, out=dq)
        torch.mul(block.k[1], block.dk, out=dk)
        dv.copy_(block.dv)
    return dkv, dz

"""Bidirectional eq. 19, self- or cross-attention: three-operand products whose order opt_einsum chooses.

(phi^ psi^^T) v costs n m (f + e), phi^ (psi^^T v) costs (n + m) f e: short sequences take the first,
long ones the second. The same holds for each gradient.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from opt_einsum import contract
from torch import Tensor

from linrope.backends.eager_blocks import load_features, load_values, split
from linrope.backends.eager_causal import Call
from linrope.feature_maps import ELEMENTWISE

# phi^ (b g r n f), psi^ (b g m f), v (b g m e), num and its gradient gb (b g r n e), S (b g f e)
NUM = "bgrnf,bgmf,bgme->bgrne"
D_PHI = "bgrne,bgme,bgmf->bgrnf"
D_PSI = "bgme,bgrne,bgrnf->bgmf"
D_V = "bgmf,bgrnf,bgrne->bgme"
STATE = "bgmf,bgme->bgfe"


class _Features:
    """phi, R phi, psi, R psi and v of a whole sequence, and how to turn back."""

    def __init__(self, call: Call, start: int) -> None:
        (b, n, h, f), (m, g, e) = call.q.shape, call.v.shape[1:]

        def new(*shape: int) -> Tensor:
            return call.q.new_empty(shape, dtype=call.dtype)

        self.hidden = None
        if call.key_mask is not None:
            self.hidden = ~split(call.key_mask[..., None, None], 1, m, 1)
        function = ELEMENTWISE[call.feature_map]
        self.q_turn = call.q_angles.block(start, 1, n)
        self.k_turn = call.k_angles.block(start, 1, m)
        self.q_in, self.k_in = split(call.q, 1, n, g), split(call.k, 1, m, g)
        q, k, v = new(2, 1, b, g, h // g, n, f), new(2, 1, b, g, 1, m, f), new(1, b, g, 1, m, e)
        load_features(self.q_in, function, self.q_turn, None, q)
        load_features(self.k_in, function, self.k_turn, self.hidden, k)
        load_values(split(call.v, 1, m, g), self.hidden, v)
        (self.phi, self.phi_hat), (self.psi, self.psi_hat) = q[:, 0], k[:, 0, :, :, 0]
        self.v = v[0, :, :, 0]


def forward(call: Call, kv: Tensor, z: Tensor, carry: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out (b, n, h, e), den (b, n, h), and the state after all keys; carry: whether S is wanted."""
    if call.bounds is None:
        return _forward(call, 0, kv, z, carry)
    parts = [
        _forward(part, start, kv[i : i + 1], z[i : i + 1], carry)
        for i, (start, part) in enumerate(_each(call))
    ]
    outs, dens, kvs, zs = zip(*parts)
    return torch.cat(outs, 1), torch.cat(dens, 1), torch.cat(kvs), torch.cat(zs)


def _each(call: Call) -> Iterator[tuple[int, Call]]:
    """First token and call of each packed sequence."""
    for low, high in call.sequences:
        q, k, v = (x[:, low:high] for x in (call.q, call.k, call.v))
        mask = None if call.key_mask is None else call.key_mask[:, low:high]
        yield low, replace(call, q=q, k=k, v=v, key_mask=mask, bounds=None)


def _forward(
    call: Call, start: int, kv: Tensor, z: Tensor, carry: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = _Features(call, start)
    b, n, h, _ = call.q.shape
    num = contract(NUM, x.phi_hat, x.psi_hat, x.v)
    z_end = z + x.psi.sum(-2)
    kv_end = kv.clone()
    if carry:
        num += x.phi_hat @ kv[:, :, None].to(call.dtype)
        kv_end += contract(STATE, x.psi_hat, x.v)
    den = num.new_zeros(b, n, h)
    if call.normalize:
        den_now = (x.phi @ z_end[:, :, None, :, None].to(call.dtype))[..., 0]
        split(den[..., None], 1, n, z.shape[1])[0, ..., 0] = den_now
        num /= den_now.clamp(min=call.eps)[..., None]
    out = call.v.new_empty(b, n, h, call.v.shape[-1])
    split(out, 1, n, z.shape[1])[0] = num
    return out, den, kv_end, z_end


def backward(
    call: Call, g_out: Tensor, den: Tensor, kv: Tensor, z_end: Tensor, dkv: Tensor, dz: Tensor, carry: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and of the first state; dkv, dz: those of the last state."""
    if call.bounds is None:
        return _backward(call, 0, g_out, den, kv, z_end, dkv, dz, carry)
    parts = []
    for i, (start, part) in enumerate(_each(call)):
        own, tokens = slice(i, i + 1), slice(start, start + part.q.shape[1])
        states = kv[own], z_end[own], dkv[own], dz[own]
        parts.append(_backward(part, start, g_out[:, tokens], den[:, tokens], *states, carry))
    dqs, dks, dvs, dkvs, dzs = zip(*parts)
    return torch.cat(dqs, 1), torch.cat(dks, 1), torch.cat(dvs, 1), torch.cat(dkvs), torch.cat(dzs)


def _backward(
    call: Call, start: int, g_out: Tensor, den: Tensor, kv: Tensor, z_end: Tensor, dkv: Tensor, dz: Tensor,
    carry: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dkv, dz = dkv.clone(), dz.clone()
    x = _Features(call, start)
    slope = ELEMENTWISE[call.feature_map].slope
    n, g = call.q.shape[1], z_end.shape[1]
    gb = split(g_out, 1, n, g)[0].to(call.dtype)
    if call.normalize:
        den_now = split(den[..., None], 1, n, g)[0]
        gb = gb / den_now.clamp(min=call.eps)
    dphi_hat = contract(D_PHI, gb, x.v, x.psi_hat)
    dpsi_hat = contract(D_PSI, x.v, gb, x.phi_hat)
    dv = contract(D_V, x.psi_hat, x.phi_hat, gb)
    if carry:
        dphi_hat += gb @ kv[:, :, None].mT.to(call.dtype)
        dpsi_hat += x.v @ dkv.mT
        dv += x.psi_hat @ dkv
        dkv += contract("bgrnf,bgrne->bgfe", x.phi_hat, gb)
    dphi, dpsi = x.phi_hat, x.psi_hat[:, :, None]  # their buffers: the rotated features are done with
    if x.q_turn is None or x.k_turn is None:
        dphi.copy_(dphi_hat)
        dpsi.copy_(dpsi_hat[:, :, None])
    else:
        x.q_turn.undo(dphi_hat[None].contiguous(), dphi[None])
        x.k_turn.undo(dpsi_hat[None, :, :, None].contiguous(), dpsi[None])
    if call.normalize:
        delta = (x.phi * dphi).sum(-1, keepdim=True).div_(den_now).neg_()
        delta.masked_fill_(den_now < call.eps, 0)  # there max(den, eps) is constant
        dphi += delta * z_end[:, :, None, None].to(call.dtype)
        dz += (delta * x.phi).sum((2, 3))
    dpsi += dz[:, :, None, None].to(call.dtype)
    dphi *= slope(x.q_in[0], x.phi, torch.empty_like(x.phi))
    dpsi *= slope(x.k_in[0], x.psi[:, :, None], torch.empty_like(dpsi))
    if x.hidden is not None:
        dpsi.masked_fill_(x.hidden[0], 0)
    grads = []
    for value, like in ((dphi, call.q), (dpsi, call.k), (dv[:, :, None], call.v)):
        grad = torch.empty_like(like, memory_format=torch.contiguous_format)
        split(grad, 1, like.shape[1], g)[0] = value
        grads.append(grad)
    return grads[0], grads[1], grads[2], dkv, dz

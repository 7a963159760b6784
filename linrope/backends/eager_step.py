"""One token of eq. 19: the state takes the key in, then the query reads it. For decoding."""

import torch
from torch import Tensor

from linrope.backends.eager_causal import Call
from linrope.feature_maps import ELEMENTWISE


def step(call: Call, kv: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q (b, 1, h, d), k (b, 1, g, d), v (b, 1, g, e), kv (b, g, f, e), z (b, g, f) -> out, kv, z."""
    (b, _, h, f), (_, _, g, e) = call.q.shape, call.v.shape
    value = ELEMENTWISE[call.feature_map].value
    phi = value(call.q.to(call.dtype), None, None).view(1, b, g, h // g, 1, f)
    psi = value(call.k.to(call.dtype), None, None).view(1, b, g, 1, 1, f)
    v = call.v.reshape(b, g, 1, e).to(call.dtype)
    if call.key_mask is not None:
        hidden = ~call.key_mask[:, :, None, None]
        psi, v = psi.masked_fill(hidden[..., None, None], 0), v.masked_fill(hidden, 0)
    phi_hat, psi_hat = phi, psi
    q_turn = call.q_angles.block(0, 1, 1)
    k_turn = q_turn if call.k_angles is call.q_angles else call.k_angles.block(0, 1, 1)
    if q_turn is not None and k_turn is not None:
        phi_hat, psi_hat = torch.empty_like(phi), torch.empty_like(psi)
        q_turn.apply(phi, phi_hat)
        k_turn.apply(psi, psi_hat)
    kv = torch.addcmul(kv, psi_hat.view(b, g, f, 1), v)
    z = z + psi.view(b, g, f)
    out = phi_hat.view(b, g, h // g, f) @ kv
    if call.normalize:
        den = phi.view(b, g, h // g, f) @ z.to(call.dtype)[..., None]
        out /= den.clamp_(min=call.eps)
    return out.view(b, 1, h, e).to(call.v.dtype), kv, z

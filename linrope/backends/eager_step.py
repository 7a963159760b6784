"""One token of eq. 19: the state takes the key in, then the query reads it. For decoding.

Few and small operations: what a step costs is mostly PyTorch's cost per call.
"""

import torch
from torch import Tensor

from linrope.feature_maps import ELEMENTWISE
from linrope.rotary import Rotary


def step(
    q: Tensor,  # (b, 1, h, d)
    k: Tensor,  # (b, 1, g, d)
    v: Tensor,  # (b, 1, g, e)
    kv: Tensor,  # (b, g, f, e)
    z: Tensor,  # (b, g, f)
    *,
    feature_map: str,
    rotary: Rotary | None,
    decay: Tensor | None,  # (g,)
    positions: Tensor,  # (b or 1, 1), with axes (b or 1, 1, axes)
    key_positions: Tensor | None,
    start: Tensor,  # (b or 1,)
    key_mask: Tensor | None,  # (b, 1)
    normalize: bool,
    eps: float,
    in_place: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``eager.attend`` for one token, without gradients."""
    (b, _, h, f), (_, _, g, e) = q.shape, v.shape
    value = ELEMENTWISE[feature_map].value
    phi = value(q.to(kv.dtype), None, None).reshape(b, g, h // g, f)
    psi = value(k.to(kv.dtype), None, None).reshape(b, g, 1, f)
    v = v.to(kv.dtype).reshape(b, g, 1, e)
    if key_mask is not None:
        hidden = ~key_mask[:, :, None, None]
        psi, v = psi.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
    phi_hat, psi_hat = phi, psi
    if rotary is not None:
        turn = _turn(rotary, positions, kv.dtype)
        phi_hat = _rotate(rotary, phi, turn)
        psi_hat = _rotate(
            rotary, psi, turn if key_positions is None else _turn(rotary, key_positions, kv.dtype)
        )
    if decay is not None or (rotary is not None and rotary.fade is not None):
        kv_fade, z_fade = _fade(decay, rotary, (positions - start[:, None] + 1)[..., None])
        kv = torch.addcmul(kv, kv, kv_fade[..., None].to(kv.dtype), out=kv if in_place else None)
        z = torch.addcmul(z, z, z_fade.to(z.dtype), out=z if in_place else None)
    kv = torch.addcmul(kv, psi_hat.mT, v, out=kv if in_place else None)
    z = torch.add(z, psi[:, :, 0], out=z if in_place else None)
    out = phi_hat @ kv
    if normalize:
        out /= (phi @ z.to(kv.dtype)[..., None]).clamp_(min=eps)
    return out.view(b, 1, h, e), kv, z


def _turn(rotary: Rotary, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    cos, sin = rotary.cos_sin(positions[:, 0], dtype)  # (b or 1, g or 1, p)
    return cos[:, :, None], sin[:, :, None]


def _rotate(rotary: Rotary, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    (cos, sin), width = turn, rotary.rotary_dim
    turned = x[..., :width]
    if rotary.layout == "interleaved":
        pairs = torch.view_as_complex(turned.unflatten(-1, (-1, 2))) * torch.complex(cos, sin)
        turned = torch.view_as_real(pairs).flatten(-2)
    else:
        x1, x2 = turned.chunk(2, -1)
        turned = torch.cat((x1 * cos - x2 * sin, x1 * sin + x2 * cos), -1)
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), -1)


def _fade(decay: Tensor | None, rotary: Rotary | None, distance: Tensor) -> tuple[Tensor, Tensor]:
    """Powers for S (b or 1, g or 1, f or 1) and z (.., 1), less 1: g in float32 would be a bias."""
    rates = distance.new_zeros(1, 1, dtype=torch.float64) if decay is None else decay.double().log()[:, None]
    kv_rates = rates
    if rotary is not None and rotary.fade is not None:
        kv_rates = rates + rotary.fade.to(rates.device)
    return torch.expm1(kv_rates * distance), torch.expm1(rates * distance)

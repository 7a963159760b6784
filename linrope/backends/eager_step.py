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
    if decay is not None:
        fade = decay.double() ** (positions - start[:, None] + 1)  # (b or 1, g)
        faded = kv * fade[..., None, None].to(kv.dtype), z * fade[..., None].to(z.dtype)
        kv, z = (kv.copy_(faded[0]), z.copy_(faded[1])) if in_place else faded
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

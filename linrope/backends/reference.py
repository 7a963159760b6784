"""RoFormer eq. 19 as it is written: quadratic, differentiable, in any float dtype. The oracle."""

import torch
from einops import rearrange
from torch import Tensor

from linrope.feature_maps import ELEMENTWISE
from linrope.rotary import Rotary


def supports(q: Tensor, v: Tensor, kv: Tensor) -> str | None:
    return None


def attend(
    q: Tensor,  # (b, n, h, d)
    k: Tensor,  # (b, m, g, d)
    v: Tensor,  # (b, m, g, e)
    kv: Tensor,  # (b, g, f, e)  the state before the first key
    z: Tensor,  # (b, g, f)
    *,
    feature_map: str,
    rotary: Rotary | None,
    positions: Tensor,  # (b or 1, n), or (b or 1, 1): consecutive from there on
    key_positions: Tensor | None,  # (b or 1, m), likewise; None: as positions
    key_mask: Tensor | None,  # (b, m)
    causal: bool,
    normalize: bool,
    eps: float,
    carry: bool = True,  # whether the last state is wanted; here it always is computed
    in_place: bool = False,  # whether the first may be overwritten with it; here it never is
) -> tuple[Tensor, Tensor, Tensor]:
    """out (b, n, h, e) in v's dtype, and the state after the last key; computed in q's dtype.

    num_i = sum_j <R(p_i) phi(q_i), R(p_j) psi(k_j)> v_j,  den_i = sum_j <phi(q_i), psi(k_j)>,
    out_i = num_i / max(den_i, eps), the sums over all j, or over j <= i.
    """
    dtype, (n, m) = q.dtype, (q.shape[1], k.shape[1])
    function = ELEMENTWISE[feature_map].value
    if key_mask is not None:  # before the map too: its slope may be infinite there
        hidden = ~key_mask[:, :, None, None]
        k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
    phi, psi = function(q, None, None), function(k, None, None)
    if key_mask is not None:
        psi = psi.masked_fill(hidden, 0)
    phi_hat, psi_hat = phi, psi
    if rotary is not None:
        phi_hat = rotary(phi, _all_positions(positions, n))
        psi_hat = rotary(psi, _all_positions(positions if key_positions is None else key_positions, m))

    # Query head i reads key/value head i // r: g groups of r.
    phi, phi_hat = (rearrange(x, "b n (g r) f -> b g r n f", g=k.shape[2]) for x in (phi, phi_hat))
    scores = torch.einsum("bgrnf,bmgf->bgrnm", phi_hat, psi_hat)
    if causal:
        scores = scores.tril()
    num = torch.einsum("bgrnm,bmge->bgrne", scores, v.to(dtype))
    num = num + torch.einsum("bgrnf,bgfe->bgrne", phi_hat, kv.to(dtype))
    if normalize:
        weights = torch.einsum("bgrnf,bmgf->bgrnm", phi, psi)
        if causal:
            weights = weights.tril()
        den = weights.sum(-1) + torch.einsum("bgrnf,bgf->bgrn", phi, z.to(dtype))
        num = num / den.clamp(min=eps)[..., None]
    out = rearrange(num, "b g r n e -> b n (g r) e")

    kv = kv + torch.einsum("bmgf,bmge->bgfe", psi_hat.to(kv.dtype), v.to(kv.dtype))
    return out.to(v.dtype), kv, z + psi.to(z.dtype).sum(1)


def _all_positions(positions: Tensor, n: int) -> Tensor:
    if positions.shape[1] == n:
        return positions
    return positions + torch.arange(n, device=positions.device)

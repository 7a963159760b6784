"""RoFormer eq. 19 as it is written: quadratic, differentiable, in any float dtype. The oracle."""

from itertools import pairwise
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from linrope.feature_maps import ELEMENTWISE
from linrope.rotary import Rotary, spell_out


def supports(q: Tensor, v: Tensor, kv: Tensor, rotary: Rotary | None) -> str | None:
    return None


def attend(
    q: Tensor,  # (b, n, h, d)
    k: Tensor,  # (b, m, g, d)
    v: Tensor,  # (b, m, g, e)
    kv: Tensor,  # (b, g, f, e)  the state before the first key; packed sequences: (s, g, f, e)
    z: Tensor,  # (b, g, f)
    *,
    feature_map: str,
    rotary: Rotary | None,
    decay: Tensor | None,  # (g,)
    positions: Tensor,  # (b or 1, n), or (b or 1, 1): consecutive from there on; with axes: (.., axes)
    key_positions: Tensor | None,  # (b or 1, m), likewise; None: as positions
    start: Tensor,  # (b or 1,) the state's position, of the first token to come
    key_mask: Tensor | None,  # (b, m)
    cu_seqlens: Tensor | None,  # (s + 1,)
    causal: bool,
    normalize: bool,
    eps: float,
    carry: bool = True,  # whether the last state is wanted; here it always is computed
    in_place: bool = False,  # whether the first may be overwritten with it; here it never is
) -> tuple[Tensor, Tensor, Tensor]:
    """out (b, n, h, e) in v's dtype, and the state after the last key; computed in q's dtype.

    num_i = sum_j g^(p_i - p_j) <R(p_i) phi(q_i), R(p_j) psi(k_j)> v_j
    den_i = sum_j g^(p_i - p_j) <phi(q_i), psi(k_j)>,   out_i = num_i / max(den_i, eps)

    The sums run over all j, or over j <= i. A state is as its last token sees it, at position start - 1.
    """
    dtype, (n, m) = q.dtype, (q.shape[1], k.shape[1])
    where = spell_out(positions, n)
    key_where = where if key_positions is None else spell_out(key_positions, m)
    if cu_seqlens is not None:
        how: dict[str, Any] = {"feature_map": feature_map, "rotary": rotary, "decay": decay}
        how |= {"causal": causal, "normalize": normalize, "eps": eps}
        return _each(cu_seqlens.tolist(), q, k, v, kv, z, where, key_where, start, key_mask, how)
    function = ELEMENTWISE[feature_map].value
    if key_mask is not None:  # before the map too: its slope may be infinite there
        hidden = ~key_mask[:, :, None, None]
        k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
    phi, psi = function(q, None, None), function(k, None, None)
    if key_mask is not None:
        psi = psi.masked_fill(hidden, 0)
    phi_hat, psi_hat = phi, psi
    if rotary is not None:
        phi_hat, psi_hat = rotary(phi, where), rotary(psi, key_where)
    # Query head i reads key/value head i // r: g groups of r.
    phi, phi_hat = (rearrange(x, "b n (g r) f -> b g r n f", g=k.shape[2]) for x in (phi, phi_hat))
    psi, psi_hat, v_wide = (rearrange(x, "b m g f -> b g m f") for x in (psi, psi_hat, v.to(dtype)))

    # log g per position, (g or 1, 1); in the numerator xPos joins in, per feature: (g or 1, f).
    rates = phi.new_zeros(1, 1, dtype=torch.float64) if decay is None else decay.double().log()[:, None]
    rates_hat = rates
    if rotary is not None and rotary.fade is not None:
        rates_hat = rates + rotary.fade.to(q.device)
    if where.ndim == 3:  # on a grid nothing fades
        where, key_where = where[..., 0], key_where[..., 0]
    before = start[:, None] - 1  # a state is as its last token sees it
    last = key_where[:, -1:] if m else before

    def power(rates: Tensor, distance: Tensor) -> Tensor:
        """(g or 1, f or 1), (b or 1, ..) -> g^distance (b or 1, g or 1, .., f or 1)"""
        rates = rates.view(1, len(rates), *[1] * (distance.ndim - 1), -1)
        return (distance.clamp(min=0)[:, None, ..., None] * rates).exp().to(dtype)

    between = where[:, :, None] - key_where[:, None]
    if rates_hat.shape[1] == 1:
        scores = torch.einsum("bgrnf,bgmf->bgrnm", phi_hat, psi_hat)
        scores = scores * power(rates, between)[:, :, None, ..., 0]
    else:
        faded = psi_hat[:, :, None] * power(rates_hat, between)
        scores = torch.einsum("bgrnf,bgnmf->bgrnm", phi_hat, faded)
    if causal:
        scores = scores.tril()
    num = torch.einsum("bgrnm,bgme->bgrne", scores, v_wide)
    seen = phi_hat * power(rates_hat, where - before)[:, :, None]
    num = num + torch.einsum("bgrnf,bgfe->bgrne", seen, kv.to(dtype))
    if normalize:
        weights = torch.einsum("bgrnf,bgmf->bgrnm", phi, psi) * power(rates, between)[:, :, None, ..., 0]
        if causal:
            weights = weights.tril()
        seen = phi * power(rates, where - before)[:, :, None]
        den = weights.sum(-1) + torch.einsum("bgrnf,bgf->bgrn", seen, z.to(dtype))
        num = num / den.clamp(min=eps)[..., None]
    out = rearrange(num, "b g r n e -> b n (g r) e")

    psi_hat, psi = psi_hat * power(rates_hat, last - key_where), psi * power(rates, last - key_where)
    kv = kv * power(rates_hat, last - before)[:, :, 0, :, None].to(kv.dtype)
    kv = kv + torch.einsum("bgmf,bgme->bgfe", psi_hat.to(kv.dtype), v_wide.to(kv.dtype))
    z = z * power(rates, last - before)[:, :, 0].to(z.dtype)
    return out.to(v.dtype), kv, z + psi.to(z.dtype).sum(2)


def _each(
    bounds: list[int], q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor, where: Tensor,
    key_where: Tensor, start: Tensor, key_mask: Tensor | None, how: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Packed sequences, apart from each other."""
    results = [(q.new_zeros(1, 0, q.shape[2], v.shape[3], dtype=v.dtype), kv[:0], z[:0])]
    for i, (low, high) in enumerate(pairwise(bounds)):
        tokens, own = slice(low, high), slice(i, i + 1)
        results.append(
            attend(
                q[:, tokens], k[:, tokens], v[:, tokens], kv[own], z[own], **how, cu_seqlens=None,
                positions=where[:, tokens], key_positions=key_where[:, tokens], start=start[own],
                key_mask=None if key_mask is None else key_mask[:, tokens],
            )
        )  # fmt: skip
    outs, kvs, zs = zip(*results, strict=True)
    return torch.cat(outs, 1), torch.cat(kvs), torch.cat(zs)

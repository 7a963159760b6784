"""RoFormer eq. 19 as it is written: quadratic, differentiable, in any float dtype. The oracle."""

from itertools import pairwise

import torch
from einops import rearrange
from torch import Tensor

from linrope.backends.call import Call, Sums
from linrope.feature_maps import ELEMENTWISE
from linrope.feature_maps.base import at_most_0
from linrope.rotation.rotary import rotate, spell_out
from linrope.sequence.packing import sums_so_far
from linrope.sequence.state import LinearAttentionState


def supports(call: Call, state: LinearAttentionState | None) -> str | None:
    return None


def attend(call: Call, state: LinearAttentionState | None) -> tuple[Tensor, Sums | None]:
    """out (b, n, h, e) in v's dtype, and the sums after the last key; computed in q's dtype."""
    (_, _, g, f), e = call.k.shape, call.v.shape[3]
    if state is None:
        wide = torch.promote_types(call.v.dtype, torch.float32)
        zeros = call.v.new_zeros(call.sequences, g, f, e, dtype=wide)
        sums = Sums(zeros, zeros.new_zeros(*zeros.shape[:3], dtype=torch.float64), None)
    else:
        rows = state.rows()
        sums = Sums(rows.kv, rows.z, rows.angle)
    if call.cu_seqlens is None:
        out, kv, z = _attend(call, sums)
    else:
        outs, kvs, zs = [call.v[:, :0].new_empty(1, 0, g * call.group, e)], [sums.kv[:0]], [sums.z[:0]]
        for i, (low, high) in enumerate(pairwise(call.cu_seqlens.tolist())):  # apart from each other
            own = Sums(*(None if x is None else x[i : i + 1] for x in sums))  # type: ignore[arg-type]
            part = _attend(_part(call, low, high), own)
            for found, piece in zip((outs, kvs, zs), part, strict=True):
                found.append(piece)
        out, kv, z = torch.cat(outs, 1), torch.cat(kvs), torch.cat(zs)
    return out, Sums(kv, z, call.last_angle(sums.angle)) if call.want_state else None


def _part(call: Call, low: int, high: int) -> Call:
    """The tokens low .. high - 1."""
    whole = {
        name: getattr(call, name)
        for name in ("q", "k", "v", "log_decay", "angle_steps", "distances", "key_mask")
    }
    parts = {name: None if x is None else x[:, low:high] for name, x in whole.items()}
    positions, keys = spell_out(call.positions, call.k.shape[1]), call.key_positions
    key_positions = None if keys is None else spell_out(keys, call.k.shape[1])[:, low:high]
    here = {"positions": positions[:, low:high], "key_positions": key_positions, "cu_seqlens": None}
    return call._replace(**parts, **here)  # type: ignore[arg-type]


def _attend(call: Call, sums: Sums) -> tuple[Tensor, Tensor, Tensor]:
    """out and the last kv and z of sequences that lie in rows.

    num_i = sum_j e^(L_i - L_j) <R(Theta_i) phi(q_i), R(Theta_j) psi(k_j)> v_j
    den_i = sum_j e^(L_i - L_j) <phi(q_i), psi(k_j)>,   out_i = num_i / max(den_i, eps)

    The sums run over all j, or over j <= i. A state is as its last token sees it.
    """
    q = call.k[:, :0] if call.q is None else call.q
    dtype, (n, m), function = q.dtype, (q.shape[1], call.k.shape[1]), ELEMENTWISE[call.feature_map].value
    k, v = call.k, call.v.to(dtype)
    if call.key_mask is not None:  # before the map too: its slope may be infinite there
        hidden = ~call.key_mask[:, :, None, None]
        k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
    phi, psi = function(q), function(k)
    if call.key_mask is not None:
        psi = psi.masked_fill(hidden, 0)
    phi_hat, psi_hat = _rotated(call, phi, sums.angle, keys=False), _rotated(call, psi, sums.angle, keys=True)
    # Query head i reads key/value head i // r: g groups of r.
    phi, phi_hat = (rearrange(x, "b n (g r) f -> b g r n f", g=k.shape[2]) for x in (phi, phi_hat))
    psi, psi_hat, v = (rearrange(x, "b m g f -> b g m f") for x in (psi, psi_hat, v))

    # L (b or 1, g or 1, m, 1), summed from the token before the first; in the numerator xPos joins in, per
    # feature.
    length = phi.new_zeros(1, 1, m, 1, dtype=torch.float64)
    if call.log_decay is not None:
        length = rearrange(call.log_decay.double().cumsum(1), "b m g -> b g m 1")
    length_hat = length
    if call.fade is not None and call.distances is not None:
        length_hat = length + (call.distances.cumsum(1)[..., None] * call.fade)[:, None]
    own, own_hat = (x[:, :, :n] if call.causal else x.new_zeros(1, 1, n, 1) for x in (length, length_hat))
    last, last_hat = (x[:, :, -1:] if m else x.new_zeros(1, 1, 1, 1) for x in (length, length_hat))

    def fade(exponent: Tensor) -> Tensor:
        return at_most_0(exponent).exp().to(dtype)

    def visible(scores: Tensor) -> Tensor:
        return scores.tril() if call.causal else scores

    between = own[..., None, :] - length[..., None, :, :]  # (b, g, n, m, 1)
    if length_hat.shape[-1] == 1:
        scores = torch.einsum("bgrnf,bgmf->bgrnm", phi_hat, psi_hat) * fade(between)[:, :, None, ..., 0]
    else:
        faded = psi_hat[:, :, None] * fade(own_hat[..., None, :] - length_hat[..., None, :, :])
        scores = torch.einsum("bgrnf,bgnmf->bgrnm", phi_hat, faded)
    num = torch.einsum("bgrnm,bgme->bgrne", visible(scores), v)
    num = num + torch.einsum("bgrnf,bgfe->bgrne", phi_hat * fade(own_hat)[:, :, None], sums.kv.to(dtype))
    if call.normalize:
        weights = torch.einsum("bgrnf,bgmf->bgrnm", phi, psi) * fade(between)[:, :, None, ..., 0]
        den = visible(weights).sum(-1)
        den = den + torch.einsum("bgrnf,bgf->bgrn", phi * fade(own)[:, :, None], sums.z.to(dtype))
        den = den + call.eps if call.eps_mode == "add" else den.clamp(min=call.eps)
        num = num / den[..., None]
    out = rearrange(num, "b g r n e -> b n (g r) e")

    psi_hat, psi = psi_hat * fade(last_hat - length_hat), psi * fade(last - length)
    kv = sums.kv * last_hat.exp().mT.to(sums.kv.dtype)
    kv = kv + torch.einsum("bgmf,bgme->bgfe", psi_hat.to(kv.dtype), v.to(kv.dtype))
    z = sums.z * last.exp()[:, :, 0].to(sums.z.dtype) + psi.to(sums.z.dtype).sum(2)
    return out.to(call.v.dtype), kv, z


def _rotated(call: Call, x: Tensor, angle: Tensor | None, *, keys: bool) -> Tensor:
    """R(Theta) x of x (b, n, heads, f), in x's dtype, with the gradient of angle_steps."""
    wide = torch.promote_types(x.dtype, torch.float32)
    found = call.cos_sin(angle, wide, keys=keys)
    if found is None or x.shape[1] == 0:
        return x
    cos, sin = found
    if call.angle_steps is not None and call.angle_steps.requires_grad:
        steps = sums_so_far(call.angle_steps.double(), None)
        zero = (steps - steps.detach()).to(
            wide
        )  # the angle is an integer: here is what its slope goes through
        cos, sin = cos - sin * zero, sin + cos * zero
    heads = cos.shape[2]
    if heads > 1:  # query heads that share a key/value head share its angles
        cos, sin = (y.repeat_interleave(x.shape[2] // heads, 2) for y in (cos, sin))
    return rotate(x, cos, sin, call.layout)

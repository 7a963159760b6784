"""Eq. 19 in plain PyTorch on any device: chunked, with its own backward, as torch.library operators.

It saves q, k, v, the normalizer and the states at block starts, and recomputes the rest. To
torch.compile a call is one opaque node, whatever the length.
"""

import torch
from torch import Tensor

from linrope.backends import eager_bidirectional, eager_causal, eager_causal_backward, eager_step
from linrope.backends.eager_blocks import BLOCK, Angles, num_blocks
from linrope.backends.eager_fade import Fade
from linrope.rotary import Rotary


def supports(q: Tensor, v: Tensor, kv: Tensor, rotary: Rotary | None) -> str | None:
    return None


def attend(
    q: Tensor,  # (b, n, h, d)
    k: Tensor,  # (b, m, g, d)
    v: Tensor,  # (b, m, g, e)
    kv: Tensor,  # (b, g, f, e)
    z: Tensor,  # (b, g, f)
    *,
    feature_map: str,
    rotary: Rotary | None,
    decay: Tensor | None,
    positions: Tensor,  # (b or 1, n), or (b or 1, 1): consecutive from there on
    key_positions: Tensor | None,
    start: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    causal: bool,
    normalize: bool,
    eps: float,
    carry: bool,
    in_place: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``reference.attend``; out has v's dtype, all arithmetic kv's (float32 or float64)."""
    save = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, kv, z))
    if causal and q.shape[1] == 1 and cu_seqlens is None and not save and not torch.compiler.is_compiling():
        with torch.autocast(q.device.type, enabled=False):
            out, kv, z = eager_step.step(
                q, k, v, kv, z,
                feature_map=feature_map, rotary=rotary, decay=decay, positions=positions,
                key_positions=key_positions, start=start, key_mask=key_mask, normalize=normalize, eps=eps,
                in_place=in_place,
            )  # fmt: skip
        return out.to(v.dtype), kv, z
    theta = None if rotary is None else rotary.frequencies.to(q.device)
    xpos = None if rotary is None or rotary.fade is None else rotary.fade.to(q.device)
    layout = "" if rotary is None else rotary.layout
    out, _, kv, z, _, _ = _attend(
        q, k, v, kv, z, theta, xpos, decay, positions, key_positions, start, key_mask, cu_seqlens,
        layout, feature_map, causal, normalize, eps, carry, save,
    )  # fmt: skip
    return out, kv, z


def _call(
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor, theta: Tensor | None, xpos: Tensor | None,
    decay: Tensor | None, positions: Tensor, key_positions: Tensor | None, start: Tensor,
    key_mask: Tensor | None, cu_seqlens: Tensor | None, layout: str, feature_map: str, causal: bool,
    normalize: bool, eps: float,
) -> eager_causal.Call:  # fmt: skip
    n, m = q.shape[1], k.shape[1]
    bounds = None if cu_seqlens is None else cu_seqlens.tolist()
    q_angles = Angles(theta, layout, positions, n, min(n, BLOCK) if causal else n, kv.dtype)
    k_angles = q_angles
    if key_positions is not None:
        k_angles = Angles(theta, layout, key_positions, m, min(m, BLOCK) if causal else m, kv.dtype)
    fade = None
    if decay is not None or xpos is not None:
        pairs = 0 if theta is None else theta.shape[2]
        fade = Fade(decay, xpos, layout == "interleaved", pairs, positions, start, n, bounds, kv.dtype)
    return eager_causal.Call(
        q, k, v, key_mask, q_angles, k_angles, fade, bounds, feature_map, normalize, eps, kv.dtype
    )


def _new_starts(state: Tensor, blocks: int, cu_seqlens: Tensor | None) -> Tensor:
    return state.new_zeros(blocks, *(state if cu_seqlens is None else state[:1]).shape)


@torch.library.custom_op("linrope::eager", mutates_args=())
def _attend(
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor, theta: Tensor | None, xpos: Tensor | None,
    decay: Tensor | None, positions: Tensor, key_positions: Tensor | None, start: Tensor,
    key_mask: Tensor | None, cu_seqlens: Tensor | None, layout: str, feature_map: str, causal: bool,
    normalize: bool, eps: float, carry: bool, save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """out, den, kv, z, and for the backward pass the kv and z at block starts."""
    call = _call(q, k, v, kv, theta, xpos, decay, positions, key_positions, start, key_mask, cu_seqlens,
                 layout, feature_map, causal, normalize, eps)  # fmt: skip
    starts = num_blocks(q.shape[1], 1 if cu_seqlens is None else len(kv)) if save and causal else 0
    kv_starts, z_starts = _new_starts(kv, starts, cu_seqlens), _new_starts(z, starts, cu_seqlens)
    with torch.autocast(q.device.type, enabled=False):
        if not causal:
            out, den, kv_end, z_end = eager_bidirectional.forward(call, kv, z, carry)
        else:
            out = v.new_empty(*q.shape[:3], v.shape[3])
            den = kv.new_empty(q.shape[:3]) if normalize and save else kv.new_zeros(q.shape[:3])
            kv_end, z_end = torch.empty_like(kv), torch.empty_like(z)
            eager_causal.forward(call, kv, z, out, den, kv_end, z_end, kv_starts, z_starts)
    return out, den, kv_end, z_end, kv_starts, z_starts


@_attend.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor, theta: Tensor | None, xpos: Tensor | None,
    decay: Tensor | None, positions: Tensor, key_positions: Tensor | None, start: Tensor,
    key_mask: Tensor | None, cu_seqlens: Tensor | None, layout: str, feature_map: str, causal: bool,
    normalize: bool, eps: float, carry: bool, save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    starts = num_blocks(q.shape[1], 1 if cu_seqlens is None else len(kv)) if save and causal else 0
    return (
        v.new_empty(*q.shape[:3], v.shape[3]),
        kv.new_empty(q.shape[:3]),
        torch.empty_like(kv),
        torch.empty_like(z),
        _new_starts(kv, starts, cu_seqlens),
        _new_starts(z, starts, cu_seqlens),
    )


@torch.library.custom_op("linrope::eager_backward", mutates_args=())
def _attend_backward(
    g_out: Tensor, g_kv: Tensor, g_z: Tensor, den: Tensor, z_end: Tensor, kv_starts: Tensor,
    z_starts: Tensor, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, theta: Tensor | None,
    xpos: Tensor | None, decay: Tensor | None, positions: Tensor, key_positions: Tensor | None,
    start: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None, layout: str, feature_map: str,
    causal: bool, normalize: bool, eps: float, carry: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, kv and z."""
    call = _call(q, k, v, kv, theta, xpos, decay, positions, key_positions, start, key_mask, cu_seqlens,
                 layout, feature_map, causal, normalize, eps)  # fmt: skip
    with torch.autocast(q.device.type, enabled=False):
        if not causal:
            return eager_bidirectional.backward(call, g_out, den, kv, z_end, g_kv, g_z, carry)
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        dkv, dz = g_kv.clone(), g_z.clone()
        eager_causal_backward.backward(call, g_out, den, kv_starts, z_starts, dq, dk, dv, dkv, dz)
    return dq, dk, dv, dkv, dz


@_attend_backward.register_fake
def _(
    g_out: Tensor, g_kv: Tensor, g_z: Tensor, den: Tensor, z_end: Tensor, kv_starts: Tensor,
    z_starts: Tensor, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, theta: Tensor | None,
    xpos: Tensor | None, decay: Tensor | None, positions: Tensor, key_positions: Tensor | None,
    start: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None, layout: str, feature_map: str,
    causal: bool, normalize: bool, eps: float, carry: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv, torch.empty_like(g_kv), torch.empty_like(g_z)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, kv, _, *tensors = inputs[:13]
    *ctx.how, _save = inputs[13:]
    _, den, _, z_end, kv_starts, z_starts = output
    ctx.save_for_backward(den, z_end, kv_starts, z_starts, q, k, v, kv, *tensors)
    ctx.set_materialize_grads(False)


def _backward(ctx, g_out, g_den, g_kv, g_z, *_):  # type: ignore[no-untyped-def]
    den, z_end, *rest = ctx.saved_tensors
    q, v, kv = rest[2], rest[4], rest[5]
    if g_out is None:
        g_out = v.new_zeros(*q.shape[:3], v.shape[3])
    g_kv = torch.zeros_like(kv) if g_kv is None else g_kv
    g_z = torch.zeros_like(z_end) if g_z is None else g_z
    grads = _attend_backward(g_out, g_kv, g_z, den, z_end, *rest, *ctx.how)
    return *grads, *[None] * 15


_attend.register_autograd(_backward, setup_context=_setup_context)

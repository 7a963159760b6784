"""Eq. 19 on GPUs, in the fused kernels of linrope_kernels, as torch.library operators.

It saves q, k, v, the normalizer, the states at segment starts, and out for more than 64 features. In
Triton's interpreter (TRITON_INTERPRET=1 before the start) it takes CPU tensors, for tests.
"""

import torch
from linrope_kernels import INTERPRETED, launch
from torch import Tensor

from linrope.rotary import Rotary, spell_out

MAX_DIM = 256


def why_not() -> str | None:
    """Why no call at all runs on this machine; None: there is a device for it."""
    if INTERPRETED or torch.cuda.is_available():
        return None
    return "PyTorch sees no CUDA device"


def supports(q: Tensor, v: Tensor, kv: Tensor, rotary: Rotary | None) -> str | None:
    """Why these kernels cannot run the call; None: they can."""
    if not q.is_cuda and not INTERPRETED:
        return (
            f"tensors on {q.device}: it needs a CUDA device, or TRITON_INTERPRET=1 set before Python starts"
        )
    if q.is_cuda and torch.cuda.get_device_capability(q.device) < (8, 0):
        return "this GPU: it needs compute capability 8.0 or more"
    if q.dtype == torch.float64 or kv.dtype == torch.float64:
        return "float64: use backend='eager'"
    if q.dtype == torch.bfloat16 and INTERPRETED:
        return "bfloat16 in Triton's interpreter, which multiplies its bit patterns: use float16 or float32"
    if rotary is not None and rotary.fade is not None:
        return "xpos, a decay per pair of features: use backend='eager'"
    f, e = q.shape[3], v.shape[3]
    if f > MAX_DIM or e > MAX_DIM:
        return f"{f} features and {e} values per head: it takes up to {MAX_DIM} of each; use backend='eager'"
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
    """As ``reference.attend``; out has v's dtype, sums are float32 and z float64."""
    n, m = q.shape[1], k.shape[1]
    theta = None if rotary is None else rotary.turns(q.device)
    layout = "half" if rotary is None else rotary.layout
    if key_positions is not None and (n, m) != (positions.shape[1], key_positions.shape[1]):
        # The kernels take both forms, but not one of each.
        positions, key_positions = spell_out(positions, n), spell_out(key_positions, m)
    positions = positions.contiguous()
    key_positions = None if key_positions is None else key_positions.contiguous()
    key_mask = None if key_mask is None else key_mask.contiguous()
    z_dtype = z.dtype
    kv, z = kv.contiguous(), z.double().contiguous()
    save = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, kv, z))
    step = causal and n == 1 and cu_seqlens is None
    if step and not save and not torch.compiler.is_compiling():
        call = _call(
            q, k, v, theta, decay, positions, key_positions, start, key_mask, None,
            layout, feature_map, causal, normalize, eps,
        )  # fmt: skip
        out = v.new_empty(*q.shape[:3], v.shape[3])
        end = (kv, z) if in_place else (torch.empty_like(kv), torch.empty_like(z))
        with torch.cuda.device_of(q):
            launch.step_fwd(call, (kv, z), out, end)
        return out, end[0], end[1].to(z_dtype)
    out, _, kv, z, _, _ = _attend(
        q, k, v, kv, z, theta, decay, positions, key_positions, start, key_mask, cu_seqlens,
        layout, feature_map, causal, normalize, eps, save,
    )  # fmt: skip
    return out, kv, z.to(z_dtype)


def _call(
    q: Tensor, k: Tensor, v: Tensor, theta: Tensor | None, decay: Tensor | None, positions: Tensor,
    key_positions: Tensor | None, start: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None,
    layout: str, feature_map: str, causal: bool, normalize: bool, eps: float,
) -> launch.Call:  # fmt: skip
    # float16 has tf32's digits, but sums of features leave its range.
    dot = "bf16" if q.dtype == torch.bfloat16 else "tf32"
    if q.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest":
        dot = "ieee"
    return launch.Call(
        q, k, v, key_mask, theta, layout, positions, key_positions, feature_map, causal, normalize, eps, dot,
        decay, start, cu_seqlens,
    )  # fmt: skip


@torch.library.custom_op("linrope::triton", mutates_args=())
def _attend(
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor, theta: Tensor | None, decay: Tensor | None,
    positions: Tensor, key_positions: Tensor | None, start: Tensor, key_mask: Tensor | None,
    cu_seqlens: Tensor | None, layout: str, feature_map: str, causal: bool, normalize: bool, eps: float,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """out, den, kv, z, and for the backward pass the kv and z at segment starts."""
    call = _call(
        q, k, v, theta, decay, positions, key_positions, start, key_mask, cu_seqlens,
        layout, feature_map, causal, normalize, eps,
    )  # fmt: skip
    out, den, kv_end, z_end, *saved = _new_results(call, kv, z, save)
    with torch.cuda.device_of(q):
        launch.attend_fwd(
            call, (kv, z), out, den if den.numel() else None, (kv_end, z_end),
            (saved[0], saved[1]) if saved[0].numel() else None,
        )  # fmt: skip
    return out, den, kv_end, z_end, saved[0], saved[1]


def _new_results(call: launch.Call, kv: Tensor, z: Tensor, save: bool) -> tuple[Tensor, ...]:
    (b, n, h, f), e = call.q.shape, call.v.shape[3]
    segments = launch.saved_segments(call) if save else 0
    return (
        call.v.new_empty(b, n, h, e),
        kv.new_empty(b, h, n if save and call.normalize else 0),
        torch.empty_like(kv),
        torch.empty_like(z),
        kv.new_zeros(call.sequences, segments, f, e),  # short sequences leave some unused
        z.new_zeros(call.sequences, segments, f),
    )


@_attend.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor, theta: Tensor | None, decay: Tensor | None,
    positions: Tensor, key_positions: Tensor | None, start: Tensor, key_mask: Tensor | None,
    cu_seqlens: Tensor | None, layout: str, feature_map: str, causal: bool, normalize: bool, eps: float,
    save: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    call = _call(
        q, k, v, theta, decay, positions, key_positions, start, key_mask, cu_seqlens,
        layout, feature_map, causal, normalize, eps,
    )  # fmt: skip
    return _new_results(call, kv, z, save)


@torch.library.custom_op("linrope::triton_backward", mutates_args=())
def _attend_backward(
    g_out: Tensor, g_kv: Tensor, g_z: Tensor, out: Tensor | None, den: Tensor, kv_end: Tensor, z_end: Tensor,
    kv_saved: Tensor, z_saved: Tensor, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor,
    theta: Tensor | None, decay: Tensor | None, positions: Tensor, key_positions: Tensor | None,
    start: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None, layout: str, feature_map: str,
    causal: bool, normalize: bool, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, kv and z."""
    call = _call(
        q, k, v, theta, decay, positions, key_positions, start, key_mask, cu_seqlens,
        layout, feature_map, causal, normalize, eps,
    )  # fmt: skip
    dq, dk, dv, dkv, dz = _new_gradients(q, k, v, kv, z)
    with torch.cuda.device_of(q):
        launch.attend_bwd(
            call, (kv, z), (kv_saved, z_saved) if kv_saved.numel() else None, (kv_end, z_end),
            out, den if normalize else None, g_out, (g_kv, g_z), dq, dk, dv, (dkv, dz),
        )  # fmt: skip
    return dq, dk, dv, dkv, dz


def _new_gradients(*tensors: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dkv, dz = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors)
    return dq, dk, dv, dkv, dz


@_attend_backward.register_fake
def _(
    g_out: Tensor, g_kv: Tensor, g_z: Tensor, out: Tensor | None, den: Tensor, kv_end: Tensor, z_end: Tensor,
    kv_saved: Tensor, z_saved: Tensor, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor,
    theta: Tensor | None, decay: Tensor | None, positions: Tensor, key_positions: Tensor | None,
    start: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None, layout: str, feature_map: str,
    causal: bool, normalize: bool, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _new_gradients(q, k, v, kv, z)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.layout, ctx.feature_map, ctx.causal, ctx.normalize, ctx.eps, _ = inputs
    how = ctx.layout, ctx.feature_map, ctx.causal, ctx.normalize, ctx.eps
    q, k, v, _, _, theta, decay, positions, key_positions, start, key_mask, cu_seqlens = tensors
    call = _call(q, k, v, theta, decay, positions, key_positions, start, key_mask, cu_seqlens, *how)
    out, *rest = output
    ctx.save_for_backward(out if call.reads_out and ctx.normalize else None, *rest, *tensors)
    ctx.set_materialize_grads(False)


def _backward(ctx, g_out, g_den, g_kv, g_z, *_):  # type: ignore[no-untyped-def]
    _, _, kv_end, z_end, _, _, q, _, v, *_ = ctx.saved_tensors
    grads = _attend_backward(
        v.new_zeros(*q.shape[:3], v.shape[3]) if g_out is None else g_out,
        torch.zeros_like(kv_end) if g_kv is None else g_kv.contiguous(),
        torch.zeros_like(z_end) if g_z is None else g_z.contiguous(),
        *ctx.saved_tensors, ctx.layout, ctx.feature_map, ctx.causal, ctx.normalize, ctx.eps,
    )  # fmt: skip
    return *grads, *[None] * 13


_attend.register_autograd(_backward, setup_context=_setup_context)

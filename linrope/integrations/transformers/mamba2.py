"""Computes with linrope what transformers' Mamba-2 layers compute between their projections.

    q = C     k = B     v = x     write = dt     log_decay = A dt     no feature map, no rotation, no normalizer
    S_t = e^(A dt_t) S_(t-1) + B_t (dt_t x_t)^T     y_t = C_t S_t + D x_t

The functions take the arguments that transformers' functions of the same names take. b batch, n tokens, h heads of p
values, g groups of heads that share B and C, s features (the state size), c channels.

Source: Mamba-2, arXiv 2405.21060.
"""

from collections.abc import MutableMapping

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from linrope.operation.from_sums import state_from_sums
from linrope.operation.functional import linear_rope_attention
from linrope.ops import convolve, gated_norm
from linrope.recurrence.state import LinearAttentionState

SILU = ("silu", "swish")  # the two names that transformers has for it


def mamba2_chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    *,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """All tokens: (b, n, h, p) in float32 or wider and, if wanted, the state after each sequence's last token.

    x (b, n, h, p), dt (b, n, h), A, D and dt_bias (h,), B and C (b, n, g, s), states (b, h, p, s). seq_idx
    (b, n) or cu_seqlens (sequences + 1,) pack sequences into rows; states are then (sequences, h, p, s).
    """
    b, n, h, p = hidden_states.shape
    wide = torch.promote_types(hidden_states.dtype, torch.float32)
    steps = _step_sizes(dt.to(wide), dt_bias, dt_softplus).clamp(*dt_limit)
    log_decay = A.to(wide) * steps
    x, k, q = hidden_states.to(wide), B.to(wide), C.to(wide)
    cu_seqlens = packed_bounds(seq_idx) if cu_seqlens is None else cu_seqlens
    if cu_seqlens is not None:
        x, steps, log_decay, k, q = (y.reshape(1, b * n, *y.shape[2:]) for y in (x, steps, log_decay, k, q))
    gradients = torch.is_grad_enabled() and any(z.requires_grad for z in (x, steps, log_decay, k, q))
    initial = None if initial_states is None else state_before(initial_states.mT, wide, gradients)
    result = linear_rope_attention(
        q,
        k,
        x,
        feature_map=None,
        normalize=False,
        log_decay=log_decay,
        write=steps,
        cu_seqlens=cu_seqlens,
        state=initial,
        return_state=return_final_states,
    )
    out, last = result if isinstance(result, tuple) else (result, None)
    if D is not None:
        out = gated_norm(out, v=x, skip=D.to(wide))
    out = out.view(b, n, h, p)
    return out if last is None else (out, last.kv.mT)


def mamba2_selective_state_update(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
) -> Tensor:
    """One token: y (b, h, p). The state (b, h, p, s) is overwritten, in whichever order its memory has.

    x and z (b, h, p), dt (b, h, p), A (h, p, s), B and C (b, g, s), D and dt_bias (h, p). dt, A and dt_bias repeat one
    number per head, which ``families`` checks before the call.
    """
    wide = state.dtype
    steps = _step_sizes(dt[..., 0].to(wide), None if dt_bias is None else dt_bias[..., 0], dt_softplus)
    x = hidden_states.to(wide)
    q, k, v, write = (y[:, None] for y in (C.to(wide), B.to(wide), x, steps))
    log_decay = (steps * A[:, 0, 0].to(wide))[:, None]
    out = attend_in_place(state, q, k, v, log_decay=log_decay, write=write, swapped=True)[:, 0]
    if D is not None:
        out = torch.addcmul(out, x, D.to(wide))
    out = out.to(hidden_states.dtype)
    return out if z is None else out * F.silu(z)


def state_before(sums: Tensor, dtype: torch.dtype, gradients: bool) -> LinearAttentionState:
    """The state of a cache's sums (b, h, s, p).

    gradients: whether a backward pass will read the sums again. They are copied then, because the owner of the cache
    overwrites them with the sums after this call.
    """
    copied = sums.to(dtype, copy=gradients)
    return state_from_sums(copied, feature_map=None)


# The last state in each tensor of a cache: making one anew for every token would take as long as half a step.
_last_states: MutableMapping[Tensor, LinearAttentionState] = WeakTensorKeyDictionary()


def attend_in_place(
    cached: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    swapped: bool,
    log_decay: Tensor | None = None,
    decay: Tensor | None = None,
    write: Tensor | None = None,
) -> Tensor:
    """One token of linear_rope_attention without a normalizer: out (b, 1, h, p). Overwrites the cached sums.

    cached: (b, h, s, p), or (b, h, p, s) if swapped.
    """
    kv = cached.mT if swapped else cached
    compiling = torch.compiler.is_compiling()
    differentiable = [x for x in (cached, q, k, v, log_decay, decay, write) if x is not None]
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in differentiable)
    if gradients:
        state = state_before(kv, kv.dtype, gradients=True)
    else:
        last = None if compiling else _last_states.get(cached)
        if last is None or last.kv.data_ptr() != kv.data_ptr() or last.kv.stride() != kv.stride():
            last = state_from_sums(kv.detach(), feature_map=None)
        state = last.donate()
    out, after = linear_rope_attention(
        q,
        k,
        v,
        feature_map=None,
        normalize=False,
        log_decay=log_decay,
        decay=decay,
        write=write,
        state=state,
        return_state=True,
    )
    if gradients or compiling:
        kv.copy_(after.kv)
    else:
        _last_states[cached] = after
    return out


def causal_conv1d_fn(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The causal convolution of channels (b, c, n) with weight (c, taps), and SiLU if activation names it."""
    b, c, n = hidden_states.shape
    x = hidden_states.transpose(1, 2)
    cu_seqlens = packed_bounds(seq_idx) if cu_seqlens is None else cu_seqlens
    if cu_seqlens is not None:
        x = x.reshape(1, b * n, c)
    y = convolve(x, weight, bias, cu_seqlens=cu_seqlens, silu=activation in SILU)
    return y.view(b, n, c).transpose(1, 2)


def causal_conv1d_update(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Some tokens (b, c, n) of ``causal_conv1d_fn`` after those in conv_state (b, c, taps - 1 or more).

    conv_state then holds its last columns and these tokens. Sums are float32 or wider.
    """
    n, taps, columns = hidden_states.shape[-1], weight.shape[-1], conv_state.shape[-1]
    first = columns - max(columns - n, taps - 1)
    inputs = torch.cat((conv_state[..., first:], hidden_states), -1)  # the backward pass reads this copy
    conv_state.copy_(inputs[..., inputs.shape[-1] - columns :])
    inputs = inputs[..., inputs.shape[-1] - n - taps + 1 :]
    if n != 1:
        return causal_conv1d_fn(inputs, weight, bias, activation)[..., taps - 1 :].to(hidden_states.dtype)
    wide = torch.promote_types(weight.dtype, torch.float32)
    y = torch.linalg.vecdot(inputs.to(wide), weight.to(wide))
    y = y if bias is None else y + bias
    y = F.silu(y) if activation in SILU else y
    return y.to(hidden_states.dtype)[..., None]


def norm_of_groups(
    out: Tensor, weight: Tensor, gate: Tensor | None, *, groups: int, eps: float, gate_first: bool
) -> Tensor:
    """RMS norm of each group of channels (.., c), times silu(gate) before or after it."""
    shape = out.shape
    out = out.reshape(1, -1, groups, shape[-1] // groups)
    gate = None if gate is None else gate.reshape(1, -1, shape[-1])
    order = "before" if gate_first else "after"
    y = gated_norm(out, weight.view(groups, -1), eps=eps, gate=gate, gate_order=order)
    return y.view(shape)


def packed_bounds(seq_idx: Tensor | None) -> Tensor | None:
    """The bounds of the sequences that share rows, over all b n tokens. seq_idx (b, n): the sequence of each token."""
    if seq_idx is None:
        return None
    starts = torch.ones_like(seq_idx, dtype=torch.bool)
    starts[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    first = starts.flatten().nonzero()[:, 0]
    return torch.cat((first, first.new_tensor([seq_idx.numel()])))


def _step_sizes(dt: Tensor, dt_bias: Tensor | None, dt_softplus: bool) -> Tensor:
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    return F.softplus(dt) if dt_softplus else dt

"""Computes with linrope what transformers' Mamba-2 layers compute between their projections.

    q = C     k = B     v = x     write = dt     log_decay = A dt     no feature map, no rotation, no normalizer
    S_t = e^(A dt_t) S_(t-1) + B_t (dt_t x_t)^T     y_t = C_t S_t + D x_t

The functions take the arguments that transformers' functions of the same names take. b batch, n tokens, h heads of p
values, g groups of heads that share B and C, s features (the state size), c channels.

Source: Mamba-2, arXiv 2405.21060.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from linrope.integrations.transformers.shared import Gates, attend, attend_in_place
from linrope.ops import gated_norm


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
    wide = torch.promote_types(hidden_states.dtype, torch.float32)
    steps = _step_sizes(dt.to(wide), dt_bias, dt_softplus).clamp(*dt_limit)
    x = hidden_states.to(wide)
    out, last = attend(
        C.to(wide),
        B.to(wide),
        x,
        Gates(log_decay=A.to(wide) * steps, write=steps),
        before=initial_states,
        return_state=return_final_states,
        swapped=True,
        seq_idx=seq_idx,
        cu_seqlens=cu_seqlens,
    )
    if D is not None:
        out = gated_norm(out, v=x, skip=D.to(wide)).view(x.shape)
    return out if last is None else (out, last)


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

    y is in float32 or wider, as the scan's: in half precision tokens read one by one and together are then the same.

    x and z (b, h, p), dt (b, h, p), A (h, p, s), B and C (b, g, s), D and dt_bias (h, p). dt, A and dt_bias repeat one
    number per head, which ``families`` checks before the call.
    """
    wide = state.dtype
    steps = _step_sizes(dt[..., 0].to(wide), None if dt_bias is None else dt_bias[..., 0], dt_softplus)
    x = hidden_states.to(wide)
    q, k, v, write = (y[:, None] for y in (C.to(wide), B.to(wide), x, steps))
    log_decay = (steps * A[:, 0, 0].to(wide))[:, None]
    out = attend_in_place(state, q, k, v, Gates(log_decay=log_decay, write=write), swapped=True)[:, 0]
    if D is not None:
        out = torch.addcmul(out, x, D.to(wide))
    return out if z is None else out * F.silu(z)


def no_combined_kernel(*_: Any, **__: Any) -> None:
    """Stands in for the kernel that computes a whole layer. None makes the layer call the other functions."""


def _step_sizes(dt: Tensor, dt_bias: Tensor | None, dt_softplus: bool) -> Tensor:
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    return F.softplus(dt) if dt_softplus else dt

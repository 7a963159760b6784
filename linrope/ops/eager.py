"""The operators in plain PyTorch: their definition, for any dtype and device, for exporters and transformations.

b batch, n tokens, c channels, s sequences; h heads, g heads of v, e values.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from linrope.recurrence.packing import owners, rising_bounds


def convolve(
    x: Tensor,  # (b, n, c)
    weight: Tensor,  # (c, taps)
    bias: Tensor | None,  # (c,)
    before: Tensor | None,  # (s, taps - 1, c)
    cu_seqlens: Tensor | None,
    silu: bool,
) -> Tensor:
    (b, n, c), width = x.shape, weight.shape[1] - 1
    if cu_seqlens is None:
        before = x.new_zeros(b, width, c) if before is None else before.to(x.dtype)
        y = _sums(torch.cat((before, x), 1), weight, bias)
    else:
        # One table: for each sequence the inputs before it, then its tokens.
        bounds, s = rising_bounds(cu_seqlens, n), len(cu_seqlens) - 1
        assert bounds is not None
        rows = torch.arange(n, device=x.device) + owners(bounds, n) * width  # a token's first input
        table = x.new_zeros(n + s * width, c).index_copy(0, rows + width, x[0])
        if before is not None:
            first = bounds[:-1] + torch.arange(s, device=x.device) * width
            earlier_rows = (first[:, None] + torch.arange(width, device=x.device)).flatten()
            table = table.index_copy(0, earlier_rows, before.to(x.dtype).flatten(0, 1))
        y = _sums(table[None], weight, bias).index_select(1, rows)
    return (F.silu(y) if silu else y).to(x.dtype)


def _sums(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(b, taps - 1 + n, c) -> (b, n, c), by shifts because depthwise conv1d is slow on a CPU."""
    wide = torch.promote_types(inputs.dtype, torch.float32)
    inputs, weight, taps = inputs.to(wide), weight.to(wide), weight.shape[1]
    n = inputs.shape[1] - taps + 1
    y = inputs[:, taps - 1 :] * weight[:, -1]
    for tap in range(taps - 1):
        y = y + inputs[:, tap : tap + n] * weight[:, tap]
    return y if bias is None else y + bias.to(wide)


def gated_norm(
    out: Tensor,  # (b, n, h, e)
    weight: Tensor | None,  # (e,) or (h, e)
    gate: Tensor | None,  # (b, n, h e)
    v: Tensor | None,  # (b, n, g, e)
    skip: Tensor | None,  # (h,)
    eps: float,
    over_heads: bool,
    gate_first: bool,
    skip_first: bool,
) -> Tensor:
    wide = torch.promote_types(out.dtype, torch.float32)
    u, h = out.to(wide), out.shape[2]
    skip_term = factor = None
    if skip is not None and v is not None:
        skip_term = skip.to(wide)[:, None] * v.to(wide).repeat_interleave(h // v.shape[2], 2)
    if gate is not None:
        factor = F.silu(gate.to(wide)).view(out.shape)
    if skip_term is not None and skip_first:
        u = u + skip_term
    if factor is not None and gate_first:
        u = u * factor
    if weight is not None:
        mean = u.square().mean((2, 3) if over_heads else 3, keepdim=True)
        u = weight.to(wide) * (u * _inverse_root(mean, eps))
    if skip_term is not None and not skip_first:
        u = u + skip_term
    if factor is not None and not gate_first:
        u = u * factor
    return u.flatten(2).to(out.dtype)


def _inverse_root(mean: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean + eps)."""
    if torch.onnx.is_in_onnx_export():  # whose optimizer drops a sum with a number below 1e-8
        scaled = mean * (1 / eps) + 1
        return torch.rsqrt(scaled) * float(eps**-0.5)
    return torch.rsqrt(mean + eps)

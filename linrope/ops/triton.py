"""The operators in the Triton kernels of linrope_kernels, for GPUs.

In Triton's interpreter (TRITON_INTERPRET=1 before Python starts) they run CPU tensors, for tests.
"""

from collections.abc import Sequence
from typing import Any

import torch
from linrope_kernels import INTERPRETED, convolution, norm
from torch import Tensor

from linrope.backends.native import with_dense_rows
from linrope.backends.triton import MIN_CAPABILITY

MAX_TAPS = 8


def why_not_tensors(tensors: Sequence[Tensor], *, taps: int, group: int, values: int) -> str | None:
    """The reason why the kernels cannot compute with these tensors; None: they can."""
    for x in tensors:
        if not x.is_cuda and not INTERPRETED:
            return f"tensors on {x.device}: it needs a CUDA device, or TRITON_INTERPRET=1 set before Python starts"
        if x.is_cuda and torch.cuda.get_device_capability(x.device) < MIN_CAPABILITY:
            return "this GPU, whose compute capability is below 8.0"
        if x.dtype == torch.float64:
            return "float64: use backend='eager'"
        if x.dtype == torch.bfloat16 and INTERPRETED:
            return "bfloat16 in Triton's interpreter, which does not round to nearest: use float16 or float32"
    if taps > MAX_TAPS:
        return f"{taps} taps: it takes up to {MAX_TAPS}; use backend='eager'"
    if norm.tile_values(group, values) > norm.MOST_VALUES:
        return (
            f"{group} heads of {values} values share a head of v: the kernel takes up to {norm.MOST_VALUES} values per "
            "head of v, after both numbers are rounded up to powers of two; use backend='eager'"
        )
    return None


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    before: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
) -> Tensor:
    with torch.cuda.device_of(x):
        return convolution.convolve_fwd(_convolution(x, weight, bias, before, cu_seqlens, silu))


def convolve_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    before: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
) -> list[Tensor | None]:
    call = _convolution(x, weight, bias, before, cu_seqlens, silu)
    with torch.cuda.device_of(x):
        dx, d_weight, d_bias, d_before = convolution.convolve_bwd(call, with_dense_rows(gradient))
    if before is not None and d_before is not None:
        d_before = d_before.to(before.dtype)
    return [dx, d_weight, d_bias, d_before, None]


def convolve_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, inputs: Tensor, slots: Tensor | None, silu: bool
) -> Tensor:
    slots = None if slots is None else slots.contiguous()
    with torch.cuda.device_of(x):
        return convolution.convolve_step(_convolution(x, weight, bias, None, None, silu), inputs, slots)


def gated_norm(
    out: Tensor,
    weight: Tensor | None,
    gate: Tensor | None,
    v: Tensor | None,
    skip: Tensor | None,
    *options: Any,
) -> Tensor:
    """options: eps, over_heads, gate_first and skip_first, which only the kernel reads."""
    with torch.cuda.device_of(out):
        return norm.norm_fwd(_norm(out, weight, gate, v, skip, *options))


def gated_norm_backward(
    gradient: Tensor,
    out: Tensor,
    weight: Tensor | None,
    gate: Tensor | None,
    v: Tensor | None,
    skip: Tensor | None,
    *options: Any,
) -> list[Tensor | None]:
    with torch.cuda.device_of(out):
        return norm.norm_bwd(_norm(out, weight, gate, v, skip, *options), with_dense_rows(gradient))


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    before: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
) -> convolution.Convolution:
    return convolution.Convolution(
        x=with_dense_rows(x),
        weight=weight,
        bias=_dense(bias),
        before=None if before is None else _with_even_rows(before.to(x.dtype)),
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.contiguous(),
        silu=silu,
    )


def _norm(
    out: Tensor,
    weight: Tensor | None,
    gate: Tensor | None,
    v: Tensor | None,
    skip: Tensor | None,
    eps: float,
    over_heads: bool,
    gate_first: bool,
    skip_first: bool,
) -> norm.Norm:
    return norm.Norm(
        out=with_dense_rows(out),
        weight=weight,
        gate=_dense(gate),
        v=_dense(v),
        skip=skip,
        eps=eps,
        over_heads=over_heads,
        gate_first=gate_first,
        skip_first=skip_first,
    )


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else with_dense_rows(x)


def _with_even_rows(x: Tensor) -> Tensor:
    """x (s, rows, c) with a last stride of 1 and one distance between all rows, as in a slice of the channels."""
    x = with_dense_rows(x)
    s, rows, _ = x.shape
    return x if s == 1 or rows == 1 or x.stride(0) == rows * x.stride(1) else x.contiguous()

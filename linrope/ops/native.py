"""The operators in the compiled kernels of kernels/cpu.

Parameters and their gradients are float32 there, whatever the dtype of the tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from linrope.backends.native import why_not, with_dense_rows
from linrope.recurrence.call import contiguous

MAX_TAPS = 8
MOST_VALUES = 2**16 - 1  # per head
_ops = torch.ops.linrope_native


def why_not_tensors(tensors: Sequence[Tensor], *, taps: int, values: int) -> str | None:
    """The reason why the kernels cannot compute with these tensors; None: they can."""
    if (reason := why_not()) is not None:
        return reason
    if not hasattr(_ops, "convolve"):
        return "the library was built from other sources: run `make native`"
    for x in tensors:
        if x.device.type != "cpu":
            return f"tensors on {x.device}: native runs on CPUs only"
        if x.dtype == torch.float64:
            return "float64: use backend='eager'"
    if taps > MAX_TAPS:
        return f"{taps} taps: it takes up to {MAX_TAPS}; use backend='eager'"
    if values > MOST_VALUES:
        return f"{values} values per head: it takes up to {MOST_VALUES}; use backend='eager'"
    return None


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    before: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
) -> Tensor:
    y: Tensor = _ops.convolve.default(
        with_dense_rows(x), _float(weight), _float(bias), _like(before, x), contiguous(cu_seqlens), silu
    )
    return y


def convolve_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    before: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
) -> list[Tensor | None]:
    dx, d_weight, d_bias, d_before = _ops.convolve_backward.default(
        with_dense_rows(gradient),
        with_dense_rows(x),
        _float(weight),
        _float(bias),
        _like(before, x),
        contiguous(cu_seqlens),
        silu,
    )
    return [dx, _gradient(d_weight, weight), _gradient(d_bias, bias), _gradient(d_before, before), None]


def gated_norm(
    out: Tensor,
    weight: Tensor | None,
    gate: Tensor | None,
    v: Tensor | None,
    skip: Tensor | None,
    *options: Any,
) -> Tensor:
    """options: eps, over_heads, gate_first and skip_first, which only the kernel reads."""
    y: Tensor = _ops.gated_norm.default(*_norm_inputs(out, weight, gate, v, skip), *options)
    return y if y.dtype == out.dtype else y.to(out.dtype)


def gated_norm_backward(
    gradient: Tensor,
    out: Tensor,
    weight: Tensor | None,
    gate: Tensor | None,
    v: Tensor | None,
    skip: Tensor | None,
    *options: Any,
) -> list[Tensor | None]:
    inputs = _norm_inputs(out, weight, gate, v, skip)
    d_out, d_gate, d_v, d_weight, d_skip = _ops.gated_norm_backward.default(
        _like(gradient, inputs[0]), *inputs, *options
    )
    return [
        _gradient(d_out, out),
        None if weight is None else _gradient(d_weight.view(weight.shape), weight),
        _gradient(d_gate, gate),
        _gradient(d_v, v),
        _gradient(d_skip, skip),
    ]


def _norm_inputs(
    out: Tensor, weight: Tensor | None, gate: Tensor | None, v: Tensor | None, skip: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """out, gate and v in one dtype, weight and skip in float32; in the kernel's order."""
    if any(x is not None and x.dtype != out.dtype for x in (gate, v)):
        for x in (gate, v):
            if x is not None:
                out = out.to(torch.promote_types(out.dtype, x.dtype))
    return with_dense_rows(out), _like(gate, out), _like(v, out), _float(weight), _float(skip)


def _float(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float().contiguous()


def _like(x: Tensor | None, like: Tensor) -> Tensor | None:
    if x is None:
        return None
    return with_dense_rows(x if x.dtype == like.dtype else x.to(like.dtype))


def _gradient(gradient: Tensor, x: Tensor | None) -> Tensor | None:
    """The kernel's gradient of x, in the dtype of x."""
    if x is None:
        return None
    return gradient if gradient.dtype == x.dtype else gradient.to(x.dtype)

"""The operators in the compiled kernels of kernels/cpu.

Parameters and their gradients are float32 there, whatever the dtype of the tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from linrope.backends.call import contiguous
from linrope.backends.native import why_not, with_dense_rows

MAX_TAPS = 8
MOST_VALUES = 2**16 - 1  # per head
_ops = torch.ops.linrope_native


def why_not_tensors(tensors: Sequence[Tensor], *, taps: int, group: int, values: int) -> str | None:
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
    dx, sums, d_before = _ops.convolve_backward.default(
        with_dense_rows(gradient),
        with_dense_rows(x),
        _float(weight),
        _float(bias),
        _like(before, x),
        contiguous(cu_seqlens),
        silu,
    )
    return [
        dx,
        # Copies, because the results of an operator must not share memory
        sums[:-1].mT.to(weight.dtype).clone(memory_format=torch.contiguous_format),
        None if bias is None else sums[-1].to(bias.dtype).clone(),
        None if before is None else d_before.to(before.dtype),
    ]


def convolve_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, inputs: Tensor, slots: Tensor | None, silu: bool
) -> Tensor:
    y: Tensor = _ops.convolve_step.default(
        with_dense_rows(x), _float(weight), _float(bias), inputs, contiguous(slots), silu
    )
    return y


def gated_norm(
    out: Tensor,
    weight: Tensor | None,
    gate: Tensor | None,
    v: Tensor | None,
    skip: Tensor | None,
    *options: Any,
) -> Tensor:
    """options: eps, over_heads, gate_first and skip_first, which only the kernel reads."""
    tokens, parameters = _norm_inputs(out, weight, gate, v, skip)
    y: Tensor = _ops.gated_norm.default(*tokens, *parameters, *options)
    return y.to(out.dtype)


def gated_norm_backward(
    gradient: Tensor,
    out: Tensor,
    weight: Tensor | None,
    gate: Tensor | None,
    v: Tensor | None,
    skip: Tensor | None,
    *options: Any,
) -> list[Tensor | None]:
    tokens, parameters = _norm_inputs(out, weight, gate, v, skip)
    d_out, d_gate, d_v, sums = _ops.gated_norm_backward.default(
        _like(gradient, tokens[0]), *tokens, *parameters, *options
    )
    # Sums over the tokens: the gradient of the weight, and that of D before it is summed over the values
    sums = sums.view(2, *out.shape[2:])
    d_weight = None
    if weight is not None:
        d_weight = (sums[0] if weight.ndim == 2 else sums[0].sum(0)).to(weight.dtype)
    return [
        d_out.to(out.dtype),
        d_weight,
        None if gate is None else d_gate.to(gate.dtype),
        None if v is None else d_v.to(v.dtype),
        None if skip is None else sums[1].sum(1).to(skip.dtype),
    ]


def _norm_inputs(
    out: Tensor, weight: Tensor | None, gate: Tensor | None, v: Tensor | None, skip: Tensor | None
) -> tuple[tuple[Tensor, Tensor | None, Tensor | None], tuple[Tensor | None, Tensor | None]]:
    """out, gate and v in one dtype; the weight as (h, e) and D, in float32."""
    dtype = out.dtype
    for x in (gate, v):
        if x is not None:
            dtype = torch.promote_types(dtype, x.dtype)
    tokens = out if out.dtype == dtype else out.to(dtype)
    if weight is not None:
        weight = weight.expand(out.shape[2:])
    return (with_dense_rows(tokens), _like(gate, tokens), _like(v, tokens)), (_float(weight), _float(skip))


def _float(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float().contiguous()


def _like(x: Tensor | None, like: Tensor) -> Tensor | None:
    return None if x is None else with_dense_rows(x.to(like.dtype))

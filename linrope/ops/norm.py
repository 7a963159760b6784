"""The RMS norm of the heads' outputs, with a gate and a skip connection from the values."""

from collections.abc import Callable
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch.nn import functional as F

from linrope.backends import native
from linrope.backends.library import named_results, run_by_name
from linrope.backends.operator import Operator, Output, Tensors
from linrope.common.argument_checks import ORDERS, SPANS, check_dense, check_name
from linrope.common.tracing import check_not_in_onnx
from linrope.ops.arguments import (
    as_parameter,
    as_tokens,
    check_shape,
    choose,
    converted,
    gradient_of,
    launch,
    plan_of,
    run_as_is,
)

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}  # of a gate
MAX_VALUES = {"native": native.MAX_VALUES, "triton": 2**16 - 1}  # the most per head that the kernels take


class _GatedNorm(NamedTuple):
    """A call, checked. b batch, n tokens, h heads, g heads of v, e values."""

    out: Tensor  # (b, n, h, e)
    weight: Tensor | None  # (e,) or (h, e)
    gate: Tensor | None  # (b, n, h e)
    v: Tensor | None  # (b, n, g, e)
    skip: Tensor | None  # (h,)
    eps: float
    over_heads: bool
    gate_first: bool
    skip_first: bool
    gate_activation: str
    kernel: str  # "native" or "triton"; "eager" has none


def gated_norm(
    out: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    over: str = "head",
    gate: Tensor | None = None,
    gate_order: str = "after",
    gate_activation: str = "silu",
    v: Tensor | None = None,
    skip: Tensor | None = None,
    skip_order: str = "after",
    backend: str = "auto",
) -> Tensor:
    """Normalizes out, adds the values that skip the attention, and multiplies by a gate.

        u = (out + D v) * f(z)                       each factor and summand whose order is "before"
        u = weight * u * rsqrt(mean(u^2) + eps)      unless weight is None
        y = (u + D v) * f(z)                         each factor and summand whose order is "after"

    Sums are float32, or float64 for float64. "native" and "triton" save only the inputs for the backward pass. "triton"
    is one launch forward and two backward.

    Args:
        out: (b, n, h, e), the output of linear_rope_attention. Any strides; "native" and "triton" read it in place if
            the last stride is 1.
        weight: (e,) or (h, e) with over="head", (h e,) with over="all". None: no norm.
        eps: added to the mean square.
        over: "head" takes the mean over the values of each head, "all" over the values of all heads.
        gate: z (b, n, h e).
        gate_order: "after" the norm, or "before" it as in Mamba-2.
        gate_activation: f, "silu", or "sigmoid" as in Kimi Delta Attention.
        v: (b, n, g, e), the values; g divides h. Given together with skip.
        skip: D (h,).
        skip_order: "after" the norm, or "before" it.
        backend: "auto", "native", "triton" or "eager". For float32, bfloat16 and float16 "auto" takes native on a CPU
            and triton on a GPU if they can run the call, else eager.

    Returns:
        y (b, n, h e) in the dtype of out. It has gradients for out, weight, gate, v and skip.

    Raises:
        TypeError: an argument is not a dense tensor of real numbers.
        ValueError: a shape or device does not fit, a name is unknown, eps is not positive, or only one of v and skip
            is given.
        RuntimeError: the backend cannot run the call.

    Source: RMSNorm (arXiv 1910.07467); the gate and the skip connection of Mamba-2 (arXiv 2405.21060).

    >>> from linrope.ops import gated_norm
    >>> out = torch.tensor([3.0, 4.0]).view(1, 1, 1, 2)
    >>> gated_norm(out, torch.ones(2)) * 12.5**0.5
    tensor([[[3.0000, 4.0000]]])
    """
    tensors = out, weight, gate, v, skip
    names = over, gate_order, gate_activation, skip_order

    def check() -> str:
        _check(*tensors, eps, *names)
        return choose(backend, tensors, out.shape[3], "values per head", MAX_VALUES)

    plan = plan_of(("gated_norm", eps, *names, backend), tensors, check)
    flags = over == "all", gate_order == "before", skip_order == "before"
    sigmoid = gate_activation == "sigmoid"
    y = run_as_is(plan, "gated_norm", tensors, float(eps), *flags, sigmoid)
    if y is not None:
        return y  # type: ignore[no-any-return]
    if weight is not None and weight.ndim == 1 and over == "all":
        weight = weight.view(out.shape[2:])
    call = _GatedNorm(out, weight, gate, v, skip, float(eps), *flags, gate_activation, plan.kernel)
    return _NORM.definition(call) if plan.kernel == "eager" else _NORM(call, call)[0]


def _check(
    out: Tensor,
    weight: Tensor | None,
    gate: Tensor | None,
    v: Tensor | None,
    skip: Tensor | None,
    eps: float,
    over: str,
    gate_order: str,
    gate_activation: str,
    skip_order: str,
) -> None:
    check_dense("out", out)
    if out.ndim != 4:
        raise ValueError(f"out: got shape {tuple(out.shape)}, expected (batch, length, heads, values)")
    b, n, h, e = out.shape
    check_name("over", over, SPANS)
    if weight is not None:
        check_dense("weight", weight, out.device)
        check_shape("weight", weight, *([(h * e,)] if over == "all" else [(e,), (h, e)]))
        if not 0 < eps < float("inf"):
            raise ValueError(f"eps={eps}: expected a positive finite number")
    if gate is not None:
        check_dense("gate", gate, out.device)
        check_shape("gate", gate, (b, n, h * e))
    if (v is None) != (skip is None):
        raise ValueError(f"v, skip: got {'v' if skip is None else 'skip'} alone, expected both or neither")
    if v is not None and skip is not None:
        check_dense("v", v, out.device)
        check_dense("skip", skip, out.device)
        g = v.shape[2] if v.ndim == 4 else 0
        check_shape("v", v, (b, n, g, e))
        if g == 0 or h % g:
            raise ValueError(f"v: got {g} heads, expected a divisor of out's {h}")
        check_shape("skip", skip, (h,))
    check_name("gate_order", gate_order, ORDERS)
    check_name("skip_order", skip_order, ORDERS)
    check_name("gate_activation", gate_activation, tuple(ACTIVATIONS))


def _inverse_root(mean: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean + eps)."""
    if torch.onnx.is_in_onnx_export():  # whose optimizer drops a sum with a number below 1e-8
        scaled = mean * (1 / eps) + 1
        return torch.rsqrt(scaled) * float(eps**-0.5)
    return torch.rsqrt(mean + eps)


class _Norm(Operator[_GatedNorm]):
    """The kernels, which save only the inputs, and their definition."""

    name = "gated_norm"
    types = get_type_hints(_GatedNorm)
    inputs = 5
    record = _GatedNorm

    @staticmethod
    def definition(call: _GatedNorm) -> Tensor:
        """The operator in plain PyTorch: for any dtype and device, for exporters and transformations."""
        out, weight, gate, v, skip, eps, over_heads, gate_first, skip_first, activation, _ = call
        wide = torch.promote_types(out.dtype, torch.float32)
        u, h = out.to(wide), out.shape[2]
        skip_term = factor = None
        if skip is not None and v is not None:
            skip_term = skip.to(wide)[:, None] * v.to(wide).repeat_interleave(h // v.shape[2], 2)
        if gate is not None:
            factor = ACTIVATIONS[activation](gate.to(wide)).view(out.shape)
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

    def new(self, record: _GatedNorm, save: bool) -> Output:
        check_not_in_onnx(record.kernel, "'eager'")
        b, n, h, e = record.out.shape
        return record.out.new_empty(b, n, h * e), []

    def forward(self, record: _GatedNorm, save: bool) -> Output:
        if record.kernel == "triton":
            return launch("norm_fwd", record), []
        return converted(run_by_name("gated_norm", _kernel_arguments(record)), record.out.dtype), []

    def backward(self, record: _GatedNorm, saved: list[Tensor], g: Tensors) -> Tensors:
        if record.kernel == "triton":
            return launch("norm_bwd", record, g[0])  # type: ignore[no-any-return]
        arguments = _kernel_arguments(record)
        gradient = as_tokens(g[0], arguments["out"].dtype)
        found = named_results("gated_norm_backward", arguments | {"gradient": gradient})
        if record.weight is not None:
            found["weight"] = found["weight"].view(record.weight.shape)
        return [gradient_of(x, found[name]) for name, x in zip(record._fields, record[:5])]


_NORM = _Norm()


def _kernel_arguments(call: _GatedNorm) -> dict[str, Any]:
    """out, gate and v in one dtype, weight and skip in float32."""
    dtype = call.out.dtype
    for x in (call.gate, call.v):
        if x is not None and x.dtype != dtype:
            dtype = torch.promote_types(dtype, x.dtype)
    return {
        "out": as_tokens(call.out, dtype),
        "weight": as_parameter(call.weight),
        "gate": as_tokens(call.gate, dtype),
        "v": as_tokens(call.v, dtype),
        "skip": as_parameter(call.skip),
        "eps": call.eps,
        "over_heads": call.over_heads,
        "gate_first": call.gate_first,
        "skip_first": call.skip_first,
        "sigmoid": call.gate_activation == "sigmoid",
    }

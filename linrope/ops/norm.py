"""The RMS norm of the heads' outputs, with a gate and a skip connection from the values."""

from torch import Tensor

from linrope.common.argument_checks import check_name
from linrope.ops import eager, fused
from linrope.ops.backends import choose
from linrope.ops.checks import check_dense, check_shape

OVER = ("head", "all")
ORDERS = ("before", "after")  # where a skip or a gate acts: before or after the norm


def gated_norm(
    out: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    over: str = "head",
    gate: Tensor | None = None,
    gate_order: str = "after",
    v: Tensor | None = None,
    skip: Tensor | None = None,
    skip_order: str = "after",
    backend: str = "auto",
) -> Tensor:
    """Normalizes out, adds the values that skip the attention, and multiplies by a gate.

        u = (out + D v) * silu(z)                    each factor and summand whose order is "before"
        u = weight * u * rsqrt(mean(u^2) + eps)      unless weight is None
        y = (u + D v) * silu(z)                      each factor and summand whose order is "after"

    Sums are float32, or float64 for float64. "native" saves only the inputs for the backward pass.

    Args:
        out: (b, n, h, e), the output of linear_rope_attention. Any strides; "native" reads it in place if
            the last stride is 1.
        weight: (e,) or (h, e) with over="head", (h e,) with over="all". None: no norm.
        eps: added to the mean square.
        over: "head" takes the mean over the values of each head, "all" over the values of all heads.
        gate: z (b, n, h e).
        gate_order: "after" the norm, or "before" it as in Mamba-2.
        v: (b, n, g, e), the values; g divides h. Given together with skip.
        skip: D (h,).
        skip_order: "after" the norm, or "before" it.
        backend: "auto", "native" or "eager". For float32, bfloat16 and float16 "auto" takes native on a CPU, else
            eager.

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
    _check(out, weight, eps, over, gate, v, skip)
    check_name("gate_order", gate_order, ORDERS)
    check_name("skip_order", skip_order, ORDERS)
    if weight is not None and weight.ndim == 1 and over == "all":
        weight = weight.view(out.shape[2:])
    tensors = (out, weight, gate, v, skip)
    options = (float(eps), over == "all", gate_order == "before", skip_order == "before")
    name = choose(backend, tensors, values=out.shape[3])
    if name == "eager":
        return eager.gated_norm(*tensors, *options)
    return fused.gated_norm(name, *tensors, *options)


def _check(
    out: Tensor,
    weight: Tensor | None,
    eps: float,
    over: str,
    gate: Tensor | None,
    v: Tensor | None,
    skip: Tensor | None,
) -> None:
    check_dense("out", out)
    if out.ndim != 4:
        raise ValueError(f"out: got shape {tuple(out.shape)}, expected (batch, length, heads, values)")
    b, n, h, e = out.shape
    check_name("over", over, OVER)
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

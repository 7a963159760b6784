"""A causal convolution of a few taps, each channel on its own."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch.nn import functional as F

from linrope.backends.native import run_operator
from linrope.backends.operator import Operator, Output, Tensors
from linrope.common.tracing import check_not_in_onnx, plain
from linrope.operation.checks import check_packing
from linrope.ops.arguments import (
    as_parameter,
    check_dense,
    check_shape,
    choose,
    gradient_of,
    with_dense_rows,
)
from linrope.recurrence.call import contiguous
from linrope.recurrence.packing import owners, rising_bounds

MAX_TAPS = 8  # of the native kernel


class _Convolution(NamedTuple):
    """A call, checked. b batch, n tokens, c channels, s sequences."""

    x: Tensor  # (b, n, c)
    weight: Tensor  # (c, taps)
    bias: Tensor | None  # (c,)
    before: Tensor | None  # (s, taps - 1, c)
    cu_seqlens: Tensor | None  # (s + 1,)
    silu: bool
    kernel: str  # "native" or "triton"; "eager" has none


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    before: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    silu: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Convolves each channel of x with its own weights, over a token and the tokens before it.

        y_i = act(bias + sum_t weight[:, taps - 1 - t] x_(i - t))       t = 0 .. taps - 1; act: silu or identity

    Sums are float32, or float64 for float64. "native" saves only the inputs for the backward pass.

    Args:
        x: (b, n, c). Any strides; "native" reads it in place if the last stride is 1.
        weight: (c, taps), or (c, 1, taps) as in torch.nn.Conv1d.
        bias: (c,).
        before: (s, taps - 1, c), the inputs before each sequence. None: zeros. s is b, or the number of packed
            sequences.
        cu_seqlens: (s + 1,) the bounds of packed sequences; b is then 1.
        silu: whether to apply silu.
        backend: "auto", "native" or "eager". For float32, bfloat16 and float16 and up to 8 taps "auto" takes native on
            a CPU, else eager.

    Returns:
        y (b, n, c) in the dtype of x. It has gradients for x, weight, bias and before.

    Raises:
        TypeError: an argument is not a dense tensor of real numbers.
        ValueError: a shape or device does not fit, or the backend is unknown.
        RuntimeError: the backend cannot run the call.

    Source: the convolution of H3 (arXiv 2212.14052) and Mamba (arXiv 2312.00752).

    >>> from linrope.ops import convolve
    >>> convolve(torch.ones(1, 4, 1), torch.tensor([[1.0, 10.0, 100.0]])).flatten()
    tensor([100., 110., 111., 111.])
    """
    return convolve_parts(
        (x,), weight, bias, before=before, cu_seqlens=cu_seqlens, silu=silu, backend=backend
    )[0]


def convolve_parts(
    parts: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    before: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    silu: bool = False,
    backend: str = "auto",
) -> Sequence[Tensor]:
    """``convolve`` of several x, which together have the channels of weight. They are not copied into one tensor.

    >>> from linrope.ops import convolve, convolve_parts
    >>> a, b, weight = torch.randn(1, 9, 2), torch.randn(1, 9, 3), torch.randn(5, 4)
    >>> y = torch.cat(convolve_parts((a, b), weight), -1)
    >>> torch.testing.assert_close(y, convolve(torch.cat((a, b), -1), weight))
    """
    weight = _check(parts, weight, bias)
    (b, n, _), (c, taps), device = parts[0].shape, weight.shape, weight.device
    check_packing(cu_seqlens, b, n, n, device)
    if before is not None:
        check_dense("before", before, device)
        s = b if cu_seqlens is None else len(cu_seqlens) - 1
        check_shape("before", before, (s, taps - 1, c))
    tensors = (*parts, weight, bias, before)
    too_large = f"{taps} taps: it takes up to {MAX_TAPS}; use backend='eager'" if taps > MAX_TAPS else None
    kernel = choose(backend, tensors, too_large)
    calls = _split(parts, weight, bias, before, cu_seqlens, silu, kernel)
    if kernel == "eager":
        return [_CONVOLVE.definition(call) for call in calls]
    if len(parts) > 1 and torch.is_grad_enabled() and plain(x for x in tensors if x is not None):
        return _InOneNode.apply(silu, kernel, weight, bias, before, cu_seqlens, *parts)  # type: ignore[no-any-return, no-untyped-call]
    return [_CONVOLVE(call, call)[0] for call in calls]


def _check(parts: Sequence[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    """Checks the arguments. Returns the weight as (c, taps)."""
    if not parts:
        raise ValueError("parts: got none, expected at least one tensor")
    c, device = 0, None
    for x in parts:
        check_dense("x", x, device)
        if x.ndim != 3:
            raise ValueError(f"x: got shape {tuple(x.shape)}, expected (batch, length, channels)")
        check_shape("x", x, (*parts[0].shape[:2], x.shape[2]))
        c, device = c + x.shape[2], x.device
    check_dense("weight", weight, device)
    taps = weight.shape[-1] if weight.ndim else 0
    check_shape("weight", weight, (c, taps), (c, 1, taps))
    if taps < 1:
        raise ValueError("weight: got 0 taps, expected at least 1")
    if bias is not None:
        check_dense("bias", bias, device)
        check_shape("bias", bias, (c,))
    return weight.view(c, taps) if weight.ndim == 3 else weight


def _split(parts: Sequence[Tensor], *arguments: Any) -> Iterator[_Convolution]:
    """The call of each part, with its channels of weight, bias and before."""
    if len(parts) == 1:
        yield _Convolution(parts[0], *arguments)
        return
    weight, bias, before, *rest = arguments
    low = 0
    for x in parts:
        channels = slice(low, low := low + x.shape[2])
        x_bias = None if bias is None else bias[channels]
        x_before = None if before is None else before[..., channels]
        yield _Convolution(x, weight[channels], x_bias, x_before, *rest)


def _sums(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(b, taps - 1 + n, c) -> (b, n, c), by shifts because depthwise conv1d is slow on a CPU."""
    wide = torch.promote_types(inputs.dtype, torch.float32)
    inputs, weight, taps = inputs.to(wide), weight.to(wide), weight.shape[1]
    n = inputs.shape[1] - taps + 1
    y = inputs[:, taps - 1 :] * weight[:, -1]
    for tap in range(taps - 1):
        y = y + inputs[:, tap : tap + n] * weight[:, tap]
    return y if bias is None else y + bias.to(wide)


class _Convolve(Operator[_Convolution]):
    """The native kernel, which saves only the inputs, and its definition."""

    name = "convolve"
    types = get_type_hints(_Convolution)
    inputs = 4
    record = _Convolution

    @staticmethod
    def definition(call: _Convolution) -> Tensor:
        """The operator in plain PyTorch: for any dtype and device, for exporters and transformations."""
        x, weight, bias, before, cu_seqlens, silu, _ = call
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

    def new(self, record: _Convolution, save: bool) -> Output:
        check_not_in_onnx("native", "'eager'")
        return record.x.new_empty(record.x.shape), []

    def forward(self, record: _Convolution, save: bool) -> Output:
        return run_operator("convolve", _kernel_arguments(record)), []

    def backward(self, record: _Convolution, saved: list[Tensor], g: Tensors) -> Tensors:
        gradient = with_dense_rows(g[0], record.x.dtype)
        found = run_operator("convolve_backward", _kernel_arguments(record) | {"gradient": gradient})
        return [gradient_of(x, d_x) for x, d_x in zip(record[:4], found)]


_CONVOLVE = _Convolve()


def _kernel_arguments(call: _Convolution) -> dict[str, Any]:
    return {
        "x": with_dense_rows(call.x, call.x.dtype),
        "weight": as_parameter(call.weight),
        "bias": as_parameter(call.bias),
        "before": with_dense_rows(call.before, call.x.dtype),
        "cu_seqlens": contiguous(call.cu_seqlens),
        "silu": call.silu,
    }


class _InOneNode(torch.autograd.Function):
    """Several parts as one node of autograd's graph. A node and slices for each would cost more than short calls."""

    @staticmethod
    def forward(ctx: Any, silu: bool, kernel: str, *tensors: Any) -> tuple[Tensor, ...]:
        weight, bias, before, cu_seqlens, *parts = tensors
        ctx.save_for_backward(*tensors)
        ctx.settings = silu, kernel
        calls = _split(parts, weight, bias, before, cu_seqlens, silu, kernel)
        return tuple(_CONVOLVE.forward(call, True)[0] for call in calls)

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple[Any, ...]:
        weight, bias, before, cu_seqlens, *parts = ctx.saved_tensors
        found = [
            _CONVOLVE.differentiate_definition(call, [gradient])
            if torch.is_grad_enabled()
            else _CONVOLVE.backward(call, [], [gradient])
            for gradient, call in zip(
                g, _split(parts, weight, bias, before, cu_seqlens, *ctx.settings), strict=True
            )
        ]
        d_x, d_weight, d_bias, d_before = zip(*found, strict=True)
        return None, None, _join(d_weight, 0), _join(d_bias, 0), _join(d_before, 2), None, *d_x


def _join(gradients: Sequence[Tensor | None], dim: int) -> Tensor | None:
    present = [x for x in gradients if x is not None]
    return torch.cat(present, dim) if len(present) == len(gradients) else None

"""A causal convolution of a few taps, each channel on its own."""

from collections.abc import Sequence
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch.nn import functional as F

from linrope.backends import native
from linrope.backends.library import named_results, run_by_name
from linrope.backends.operator import Operator, Output, Tensors
from linrope.common.argument_checks import check_dense
from linrope.common.tracing import check_not_in_onnx
from linrope.operation.checks import check_bounds, check_cu_seqlens
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
from linrope.recurrence.call import contiguous
from linrope.recurrence.packing import owners, rising_bounds

MAX_TAPS = {"native": native.MAX_TAPS, "triton": 8}  # the most that the kernels take
MAX_PARTS = 3  # q, k and v


class _Convolution(NamedTuple):
    """A call, checked. b batch, n tokens, c channels of all parts, s sequences."""

    x: Tensor  # (b, n, channels), the first part
    x2: Tensor | None  # the second, with channels of its own
    x3: Tensor | None
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

    Sums are float32, or float64 for float64. The kernels save only the inputs for the backward pass.

    Args:
        x: (b, n, c). Any strides; the kernels read it in place if the last stride is 1.
        weight: (c, taps), or (c, 1, taps) as in torch.nn.Conv1d.
        bias: (c,).
        before: (s, taps - 1, c), the inputs before each sequence. None: zeros. s is b, or the number of packed
            sequences.
        cu_seqlens: (s + 1,) the bounds of packed sequences; b is then 1.
        silu: whether to apply silu.
        backend: "auto", "native", "triton" or "eager". For float32, bfloat16 and float16 and up to 8 taps "auto" takes
            native on a CPU and triton on a GPU, else eager.

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
    """``convolve`` of up to three x, which together have the channels of weight. They are not copied into one tensor.

    >>> from linrope.ops import convolve, convolve_parts
    >>> a, b, weight = torch.randn(1, 9, 2), torch.randn(1, 9, 3), torch.randn(5, 4)
    >>> y = torch.cat(convolve_parts((a, b), weight), -1)
    >>> torch.testing.assert_close(y, convolve(torch.cat((a, b), -1), weight))
    """
    tensors = *parts, weight, bias, before

    def check() -> str:
        taps = _check(parts, weight, bias, before, cu_seqlens)
        return choose(backend, tensors, taps, "taps", MAX_TAPS)

    plan = plan_of(("convolve", len(parts), backend), (*tensors, cu_seqlens), check)
    if cu_seqlens is not None:
        check_bounds(cu_seqlens, parts[0].shape[1])
    if len(parts) == 1:
        y = run_as_is(plan, "convolve", (*tensors, cu_seqlens), silu)
        if y is not None:
            return (y,)
    if weight.ndim == 3:
        weight = weight.view(weight.shape[0], weight.shape[2])
    others, kernel = (*parts[1:], None, None), plan.kernel
    call = _Convolution(parts[0], others[0], others[1], weight, bias, before, cu_seqlens, silu, kernel)
    return _CONVOLVE.definition(call) if kernel == "eager" else _CONVOLVE(call, call)[: len(parts)]


def _check(
    parts: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor | None,
    before: Tensor | None,
    cu_seqlens: Tensor | None,
) -> int:
    """Checks the arguments, apart from the numbers in cu_seqlens. Returns the number of taps."""
    if not 1 <= len(parts) <= MAX_PARTS:
        raise ValueError(f"parts: got {len(parts) or 'none'}, expected 1 to {MAX_PARTS} tensors")
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
    b, n, _ = parts[0].shape
    check_cu_seqlens(cu_seqlens, b, n, n, weight.device)
    if before is not None:
        check_dense("before", before, device)
        s = b if cu_seqlens is None else len(cu_seqlens) - 1
        check_shape("before", before, (s, taps - 1, c))
    return taps


def _parts(call: _Convolution) -> list[Tensor]:
    return [x for x in call[:3] if x is not None]


def _split(call: _Convolution) -> list[_Convolution]:
    """The call of each part, with its channels of weight, bias and before."""
    if call.x2 is None:
        return [call]
    _, _, _, weight, bias, before, cu_seqlens, silu, kernel = call
    calls, low = [], 0
    for x in _parts(call):
        channels = slice(low, low := low + x.shape[2])
        x_bias = None if bias is None else bias[channels]
        x_before = None if before is None else before[..., channels]
        part = _Convolution(x, None, None, weight[channels], x_bias, x_before, cu_seqlens, silu, kernel)
        calls.append(part)
    return calls


def _sums(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(b, taps - 1 + n, c) -> (b, n, c), by shifts because depthwise conv1d is slow on a CPU."""
    wide = torch.promote_types(inputs.dtype, torch.float32)
    inputs, weight, taps = inputs.to(wide), weight.to(wide), weight.shape[1]
    n = inputs.shape[1] - taps + 1
    y = inputs[:, taps - 1 :] * weight[:, -1]
    for tap in range(taps - 1):
        y = y + inputs[:, tap : tap + n] * weight[:, tap]
    return y if bias is None else y + bias.to(wide)


def _convolved(call: _Convolution) -> Tensor:
    """A call of one part in plain PyTorch."""
    x, _, _, weight, bias, before, cu_seqlens, silu, _ = call
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


class _Convolve(Operator[_Convolution]):
    """Convolves each part. The kernels save only the inputs."""

    name = "convolve"
    types = get_type_hints(_Convolution)
    inputs = 6
    results = MAX_PARTS
    record = _Convolution

    @staticmethod
    def definition(call: _Convolution) -> tuple[Tensor, ...]:
        """The operator in plain PyTorch: for any dtype and device, for exporters and transformations."""
        return tuple(map(_convolved, _split(call)))

    def new(self, record: _Convolution, save: bool) -> Output:
        check_not_in_onnx(record.kernel, "'eager'")
        return _results([x.new_empty(x.shape) for x in _parts(record)])

    def forward(self, record: _Convolution, save: bool) -> Output:
        if record.kernel == "native":
            if record.x2 is None:
                return run_by_name("convolve", _native(record)), None, None, []
            return _results([run_by_name("convolve", _native(x)) for x in _split(record)])
        ys = launch("convolve_fwd", record)
        return _results([converted(y, x.dtype) for x, y in zip(_parts(record), ys)])

    def backward(self, record: _Convolution, saved: list[Tensor], g: Tensors) -> Tensors:
        if record.kernel == "native":
            found = _native_backward(record, g)
        else:
            d_parts, *others = launch("convolve_bwd", record, *g)
            found = *d_parts, *(None,) * (MAX_PARTS - len(d_parts)), *others
        return [gradient_of(x, d_x) for x, d_x in zip(record[:6], found)]


_CONVOLVE = _Convolve()


def _results(ys: list[Tensor]) -> Output:
    """ys as the operator returns them, which saves nothing."""
    return *ys, *[None] * (MAX_PARTS - len(ys)), []


def _native(call: _Convolution) -> dict[str, Any]:
    """The arguments of the native kernel for one part."""
    return {
        "x": as_tokens(call.x, call.x.dtype),
        "weight": as_parameter(call.weight),
        "bias": as_parameter(call.bias),
        "before": as_tokens(call.before, call.x.dtype),
        "cu_seqlens": contiguous(call.cu_seqlens),
        "silu": call.silu,
    }


def _native_backward(record: _Convolution, g: Tensors) -> Sequence[Any]:
    """The gradients of the inputs: each part's own, and those of weight, bias and before, whose channels are joined."""
    found = []
    for part, g_y in zip(_split(record), g):
        gradient = part.x.new_zeros(part.x.shape) if g_y is None else as_tokens(g_y, part.x.dtype)
        found.append(named_results("convolve_backward", _native(part) | {"gradient": gradient}))
    d_parts = [part["x"] for part in found] + [None] * (MAX_PARTS - len(found))
    if len(found) == 1:
        return *d_parts, *map(found[0].get, ("weight", "bias", "before"))
    axes = {"weight": 0, "bias": 0, "before": 2}
    return *d_parts, *[
        None if getattr(record, name) is None else torch.cat([part[name] for part in found], axis)
        for name, axis in axes.items()
    ]

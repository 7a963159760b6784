"""A causal convolution of a few taps, each channel on its own."""

from collections.abc import Sequence

from torch import Tensor

from linrope.operation.checks import check_packing
from linrope.ops import eager, fused
from linrope.ops.backends import choose
from linrope.ops.checks import check_dense, check_shape


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
    name = choose(backend, (*parts, weight, bias, before), taps=taps)
    if name == "eager":
        arguments = fused.arguments_by_part(parts, weight, bias, before, cu_seqlens, silu)
        return [eager.convolve(*x) for x in arguments]
    return fused.convolve_parts(name, parts, weight, bias, before, cu_seqlens, silu)


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

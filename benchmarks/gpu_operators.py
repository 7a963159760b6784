"""Measures the convolution and the gated norm on a GPU, beside the time that moving their bytes takes at least."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from linrope.ops import convolve, gated_norm

Row = dict[str, Any]
ROWS = 300  # tokens whose results are compared


def operators_row(
    shape: tuple[int, int, int, int],
    device: str,
    dtype: torch.dtype,
    bandwidth: float,
    timed: Callable[..., Row],
) -> Row:
    """shape: (b, n, h, e); the convolution has h e channels, 4 taps and silu, the norm all heads, gate and D v."""
    b, n, h, e = shape
    new = partial(torch.randn, device=device, dtype=dtype)
    norm = {"out": new(b, n, h, e), "weight": new(h * e), "gate": new(b, n, h * e), "v": new(b, n, h, e)}
    cases: dict[str, tuple[dict[str, Tensor], Callable[..., Tensor], int, int]] = {
        "conv": (
            {"x": new(b, n, h * e), "weight": new(h * e, 4), "bias": new(h * e)},
            partial(convolve, silu=True),
            2,  # numbers that the forward pass moves for each of x
            3,  # the backward pass
        ),
        "norm": (
            norm | {"skip": new(h)},
            partial(gated_norm, over="all", gate_order="before"),
            4,
            7,
        ),
    }  # fmt: skip
    row: Row = {}
    for name, (inputs, call, forward_moves, backward_moves) in cases.items():
        check(inputs, call)
        forward = timed(partial(call, **inputs, backend="triton"), device, True)["median_ms"]
        training = timed(partial(gradients, inputs, call, "triton"), device, True)["median_ms"]
        per_move = b * n * h * e * dtype.itemsize / bandwidth * 1e3
        row |= {f"{name} ms": forward, f"{name} floor": forward_moves * per_move / forward}
        row |= {f"{name} grad floor": backward_moves * per_move / (training - forward)}
    return row


def gradients(inputs: dict[str, Tensor], call: Callable[..., Tensor], backend: str) -> list[Tensor]:
    """y and the gradients of all inputs; that of y is y itself."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    y = call(**leaves, backend=backend)
    return [y.detach(), *torch.autograd.grad(y, list(leaves.values()), y.detach())]


def check(inputs: dict[str, Tensor], call: Callable[..., Tensor]) -> None:
    """AssertionError: y or the gradients at the first tokens are not those of float64, rounded once."""
    part = {name: x[:1, :ROWS] if x.ndim > 2 else x for name, x in inputs.items()}
    exact = gradients({name: x.double() for name, x in part.items()}, call, "eager")
    for actual, expected in zip(gradients(part, call, "triton"), exact, strict=True):
        error = (actual.double() - expected).abs()
        allowed = 2 * torch.finfo(actual.dtype).eps * expected.abs().max()
        assert float(error.max()) <= float(allowed), (
            f"off by {float(error.max() / allowed):.3g} times the bound"
        )

"""Gates: y = act(W x + b) for each token and head, with act log sigmoid or sigmoid, and their gradients.

The products have the precision of float32, unless x and W are both half precision, whose products are exact.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linrope_kernels.decay import expm1
from linrope_kernels.partial_sums import sum_rows
from linrope_kernels.pieces import operand
from linrope_kernels.start import start_kernel
from linrope_kernels.tiles import power_of_two_from_16

ENOUGH_PROGRAMS = 528  # 4 for each of an H200's multiprocessors
MOST_SUMS = 256  # the most partial sums of a weight's gradient


@triton.jit
def log1p(t):
    """log(1 + t) for 0 <= t <= 1: the rounding error of 1 + t is divided out (Goldberg 1991, theorem 4)."""
    u = 1 + t
    return tl.where(u == 1, t, tl.log(u) * (t / tl.where(u == 1, 1.0, u - 1)))


@triton.jit
def gate_dot(a, b, acc, DOT: tl.constexpr):
    return tl.dot(a, b, acc, input_precision="tf32x3" if DOT == "tf32x3" else "tf32")


@triton.jit
def load_tile(X, stride, row, column, rows, COLUMNS: tl.constexpr):
    """A tile of X (rows, COLUMNS), 0 outside."""
    inside = (row < rows)[:, None] & (column < COLUMNS)[None, :]
    return tl.load(X + row.to(tl.int64)[:, None] * stride + column[None, :], mask=inside, other=0)


@triton.jit(do_not_specialize=["rows"])
def gates_fwd_kernel(
    X, x_stride,  # (rows, dim), the last stride is 1
    WEIGHT,  # (heads, dim)
    BIAS,  # (heads,)
    Y,  # (rows, heads) float32
    COMPLEMENT,  # 1 - e^y, likewise; None: not wanted
    rows,
    HEADS: tl.constexpr, DIM: tl.constexpr, SIGMOID: tl.constexpr, DOT: tl.constexpr,
    C: tl.constexpr, G: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gates of C tokens."""
    row, head = tl.program_id(0) * C + tl.arange(0, C), tl.arange(0, G)
    y = tl.zeros([C, G], tl.float32)
    for k in tl.range(0, DIM, K, num_stages=STAGES):
        column = k + tl.arange(0, K)
        x = operand(load_tile(X, x_stride, row, column, rows, DIM), DOT)
        weight = operand(load_tile(WEIGHT, DIM, head, column, HEADS, DIM), DOT)
        y = gate_dot(x, tl.trans(weight), y, DOT)
    y += tl.load(BIAS + head, mask=head < HEADS, other=0).to(tl.float32)[None, :]
    at = row.to(tl.int64)[:, None] * HEADS + head[None, :]
    inside = (row < rows)[:, None] & (head < HEADS)[None, :]
    t = tl.exp(-tl.abs(y))
    larger, smaller = 1 / (1 + t), t / (1 + t)  # the sigmoids of |y| and of -|y|
    if SIGMOID:
        tl.store(Y + at, tl.where(y < 0, smaller, larger), mask=inside)
    else:
        tl.store(Y + at, tl.minimum(y, 0) - log1p(t), mask=inside)
        if COMPLEMENT is not None:
            tl.store(COMPLEMENT + at, tl.where(y < 0, larger, smaller), mask=inside)


@triton.jit(do_not_specialize=["rows", "tiles"])
def gates_bwd_kernel(
    X, x_stride, WEIGHT, Y,  # as in gates_fwd_kernel
    DY, D_COMPLEMENT,  # the gradients of Y and COMPLEMENT; None: 0
    DX,  # (rows, dim)
    D_WEIGHT, D_BIAS,  # (parts, heads, dim) and (parts, heads) float32: the sums over each part's tokens
    rows, tiles,  # tiles: of C tokens, in each part
    HEADS: tl.constexpr, DIM: tl.constexpr, SIGMOID: tl.constexpr, DOT: tl.constexpr,
    C: tl.constexpr, G: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """K columns of dx = W^T d and of dW = sum d x^T, for a part of the tokens; d is the gradient of W x + b:

    d = (dy - e^y dc) (1 - e^y)        y = log sigmoid(..), c = 1 - e^y
    d = dy y (1 - y)                   y = sigmoid(..)
    """
    BLOCKS: tl.constexpr = (DIM + K - 1) // K
    block, part = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    head, column = tl.arange(0, G), block * K + tl.arange(0, K)
    weight = operand(load_tile(WEIGHT, DIM, head, column, HEADS, DIM), DOT)
    d_weight, d_bias = tl.zeros([G, K], tl.float32), tl.zeros([G], tl.float32)
    for tile in range(tiles):
        row = (part * tiles + tile) * C + tl.arange(0, C)
        y = load_tile(Y, HEADS, row, head, rows, HEADS)
        d = tl.zeros([C, G], tl.float32)
        if DY is not None:
            d = load_tile(DY, HEADS, row, head, rows, HEADS).to(tl.float32)
        if SIGMOID:
            d = d * y * (1 - y)
        else:
            if D_COMPLEMENT is not None:
                d -= tl.exp(y) * load_tile(D_COMPLEMENT, HEADS, row, head, rows, HEADS).to(tl.float32)
            d = d * -expm1(y)
        d_bias += tl.sum(d, 0)
        d = operand(d, DOT)
        dx = gate_dot(d, weight, tl.zeros([C, K], tl.float32), DOT)
        x = operand(load_tile(X, x_stride, row, column, rows, DIM), DOT)
        d_weight = gate_dot(tl.trans(d), x, d_weight, DOT)
        inside = (row < rows)[:, None] & (column < DIM)[None, :]
        at = DX + row.to(tl.int64)[:, None] * DIM + column[None, :]
        tl.store(at, dx.to(DX.dtype.element_ty), mask=inside)
    inside = (head < HEADS)[:, None] & (column < DIM)[None, :]
    tl.store(D_WEIGHT + (part * HEADS + head)[:, None] * DIM + column[None, :], d_weight, mask=inside)
    if block == 0:
        tl.store(D_BIAS + part * HEADS + head, d_bias, mask=head < HEADS)


def _sizes(x: Tensor, weight: Tensor) -> tuple[Tensor, str, int]:
    """x as (b n, dim), the precision of products, and the heads in a tile."""
    half = x.dtype.itemsize == weight.dtype.itemsize == 2
    x = x.reshape(-1, x.shape[2])
    return (
        x if x.stride(1) == 1 else x.contiguous(),
        "tf32" if half else "tf32x3",
        power_of_two_from_16(len(weight)),
    )


def gates_fwd(
    x: Tensor, weight: Tensor, bias: Tensor, activation: str, y: Tensor, complement: Tensor | None
) -> None:
    """Writes y and, if wanted, 1 - e^y, (b, n, heads) float32."""
    (x, dot, heads), chunk = _sizes(x, weight), 32
    start_kernel(
        gates_fwd_kernel, -(-len(x) // chunk), x, x.stride(0), weight.contiguous(), bias.contiguous(), y, complement,
        len(x), HEADS=len(weight), DIM=x.shape[1], SIGMOID=activation == "sigmoid", DOT=dot,
        C=chunk, G=heads, K=64, STAGES=3, num_warps=4, num_stages=3,
    )  # fmt: skip


def gates_bwd(
    x: Tensor, weight: Tensor, bias: Tensor, activation: str, y: Tensor, dy: Tensor | None, d_complement: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x, weight and bias, each in its dtype."""
    dx, d_weight, d_bias = (
        torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, weight, bias)
    )
    (x, dot, heads), columns = _sizes(x, weight), 32
    chunk, warps = (32, 4) if heads <= 64 else (16, 8)  # W and its gradient stay in registers
    if not len(x):
        return dx, d_weight.zero_(), d_bias.zero_()
    blocks, pieces = -(-x.shape[1] // columns), -(-len(x) // chunk)
    tiles = -(-pieces // min(pieces, MOST_SUMS, -(-ENOUGH_PROGRAMS // blocks)))
    parts = -(-pieces // tiles)
    weight_sums = y.new_empty(parts, weight.numel())
    bias_sums = y.new_empty(parts, len(bias))
    dy, d_complement = (None if t is None else t.contiguous() for t in (dy, d_complement))
    start_kernel(
        gates_bwd_kernel, blocks * parts, x, x.stride(0), weight.contiguous(), y, dy, d_complement, dx, weight_sums,
        bias_sums, len(x), tiles, HEADS=len(weight), DIM=x.shape[1], SIGMOID=activation == "sigmoid", DOT=dot,
        C=chunk, G=heads, K=columns, num_warps=warps,
    )  # fmt: skip
    sum_rows(weight_sums, d_weight, bias_sums, d_bias)
    return dx, d_weight, d_bias

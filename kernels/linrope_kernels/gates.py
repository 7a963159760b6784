"""Gates: y = act(W x + b) for each token and head, with act log sigmoid or sigmoid, and their gradients.

All products have the precision of float32. x and W in half precision are exact in tf32; other numbers are split.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from linrope_kernels.decay import expm1
from linrope_kernels.launch import stages_of
from linrope_kernels.partial_sums import sum_rows
from linrope_kernels.pieces import dot, operand
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
def gate_dot(a, b, acc, DOT: tl.constexpr, EXACT: tl.constexpr):
    """acc + a b with the precision of float32. EXACT: a is in half precision, too."""
    if DOT == "tf32x3" or EXACT:
        return dot(a, b, acc, DOT)
    else:
        high = operand(a, DOT)
        return dot(high, b, dot(operand(a - high, DOT), b, acc, DOT), DOT)


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
        y = gate_dot(x, tl.trans(weight), y, DOT, True)
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
    rows, tiles,  # tiles: the number of tiles of C tokens in each part
    HEADS: tl.constexpr, DIM: tl.constexpr, SIGMOID: tl.constexpr, DOT: tl.constexpr,
    C: tl.constexpr, G: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr,
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
    for tile in tl.range(0, tiles, num_stages=STAGES):
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
        dx = gate_dot(d, weight, tl.zeros([C, K], tl.float32), DOT, False)
        x = operand(load_tile(X, x_stride, row, column, rows, DIM), DOT)
        d_weight = gate_dot(tl.trans(d), x, d_weight, DOT, False)
        inside = (row < rows)[:, None] & (column < DIM)[None, :]
        at = DX + row.to(tl.int64)[:, None] * DIM + column[None, :]
        tl.store(at, dx.to(DX.dtype.element_ty), mask=inside)
    inside = (head < HEADS)[:, None] & (column < DIM)[None, :]
    tl.store(
        D_WEIGHT + (part.to(tl.int64) * HEADS + head)[:, None] * DIM + column[None, :], d_weight, mask=inside
    )
    if block == 0:
        tl.store(D_BIAS + part * HEADS + head, d_bias, mask=head < HEADS)


def _constants(call: Any) -> dict[str, Any]:
    half = call.x.dtype.itemsize == call.weight.dtype.itemsize == 2
    (heads, dim), stages = call.weight.shape, stages_of(call.x, 3)
    return {
        "HEADS": heads, "DIM": dim, "SIGMOID": call.activation == "sigmoid", "DOT": "tf32" if half else "tf32x3",
        "G": power_of_two_from_16(heads), "STAGES": stages, "num_stages": stages,
    }  # fmt: skip


def _in_rows(x: Tensor) -> Tensor:
    """x (b, n, dim) with the same distance between all neighbouring tokens."""
    b, n, _ = x.shape
    regular = x.stride(2) == 1 and (b == 1 or x.stride(0) == n * x.stride(1))
    return x if regular else x.contiguous()


def gates_fwd(call: Any) -> tuple[Tensor, Tensor | None]:
    """y and, if wanted, 1 - e^y, (b, n, heads) float32. call: the record of linrope/ops/gates.py."""
    (b, n, _), x, constants = call.x.shape, _in_rows(call.x), _constants(call)
    y = x.new_empty(b, n, call.weight.shape[0], dtype=torch.float32)
    complement = torch.empty_like(y) if call.complement else None
    start_kernel(
        gates_fwd_kernel, -(-b * n // 32), x, x.stride(1), call.weight.contiguous(), call.bias.contiguous(), y,
        complement, b * n, **constants, C=32, K=32 if constants["DOT"] == "tf32x3" else 64, num_warps=4,
    )  # fmt: skip
    return y, complement


def gates_bwd(call: Any, y: Tensor, dy: Tensor | None, d_complement: Tensor | None) -> list[Tensor]:
    """The gradients of x, weight and bias, each in its dtype."""
    (b, n, dim), heads, x = call.x.shape, call.weight.shape[0], _in_rows(call.x)
    dx, d_weight, d_bias = (t.new_empty(t.shape) for t in (call.x, call.weight, call.bias))
    if b * n == 0:
        return [dx, d_weight.zero_(), d_bias.zero_()]
    chunk, columns, warps = (
        (32, 32, 4) if heads <= 64 else (16, 32, 8)
    )  # W and its gradient stay in registers
    blocks, pieces = -(-dim // columns), -(-b * n // chunk)
    tiles = -(-pieces // min(pieces, MOST_SUMS, -(-ENOUGH_PROGRAMS // blocks)))
    parts = -(-pieces // tiles)
    weight_sums, bias_sums = y.new_empty(parts, heads * dim), y.new_empty(parts, heads)
    gradients = [None if t is None else t.contiguous() for t in (dy, d_complement)]
    start_kernel(
        gates_bwd_kernel, blocks * parts, x, x.stride(1), call.weight.contiguous(), y, *gradients, dx, weight_sums,
        bias_sums, b * n, tiles, **_constants(call), C=chunk, K=columns, num_warps=warps,
    )  # fmt: skip
    sum_rows(weight_sums, d_weight, bias_sums, d_bias)
    return [dx, d_weight, d_bias]

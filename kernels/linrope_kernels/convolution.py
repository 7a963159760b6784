"""Launchers of the causal convolution of each channel.

b batch, n tokens, c channels, s sequences.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton import next_power_of_2

from linrope_kernels.convolution_kernels import convolve_bwd_kernel, convolve_fwd_kernel, convolve_step_kernel
from linrope_kernels.partial_sums import sum_rows
from linrope_kernels.tiles import power_of_two_from_16

UNROLL = 4  # positions whose inputs are loaded together
ENOUGH_PROGRAMS = 1056  # 8 for each of an H200's multiprocessors
MOST_SUMS = 1024  # the most partial sums of a weight's gradient


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """The inputs of a convolution; the last stride of x, bias and before is 1, and cu_seqlens is contiguous."""

    x: Tensor  # (b, n, c)
    weight: Tensor  # (c, taps)
    bias: Tensor | None  # (c,)
    before: Tensor | None = None  # (s, taps - 1, c) in the dtype of x, all rows equally far from one another
    cu_seqlens: Tensor | None = None  # (s + 1,) integers
    silu: bool

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The kernels' first arguments."""
        before, cu_seqlens, stride = self.before, self.cu_seqlens, 0
        if self.weight.shape[1] == 1:  # a token sees itself alone, whatever it is packed with
            before = cu_seqlens = None
        if before is not None:
            stride = before.stride(1) if before.shape[0] == 1 else before.stride(0) // before.shape[1]
        return (
            self.x, self.x.stride()[:2], self.weight, self.weight.stride(), self.bias,
            before, stride, cu_seqlens, self.x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1,
        )  # fmt: skip

    @property
    def constants(self) -> dict[str, Any]:
        return {"CHANNELS": self.weight.shape[0], "TAPS": self.weight.shape[1], "SILU": self.silu}


def convolve_fwd(call: Convolution) -> Tensor:
    (b, n, c), y = call.x.shape, call.x.new_empty(call.x.shape)
    elements = 4096 if call.weight.shape[1] <= 4 else 2048
    tokens = min(next_power_of_2(max(n, 1)), elements // 64)
    channels = min(256, elements // tokens, power_of_two_from_16(c))
    programs = b * -(-n // tokens) * -(-c // channels)
    if programs:
        convolve_fwd_kernel[(programs,)](
            *call.inputs, y, n, **call.constants, C=tokens, BC=channels,
            num_warps=min(4, max(1, tokens * channels // 256)),
        )  # fmt: skip
    return y


def convolve_step(call: Convolution, inputs: Tensor, slots: Tensor | None) -> Tensor:
    """y (s, 1, c); shifts x (s, 1, c) into inputs (rows, taps - 1, c), of any strides."""
    (s, _, c), y = call.x.shape, call.x.new_empty(call.x.shape)
    channels = min(256, power_of_two_from_16(c))
    if y.numel():
        convolve_step_kernel[(s * -(-c // channels),)](
            call.x, call.x.stride(0), call.weight, call.weight.stride(), call.bias, inputs, inputs.stride(), slots, y,
            **call.constants, BC=channels, num_warps=2,
        )  # fmt: skip
    return y


def convolve_bwd(call: Convolution, dy: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of x, weight, bias and before, each in its dtype. The last stride of dy is 1."""
    (b, n, c), taps = call.x.shape, call.weight.shape[1]
    dx, d_weight = call.x.new_empty(call.x.shape), call.weight.new_empty(c, taps)
    d_bias = None if call.bias is None else call.bias.new_empty(c)
    d_before = None if call.before is None else call.before.new_empty(call.before.shape)
    if not dx.numel():
        for x in (d_weight, d_bias, d_before):
            if x is not None:
                x.zero_()
        return dx, d_weight, d_bias, d_before
    channels = min(64, power_of_two_from_16(c))
    rows, blocks = 512 // channels, -(-c // channels)
    *_, before, _, cu_seqlens, sequences = call.inputs
    gaps = sequences if cu_seqlens is not None else int(before is not None)
    positions = n + gaps * (taps - 1)
    length = chunk_length(positions, b, rows, blocks)
    chunks = -(-positions // length)
    parts = -(-b * chunks // rows)
    weight_sums = dx.new_empty(parts, c * taps, dtype=torch.float32)
    bias_sums = None if d_bias is None else weight_sums.new_empty(parts, c)
    convolve_bwd_kernel[(parts * blocks,)](
        *call.inputs, dy, dy.stride()[:2], dx, None if before is None else d_before, weight_sums, bias_sums,
        n, chunks, length, **call.constants, G=rows, BC=channels, UNROLL=UNROLL, num_warps=4,
    )  # fmt: skip
    sum_rows(weight_sums, d_weight, bias_sums, d_bias)
    return dx, d_weight, d_bias, d_before


def chunk_length(positions: int, batch: int, rows: int, blocks: int) -> int:
    """Positions per chunk: 8 to 64, as many as leave ENOUGH_PROGRAMS; more if there would be more than MOST_SUMS sums.

    A chunk also loads 2 (taps - 1) inputs of its neighbours. Its length, and so the bits of a result, depend on sizes
    alone.
    """

    def parts(length: int) -> int:
        return -(-batch * -(-positions // length) // rows)

    length = 2 * UNROLL
    while length < positions and (
        (length < 64 and parts(2 * length) * blocks >= ENOUGH_PROGRAMS) or parts(length) > MOST_SUMS
    ):
        length *= 2
    return length

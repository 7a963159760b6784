"""The causal convolution of each channel: y_i = act(bias + sum_t weight[taps - 1 - t] x_(i - t)).

b batch, n tokens, s sequences, c channels. x is up to three tensors, its parts, which together have all channels. A
program computes a block of channels of one part. Tokens are counted through the batch, so that its rows are packed
sequences of n tokens each. The inputs before a sequence are its rows of BEFORE, or 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from linrope_kernels.partial_sums import sum_rows
from linrope_kernels.pieces import gate_and_slope
from linrope_kernels.start import start_kernel
from linrope_kernels.tiles import power_of_two_from_16

UNROLL = 4  # positions whose inputs are loaded together
ENOUGH_PROGRAMS = 192  # they keep all 132 multiprocessors of an H200 busy, which hold two such programs each
LONGEST = 2048  # positions of a chunk, whose products are summed one after another in float32
SHORTEST = 32  # where programs share a channel: a chunk also loads 2 (taps - 1) inputs of its neighbours

# ---- Where a token's inputs are


@triton.jit
def bound(CU_SEQLENS, sequence, sequences, n):
    """A sequence's first token. On a GPU the bounds are unchecked: they are clamped, the first to 0, the last to n."""
    if CU_SEQLENS is None:
        return sequence * n
    else:
        inner = tl.load(CU_SEQLENS + sequence, mask=(sequence > 0) & (sequence < sequences), other=0)
        return tl.where(sequence < sequences, tl.minimum(tl.maximum(inner, 0), n), n).to(tl.int32)


@triton.jit
def sequence_at(CU_SEQLENS, sequences, n, position, GAP: tl.constexpr):
    """The last sequence that begins at or before each position. A sequence begins with GAP extra positions."""
    if CU_SEQLENS is None:
        return tl.minimum(tl.maximum(position, 0) // (n + GAP), sequences - 1)
    else:
        low = tl.zeros(position.shape, tl.int32)
        high, span = low + sequences, sequences
        while span > 1:
            middle = (low + high) // 2
            begins = bound(CU_SEQLENS, middle, sequences, n) + middle * GAP <= position
            low, high = tl.where(begins, middle, low), tl.where(begins, high, middle)
            span = (span + 1) // 2
        return low


@triton.jit
def of_part(values, block, FIRST: tl.constexpr):
    """The value of the part that has this block of channels. values: one per part. FIRST: each part's first block."""
    value = values[0]
    for i in tl.static_range(1, len(values)):
        value = tl.where(block < FIRST[i], value, values[i])
    return value


@triton.jit
def channels_of(block, CHANNELS: tl.constexpr, FIRST: tl.constexpr, BC: tl.constexpr):
    """A block's channels (1, BC), counted in its part and in all parts; which of them exist; the part's size."""
    first, offset, size = 0, 0, CHANNELS[1]
    for i in tl.static_range(1, len(CHANNELS) - 1):
        here = block >= FIRST[i]
        first, offset = tl.where(here, FIRST[i], first), tl.where(here, CHANNELS[i], offset)
        size = tl.where(here, CHANNELS[i + 1] - CHANNELS[i], size)
    channel = (block - first) * BC + tl.arange(0, BC)[None, :]
    return channel, offset + channel, channel < size, size


@triton.jit
def load_parameters(WEIGHT, strides, BIAS, channels, inside, TAPS: tl.constexpr):
    """A tuple of the weights of each tap, and the bias or 0, each (1, BC) in float32."""
    weights = ()
    for tap in tl.static_range(TAPS):
        at = WEIGHT + channels * strides[0] + tap * strides[1]
        weights = weights + (tl.load(at, mask=inside, other=0).to(tl.float32),)
    if BIAS is None:
        return weights, tl.zeros(channels.shape, tl.float32)
    else:
        return weights, tl.load(BIAS + channels, mask=inside, other=0).to(tl.float32)


@triton.jit
def load_inputs(X, strides, BEFORE, before_strides, sequence, token, row, is_token, is_row, inside):
    """X at ``token``, or BEFORE at that row of the sequence, else 0. X and BEFORE: pointers to the block's channels.

    strides: from token to token, and what is added to that between two rows of the batch.
    """
    at = X + (token.to(tl.int64) * strides[0] + sequence.to(tl.int64) * strides[1])
    x = tl.load(at, mask=is_token & inside, other=0)
    if BEFORE is not None:
        at = BEFORE + (sequence.to(tl.int64) * before_strides[0] + row.to(tl.int64) * before_strides[1])
        x = tl.where(is_row, tl.load(at, mask=is_row & inside, other=0), x)
    return x.to(tl.float32)


# ---- Forward


@triton.jit(do_not_specialize=["n", "sequences", "tokens"])
def convolve_fwd_kernel(
    X, x_strides,  # a tuple of parts (b, n, channels), the last stride is 1; their strides as in load_inputs
    WEIGHT, weight_strides,  # (c, taps)
    BIAS,  # (c,); None: 0
    BEFORE, before_strides,  # (s, taps - 1, c), the last stride is 1; None: 0
    CU_SEQLENS, sequences, n,  # (s + 1,); None: each sequence has n tokens. Else there are n tokens in all
    Y,  # a tuple of parts (b, n, channels) contiguous
    tokens,
    CHANNELS: tl.constexpr, FIRST: tl.constexpr,  # the first channel and block of each part, and the numbers of all
    TAPS: tl.constexpr, SILU: tl.constexpr, C: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """C tokens of BC channels. Inputs are loaded once per tap: once from memory, then from the first-level cache."""
    WIDTH: tl.constexpr = TAPS - 1
    block = tl.program_id(0) % FIRST[-1]
    token = tl.program_id(0) // FIRST[-1] * C + tl.arange(0, C)[:, None]
    channel, channels, inside, size = channels_of(block, CHANNELS, FIRST, BC)
    sequence = sequence_at(CU_SEQLENS, sequences, n, token, 0)
    first = bound(CU_SEQLENS, sequence, sequences, n)
    weights, y = load_parameters(WEIGHT, weight_strides, BIAS, channels, inside, TAPS)
    X, Y = of_part(X, block, FIRST) + channel, of_part(Y, block, FIRST)
    x_strides = of_part(x_strides[0], block, FIRST), of_part(x_strides[1], block, FIRST)
    if BEFORE is not None:
        BEFORE += channels
    for tap in tl.static_range(TAPS):
        place = token - (WIDTH - tap)
        row, is_token = place - first + WIDTH, (place >= first) & (token < tokens)
        is_row = (place < first) & (token < tokens)
        x = load_inputs(X, x_strides, BEFORE, before_strides, sequence, place, row, is_token, is_row, inside)
        y = tl.fma(weights[tap], x, y)
    if SILU:
        y = gate_and_slope(y, "silu")[0]
    at = Y + (token.to(tl.int64) * size + channel)
    tl.store(at, y.to(Y.dtype.element_ty), mask=(token < tokens) & inside)


# ---- Backward


@triton.jit
def advance(CU_SEQLENS, sequences, n, position, span, WIDTH: tl.constexpr, BC: tl.constexpr):
    """A position's token, its row of BEFORE, whether it is a token, whether it is a row, and its span.

    span: a sequence, its first token and its last token + 1; the argument is that of the position before. A sequence's
    positions are WIDTH rows and its tokens.
    """
    sequence, first, end = span
    ends = (position >= end + (sequence + 1) * WIDTH) & (sequence + 1 < sequences)
    sequence += ends.to(tl.int32)
    first, following = tl.where(ends, end, first), sequence + 1
    if CU_SEQLENS is None:
        end = bound(CU_SEQLENS, following, sequences, n)
    else:  # loaded in all columns, like the inputs: a load of (G, 1) would lie in other threads
        following = tl.broadcast_to(following, [position.shape[0], BC])
        end = tl.max(bound(CU_SEQLENS, following, sequences, n), 1, keep_dims=True)
    token = position - (sequence + 1) * WIDTH
    row = token - first + WIDTH
    is_token, is_row = (row >= WIDTH) & (token < end), (row >= 0) & (row < WIDTH)
    return token, row, is_token, is_row, (sequence, first, end)


@triton.jit(do_not_specialize=["n", "sequences", "length"])
def convolve_bwd_kernel(
    X, x_strides, WEIGHT, weight_strides, BIAS, BEFORE, before_strides, CU_SEQLENS, sequences, n,
    DY, dy_strides,  # a tuple of parts (b, n, channels), the last stride is 1
    DX,  # a tuple of parts (b, n, channels) contiguous
    D_BEFORE,  # (s, taps - 1, c) contiguous; None with BEFORE
    D_WEIGHT,  # (splits, c, taps): sums over the positions of each program
    D_BIAS,  # (splits, c); None with BIAS
    length,  # positions of a chunk, a multiple of UNROLL
    CHANNELS: tl.constexpr, FIRST: tl.constexpr, TAPS: tl.constexpr, SILU: tl.constexpr,
    G: tl.constexpr, BC: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """G chunks side by side, BC channels: each program walks along its chunks and loads their inputs once.

        da_i = dy_i act'(a_i)        dx_i = sum_t weight[taps - 1 - t] da_(i + t)        a: y before act

    The positions are each sequence's rows of BEFORE, present or not, and its tokens. da is 0 at the rows, so that the
    inputs and da of two sequences never mix.
    """
    WIDTH: tl.constexpr = TAPS - 1
    NOWHERE: tl.constexpr = -1  # no place; a place is a token, or -2 - i for row i of D_BEFORE
    block, split = tl.program_id(0) % FIRST[-1], tl.program_id(0) // FIRST[-1]
    channel, channels, inside, size = channels_of(block, CHANNELS, FIRST, BC)
    weights, bias = load_parameters(WEIGHT, weight_strides, BIAS, channels, inside, TAPS)
    X, DY = of_part(X, block, FIRST) + channel, of_part(DY, block, FIRST) + channel
    DX = of_part(DX, block, FIRST)
    x_strides = of_part(x_strides[0], block, FIRST), of_part(x_strides[1], block, FIRST)
    dy_strides = of_part(dy_strides[0], block, FIRST), of_part(dy_strides[1], block, FIRST)
    if BEFORE is not None:
        BEFORE += channels
    start = (split * G + tl.arange(0, G)[:, None]) * length - WIDTH
    sequence = sequence_at(CU_SEQLENS, sequences, n, start, WIDTH)
    first = bound(CU_SEQLENS, sequence, sequences, n)
    span = (sequence, first, bound(CU_SEQLENS, sequence + 1, sequences, n))

    # Tuples of what belongs to consecutive positions, the first of them WIDTH positions before the chunk
    x, da, places, weight_sums = (), (), (), ()
    for j in tl.static_range(WIDTH):
        token, row, is_token, is_row, span = advance(CU_SEQLENS, sequences, n, start + j, span, WIDTH, BC)
        is_read = is_row & (span[2] > span[1])
        z = load_inputs(X, x_strides, BEFORE, before_strides, span[0], token, row, is_token, is_read, inside)
        x = x + (z,)
        da, places = da + (tl.zeros([G, BC], tl.float32),), places + (tl.full([G, 1], NOWHERE, tl.int32),)
    for _tap in tl.static_range(TAPS):
        weight_sums = weight_sums + (tl.zeros([G, BC], tl.float32),)
    bias_sum = tl.zeros([G, BC], tl.float32)

    for i in range(0, length + WIDTH, UNROLL):
        dy, are_tokens = (), ()
        for j in tl.static_range(UNROLL):
            position = start + (i + j + WIDTH)
            token, row, is_token, is_row, span = advance(CU_SEQLENS, sequences, n, position, span, WIDTH, BC)
            place = tl.where(is_token, token, tl.where(is_row, -2 - span[0] * WIDTH - row, NOWHERE))
            places = places + (tl.where(i < length, place, NOWHERE),)  # the rest belongs to the next chunk
            is_read = is_row & (span[2] > span[1])  # rows that no token sees may hold NaN
            z = load_inputs(
                X, x_strides, BEFORE, before_strides, span[0], token, row, is_token, is_read, inside
            )
            d = load_inputs(DY, dy_strides, None, (0, 0), span[0], token, row, is_token, is_read, inside)
            x, dy, are_tokens = x + (z,), dy + (d,), are_tokens + (is_token,)
        for j in tl.static_range(UNROLL):
            d = dy[j]
            if SILU:
                a = bias
                for tap in tl.static_range(TAPS):
                    a = tl.fma(weights[tap], x[j + tap], a)
                d = tl.where(are_tokens[j], d * gate_and_slope(a, "silu")[1], 0.0)  # other inputs may be NaN
            own, sums = tl.where(places[j + WIDTH] >= 0, d, 0.0), ()
            for tap in tl.static_range(TAPS):
                sums = sums + (tl.fma(own, x[j + tap], weight_sums[tap]),)
            da, weight_sums, bias_sum = da + (d,), sums, bias_sum + own
            dx = weights[WIDTH] * da[j]
            for t in tl.static_range(1, TAPS):
                dx = tl.fma(weights[WIDTH - t], da[j + t], dx)
            place = places[j]
            at = DX + (place.to(tl.int64) * size + channel)
            tl.store(at, dx.to(DX.dtype.element_ty), mask=(place >= 0) & inside)
            if D_BEFORE is not None:
                at = D_BEFORE + ((-2 - place).to(tl.int64) * CHANNELS[-1] + channels)
                tl.store(at, dx.to(D_BEFORE.dtype.element_ty), mask=(place < NOWHERE) & inside)
        x, da, places = x[UNROLL:], da[UNROLL:], places[UNROLL:]

    at = split.to(tl.int64) * CHANNELS[-1] + channels
    for tap in tl.static_range(TAPS):
        total = tl.sum(weight_sums[tap], 0, keep_dims=True)
        tl.store(D_WEIGHT + (at * TAPS + tap), total.to(D_WEIGHT.dtype.element_ty), mask=inside)
    if D_BIAS is not None:
        total = tl.sum(bias_sum, 0, keep_dims=True)
        tl.store(D_BIAS + at, total.to(D_BIAS.dtype.element_ty), mask=inside)


# ---- Launchers


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """A call's inputs; the last stride of the parts and of before is 1, bias and cu_seqlens are contiguous."""

    parts: Sequence[Tensor]  # (b, n, channels) each, in one dtype
    weight: Tensor  # (c, taps)
    bias: Tensor | None  # (c,)
    before: Tensor | None  # (s, taps - 1, c) in the dtype of the parts
    cu_seqlens: Tensor | None  # (s + 1,) integers
    silu: bool

    @classmethod
    def of(cls, record: Any) -> "Convolution":
        """The call of linrope/ops/convolution.py's record."""
        parts = [x for x in (record.x, record.x2, record.x3) if x is not None]
        dtype = reduce(torch.promote_types, [x.dtype for x in parts])
        return cls(
            parts=[_dense(x, dtype) for x in parts],
            weight=record.weight,
            bias=None if record.bias is None else record.bias.contiguous(),
            before=None if record.before is None else _dense(record.before, dtype),
            cu_seqlens=None if record.cu_seqlens is None else record.cu_seqlens.contiguous(),
            silu=record.silu,
        )

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The kernels' first arguments."""
        before, cu_seqlens, (b, n, _) = self.before, self.cu_seqlens, self.parts[0].shape
        if self.weight.shape[1] == 1:  # a token sees itself alone, whatever it is packed with
            before = cu_seqlens = None
        return (
            *_pointers(self.parts), self.weight, self.weight.stride(), self.bias,
            before, (0, 0) if before is None else before.stride()[:2],
            cu_seqlens, b if cu_seqlens is None else len(cu_seqlens) - 1, n,
        )  # fmt: skip

    @property
    def sizes(self) -> list[int]:
        """The number of channels of each part."""
        return [x.shape[2] for x in self.parts]

    def blocks(self, channels: int) -> int:
        """The number of blocks, if each has this many channels."""
        return sum(-(-size // channels) for size in self.sizes)

    def constants(self, channels: int) -> dict[str, Any]:
        blocks = (-(-size // channels) for size in self.sizes)
        return {
            "CHANNELS": tuple(accumulate(self.sizes, initial=0)), "FIRST": tuple(accumulate(blocks, initial=0)),
            "TAPS": self.weight.shape[1], "SILU": self.silu, "BC": channels,
        }  # fmt: skip

    def empty_parts(self) -> list[Tensor]:
        return [x.new_empty(x.shape) for x in self.parts]


def _pointers(parts: Sequence[Tensor]) -> tuple[Any, ...]:
    """The parts, and the two strides of load_inputs, each of all parts."""
    b, n, _ = parts[0].shape
    tokens = tuple(x.stride(1) for x in parts)
    return tuple(parts), (tokens, tuple(x.stride(0) - n * x.stride(1) if b > 1 else 0 for x in parts))


def _dense(x: Tensor, dtype: torch.dtype) -> Tensor:
    x = x if x.dtype == dtype else x.to(dtype)
    return x if x.stride(-1) == 1 else x.contiguous()


def convolve_fwd(record: Any) -> list[Tensor]:
    """The result of each part, all in one dtype."""
    call = Convolution.of(record)
    ys, (b, n, _) = call.empty_parts(), call.parts[0].shape
    elements = 4096 if call.weight.shape[1] <= 4 else 2048
    tokens = min(triton.next_power_of_2(max(b * n, 1)), elements // 64)
    channels = min(256, elements // tokens, power_of_two_from_16(max(call.sizes)))
    start_kernel(
        convolve_fwd_kernel, -(-b * n // tokens) * call.blocks(channels),
        *call.inputs, tuple(ys), b * n, **call.constants(channels), C=tokens,
        num_warps=min(4, max(1, tokens * channels // 256)),
    )  # fmt: skip
    return ys


def convolve_bwd(
    record: Any, *gradients: Tensor | None
) -> tuple[list[Tensor], Tensor, Tensor | None, Tensor | None]:
    """The gradients of the parts, in one dtype, weight, bias and before. gradients: of the results; None: 0."""
    call = Convolution.of(record)
    pairs = zip(call.parts, gradients)
    dy = [x.new_zeros(x.shape) if g is None else _dense(g, x.dtype) for x, g in pairs]
    (b, n, _), (c, taps), dx = call.parts[0].shape, call.weight.shape, call.empty_parts()
    d_weight = call.weight.new_empty(c, taps)
    d_bias = None if call.bias is None else call.bias.new_empty(c)
    d_before = None if call.before is None else call.before.new_empty(call.before.shape)
    if b * n * c == 0:
        for x in (d_weight, d_bias, d_before):
            if x is not None:
                x.zero_()
        return dx, d_weight, d_bias, d_before
    inputs = call.inputs
    *_, before, _, _, sequences, _ = inputs
    channels = block_of_channels(call)
    rows, blocks = 1024 // channels, call.blocks(channels)
    positions = b * n + sequences * (taps - 1)
    length = chunk_length(positions, rows, blocks)
    splits = -(-positions // (rows * length))
    weight_sums, bias_sums = d_weight, d_bias
    if splits > 1:
        weight_sums = d_weight.new_empty(splits, c * taps, dtype=torch.float32)
        bias_sums = None if d_bias is None else d_bias.new_empty(splits, c, dtype=torch.float32)
    start_kernel(
        convolve_bwd_kernel, splits * blocks, *inputs, *_pointers(dy), tuple(dx),
        None if before is None else d_before, weight_sums, bias_sums, length,
        **call.constants(channels), G=rows, UNROLL=UNROLL, num_warps=8,
    )  # fmt: skip
    if splits > 1:
        sum_rows(weight_sums, d_weight, bias_sums, d_bias)
    return dx, d_weight, d_bias, d_before


def block_of_channels(call: Convolution) -> int:
    """64 channels, or fewer if each program can then sum over all positions. 16 channels fill a sector of memory."""
    most = min(64, power_of_two_from_16(max(call.sizes)))
    enough = (size for size in (64, 32, 16) if size <= most and call.blocks(size) >= ENOUGH_PROGRAMS)
    return next(enough, most)


def chunk_length(positions: int, rows: int, blocks: int) -> int:
    """Positions per chunk. They depend on sizes alone, and so do the bits of a result."""
    splits = 1
    if blocks < ENOUGH_PROGRAMS:
        splits = min(-(-2 * ENOUGH_PROGRAMS // blocks), -(-positions // (rows * SHORTEST)))
    length = min(LONGEST, -(-positions // (rows * splits)))
    return -(-length // UNROLL) * UNROLL

"""Kernels of the causal convolution: y_i = act(bias + sum_t weight[taps - 1 - t] x_(i - t)) in each channel.

b batch, n tokens, c channels, s sequences. The inputs before a sequence are its rows of BEFORE, or 0.
"""

# Triton's compiler does not know (*tuple, x), and lets tuples grow
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

import triton
import triton.language as tl

from linrope_kernels.pieces import silu_and_slope

# Values of a place, see rows_of
HIDDEN = tl.constexpr(-(2**30))
NOWHERE = tl.constexpr(-(2**31))  # no row at all


@triton.jit
def load_bound(CU_SEQLENS, index, n):
    """A bound of packed sequences, within 0 .. n whatever the table holds: on a GPU its values are unchecked."""
    return tl.minimum(tl.maximum(tl.load(CU_SEQLENS + index), 0), n).to(tl.int32)


@triton.jit
def packed_sequence(CU_SEQLENS, sequences, n, position, gap):
    """For each position, the last packed sequence that begins at or before it.

    Each sequence begins with ``gap`` extra positions.
    """
    low = tl.zeros(position.shape, tl.int32)
    high, span = low + sequences, sequences
    while span > 1:
        middle = (low + high) // 2
        begins = load_bound(CU_SEQLENS, middle, n) + middle * gap <= position
        low, high = tl.where(begins, middle, low), tl.where(begins, high, middle)
        span = (span + 1) // 2
    return low


@triton.jit
def in_each_row(x, ROWS: tl.constexpr):
    """x (BC,) in each row of a tile (ROWS, BC), in float32."""
    return tl.broadcast_to(x.to(tl.float32)[None, :], [ROWS, x.shape[0]])


@triton.jit
def load_weights(WEIGHT, strides, channels, inside, TAPS: tl.constexpr, ROWS: tl.constexpr):
    """A tuple of the weights of each tap, (ROWS, BC)."""
    weights = ()
    for tap in tl.static_range(TAPS):
        at = WEIGHT + channels * strides[0] + tap * strides[1]
        weights = weights + (in_each_row(tl.load(at, mask=inside, other=0), ROWS),)
    return weights


@triton.jit
def load_bias(BIAS, channels, inside, ROWS: tl.constexpr):
    """The bias (ROWS, BC); 0 without one."""
    if BIAS is None:
        return tl.zeros([ROWS, channels.shape[0]], tl.float32)
    else:
        return in_each_row(tl.load(BIAS + channels, mask=inside, other=0), ROWS)


@triton.jit
def rows_of(X, stride, BEFORE, before_stride, place):
    """Pointers to rows of X, which begins with the batch's first token, and of BEFORE.

    place: a token, or -1 - i for row i of BEFORE (s (taps - 1), c), plus HIDDEN if that sequence has no token.
    """
    at = X + place.to(tl.int64) * stride
    if BEFORE is not None:
        row = (-1 - place) & (-1 - HIDDEN)
        at = tl.where(place < 0, BEFORE + row.to(tl.int64) * before_stride, at)
    return at


@triton.jit
def is_read(BEFORE, place):
    """False for rows that no token sees: they may hold NaN."""
    return place >= (0 if BEFORE is None else HIDDEN)


@triton.jit(do_not_specialize=["n", "sequences"])
def convolve_fwd_kernel(
    X, x_strides,  # (b, n, c), the last stride is 1
    WEIGHT, weight_strides,  # (c, taps)
    BIAS,  # (c,); None: 0
    BEFORE, before_stride,  # (s, taps - 1, c) as rows one after the other; None: 0
    CU_SEQLENS, sequences,  # (s + 1,); None: not packed, s == b
    Y,  # (b, n, c) contiguous
    n,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, SILU: tl.constexpr, C: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """C tokens of BC channels. Inputs are loaded once per tap: once from memory, then from the first-level cache."""
    WIDTH: tl.constexpr = TAPS - 1
    BLOCKS: tl.constexpr = (CHANNELS + BC - 1) // BC
    block, tile = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    sequence, batch = tile // tl.cdiv(n, C), (tile // tl.cdiv(n, C)).to(tl.int64)
    token = tile % tl.cdiv(n, C) * C + tl.arange(0, C)
    channels = block * BC + tl.arange(0, BC)
    inside, first = channels < CHANNELS, tl.zeros([C], tl.int32)
    if CU_SEQLENS is not None:
        sequence = packed_sequence(CU_SEQLENS, sequences, n, token, 0)
        first = load_bound(CU_SEQLENS, sequence, n)
    weights = load_weights(WEIGHT, weight_strides, channels, inside, TAPS, C)
    y = load_bias(BIAS, channels, inside, C)
    X += batch * x_strides[0]
    for tap in tl.static_range(TAPS):
        place = token - (WIDTH - tap)
        row = place - first + WIDTH  # the row of BEFORE, among those of this sequence
        known = (token < n) & ((place >= first) | (row >= 0) & (row < WIDTH))
        place = tl.where(known, tl.where(row < WIDTH, -1 - sequence * WIDTH - row, place), NOWHERE)
        place = tl.broadcast_to(place[:, None], [C, BC])
        at = rows_of(X, x_strides[1], BEFORE, before_stride, place) + channels[None, :]
        x = tl.load(at, mask=is_read(BEFORE, place) & inside[None, :], other=0)
        y = tl.fma(weights[tap], x.to(tl.float32), y)
    if SILU:
        y = silu_and_slope(y)[0]
    Y += ((batch * n + token) * CHANNELS)[:, None] + channels[None, :]
    tl.store(Y, y.to(Y.dtype.element_ty), mask=(token < n)[:, None] & inside[None, :])


@triton.jit
def convolve_step_kernel(
    X, x_stride,  # (s, 1, c), last stride 1
    WEIGHT, weight_strides,
    BIAS,
    INPUTS, strides,  # (rows, taps - 1, c), any strides: shifted in place
    SLOTS,  # (s,) int64: the row of each sequence; None: sequence i has row i
    Y,  # (s, 1, c) contiguous
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, SILU: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """One token of one sequence, BC channels, in the order of the sums of convolve_fwd_kernel."""
    BLOCKS: tl.constexpr = (CHANNELS + BC - 1) // BC
    sequence = (tl.program_id(0) // BLOCKS).to(tl.int64)
    channels = tl.program_id(0) % BLOCKS * BC + tl.arange(0, BC)
    inside = channels < CHANNELS
    row = sequence
    if SLOTS is not None:
        row = tl.load(SLOTS + sequence)
    INPUTS += row * strides[0] + channels.to(tl.int64) * strides[2]
    weights = load_weights(WEIGHT, weight_strides, channels, inside, TAPS, 1)
    inputs = ()
    for tap in tl.static_range(TAPS - 1):
        inputs = inputs + (tl.load(INPUTS + tap * strides[1], mask=inside, other=0),)
    inputs = inputs + (tl.load(X + sequence * x_stride + channels, mask=inside, other=0),)
    y = load_bias(BIAS, channels, inside, 1)
    for tap in tl.static_range(TAPS):
        y = tl.fma(weights[tap], inputs[tap].to(tl.float32)[None, :], y)
    if SILU:
        y = silu_and_slope(y)[0]
    tl.store((Y + sequence * CHANNELS + channels)[None, :], y.to(Y.dtype.element_ty), mask=inside[None, :])
    tl.debug_barrier()  # another thread may still have to load what this one overwrites
    for tap in tl.static_range(TAPS - 1):
        tl.store(INPUTS + tap * strides[1], inputs[tap + 1], mask=inside)


@triton.jit
def place_of(CU_SEQLENS, sequences, n, position, exists, span, WIDTH: tl.constexpr, BC: tl.constexpr):
    """The place (G, BC) of a position in each chunk, as in rows_of or NOWHERE, and the span that it lies in.

    span: each chunk's sequence, its first token and its last token + 1, which advance with the position.
    """
    sequence, first, end = span
    if CU_SEQLENS is None:
        token, row = position, position + WIDTH
    else:  # a sequence has at least WIDTH positions, so that none is skipped
        ends = (position >= end + (sequence + 1) * WIDTH) & (sequence + 1 < sequences)
        sequence += ends.to(tl.int32)
        first, end = tl.where(ends, end, first), load_bound(CU_SEQLENS, sequence + 1, n)
        token, row = position - (sequence + 1) * WIDTH, position - sequence * WIDTH - first
    before = -1 - sequence * WIDTH - row + tl.where(end > first, 0, HIDDEN)
    place = tl.where(exists & (row >= 0) & (row < WIDTH), before, NOWHERE)
    is_token = exists & (token >= first) & (token < end)
    place = tl.where(is_token, token, place)
    return tl.broadcast_to(place[:, None], [place.shape[0], BC]), (sequence, first, end)


@triton.jit(do_not_specialize=["n", "sequences", "chunks", "length"])
def convolve_bwd_kernel(
    X, x_strides, WEIGHT, weight_strides, BIAS, BEFORE, before_stride, CU_SEQLENS, sequences,
    DY, dy_strides,  # (b, n, c), last stride 1
    DX,  # (b, n, c) contiguous
    D_BEFORE,  # (s, taps - 1, c) contiguous; None with BEFORE
    D_WEIGHT,  # (parts, c, taps) float32: the sum over the positions of each program
    D_BIAS,  # (parts, c) float32; None with BIAS
    n, chunks, length,  # chunks per row of the batch, and positions per chunk: a multiple of UNROLL
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, SILU: tl.constexpr,
    G: tl.constexpr, BC: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """G chunks side by side, BC channels: each program walks along its chunks and loads their inputs once.

        da_i = dy_i act'(a_i)        dx_i = sum_t weight[taps - 1 - t] da_(i + t)        a: y before act

    The positions of a chunk are tokens and rows of BEFORE. Without packing, the rows of BEFORE have negative positions.
    A packed sequence begins with the positions of its own rows of BEFORE. da is 0 at those positions, so the inputs
    and da of two sequences never mix.
    """
    WIDTH: tl.constexpr = TAPS - 1
    BLOCKS: tl.constexpr = (CHANNELS + BC - 1) // BC
    block, part = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    channels = block * BC + tl.arange(0, BC)
    inside = channels < CHANNELS
    weights = load_weights(WEIGHT, weight_strides, channels, inside, TAPS, G)
    bias = load_bias(BIAS, channels, inside, G)
    chunk = part * G + tl.arange(0, G)
    start = chunk % chunks * length
    if CU_SEQLENS is None:
        batch = (chunk // chunks).to(tl.int64)
        exists = batch < sequences
        span = (chunk // chunks, tl.zeros([G], tl.int32), n + tl.zeros([G], tl.int32))
        if BEFORE is not None:
            start -= WIDTH
    else:
        batch = tl.zeros([G], tl.int64)
        exists = chunk < chunks
        sequence = packed_sequence(CU_SEQLENS, sequences, n, start - WIDTH, WIDTH)
        first = load_bound(CU_SEQLENS, sequence, n)
        span = (sequence, first, load_bound(CU_SEQLENS, sequence + 1, n))

    X += (batch * x_strides[0])[:, None]
    DY += (batch * dy_strides[0])[:, None] + channels[None, :]
    DX += (batch * n * CHANNELS)[:, None]
    # Tuples of what belongs to consecutive positions; the first is WIDTH positions before the chunk
    x, da, places, weight_sums = (), (), (), ()
    for j in tl.static_range(WIDTH):
        place, span = place_of(CU_SEQLENS, sequences, n, start - WIDTH + j, exists, span, WIDTH, BC)
        at = rows_of(X, x_strides[1], BEFORE, before_stride, place) + channels[None, :]
        mask = is_read(BEFORE, place) & inside[None, :]
        x, places = x + (tl.load(at, mask=mask, other=0).to(tl.float32),), places + (place,)
        da = da + (tl.zeros([G, BC], tl.float32),)
    for _tap in tl.static_range(TAPS):
        weight_sums = weight_sums + (tl.zeros([G, BC], tl.float32),)
    bias_sum = tl.zeros([G, BC], tl.float32)

    for i in range(0, length + WIDTH, UNROLL):
        dy = ()
        for j in tl.static_range(UNROLL):
            place, span = place_of(CU_SEQLENS, sequences, n, start + i + j, exists, span, WIDTH, BC)
            at = rows_of(X, x_strides[1], BEFORE, before_stride, place) + channels[None, :]
            mask = is_read(BEFORE, place) & inside[None, :]
            x, places = x + (tl.load(at, mask=mask, other=0).to(tl.float32),), places + (place,)
            at = DY + place.to(tl.int64) * dy_strides[1]
            d = tl.load(at, mask=(place >= 0) & inside[None, :], other=0)
            dy = dy + (d.to(tl.float32),)
        for j in tl.static_range(UNROLL):
            d = dy[j]
            if SILU:
                a = bias
                for tap in tl.static_range(TAPS):
                    a = tl.fma(weights[tap], x[j + tap], a)
                slope = silu_and_slope(a)[1]
                d = tl.where(places[j + WIDTH] >= 0, d * slope, 0.0)  # inputs out of place may be NaN
            da = da + (d,)
            own, sums = tl.where(i < length, d, 0.0), ()  # the rest belongs to the next chunk
            for tap in tl.static_range(TAPS):
                sums = sums + (tl.fma(own, x[j + tap], weight_sums[tap]),)
            weight_sums, bias_sum = sums, bias_sum + own
            dx = weights[WIDTH] * da[j]
            for t in tl.static_range(1, TAPS):
                dx = tl.fma(weights[WIDTH - t], da[j + t], dx)
            # A tile: Triton 3.9's interpreter makes a mask of int32 of a comparison of scalars
            place, done = places[j], tl.full([1, 1], i + j - WIDTH, tl.int32)
            wanted = (place >= (0 if D_BEFORE is None else NOWHERE + 1)) & (done >= 0) & (done < length)
            at = rows_of(DX, CHANNELS, D_BEFORE, CHANNELS, place) + channels[None, :]
            tl.store(at, dx.to(DX.dtype.element_ty), mask=wanted & inside[None, :])
        x, da, places = x[UNROLL:], da[UNROLL:], places[UNROLL:]

    at = part.to(tl.int64) * CHANNELS + channels
    for tap in tl.static_range(TAPS):
        tl.store(D_WEIGHT + at * TAPS + tap, tl.sum(weight_sums[tap], 0), mask=inside)
    if D_BIAS is not None:
        tl.store(D_BIAS + at, tl.sum(bias_sum, 0), mask=inside)

"""Log decay per head or per unit, as the delta rule's kernels read it: its sums D inside each chunk.

A unit is a pair of features that turns, or a feature that does not (linrope's ``log_decay``). No exponent is positive:

    e^(D_i), e^(D_end - D_i)                          to and from a chunk's ends: D falls
    e^(D_i - D_j) = e^(D_i - D_m) e^(D_m - D_j)       between a query i and a key j of a chunk, per unit

A score is a sum over features, none of whose factors can be applied to the sum. So a factor goes to each of query and
key, with m between them: the last token of the left half of a block of 2, 4, .. C tokens, with j in that half and i in
the other. Each pair i > j is in one such block: *halving*.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from linrope_kernels.decay import clamped, decay_state, decay_tile, expm1, exponent, power
from linrope_kernels.launch import delta_precision
from linrope_kernels.memory import (
    Rows,
    broadcast_rows,
    half_layout_offsets,
    rows_of,
    rows_of_units,
    segment_span,
)
from linrope_kernels.segments import Segments
from linrope_kernels.start import start_kernel
from linrope_kernels.tiles import power_of_two


class Sums(NamedTuple):
    """D of every token, (b or 1, n, g or 1, units) as an exponent of two; units: 1 if all features decay alike."""

    rest: Rows  # float32; None: no decay
    whole: Rows  # int32; None: all of it is in rest


@triton.jit(do_not_specialize=["n", "segments"])
def sum_decay_kernel(
    log,  # Rows (b or 1, n, g or 1, units) float32 or float64, in their own batch rows and heads
    sums,  # Sums, contiguous
    SPANS,  # (s, 3) int32, as in Tokens
    n, heads, segments,
    UNITS: tl.constexpr, DOT: tl.constexpr, C: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """D of one chunk and head."""
    segment, row = tl.program_id(0) % segments, tl.program_id(0) // segments
    batch, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    first, end, _ = segment_span(SPANS, segment, C, n)
    rows = first + tl.arange(0, C)
    for unit in range(0, UNITS, B):
        units = unit + tl.arange(0, B)
        inside = (rows < end)[:, None] & (units < UNITS)[None, :]
        LOG = log.pointer + (batch * log.strides[0] + head * log.strides[2])
        a = tl.load(
            LOG + rows[:, None].to(tl.int64) * log.strides[1] + units[None, :] * log.strides[3],
            mask=inside,
            other=0,
        ).to(tl.float64)
        D = exponent(tl.cumsum(clamped(a, DOT), 0), DOT)
        at = ((batch * n + rows) * heads + head)[:, None] * UNITS + units[None, :]
        tl.store(sums.rest.pointer + at, D[1], mask=inside)
        if sums.whole.pointer is not None:
            tl.store(sums.whole.pointer + at, D[0], mask=inside)


def sums_of_decay(call: Any, segments: Segments) -> Sums:
    """D of a call whose chunks are these segments."""
    log = call.log_decay
    if log is None:
        return Sums(rows_of(None), rows_of(None))
    dot, (b, n, heads, *units) = delta_precision(call), log.shape
    rest = log.new_empty(b, n, heads, *(units or [1]), dtype=torch.float32)
    whole = None if dot == "bf16" else rest.new_empty(rest.shape, dtype=torch.int32)
    start_kernel(
        sum_decay_kernel, b * heads * segments.number, rows_of_units(log), Sums(rows_of(rest), rows_of(whole)),
        segments.spans, n, heads, segments.number,
        UNITS=rest.shape[3], DOT=dot, C=segments.length, B=min(32, power_of_two(rest.shape[3])),
    )  # fmt: skip
    return Sums(broadcast_rows(rest, 4), broadcast_rows(whole, 4))


@triton.jit
def unit_columns(w0, UNITS: tl.constexpr, PAIRS: tl.constexpr):
    """The units (2 W,) of the features of pairs from w0 on; the single one if all decay alike."""
    if not UNITS:
        return tl.arange(0, 1)
    else:
        i = 2 * w0 + tl.arange(0, 2 * PAIRS.W)
        feature = i
        if not PAIRS.INTERLEAVED:
            first, second = half_layout_offsets(i // 2, PAIRS.F, PAIRS.P)
            feature = tl.where(i % 2 == 0, first, second)
        unit = tl.where(i // 2 < PAIRS.P, i // 2, feature - PAIRS.P)
        return tl.where(unit < PAIRS.F - PAIRS.P, unit, 0)


@triton.jit
def load_exponents(sums, chunk, first, rows, columns):
    """D of these rows, counted from token ``first``, and columns, as an exponent of two."""
    strides = sums.rest.strides
    base = chunk.batch * strides[0] + chunk.head * strides[2] + first.to(tl.int64) * strides[1]
    at = rows[:, None] * strides[1] + columns[None, :]
    rest = tl.load(sums.rest.pointer + base + at)
    if sums.whole.pointer is None:
        return rest, rest
    else:
        return tl.load(sums.whole.pointer + base + at), rest


@triton.jit
def load_chunk_exponents(sums, chunk, first, last, columns):
    """D of the tokens of a chunk; rows after the last one are as this one."""
    rows = tl.minimum(tl.arange(0, chunk.rows.shape[0]), last - first)
    return load_exponents(sums, chunk, first, rows, columns)


class UnitDecay(NamedTuple):
    """The factors by which a chunk's decay multiplies tiles of features (C, 2 W), or (C, 1) if all decay alike."""

    D: Any  # as exponents of two
    from_start: Any  # e^(D_i)
    to_end: Any  # e^(D_end - D_i)
    over_chunk: Any  # e^(D_end) (1, 2 W or 1), for decay_state


@triton.jit
def load_unit_decay(sums, chunk, first, last, columns, DOT: tl.constexpr):
    D = load_chunk_exponents(sums, chunk, first, last, columns)
    D_end = load_exponents(sums, chunk, last, tl.arange(0, 1), columns)
    start = power(D, (0, 0), DOT)
    return UnitDecay(D, start, power(D_end, D, DOT), factor_of_exponent(D_end, DOT))


@triton.jit
def load_row_decay(sums, chunk, first, last, columns, UNITS: tl.constexpr, DOT: tl.constexpr):
    """A UnitDecay for tiles of values. Per unit the features have the factors already: only over_chunk is left."""
    if UNITS:
        D_end = load_exponents(sums, chunk, last, tl.arange(0, 1), columns)
        return UnitDecay(D_end, 1.0, 1.0, factor_of_exponent(D_end, DOT))
    else:
        return load_unit_decay(sums, chunk, first, last, columns, DOT)


@triton.jit
def from_start(x, decay):
    """e^(D_i) x_i. decay: None for none."""
    return x if decay is None else x * decay.from_start


@triton.jit
def to_end(x, decay):
    """e^(D_end - D_i) x_i."""
    return x if decay is None else x * decay.to_end


@triton.jit
def over_chunk(s, decay):
    """A state's tile after the chunk's decay."""
    return s if decay is None else decay_state(s, decay.over_chunk)


@triton.jit
def score_decay(D, DOT: tl.constexpr):
    """e^(D_i - D_j) (C, C) of queries i and keys j, for D (C, 1) if all features decay alike."""
    C: tl.constexpr = D[0].shape[0]
    return decay_tile((tl.reshape(D[0], [C]), tl.reshape(D[1], [C])), DOT, False)


@triton.jit
def factor_of_exponent(x, DOT: tl.constexpr):
    """``state_factor`` of an exponent of two."""
    log = (x[1] if DOT == "bf16" else x[0].to(tl.float32) + x[1]) * 0.6931471805599453  # log 2
    near_one = log > -0.25
    return tl.where(near_one, 1.0, power(x, (0, 0), DOT)), tl.where(near_one, expm1(log), 0.0)


@triton.jit
def halving(sums, D, chunk, first, last, columns, level, DOT: tl.constexpr):
    """e^(D_i - D_m) of the queries in right halves of 2^level tokens, e^(D_m - D_i) of the keys in left halves.

    Also which rows (C, 1) are queries.
    """
    i = tl.arange(0, chunk.rows.shape[0])
    middle = ((i >> level + 1) << level + 1) + (1 << level) - 1
    is_query = ((i >> level) % 2 == 1)[:, None]
    D_m = load_exponents(sums, chunk, first, tl.minimum(middle, last - first), columns)
    later = tl.where(is_query, D[0], D_m[0]), tl.where(is_query, D[1], D_m[1])
    earlier = tl.where(is_query, D_m[0], D[0]), tl.where(is_query, D_m[1], D[1])
    return power(later, earlier, DOT), is_query


@triton.jit
def between_halves(i, j, level):
    """True for a query i in a right half of 2^level tokens, and a key j in the left half before it."""
    return ((i >> level) == (j >> level) + 1) & ((i >> level) % 2 == 1)

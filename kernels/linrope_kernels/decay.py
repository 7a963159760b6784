"""Log decay: its sums D inside a chunk, and exponentials of their differences.

A float64 sum of logs is kept as an exponent of two, in the form that ``power`` takes: (whole, rest) with
e^log = 2^(whole + rest), or a single float32 where products are of bfloat16.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

MIN_LOG_DECAY = tl.constexpr(-1e4)  # e^-10000 is 0 in every dtype, and sums of such numbers are finite


@triton.jit
def expm1(y):
    """exp(y) - 1 for y <= 0, with a small relative error also near 0."""
    x = tl.maximum(y, -0.25)
    series = x * (1 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720))))))
    return tl.where(y > -0.25, series, tl.exp(y) - 1)


@triton.jit
def load_per_token(x, chunk):
    """(C,): the number of each row of x, Rows (b or 1, n, heads or 1); 0 outside."""
    X = x.pointer + (chunk.batch * x.strides[0] + chunk.head * x.strides[2])
    return tl.load(X + chunk.rows.to(tl.int64) * x.strides[1], mask=chunk.inside, other=0)


@triton.jit
def clamped(a, DOT: tl.constexpr):
    """Log decay, at least MIN_LOG_DECAY. For bfloat16 -111, which keeps sums small: 2^-160 is 0 in float32."""
    least: tl.constexpr = -111.0 if DOT == "bf16" else MIN_LOG_DECAY
    return tl.where(a < least, least, a)


@triton.jit
def load_decay(log, chunk, DOT: tl.constexpr):
    """D (C,) in float64, log decay summed from the chunk's first token to each row; and its last value."""
    a = clamped(load_per_token(log, chunk).to(tl.float64), DOT)
    return tl.cumsum(a, 0), tl.sum(a, 0)


class ChunkDecay(NamedTuple):
    """The factors by which a chunk's decay multiplies queries, keys and the state."""

    D: Any  # (C,), as an exponent of two
    from_start: Any  # e^(D_i) (C, 1): what a query reads of the state before the chunk
    to_end: Any  # e^(D_end - D_i) (C, 1): the factor of a key in the state after the chunk
    over_chunk: Any  # e^(D_end), for decay_state


@triton.jit
def chunk_decay(log, chunk, DOT: tl.constexpr, AS_VECTORS: tl.constexpr):
    """A chunk's ChunkDecay. AS_VECTORS: the factors are computed as vectors first."""
    D, D_end = load_decay(log, chunk, DOT)
    D, D_end, over_chunk = exponent(D, DOT), exponent(D_end, DOT), state_factor(D_end)
    if AS_VECTORS:
        return ChunkDecay(D, power(D, (0, 0), DOT)[:, None], power(D_end, D, DOT)[:, None], over_chunk)
    else:
        D_rows = as_rows(D)
        return ChunkDecay(D, power(D_rows, (0, 0), DOT), power(D_end, D_rows, DOT), over_chunk)


@triton.jit
def decay_tile(D, DOT: tl.constexpr, OF_KEYS: tl.constexpr):
    """e^(D_i - D_j) (C, C) of queries i, the rows, and keys j. OF_KEYS: the rows are the keys."""
    if OF_KEYS:
        return power(as_columns(D), as_rows(D), DOT)
    else:
        return power(as_rows(D), as_columns(D), DOT)


@triton.jit
def split_exponent(log):
    """(whole, rest), int32 and float32, with e^log = 2^(whole + rest), for a float64 log <= 0.

    The difference of two such pairs has float32's relative precision whatever their size, so its exponential
    is accurate to a few units in the last place. exp() of a float32 number y is off by |y| units.
    """
    log = tl.where(log < -1e8, -1e8, log) * 1.4426950408889634  # 1 / log 2
    whole = tl.where(log == log, tl.floor(log + 0.5), 0.0)  # a NaN goes into rest
    return whole.to(tl.int32), (log - whole).to(tl.float32)


@triton.jit
def exponent(log, DOT: tl.constexpr):
    """A float64 log <= 0 as an exponent of two: split, or a single float32 for bfloat16's eight bits."""
    if DOT == "bf16":
        x = (log * 1.4426950408889634).to(tl.float32)
        return x, x
    else:
        return split_exponent(log)


@triton.jit
def power(later, earlier, DOT: tl.constexpr):
    """e^(later - earlier) in float32, for exponents of summed logs, which fall; 0 below 2^-127.

    Where later is the larger one the result is arbitrary: the key lies in the query's future.
    """
    if DOT == "bf16":
        return tl.exp2(later[0] - earlier[0])
    else:
        return power_of_split(later[0] - earlier[0], later[1] - earlier[1])


@triton.jit
def power_of_split(whole, rest):
    """2^(whole + rest) in float32 for -1 <= rest <= 1 and a sum <= 0; 0 below 2^-127.

    Whole is cut off at 1, which two roundings can reach, so that keys in the future cannot overflow.
    """
    whole = tl.maximum(tl.minimum(whole, 1), -127)
    return tl.exp2(rest) * ((whole + 127) << 23).to(tl.float32, bitcast=True)  # 2^whole by its exponent bits


@triton.jit
def rematerialize(x, end):
    """Returns the exponent x, opaquely to the compiler, so that values derived from it are recomputed instead
    of held in registers. ``end`` may be any number that is never negative."""
    zero = tl.where(end < 0, 1, 0)
    return x[0] + zero, x[1] + zero


@triton.jit
def as_rows(x):
    return x[0][:, None], x[1][:, None]


@triton.jit
def as_columns(x):
    return x[0][None, :], x[1][None, :]


@triton.jit
def state_factor(log):
    """e^log of a scalar as a sum (a, b), by which ``decay_state`` multiplies.

    Near 1 it is (1, e^log - 1): the rounding error of a single factor would add up over the chunks.
    """
    whole, rest = split_exponent(log)
    near_one = log > -0.25
    return (
        tl.where(near_one, 1.0, power_of_split(whole, rest)),
        tl.where(near_one, expm1(log.to(tl.float32)), 0.0),
    )


@triton.jit
def decay_state(state, factor):
    return state * factor[0] + state * factor[1]


@triton.jit
def decay_parts(parts, decay):
    """The state's parts s[i][w] decayed over a chunk."""
    after = ()
    for i in tl.static_range(len(parts)):
        after_i = ()
        for w in tl.static_range(len(parts[i])):
            after_i = after_i + (decay_state(parts[i][w], decay.over_chunk),)
        after = after + (after_i,)
    return after

"""What is left of keys and states: sums of log decay in a chunk, and exponentials of their differences."""

import triton
import triton.language as tl


@triton.jit
def expm1(y):
    """exp(y) - 1 for y <= 0, to float32's precision also near 0."""
    x = tl.maximum(y, -0.25)
    series = x * (1 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720))))))
    return tl.where(y > -0.25, series, tl.exp(y) - 1)


@triton.jit
def load_decay(LOG, strides, rows, inside, DOT: tl.constexpr):
    """float64 sums of a chunk's log decay, from its first token to each row (C,), and to its last."""
    log = tl.load(LOG + rows.to(tl.int64) * strides[1], mask=inside, other=0).to(tl.float64)
    if DOT == "bf16":
        log = tl.where(log < -111.0, -111.0, log)  # e^-111 < 2^-149: nothing is left, and sums stay small
    return tl.cumsum(log, 0), tl.sum(log, 0)


@triton.jit
def in_twos(log):
    """(whole, rest), int32 and float32, with e^log = 2^(whole + rest): a float64 log <= 0 in two parts.

    The difference of two such pairs is right to float32 of itself, whatever their size, and the exponential
    of it to a few units in the last place. exp() of a float32 number y is off by |y| units.
    """
    log = tl.where(log < -1e8, -1e8, log) * 1.4426950408889634  # 1 / log 2
    whole = tl.where(log == log, tl.floor(log + 0.5), 0.0)  # NaN stays one, in the rest
    return whole.to(tl.int32), (log - whole).to(tl.float32)


@triton.jit
def exponents(log, DOT: tl.constexpr):
    """A float64 log <= 0 as power() takes it: in two parts, or for bfloat16's eight digits in one."""
    if DOT == "bf16":
        x = (log * 1.4426950408889634).to(tl.float32)
        return x, x
    else:
        return in_twos(log)


@triton.jit
def power(at, since, DOT: tl.constexpr):
    """e^(at - since) in float32, for exponents() of logs; below 2^-127 it is 0.

    Where at is the larger one it is any number: keys that nobody sees.
    """
    if DOT == "bf16":
        return tl.exp2(at[0] - since[0])
    else:
        return exact_power(at[0] - since[0], at[1] - since[1])


@triton.jit
def exact_power(whole, rest):
    """2^(whole + rest) in float32 for -1 <= rest <= 1 and a sum <= 0; below 2^-127 it is 0.

    Above 0 whole is cut off at 1, where two roundings may lead it: keys that nobody sees overflow nothing.
    """
    whole = tl.maximum(tl.minimum(whole, 1), -127)
    return tl.exp2(rest) * ((whole + 127) << 23).to(tl.float32, bitcast=True)  # 2^whole: its exponent's bits


@triton.jit
def again(at, end):
    """at; as the compiler does not see that, it computes from it anew what else would stay in registers."""
    never = tl.where(end < 0, 1, 0)
    return at[0] + never, at[1] + never


@triton.jit
def as_rows(at):
    return at[0][:, None], at[1][:, None]


@triton.jit
def as_columns(at):
    return at[0][None, :], at[1][None, :]


@triton.jit
def factors(log):
    """(a, b) with e^log = a + b, for scalars: a state S is to become S a + S b (fade).

    Near 1 these are 1 and the rest: a rounded factor would add the same error in every chunk.
    """
    whole, rest = in_twos(log)
    near = log > -0.25
    return tl.where(near, 1.0, exact_power(whole, rest)), tl.where(near, expm1(log.to(tl.float32)), 0.0)


@triton.jit
def fade(x, by):
    return x * by[0] + x * by[1]

"""What all kernels are made of: feature maps, rotation, tiles of feature pairs, states.

A tile of features is two tiles, one for each member of the pairs that rotate together: x1, x2 (C, W) hold
the pairs w0 .. w0 + W. The state is kept transposed, (BE, W) twice, as Hopper's matrix unit wants it.
"""

import triton
import triton.language as tl


@triton.jit
def feature(x, MAP: tl.constexpr):
    """phi(x) in float32; the names are linrope.feature_maps.ELEMENTWISE's."""
    x = x.to(tl.float32)
    if MAP == "elu+1":
        return tl.where(x > 0, x + 1, tl.exp(x))
    elif MAP == "relu":
        return tl.maximum(x, 0, propagate_nan=tl.PropagateNan.ALL)
    elif MAP == "relu2":
        x = tl.maximum(x, 0, propagate_nan=tl.PropagateNan.ALL)
        return x * x
    elif MAP == "exp":
        return tl.exp(x)
    elif MAP == "silu":
        return x * tl.sigmoid(x)
    else:
        tl.static_assert(MAP == "identity", "unknown feature map")
        return x


@triton.jit
def slope(x, MAP: tl.constexpr):
    """phi'(x) in float32."""
    x = x.to(tl.float32)
    if MAP == "elu+1":
        return tl.where(x > 0, 1.0, tl.exp(x))
    elif MAP == "relu":
        return tl.where(x > 0, 1.0, 0.0)
    elif MAP == "relu2":
        return 2 * tl.maximum(x, 0)
    elif MAP == "exp":
        return tl.exp(x)
    elif MAP == "silu":
        s = tl.sigmoid(x)
        return s + x * s * (1 - s)
    else:
        return tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def operand(x, DOT: tl.constexpr):
    """x as the matrix unit takes it. "tf32" serves float16: as many digits, and float32's range."""
    if DOT == "bf16":
        return x.to(tl.bfloat16)
    elif DOT == "tf32":  # to nearest; the unit by itself would cut off
        x = x.to(tl.float32)
        rounded = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
    else:
        return x.to(tl.float32)


@triton.jit
def dot(a, b, acc, DOT: tl.constexpr):
    """acc + a b, accumulated in float32."""
    if DOT == "ieee":
        return tl.dot(a, b, acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="tf32")


@triton.jit
def rotate(x1, x2, turn, P: tl.constexpr):
    """R x, for turn = (cos, sin)."""
    if P == 0:
        return x1, x2
    else:
        return x1 * turn[0] - x2 * turn[1], x1 * turn[1] + x2 * turn[0]


@triton.jit
def rotate_back(x1, x2, turn, P: tl.constexpr):
    """R^T x."""
    if P == 0:
        return x1, x2
    else:
        return x1 * turn[0] + x2 * turn[1], x2 * turn[0] - x1 * turn[1]


@triton.jit
def members(pairs, F: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The two features of each pair. P pairs rotate; the features that do not are paired up likewise."""
    PAIRS: tl.constexpr = (F + 1) // 2
    if INTERLEAVED:
        return 2 * pairs, 2 * pairs + 1
    elif P == 0 or P == PAIRS:
        return pairs, pairs + PAIRS
    else:
        first = pairs + tl.where(pairs < P, 0, P)
        return first, first + tl.where(pairs < P, P, PAIRS - P)


@triton.jit
def keep(x1, x2, rows, pairs, F: tl.constexpr, W: tl.constexpr):
    """x1, x2 (C, W) where the row counts and the feature exists, else 0: phi(0) need not be 0."""
    if F % (2 * W) == 0:
        return tl.where(rows[:, None], x1, 0.0), tl.where(rows[:, None], x2, 0.0)
    else:
        keep1, keep2 = (2 * pairs < F)[None, :], (2 * pairs + 1 < F)[None, :]
        return tl.where(rows[:, None] & keep1, x1, 0.0), tl.where(rows[:, None] & keep2, x2, 0.0)


@triton.jit
def in_registers(x, rows):
    """x (C, ..) again, which is 0 outside of these rows already, in a tile that this program wrote itself.

    Before 3.7 Triton lets Hopper's matrix unit read a tile as cp.async brought it, with no fence.proxy.async
    after the copy, where the product's other side is another copy, or does not change in the loop.
    """
    return tl.where(rows[:, None], x, 0.0)


@triton.jit
def expm1(y):
    """exp(y) - 1 for y <= 0, to float32's precision also near 0."""
    x = tl.maximum(y, -0.25)
    series = x * (1 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720))))))
    return tl.where(y > -0.25, series, tl.exp(y) - 1)


@triton.jit
def load_decay(LOG, strides, rows, inside):
    """float64 sums of a chunk's log decay, from its first token to each row (C,), and to its last."""
    log = tl.load(LOG + rows.to(tl.int64) * strides[1], mask=inside, other=0).to(tl.float64)
    return tl.cumsum(log, 0), tl.sum(log, 0)


@triton.jit
def in_twos(log):
    """(whole, rest), int32 and float32, with e^log = 2^(whole + rest): a float64 log <= 0 in two parts.

    The difference of two such pairs is right to float32 of itself, whatever their size, and power() forms
    the exponential of it to a few units in the last place. exp() of a float32 number y is off by |y| units.
    """
    log = tl.where(log < -1e8, -1e8, log) * 1.4426950408889634  # 1 / log 2
    whole = tl.where(log == log, tl.floor(log + 0.5), 0.0)  # NaN stays one, in the rest
    return whole.to(tl.int32), (log - whole).to(tl.float32)


@triton.jit
def power(whole, rest):
    """2^(whole + rest) in float32 for -1 <= rest <= 1 and a sum <= 0; below 2^-125 it is 0.

    Above 0 whole is cut off at 1, where two roundings may lead it: keys that nobody sees overflow nothing.
    """
    whole = tl.maximum(tl.minimum(whole, 1), -126)
    scale = ((whole + 127) << 23).to(tl.float32, bitcast=True)  # 2^whole: its exponent's bits
    return tl.where(whole > -126, tl.exp2(rest) * scale, 0.0)


@triton.jit
def tile_power(rows, columns):
    """e^(D_row - D_column) (C, C), for D in two parts (in_twos) each."""
    return power(rows[0][:, None] - columns[0][None, :], rows[1][:, None] - columns[1][None, :])


@triton.jit
def factors(log):
    """(a, b) with e^log = a + b, for scalars: a state S is to become S a + S b (fade).

    Near 1 these are 1 and the rest: a rounded factor would add the same error in every chunk.
    """
    whole, rest = in_twos(log)
    near = log > -0.25
    return tl.where(near, 1.0, power(whole, rest)), tl.where(near, expm1(log.to(tl.float32)), 0.0)


@triton.jit
def fade(x, by):
    return x * by[0] + x * by[1]


@triton.jit
def divisor(den, eps, ADD: tl.constexpr):
    """What the numerator is divided by."""
    if ADD:
        return den + eps
    else:
        return tl.maximum(den, eps)


@triton.jit
def tokens_of(SLOTS, segment, length, n):
    """First token, last token + 1 and packed sequence of a segment; SLOTS (s, 3) has them where packed."""
    if SLOTS is None:
        first = segment * length
        return first, tl.minimum(first + length, n), 0
    else:
        SLOTS += 3 * segment
        return tl.load(SLOTS), tl.load(SLOTS + 1), tl.load(SLOTS + 2)


@triton.jit
def join(x1, x2, z1, z2, row, faded):
    """(x + z in one row, z + the sum of x): whoever sees that row sees all that z has gathered before.

    faded: None, or what is left at each row of z (C,), at the last row of each x (C,), and there of z.
    """
    old1, old2 = z1.to(tl.float32)[None, :], z2.to(tl.float32)[None, :]
    if faded is None:
        z1 += tl.sum(x1, 0).to(tl.float64)
        z2 += tl.sum(x2, 0).to(tl.float64)
    else:
        old1, old2 = old1 * faded[0][:, None], old2 * faded[0][:, None]
        z1 = z1 * faded[2] + tl.sum(x1 * faded[1][:, None], 0).to(tl.float64)
        z2 = z2 * faded[2] + tl.sum(x2 * faded[1][:, None], 0).to(tl.float64)
    return x1 + tl.where(row[:, None], old1, 0.0), x2 + tl.where(row[:, None], old2, 0.0), z1, z2


@triton.jit
def load_pairs(
    X, rows, inside, strides, w0,
    F: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """x1, x2 (C, W) of the rows of X, a (n, d) matrix with strides[1] and strides[3]; 0 outside."""
    X += rows[:, None].to(tl.int64) * strides[1]
    if INTERLEAVED:
        f = 2 * w0 + tl.arange(0, 2 * W)
        keep = inside[:, None]
        if F % (2 * W) != 0:
            keep = keep & (f < F)[None, :]
        x = tl.load(X + f[None, :].to(tl.int64) * strides[3], mask=keep, other=0)
        x1, x2 = tl.split(tl.reshape(x, [C, W, 2]))
    else:
        pairs = w0 + tl.arange(0, W)
        f1, f2 = members(pairs, F, P, INTERLEAVED)
        keep1, keep2 = inside[:, None], inside[:, None]
        if F % (2 * W) != 0:
            keep1, keep2 = keep1 & (2 * pairs < F)[None, :], keep2 & (2 * pairs + 1 < F)[None, :]
        x1 = tl.load(X + f1[None, :].to(tl.int64) * strides[3], mask=keep1, other=0)
        x2 = tl.load(X + f2[None, :].to(tl.int64) * strides[3], mask=keep2, other=0)
    return x1, x2


@triton.jit
def store_pairs(
    X, x1, x2, rows, inside, strides, w0,
    F: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    X += rows[:, None].to(tl.int64) * strides[1]
    if INTERLEAVED:
        f = 2 * w0 + tl.arange(0, 2 * W)
        x = tl.reshape(tl.join(x1, x2), [C, 2 * W]).to(X.dtype.element_ty)
        keep = inside[:, None]
        if F % (2 * W) != 0:
            keep = keep & (f < F)[None, :]
        tl.store(X + f[None, :].to(tl.int64) * strides[3], x, mask=keep)
    else:
        pairs = w0 + tl.arange(0, W)
        f1, f2 = members(pairs, F, P, INTERLEAVED)
        keep1, keep2 = inside[:, None], inside[:, None]
        if F % (2 * W) != 0:
            keep1, keep2 = keep1 & (2 * pairs < F)[None, :], keep2 & (2 * pairs + 1 < F)[None, :]
        tl.store(X + f1[None, :].to(tl.int64) * strides[3], x1.to(X.dtype.element_ty), mask=keep1)
        tl.store(X + f2[None, :].to(tl.int64) * strides[3], x2.to(X.dtype.element_ty), mask=keep2)


@triton.jit
def load_values(X, rows, inside, strides, e, E: tl.constexpr, BE: tl.constexpr):
    """(C, BE): the columns e of the rows of X; 0 outside."""
    X += rows[:, None].to(tl.int64) * strides[1] + e[None, :].to(tl.int64) * strides[3]
    keep = inside[:, None]
    if E % BE != 0:
        keep = keep & (e < E)[None, :]
    return tl.load(X, mask=keep, other=0)


@triton.jit
def store_values(X, x, rows, inside, strides, e, E: tl.constexpr, BE: tl.constexpr):
    X += rows[:, None].to(tl.int64) * strides[1] + e[None, :].to(tl.int64) * strides[3]
    keep = inside[:, None]
    if E % BE != 0:
        keep = keep & (e < E)[None, :]
    tl.store(X, x.to(X.dtype.element_ty), mask=keep)


@triton.jit
def load_state(S, at, pairs, e, F: tl.constexpr, E: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr):
    """S^T (BE, W) twice, of the contiguous (f, e) matrix number ``at``; 0 where there is none."""
    if S is None:
        zeros = tl.zeros([e.shape[0], pairs.shape[0]], tl.float32)
        return zeros, zeros
    else:
        f1, f2 = members(pairs, F, P, INTERLEAVED)
        inside = (e < E)[:, None] & (2 * pairs < F)[None, :]
        S += at * F * E
        s1 = tl.load(S + f1[None, :] * E + e[:, None], mask=inside, other=0)
        s2 = tl.load(S + f2[None, :] * E + e[:, None], mask=inside & (2 * pairs + 1 < F)[None, :], other=0)
        return s1, s2


@triton.jit
def store_state(
    S, at, s1, s2, pairs, e, F: tl.constexpr, E: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr
):
    f1, f2 = members(pairs, F, P, INTERLEAVED)
    inside = (e < E)[:, None] & (2 * pairs < F)[None, :]
    S += at * F * E
    tl.store(S + f1[None, :] * E + e[:, None], s1, mask=inside)
    tl.store(S + f2[None, :] * E + e[:, None], s2, mask=inside & (2 * pairs + 1 < F)[None, :])


@triton.jit
def load_sum(Z, at, pairs, F: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr):
    """z (W,) twice, float64; 0 where there is none."""
    if Z is None:
        zeros = tl.zeros([pairs.shape[0]], tl.float64)
        return zeros, zeros
    else:
        f1, f2 = members(pairs, F, P, INTERLEAVED)
        Z += at * F
        z1 = tl.load(Z + f1, mask=2 * pairs < F, other=0).to(tl.float64)
        return z1, tl.load(Z + f2, mask=2 * pairs + 1 < F, other=0).to(tl.float64)


@triton.jit
def store_sum(Z, at, z1, z2, pairs, F: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr):
    f1, f2 = members(pairs, F, P, INTERLEAVED)
    Z += at * F
    tl.store(Z + f1, z1.to(Z.dtype.element_ty), mask=2 * pairs < F)
    tl.store(Z + f2, z2.to(Z.dtype.element_ty), mask=2 * pairs + 1 < F)


@triton.jit
def load_turn(TABLE, rows, inside, pairs, P: tl.constexpr):
    """cos and sin (C, W) of the rows' angles; no turn where nothing rotates."""
    if P == 0:
        return 1.0, 0.0
    else:
        TABLE += rows[:, None].to(tl.int64) * (2 * P) + pairs[None, :]
        keep = inside[:, None] & (pairs < P)[None, :]
        cos = tl.load(TABLE, mask=keep, other=1).to(tl.float32)
        return cos, tl.load(TABLE + P, mask=keep, other=0).to(tl.float32)


@triton.jit
def store_angles(X, x, tokens, inside, pairs, P: tl.constexpr):
    """x (C, W), a number for each pair that turns, to the rows ``tokens`` (C,) of X (.., P)."""
    tl.store(X + tokens[:, None] * P + pairs[None, :], x, mask=inside[:, None] & (pairs < P)[None, :])

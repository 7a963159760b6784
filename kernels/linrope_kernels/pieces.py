"""What all kernels are made of: feature maps, rotation, tiles of feature pairs, states.

A tile of features is (C, 2 W): W pairs, whose two members, which rotate together, stand side by side whatever
their layout in memory. The state is kept transposed, (BE, 2 W), as Hopper's matrix unit wants it.
"""

import triton
import triton.language as tl

from linrope_kernels.decay import fade


@triton.jit
def exp_up_to_0(x):
    """e^min(x, 0), NaN for NaN: no comparison for the rest to wait for; in map and slope of elu + 1.

    exp2 is one instruction, exp one with a case for results below 2^-126, which are 0 here.
    """
    return tl.exp2(tl.minimum(x, 0, propagate_nan=tl.PropagateNan.ALL) * 1.4426950408889634)  # 1 / log 2


@triton.jit
def feature(x, MAP: tl.constexpr):
    """phi(x) in float32; the names are linrope.feature_maps.ELEMENTWISE's."""
    x = x.to(tl.float32)
    if MAP == "elu+1":
        return tl.maximum(x, 0) + exp_up_to_0(x)
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
        return exp_up_to_0(x)
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
def members(x):
    """The first and the second members of the pairs, (C, W) each."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@triton.jit
def side_by_side(x1, x2):
    return tl.reshape(tl.join(x1, x2), [x1.shape[0], 2 * x1.shape[1]])


@triton.jit
def rotate(x, turn, P: tl.constexpr):
    """R x, for turn = (cos, sin)."""
    if P == 0:
        return x
    else:
        x1, x2 = members(x)
        return side_by_side(x1 * turn[0] - x2 * turn[1], x1 * turn[1] + x2 * turn[0])


@triton.jit
def rotate_back(x, turn, P: tl.constexpr):
    """R^T x."""
    if P == 0:
        return x
    else:
        x1, x2 = members(x)
        return side_by_side(x1 * turn[0] + x2 * turn[1], x2 * turn[0] - x1 * turn[1])


@triton.jit
def quarter_turns(x, y):
    """J x y (C, W), pair by pair, J a turn by 90 degrees."""
    x1, x2 = members(x)
    y1, y2 = members(y)
    return x1 * y2 - x2 * y1


@triton.jit
def halves(pairs, F: tl.constexpr, P: tl.constexpr):
    """Where both members are in layout "half". P pairs rotate; other features are paired up likewise."""
    PAIRS: tl.constexpr = (F + 1) // 2
    first = pairs + tl.where(pairs < P, 0, P)
    return first, first + tl.where(pairs < P, P, PAIRS - P)


@triton.jit
def features(w0, F: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr, W: tl.constexpr):
    """(2 W,): where in memory the features of the pairs w0 .. w0 + W are; F or more where there is none."""
    i = 2 * w0 + tl.arange(0, 2 * W)
    if INTERLEAVED:
        return i
    else:
        first, second = halves(i // 2, F, P)
        return tl.where(i < F, tl.where(i % 2 == 0, first, second), F)


@triton.jit
def keep(x, rows, w0, F: tl.constexpr, W: tl.constexpr):
    """x (C, 2 W) where the row counts and the feature exists, else 0: phi(0) need not be 0."""
    if F % (2 * W) == 0:
        return tl.where(rows[:, None], x, 0.0)
    else:
        exists = 2 * w0 + tl.arange(0, 2 * W) < F
        return tl.where(rows[:, None] & exists[None, :], x, 0.0)


@triton.jit
def in_registers(x, rows):
    """x (C, ..) again, which is 0 outside of these rows already, in a tile that this program wrote itself.

    Before 3.7 Triton lets Hopper's matrix unit read a tile as cp.async brought it, with no fence.proxy.async
    after the copy, where the product's other side is another copy, or does not change in the loop.
    """
    return tl.where(rows[:, None], x, 0.0)


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
def sum_of_products(x, y, AXIS: tl.constexpr):
    """Of x y over an axis. Each thread that the axis is spread over adds up all of it: they must agree."""
    products = x * y
    if products.numel <= 1024:  # a thread that has one would fuse it, unrounded, with the sum of the others
        products += 0.0
    return tl.sum(products, AXIS)


@triton.jit
def join(x, z, row, faded):
    """(x + z in one row, z + the sum of x): whoever sees that row sees all that z has gathered before.

    faded: None, or what is left at each row of z (C, 1), at the last row of each x (C, 1), and there of z.
    """
    old = z.to(tl.float32)[None, :]
    if faded is None:
        z += tl.sum(x, 0).to(tl.float64)
    else:
        old = old * faded[0]
        z = fade(z, faded[2]) + sum_of_products(x, faded[1], 0).to(tl.float64)
    return x + tl.where(row[:, None], old, 0.0), z


@triton.jit
def load_features(
    X, rows, inside, strides, w0,
    F: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """(C, 2 W) of the rows of X, a (n, d) matrix with strides[1] and strides[3]; 0 outside."""
    X += rows[:, None].to(tl.int64) * strides[1]
    if INTERLEAVED:
        f = 2 * w0 + tl.arange(0, 2 * W)
        mask = inside[:, None]
        if F % (2 * W) != 0:
            mask = mask & (f < F)[None, :]
        return tl.load(X + f[None, :].to(tl.int64) * strides[3], mask=mask, other=0)
    else:
        pairs = w0 + tl.arange(0, W)
        f1, f2 = halves(pairs, F, P)
        mask1, mask2 = inside[:, None], inside[:, None]
        if F % (2 * W) != 0:
            mask1, mask2 = mask1 & (2 * pairs < F)[None, :], mask2 & (2 * pairs + 1 < F)[None, :]
        x1 = tl.load(X + f1[None, :].to(tl.int64) * strides[3], mask=mask1, other=0)
        x2 = tl.load(X + f2[None, :].to(tl.int64) * strides[3], mask=mask2, other=0)
        return side_by_side(x1, x2)


@triton.jit
def store_features(
    X, x, rows, inside, strides, w0,
    F: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    X += rows[:, None].to(tl.int64) * strides[1]
    x = x.to(X.dtype.element_ty)
    if INTERLEAVED:
        f = 2 * w0 + tl.arange(0, 2 * W)
        mask = inside[:, None]
        if F % (2 * W) != 0:
            mask = mask & (f < F)[None, :]
        tl.store(X + f[None, :].to(tl.int64) * strides[3], x, mask=mask)
    else:
        pairs = w0 + tl.arange(0, W)
        f1, f2 = halves(pairs, F, P)
        x1, x2 = members(x)
        mask1, mask2 = inside[:, None], inside[:, None]
        if F % (2 * W) != 0:
            mask1, mask2 = mask1 & (2 * pairs < F)[None, :], mask2 & (2 * pairs + 1 < F)[None, :]
        tl.store(X + f1[None, :].to(tl.int64) * strides[3], x1, mask=mask1)
        tl.store(X + f2[None, :].to(tl.int64) * strides[3], x2, mask=mask2)


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
def load_state(S, at, f, e, F: tl.constexpr, E: tl.constexpr):
    """S^T (BE, 2 W), of the contiguous (f, e) matrix number ``at``; 0 where there is none."""
    if S is None:
        return tl.zeros([e.shape[0], f.shape[0]], tl.float32)
    else:
        inside = (e < E)[:, None] & (f < F)[None, :]
        return tl.load(S + at * F * E + f[None, :] * E + e[:, None], mask=inside, other=0)


@triton.jit
def store_state(S, at, s, f, e, F: tl.constexpr, E: tl.constexpr):
    tl.store(S + at * F * E + f[None, :] * E + e[:, None], s, mask=(e < E)[:, None] & (f < F)[None, :])


@triton.jit
def load_sum(Z, at, f, F: tl.constexpr):
    """z (2 W,), float64; 0 where there is none."""
    if Z is None:
        return tl.zeros([f.shape[0]], tl.float64)
    else:
        return tl.load(Z + at * F + f, mask=f < F, other=0).to(tl.float64)


@triton.jit
def store_sum(Z, at, z, f, F: tl.constexpr):
    tl.store(Z + at * F + f, z.to(Z.dtype.element_ty), mask=f < F)


@triton.jit
def load_turn(
    TABLE, rows, inside, w0,
    F: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """cos and sin (C, W) of the rows' angles, stored as features are; no turn where nothing rotates."""
    if P == 0:
        return 1.0, 0.0
    else:
        pairs = w0 + tl.arange(0, W)
        all_turn: tl.constexpr = 2 * P >= F and P % W == 0
        mask = inside[:, None]
        TABLE += rows[:, None].to(tl.int64) * (2 * P)
        if INTERLEAVED:
            i = 2 * w0 + tl.arange(0, 2 * W)
            if not all_turn:
                mask = mask & (i < 2 * P)[None, :]
            cos, sin = members(tl.load(TABLE + i[None, :], mask=mask, other=0).to(tl.float32))
            if not all_turn:
                cos = tl.where((pairs < P)[None, :], cos, 1.0)
            return cos, sin
        else:
            if not all_turn:
                mask = mask & (pairs < P)[None, :]
            cos = tl.load(TABLE + pairs[None, :], mask=mask, other=1).to(tl.float32)
            return cos, tl.load(TABLE + P + pairs[None, :], mask=mask, other=0).to(tl.float32)


@triton.jit
def store_angles(X, x, tokens, inside, pairs, P: tl.constexpr):
    """x (C, W), a number for each pair that turns, to the rows ``tokens`` (C,) of X (.., P)."""
    tl.store(X + tokens[:, None] * P + pairs[None, :], x, mask=inside[:, None] & (pairs < P)[None, :])

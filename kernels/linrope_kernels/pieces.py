"""The building blocks of all kernels: feature maps, rotation, and loads and stores of features and states.

A tile of features is (C, 2 W): W pairs per token. The two members of a pair rotate together and stand side by
side in the tile, whatever their layout in memory. The state is kept transposed, (BE, 2 W), as Hopper's matrix
unit requires.
"""

import triton
import triton.language as tl

from linrope_kernels.decay import decay_state


@triton.jit
def exp_up_to_0(x):
    """e^min(x, 0), the part of elu + 1 below 0 and its slope there; NaN for NaN.

    It needs no comparison, whose predicate other instructions would wait for. exp2 is a single instruction;
    exp also handles results below 2^-126, which become 0 here.
    """
    return tl.exp2(tl.minimum(x, 0, propagate_nan=tl.PropagateNan.ALL) * 1.4426950408889634)  # 1 / log 2


@triton.jit
def feature_map(x, MAP: tl.constexpr):
    """phi(x) in float32. MAP is a name in linrope.feature_maps.ELEMENTWISE."""
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
    """x rounded to the matrix unit's type. "tf32" serves float16: the same precision, but float32's range."""
    if DOT == "bf16":
        return x.to(tl.bfloat16)
    elif DOT == "tf32":  # round to nearest; the matrix unit would truncate
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
    """The first and the second member of each pair, two tiles (C, W)."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@triton.jit
def side_by_side(x1, x2):
    return tl.reshape(tl.join(x1, x2), [x1.shape[0], 2 * x1.shape[1]])


@triton.jit
def rotate(x, rotation, P: tl.constexpr):
    """R x, for rotation = (cos, sin)."""
    if P == 0:
        return x
    else:
        x1, x2 = members(x)
        return side_by_side(x1 * rotation[0] - x2 * rotation[1], x1 * rotation[1] + x2 * rotation[0])


@triton.jit
def rotate_back(x, rotation, P: tl.constexpr):
    """R^T x."""
    if P == 0:
        return x
    else:
        x1, x2 = members(x)
        return side_by_side(x1 * rotation[0] + x2 * rotation[1], x2 * rotation[0] - x1 * rotation[1])


@triton.jit
def angle_gradients(x, dx):
    """The gradient of each pair's angle, <J x, dx> (C, W), where J rotates a pair by 90 degrees."""
    x1, x2 = members(x)
    dx1, dx2 = members(dx)
    return x1 * dx2 - x2 * dx1


@triton.jit
def half_layout_offsets(pairs, F: tl.constexpr, P: tl.constexpr):
    """Offsets of both members of each pair in layout "half". Features that do not rotate form pairs too."""
    PAIRS: tl.constexpr = (F + 1) // 2
    first = pairs + tl.where(pairs < P, 0, P)
    return first, first + tl.where(pairs < P, P, PAIRS - P)


@triton.jit
def feature_offsets(w0, F: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr, W: tl.constexpr):
    """(2 W,): offsets in memory of the features of pairs w0 .. w0 + W; F or more beyond the last feature."""
    i = 2 * w0 + tl.arange(0, 2 * W)
    if INTERLEAVED:
        return i
    else:
        first, second = half_layout_offsets(i // 2, F, P)
        return tl.where(i < F, tl.where(i % 2 == 0, first, second), F)


@triton.jit
def mask_features(x, row_mask, w0, F: tl.constexpr, W: tl.constexpr):
    """x (C, 2 W) with 0 in masked rows and beyond feature F; phi(0), after a masked load, may not be 0."""
    if F % (2 * W) == 0:
        return tl.where(row_mask[:, None], x, 0.0)
    else:
        exists = 2 * w0 + tl.arange(0, 2 * W) < F
        return tl.where(row_mask[:, None] & exists[None, :], x, 0.0)


@triton.jit
def through_registers(x, row_mask):
    """x (C, ..), which is 0 in masked rows already, in a tile that the program itself writes from registers.

    Before version 3.7 Triton lets Hopper's matrix unit read a tile straight from cp.async with no
    fence.proxy.async in between, if the product's other operand is another such copy or constant in the loop.
    """
    return tl.where(row_mask[:, None], x, 0.0)


@triton.jit
def divisor(den, eps, ADD: tl.constexpr):
    """The denominator with eps: the numerator's divisor."""
    if ADD:
        return den + eps
    else:
        return tl.maximum(den, eps)


@triton.jit
def segment_span(SPANS, segment, length, n):
    """First token, last token + 1 and packed sequence of a segment; SPANS (s, 3) holds them if packed."""
    if SPANS is None:
        first = segment * length
        return first, tl.minimum(first + length, n), 0
    else:
        SPANS += 3 * segment
        return tl.load(SPANS), tl.load(SPANS + 1), tl.load(SPANS + 2)


@triton.jit
def sum_of_products(x, y, AXIS: tl.constexpr):
    """The sum of x y over an axis, with the same bits in every thread that computes it."""
    return tl.sum(rounded_products(x * y), AXIS)


@triton.jit
def rounded_products(products):
    """The same numbers, which the compiler cannot fuse with a sum.

    A thread that holds one product of a sum would fuse it, unrounded, with the other threads' sum.
    """
    if products.numel <= 2048:  # in larger tiles a thread holds several
        products += 0.0
    return products


@triton.jit
def carry_z(psi, z, first_row, decay):
    """psi with z added to the chunk's first row, and z after the chunk.

    Every query of the chunk sees its first key, so that a product with this psi includes the keys before the
    chunk. decay: None, or e^(D_i) (C, 1), e^(D_end - D_i) (C, 1) and the chunk's factor for decay_state.
    """
    z_before = z.to(tl.float32)[None, :]
    if decay is None:
        z += tl.sum(psi, 0).to(tl.float64)
    else:
        from_start, to_end, over_chunk = decay
        z_before = z_before * from_start
        z = decay_state(z, over_chunk) + sum_of_products(psi, to_end, 0).to(tl.float64)
    return psi + tl.where(first_row[:, None], z_before, 0.0), z


@triton.jit
def load_features(
    X, rows, inside, strides, w0,
    F: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """A tile (C, 2 W) of q or k, X (n, f) with strides[1] and strides[3]; 0 outside."""
    X += rows[:, None].to(tl.int64) * strides[1]
    if INTERLEAVED:
        f = 2 * w0 + tl.arange(0, 2 * W)
        mask = inside[:, None]
        if F % (2 * W) != 0:
            mask = mask & (f < F)[None, :]
        return tl.load(X + f[None, :].to(tl.int64) * strides[3], mask=mask, other=0)
    else:
        pairs = w0 + tl.arange(0, W)
        f1, f2 = half_layout_offsets(pairs, F, P)
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
        f1, f2 = half_layout_offsets(pairs, F, P)
        x1, x2 = members(x)
        mask1, mask2 = inside[:, None], inside[:, None]
        if F % (2 * W) != 0:
            mask1, mask2 = mask1 & (2 * pairs < F)[None, :], mask2 & (2 * pairs + 1 < F)[None, :]
        tl.store(X + f1[None, :].to(tl.int64) * strides[3], x1, mask=mask1)
        tl.store(X + f2[None, :].to(tl.int64) * strides[3], x2, mask=mask2)


@triton.jit
def load_values(X, rows, inside, strides, e, E: tl.constexpr, BE: tl.constexpr):
    """A tile (C, BE) of v or of the output, X (n, e) with strides[1] and strides[3]; 0 outside."""
    X += rows[:, None].to(tl.int64) * strides[1] + e[None, :].to(tl.int64) * strides[3]
    mask = inside[:, None]
    if E % BE != 0:
        mask = mask & (e < E)[None, :]
    return tl.load(X, mask=mask, other=0)


@triton.jit
def store_values(X, x, rows, inside, strides, e, E: tl.constexpr, BE: tl.constexpr):
    X += rows[:, None].to(tl.int64) * strides[1] + e[None, :].to(tl.int64) * strides[3]
    mask = inside[:, None]
    if E % BE != 0:
        mask = mask & (e < E)[None, :]
    tl.store(X, x.to(X.dtype.element_ty), mask=mask)


@triton.jit
def load_state(S, index, f, e, F: tl.constexpr, E: tl.constexpr):
    """S[index]^T (BE, 2 W), from contiguous states S (.., f, e); 0 if S is None."""
    if S is None:
        return tl.zeros([e.shape[0], f.shape[0]], tl.float32)
    else:
        inside = (e < E)[:, None] & (f < F)[None, :]
        return tl.load(S + index * F * E + f[None, :] * E + e[:, None], mask=inside, other=0)


@triton.jit
def store_state(S, index, s, f, e, F: tl.constexpr, E: tl.constexpr):
    tl.store(S + index * F * E + f[None, :] * E + e[:, None], s, mask=(e < E)[:, None] & (f < F)[None, :])


@triton.jit
def load_z(Z, index, f, F: tl.constexpr):
    """Z[index] (2 W,) as float64; 0 if Z is None."""
    if Z is None:
        return tl.zeros([f.shape[0]], tl.float64)
    else:
        return tl.load(Z + index * F + f, mask=f < F, other=0).to(tl.float64)


@triton.jit
def store_z(Z, index, z, f, F: tl.constexpr):
    tl.store(Z + index * F + f, z.to(Z.dtype.element_ty), mask=f < F)


@triton.jit
def load_rotation(
    TABLE, rows, inside, w0,
    F: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """cos and sin (C, W) of the rows' angles from TABLE, laid out as q; 1 and 0 where nothing rotates."""
    if P == 0:
        return 1.0, 0.0
    else:
        pairs = w0 + tl.arange(0, W)
        all_rotate: tl.constexpr = 2 * P >= F and P % W == 0
        mask = inside[:, None]
        TABLE += rows[:, None].to(tl.int64) * (2 * P)
        if INTERLEAVED:
            i = 2 * w0 + tl.arange(0, 2 * W)
            if not all_rotate:
                mask = mask & (i < 2 * P)[None, :]
            cos, sin = members(tl.load(TABLE + i[None, :], mask=mask, other=0).to(tl.float32))
            if not all_rotate:
                cos = tl.where((pairs < P)[None, :], cos, 1.0)
            return cos, sin
        else:
            if not all_rotate:
                mask = mask & (pairs < P)[None, :]
            cos = tl.load(TABLE + pairs[None, :], mask=mask, other=1).to(tl.float32)
            return cos, tl.load(TABLE + P + pairs[None, :], mask=mask, other=0).to(tl.float32)


@triton.jit
def store_angle_gradients(D_ANGLES, x, tokens, inside, pairs, P: tl.constexpr):
    """Stores x (C, W) in the rows ``tokens`` (C,) of D_ANGLES (.., P), for the pairs that rotate."""
    tl.store(D_ANGLES + tokens[:, None] * P + pairs[None, :], x, mask=inside[:, None] & (pairs < P)[None, :])


@triton.jit
def silu_and_slope(x):
    """silu(x) = x sigmoid(x), and its slope. exp2 is a single instruction, as in exp_up_to_0."""
    s = 1 / (1 + tl.exp2(x * -1.4426950408889634))  # 1 / log 2
    return x * s, s + x * s * (1 - s)

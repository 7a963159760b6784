"""The mathematics of all kernels on tiles: feature maps, rotation, matrix products and sums.

A tile of features is (C, 2 W): W pairs per token. The two members of a pair rotate together and stand side by
side in the tile, whatever their layout in memory. The state is kept transposed, (BE, 2 W), as Hopper's matrix
unit requires.
"""

import triton
import triton.language as tl

from linrope_kernels.decay import decay_state

UNIT_EPS = tl.constexpr(1e-6)  # added to the squared length of features that are divided by it
# See through_registers
NO_FENCES = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7))


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
def inverse_length(x):
    """1 / sqrt(|x|^2 + 1e-6) of each row (C, 1), as the map "unit" takes it."""
    return (1 / tl.sqrt(sum_of_products(x, x, 1) + UNIT_EPS))[:, None]


@triton.constexpr_function
def is_raw(MAP: str, P: int) -> bool:
    """True if features are what memory holds: a product of them needs ``through_registers``, or a mask instead."""
    return MAP == "identity" and P == 0


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
def gate_and_slope(x, ACTIVATION: tl.constexpr):
    """f(x) and f'(x) in float32, for f "silu" or "sigmoid". exp2 is a single instruction, as in exp_up_to_0."""
    x = x.to(tl.float32)
    s = 1 / (1 + tl.exp2(x * -1.4426950408889634))  # 1 / log 2
    if ACTIVATION == "silu":
        return x * s, s + x * s * (1 - s)
    else:
        tl.static_assert(ACTIVATION == "sigmoid", "unknown activation")
        return s, s * (1 - s)


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
    if DOT == "ieee" or DOT == "tf32x3":
        return tl.dot(a, b, acc, input_precision=DOT)
    else:
        return tl.dot(a, b, acc, input_precision="tf32")


@triton.jit
def precise_dot(a, b, acc, DOT: tl.constexpr):
    """acc + a b for float32 tiles, whose digits bfloat16 would not keep: in tf32 then."""
    PRECISION: tl.constexpr = "ieee" if DOT == "ieee" else "tf32"
    return dot(operand(a, PRECISION), operand(b, PRECISION), acc, PRECISION)


@triton.jit
def add_rows_where(which, terms, acc, DOT: tl.constexpr):
    """acc + which @ terms: the sums of those rows of terms (C, N) that each row of the mask (C, C) names.

    In bfloat16 in two parts, with 16 digits in all: half of the registers of a product in tf32.
    """
    if DOT == "bf16":
        high, ones = terms.to(tl.bfloat16), tl.where(which, 1.0, 0.0).to(tl.bfloat16)
        low = (terms - high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(ones, low, tl.dot(ones, high, acc))
    else:
        return precise_dot(tl.where(which, 1.0, 0.0), terms, acc, DOT)


@triton.jit
def dot_rows(x, y, DOT: tl.constexpr):
    """x y^T: the product of each row of x with each row of y."""
    return dot(x, tl.trans(y), tl.zeros([x.shape[0], y.shape[0]], tl.float32), DOT)


@triton.jit
def dot_parts(x, y, DOT: tl.constexpr):
    """x y^T, summed over the parts x[w] and y[w], all of them operands."""
    product = tl.zeros([x[0].shape[0], y[0].shape[0]], tl.float32)
    for w in tl.static_range(len(x)):
        product = dot(x[w], tl.trans(y[w]), product, DOT)
    return product


@triton.jit
def read_state(x, s_i, DOT: tl.constexpr):
    """x S for one part of the values: operands x[w] with the state's parts s_i[w], S^T in float32."""
    product = tl.zeros([x[0].shape[0], s_i[0].shape[0]], tl.float32)
    for w in tl.static_range(len(x)):
        product = dot(x[w], tl.trans(operand(s_i[w], DOT)), product, DOT)
    return product


@triton.jit
def add_products(s, values, features, DOT: tl.constexpr):
    """S + sum psi v^T over a chunk, in parts s[i][w] of S^T; values[i], features[w]: operands."""
    after = ()
    for i in tl.static_range(len(s)):
        s_i = ()
        for w in tl.static_range(len(features)):
            s_i = s_i + (dot(tl.trans(values[i]), features[w], s[i][w], DOT),)
        after = after + (s_i,)
    return after


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
def through_registers(x, row_mask):
    """x (C, ..), which is 0 in masked rows already, in a tile that the program itself writes from registers.

    Before version 3.7 Triton lets Hopper's matrix unit read a tile straight from cp.async with no
    fence.proxy.async in between, if the product's other operand is another such copy or constant in the loop.
    """
    return tl.where(row_mask[:, None], x, 0.0)


@triton.jit
def fenced(x, row_mask):
    """x (C, ..), a copy for a product whose other operand is a copy too, or none that the loop writes to memory."""
    if NO_FENCES:
        return through_registers(x, row_mask)
    else:
        return x


@triton.jit
def not_future(C: tl.constexpr, OF_KEYS: tl.constexpr):
    """The keys (C, C) of a chunk that each query sees. OF_KEYS: the rows are the keys."""
    rows, columns = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    if OF_KEYS:
        return rows <= columns
    else:
        return rows >= columns


@triton.jit
def divisor(den, eps, ADD: tl.constexpr):
    """The denominator with eps: the numerator's divisor."""
    if ADD:
        return den + eps
    else:
        return tl.maximum(den, eps)


@triton.jit
def sum_of_products(x, y, AXIS: tl.constexpr):
    """The sum of x y over an axis, with the same bits in every thread that computes it."""
    return tl.sum(rounded_products(x * y), AXIS)


@triton.jit
def rounded_products(products):
    """The same numbers, which the compiler cannot fuse with a sum.

    A thread that holds one product of a sum would fuse it, unrounded, with the other threads' sum.
    """
    if products.numel <= 4096:  # in larger tiles a thread holds several
        products += 0.0
    return products


@triton.jit
def carry_z(psi, z, first_row, decay):
    """psi with z added to the chunk's first row, and z after the chunk, in the precision of z.

    Every query of the chunk sees its first key, so that a product with this psi includes the keys before the
    chunk. decay: a ChunkDecay or None.
    """
    z_before = z.to(tl.float32)[None, :]
    if decay is None:
        z += tl.sum(psi, 0).to(z.dtype)
    else:
        z_before = z_before * decay.from_start
        z = decay_state(z, decay.over_chunk) + sum_of_products(psi, decay.to_end, 0).to(z.dtype)
    return tl.where(first_row[:, None], psi + z_before, psi), z


@triton.jit
def partial_sums(x):
    """The rows of x (C, 2 W) as 16 sums of C / 16 rows each, (16, 2 W).

    Each thread adds up rows of its own. A sum of all rows would pass through shared memory in every chunk.
    """
    return tl.sum(tl.reshape(x, [x.shape[0] // 16, 16, x.shape[1]]), 0)


@triton.jit
def spread(z, DOT: tl.constexpr):
    """A sum (2 W,) in the form of partial sums: in bfloat16 float32, else float64."""
    z = tl.where((tl.arange(0, 16) == 0)[:, None], z[None, :], 0.0)
    return z.to(tl.float32) if DOT == "bf16" else z


@triton.jit
def spread_parts(z, DOT: tl.constexpr):
    """Each part z[w] in the form of partial sums."""
    after = ()
    for w in tl.static_range(len(z)):
        after = after + (spread(z[w], DOT),)
    return after


@triton.jit
def totals(z):
    """The sum of the partial sums of each part z[w], in float64: undoes ``spread_parts``."""
    after = ()
    for w in tl.static_range(len(z)):
        after = after + (tl.sum(z[w].to(tl.float64), 0),)
    return after


@triton.jit
def sum_in_rows(z, C: tl.constexpr, DOT: tl.constexpr):
    """The sum of partial sums z (16, 2 W) in each of C rows."""
    ones = operand(tl.full([C, 16], 1.0, tl.float32), DOT)
    return dot(ones, operand(z, DOT), tl.zeros([C, z.shape[1]], tl.float32), DOT)

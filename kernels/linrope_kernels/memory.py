"""Where a call's tensors lie, and loads and stores of tiles: features, values, states, angles."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from linrope_kernels.decay import load_per_token
from linrope_kernels.pieces import members, side_by_side


class Rows(NamedTuple):
    """A tensor (b, n, heads, ..) of any strides; those of axes of length 1 may be 0."""

    pointer: Any
    strides: Any


def strides_of(x: Tensor | None, axes: int) -> tuple[int, ...]:
    """x's strides, 0 along axes of length 1, which broadcast."""
    if x is None:
        return (0,) * axes
    return tuple(0 if size == 1 else stride for size, stride in zip(x.shape, x.stride()))


def rows_of(x: Tensor | None) -> Rows:
    return Rows(x, (0,) * 4 if x is None else x.stride())


def broadcast_rows(x: Tensor | None, axes: int) -> Rows:
    """Rows whose axes of length 1 broadcast; the strides of the first ``axes`` only."""
    return Rows(x, strides_of(x, axes)[:axes])


def rows_of_units(x: Tensor | None) -> Rows:
    """Rows of log decay, whose axis of units may be missing: all features decay alike then."""
    return broadcast_rows(x, 4) if x is not None and x.ndim == 4 else Rows(x, (*strides_of(x, 3), 0))


class Tokens(NamedTuple):
    """A call's mask, rotation, decay and packing, which go with q, k and v."""

    mask: Any  # (b, m) bool: the keys that queries may see; None: all
    table: Rows  # (1 or b, 1 or g, n, 2 P), with its first two strides: cos and sin of the queries' angles
    key_table: Rows | None  # the same for keys; None: table is for the keys too
    log: Rows  # (b or 1, m, g or 1) float32 or float64: log decay; None: no decay
    write: Rows  # (b or 1, m, g or 1): the factors of the values; None: 1
    spans: Any  # (s, 3) int32: each segment's first token, last + 1, packed sequence; None: not packed


class Chunk(NamedTuple):
    """Consecutive tokens of a head, at which a kernel works."""

    batch: Any  # int64
    head: Any  # int64
    rows: Any  # (C,) int32: the tokens
    inside: Any  # (C,): those that exist; the others load 0 and are not stored


class Pairs(NamedTuple):
    """Constants: the features of a head in memory, and the pairs of a tile."""

    F: int  # features
    P: int  # pairs that rotate
    INTERLEAVED: bool
    W: int  # pairs of a tile


@triton.jit
def program_of(BLOCKS: tl.constexpr, segments):
    """The block, segment and head that this program computes."""
    block = tl.program_id(0) % BLOCKS
    segment = tl.program_id(0) // BLOCKS % segments
    return block, segment, tl.program_id(0) // BLOCKS // segments


@triton.jit
def places_of(bh, h, group):
    """Batch row, query head, key/value head, and that head's number in the batch, of query head bh; int64."""
    return (
        (bh // h).to(tl.int64),
        (bh % h).to(tl.int64),
        (bh % h // group).to(tl.int64),
        (bh // group).to(tl.int64),
    )


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
def row_pointers(x, chunk):
    """(C, 1): pointers to the first number of each row of x, Rows."""
    X = x.pointer + (chunk.batch * x.strides[0] + chunk.head * x.strides[2])
    return X + chunk.rows[:, None].to(tl.int64) * x.strides[1]


@triton.jit
def seen(MASK, chunk, m):
    """The chunk without the keys that MASK (b, m) hides."""
    inside = chunk.inside
    if MASK is not None:
        inside = inside & (tl.load(MASK + chunk.batch * m + chunk.rows, mask=inside, other=0) != 0)
    return Chunk(chunk.batch, chunk.head, chunk.rows, inside)


@triton.jit
def half_layout_offsets(pairs, F: tl.constexpr, P: tl.constexpr):
    """Offsets of both members of each pair in layout "half". Features that do not rotate form pairs too."""
    PAIRS: tl.constexpr = (F + 1) // 2
    first = pairs + tl.where(pairs < P, 0, P)
    return first, first + tl.where(pairs < P, P, PAIRS - P)


@triton.jit
def feature_offsets(w0, PAIRS: tl.constexpr):
    """(2 W,): offsets in memory of the features of pairs w0 .. w0 + W; F or more beyond the last feature."""
    i = 2 * w0 + tl.arange(0, 2 * PAIRS.W)
    if PAIRS.INTERLEAVED:
        return i
    else:
        first, second = half_layout_offsets(i // 2, PAIRS.F, PAIRS.P)
        return tl.where(i < PAIRS.F, tl.where(i % 2 == 0, first, second), PAIRS.F)


@triton.jit
def mask_features(x, row_mask, w0, PAIRS: tl.constexpr):
    """x (C, 2 W) with 0 beyond feature F and, unless row_mask is None, in masked rows.

    After a masked load phi(0) may not be 0.
    """
    if PAIRS.F % (2 * PAIRS.W) != 0:
        exists = 2 * w0 + tl.arange(0, 2 * PAIRS.W) < PAIRS.F
        x = tl.where(exists[None, :], x, 0.0)
    if row_mask is None:
        return x
    else:
        return tl.where(row_mask[:, None], x, 0.0)


@triton.jit
def feature_pointers(x, chunk, w0, PAIRS: tl.constexpr):
    """Pointers (C, 2 W) to the features of pairs from w0 on, and a mask of those that exist."""
    f = 2 * w0 + tl.arange(0, 2 * PAIRS.W)
    mask = chunk.inside[:, None]
    if PAIRS.F % (2 * PAIRS.W) != 0:
        mask = mask & (f < PAIRS.F)[None, :]
    return row_pointers(x, chunk) + f[None, :].to(tl.int64) * x.strides[3], mask


@triton.jit
def half_layout_pointers(x, chunk, w0, PAIRS: tl.constexpr):
    """Pointers (C, W) to the first and to the second members of the pairs, with their masks."""
    X = row_pointers(x, chunk)
    pairs = w0 + tl.arange(0, PAIRS.W)
    f1, f2 = half_layout_offsets(pairs, PAIRS.F, PAIRS.P)
    mask1, mask2 = chunk.inside[:, None], chunk.inside[:, None]
    if PAIRS.F % (2 * PAIRS.W) != 0:
        mask1, mask2 = mask1 & (2 * pairs < PAIRS.F)[None, :], mask2 & (2 * pairs + 1 < PAIRS.F)[None, :]
    X1 = X + f1[None, :].to(tl.int64) * x.strides[3]
    X2 = X + f2[None, :].to(tl.int64) * x.strides[3]
    return X1, mask1, X2, mask2


@triton.jit
def load_features(x, chunk, w0, PAIRS: tl.constexpr):
    """A tile (C, 2 W) of q or k, Rows (b, n, heads, f); 0 outside."""
    if PAIRS.INTERLEAVED:
        X, mask = feature_pointers(x, chunk, w0, PAIRS)
        return tl.load(X, mask=mask, other=0)
    else:
        X1, mask1, X2, mask2 = half_layout_pointers(x, chunk, w0, PAIRS)
        return side_by_side(tl.load(X1, mask=mask1, other=0), tl.load(X2, mask=mask2, other=0))


@triton.jit
def store_features(x, tile, chunk, w0, PAIRS: tl.constexpr):
    tile = tile.to(x.pointer.dtype.element_ty)
    if PAIRS.INTERLEAVED:
        X, mask = feature_pointers(x, chunk, w0, PAIRS)
        tl.store(X, tile, mask=mask)
    else:
        X1, mask1, X2, mask2 = half_layout_pointers(x, chunk, w0, PAIRS)
        x1, x2 = members(tile)
        tl.store(X1, x1, mask=mask1)
        tl.store(X2, x2, mask=mask2)


@triton.jit
def load_values(x, chunk, e, E: tl.constexpr, BE: tl.constexpr):
    """A tile (C, BE) of v or of the output, Rows (b, n, heads, e); 0 outside."""
    mask = chunk.inside[:, None]
    if E % BE != 0:
        mask = mask & (e < E)[None, :]
    return tl.load(row_pointers(x, chunk) + e[None, :].to(tl.int64) * x.strides[3], mask=mask, other=0)


@triton.jit
def load_write(write, chunk):
    """w (C,) in float32, the factors of the values that the tokens write."""
    return load_per_token(write, chunk).to(tl.float32)


@triton.jit
def store_values(x, tile, chunk, e, E: tl.constexpr, BE: tl.constexpr):
    mask = chunk.inside[:, None]
    if E % BE != 0:
        mask = mask & (e < E)[None, :]
    X = row_pointers(x, chunk) + e[None, :].to(tl.int64) * x.strides[3]
    tl.store(X, tile.to(x.pointer.dtype.element_ty), mask=mask)


@triton.jit
def load_state(state, index, f, e, F: tl.constexpr, E: tl.constexpr):
    """S[index]^T (BE, 2 W), from states (S, Z) whose S (.., f, e) is contiguous; 0 if S is None."""
    if state[0] is None:
        return tl.zeros([e.shape[0], f.shape[0]], tl.float32)
    else:
        inside = (e < E)[:, None] & (f < F)[None, :]
        return tl.load(state[0] + index * F * E + f[None, :] * E + e[:, None], mask=inside, other=0)


@triton.jit
def load_states(
    state, index, w0, e0, WP: tl.constexpr, EP: tl.constexpr, BE: tl.constexpr, E: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """The parts s[i][w] of S^T, tiles (BE, 2 W), and z[w] of z, from pair w0 and value e0 on."""
    s, z = (), ()
    for w in tl.static_range(WP):
        z = z + (load_z(state, index, feature_offsets(w0 + w * PAIRS.W, PAIRS), PAIRS.F),)
    for i in tl.static_range(EP):
        e, s_i = e0 + i * BE + tl.arange(0, BE), ()
        for w in tl.static_range(WP):
            s_i = s_i + (load_state(state, index, feature_offsets(w0 + w * PAIRS.W, PAIRS), e, PAIRS.F, E),)
        s = s + (s_i,)
    return s, z


@triton.jit
def store_state(state, index, s, f, e, F: tl.constexpr, E: tl.constexpr):
    inside = (e < E)[:, None] & (f < F)[None, :]
    tl.store(state[0] + index * F * E + f[None, :] * E + e[:, None], s, mask=inside)


@triton.jit
def load_z(state, index, f, F: tl.constexpr):
    """Z[index] (2 W,) as float64, from states (S, Z); 0 if Z is None."""
    if state[1] is None:
        return tl.zeros([f.shape[0]], tl.float64)
    else:
        return tl.load(state[1] + index * F + f, mask=f < F, other=0).to(tl.float64)


@triton.jit
def store_z(state, index, z, f, F: tl.constexpr):
    tl.store(state[1] + index * F + f, z.to(state[1].dtype.element_ty), mask=f < F)


@triton.jit
def store_states(state, index, s, z, w0, e0, with_z, BE: tl.constexpr, E: tl.constexpr, PAIRS: tl.constexpr):
    """Stores the parts of S and, in one of the programs that have them, of z."""
    for w in tl.static_range(len(z)):
        f = feature_offsets(w0 + w * PAIRS.W, PAIRS)
        for i in tl.static_range(len(s)):
            store_state(state, index, s[i][w], f, e0 + i * BE + tl.arange(0, BE), PAIRS.F, E)
        if with_z:
            store_z(state, index, z[w], f, PAIRS.F)


@triton.jit
def load_rotation(table, chunk, w0, PAIRS: tl.constexpr):
    """cos and sin (C, W) of the rows' angles from a table, laid out as q; 1 and 0 where nothing rotates."""
    if PAIRS.P == 0:
        return 1.0, 0.0
    else:
        P: tl.constexpr = PAIRS.P
        pairs = w0 + tl.arange(0, PAIRS.W)
        all_rotate: tl.constexpr = 2 * P >= PAIRS.F and P % PAIRS.W == 0
        mask = chunk.inside[:, None]
        TABLE = table.pointer + (chunk.batch * table.strides[0] + chunk.head * table.strides[1])
        TABLE += chunk.rows[:, None].to(tl.int64) * (2 * P)
        if PAIRS.INTERLEAVED:
            i = 2 * w0 + tl.arange(0, 2 * PAIRS.W)
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
def store_angle_gradients(D_ANGLES, x, tokens, inside, w0, P: tl.constexpr):
    """Stores x (C, W) in the rows ``tokens`` (C,) of D_ANGLES (.., P), for the pairs from w0 on that rotate."""
    pairs = w0 + tl.arange(0, x.shape[1])
    tl.store(D_ANGLES + tokens[:, None] * P + pairs[None, :], x, mask=inside[:, None] & (pairs < P)[None, :])

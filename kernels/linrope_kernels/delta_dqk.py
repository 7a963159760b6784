"""The gradients of the features and gates of one chunk, from the states around it. Equations in delta_backward.py."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from linrope_kernels.chunk_scores import chunk_of, levels
from linrope_kernels.decay import MIN_LOG_DECAY, load_per_token
from linrope_kernels.memory import (
    Chunk,
    Pairs,
    Rows,
    load_values,
    program_of,
    store_angle_gradients,
    store_values,
)
from linrope_kernels.pieces import (
    add_rows_where,
    angle_gradients,
    dot,
    dot_rows,
    members,
    operand,
    rounded_products,
    side_by_side,
    sum_of_products,
)
from linrope_kernels.unit_decay import (
    between_halves,
    from_start,
    halving,
    load_unit_decay,
    over_chunk,
    score_decay,
    to_end,
    unit_columns,
)


@triton.jit
def chunk_state_pointers(STATES, index, e, f, E: tl.constexpr, FW: tl.constexpr):
    """Pointers (BE, 2 W) to a chunk's state in STATES (.., e, f), its features as in a tile; and which exist."""
    at = index * (E * FW) + e[:, None] * FW + f[None, :]
    return STATES + at, (e < E)[:, None] & (f < FW)[None, :]


@triton.jit
def load_chunk_state(STATES, index, e, f, E: tl.constexpr, FW: tl.constexpr):
    at, inside = chunk_state_pointers(STATES, index, e, f, E, FW)
    return tl.load(at, mask=inside, other=0)


@triton.jit
def add_pairs(
    dx, dk, da, weights, x, k, sums, decay, chunk, first, last, columns, UNITS: tl.constexpr, DOT: tl.constexpr
):  # fmt: skip
    """Adds to dx, dk and da what the pairs of a reader x_i and an earlier writer k_j contribute.

    weights (C, C): the gradients of their products, which count for i > j. da: as in add_terms. decay: a UnitDecay or
    None.
    """
    C: tl.constexpr = x.shape[0]
    i, j, zero = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :], tl.zeros([C, x.shape[1]], tl.float32)
    if UNITS:
        weights = operand(weights, DOT)
        for level in range(levels(C)):
            factor, is_query = halving(sums, decay.D, chunk, first, last, columns, level, DOT)
            w = tl.where(between_halves(i, j, level), weights, 0.0).to(weights.dtype)
            of_x = factor * dot(w, operand(tl.where(is_query, 0.0, k * factor), DOT), zero, DOT)
            of_k = factor * dot(tl.trans(w), operand(tl.where(is_query, x * factor, 0.0), DOT), zero, DOT)
            dx, dk = dx + of_x, dk + of_k
            # The tokens between: in the right half up to the reader, in the left half after the writer
            between = ((i >> level) == (j >> level)) & tl.where(is_query, j >= i, j < i)
            da = add_rows_where(between, x * of_x + k * of_k, da, DOT)
    else:
        if decay is not None:
            weights *= score_decay(decay.D, DOT)
        weights = tl.where(i > j, weights, 0.0)
        if decay is not None:
            pairs = weights * dot_rows(operand(x, DOT), operand(k, DOT), DOT)
            later = add_rows_where(j >= i, pairs, tl.zeros([C, C], tl.float32), DOT)
            da += tl.sum(tl.where(j < i, later, 0.0), 1)
        w = operand(weights, DOT)
        dx = dot(w, operand(k, DOT), dx, DOT)
        dk = dot(tl.trans(w), operand(x, DOT), dk, DOT)
    return dx, dk, da


@triton.jit
def add_terms(da, terms, READERS: tl.constexpr, UNITS: tl.constexpr, DOT: tl.constexpr):
    """Adds to da the terms (C, 2 W) of tokens that read the state before the chunk, or that write to the one after it.

    A reader's go to all tokens of the chunk up to it, a writer's to those after it. da: (C, 2 W), or if all features
    decay alike (C,).
    """
    C: tl.constexpr = terms.shape[0]
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    if UNITS:
        return add_rows_where((j >= i) if READERS else (j < i), terms, da, DOT)
    else:
        of_token = tl.sum(rounded_products(terms), 1)[None, :]
        return da + tl.sum(tl.where((j >= i) if READERS else (j < i), of_token, 0.0), 1)


@triton.jit
def store_units(D_LOG, log, da, chunk, token, w0, PAIRS: tl.constexpr):
    """Stores the gradient of log decay per unit: a pair that turns has the sum of its two features."""
    first, second = members(da)
    i, columns = 2 * w0 + tl.arange(0, 2 * PAIRS.W), unit_columns(w0, True, PAIRS)
    turns = i // 2 < PAIRS.P
    d = tl.where(turns[None, :], side_by_side(first + second, first + second), da)
    inside = chunk.inside[:, None] & ((i < PAIRS.F) & (~turns | (i % 2 == 0)))[None, :]
    LOG = log.pointer + (chunk.batch * log.strides[0] + chunk.head * log.strides[2])
    LOG += chunk.rows[:, None].to(tl.int64) * log.strides[1] + columns[None, :] * log.strides[3]
    d = tl.where(tl.load(LOG, mask=inside, other=0) < MIN_LOG_DECAY, 0.0, d)  # lower gates are clamped to it
    tl.store(D_LOG + token[:, None] * (PAIRS.F - PAIRS.P) + columns[None, :], d, mask=inside)


class Results(NamedTuple):
    """Where ``delta_dqk_kernel`` stores gradients; None: not wanted. The caller sums over an axis of blocks."""

    q: Rows  # (b, n, h, f): dq^
    k: Rows  # (b, n, g, f): dk^
    erase: Any  # (b, n, g, blocks) float32
    log_decay: Any  # (b, n, g, blocks) or (b, n, g, units) float32
    angles: Any  # (b, n, g, P) float32: <J q^, dq^> + <J k^, dk^>, each token's pair with itself left out


@triton.jit(do_not_specialize=["n", "g", "group", "chunks"])
def delta_dqk_kernel(
    q, keys, log,  # Rows (b, n, h, f): q^; Keys; Rows (b or 1, n, g or 1, units): log decay
    u, du,  # Rows (b, n, g, e)
    dout,  # Rows (b, n, h, e)
    STATES, D_STATES,  # (b g chunks, e, f): S before each chunk and T after it, transposed
    results,  # Results
    n, g, group, chunks,
    F: tl.constexpr, E: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr,
    UNITS: tl.constexpr, DOT: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, BE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradients of features, erase, log decay and angles; one program per (key/value head, chunk, pair block)."""
    PAIRS: tl.constexpr = Pairs(F, P, INTERLEAVED, W)
    FW: tl.constexpr = (F + 1) // 2 * 2
    BLOCKS: tl.constexpr = (FW // 2 + W - 1) // W
    ERASE: tl.constexpr = keys.erase.pointer is not None
    ANGLES: tl.constexpr = results.angles is not None
    DECAYS: tl.constexpr = keys.sums.rest.pointer is not None
    block, segment, bg = program_of(BLOCKS, chunks)
    batch, kv_head = (bg // g).to(tl.int64), (bg % g).to(tl.int64)
    state_index = bg.to(tl.int64) * chunks + segment
    first, last, chunk = chunk_of(keys, segment, batch, kv_head, n, C)
    if first > last:  # nothing has been written to its states
        return
    w0, i, j = block * W, tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    f, columns = 2 * w0 + tl.arange(0, 2 * W), unit_columns(w0, UNITS, PAIRS)
    token = (batch * n + chunk.rows) * g + kv_head
    k = load_values(keys.k, chunk, f, FW, 2 * W).to(tl.float32)
    decay = load_unit_decay(keys.sums, chunk, first, last, columns, DOT) if DECAYS else None
    # What the states before and after the chunk contribute
    dE, dk = tl.zeros([C, 2 * W], tl.float32), tl.zeros([C, 2 * W], tl.float32)
    product = tl.zeros([2 * W], tl.float32)
    weights, da = tl.zeros([C, C], tl.float32), tl.zeros([C, 2 * W] if UNITS else [C], tl.float32)
    for e0 in range(0, E, BE):
        e = e0 + tl.arange(0, BE)
        s = load_chunk_state(STATES, state_index, e, f, E, FW)
        t = load_chunk_state(D_STATES, state_index, e, f, E, FW)
        u_e = operand(load_values(u, chunk, e, E, BE), DOT)
        dk = dot(u_e, operand(t, DOT), dk, DOT)
        if DECAYS:
            product += sum_of_products(s.to(tl.float32), t.to(tl.float32), 0)
        if ERASE:
            d = operand(-load_values(du, chunk, e, E, BE).to(tl.float32), DOT)
            dE = dot(d, operand(s, DOT), dE, DOT)
            weights = dot(d, tl.trans(u_e), weights, DOT)
    dk = to_end(dk, decay)
    turned, of_own = tl.zeros([C, W], tl.float32), tl.zeros([C, 2 * W], tl.float32)
    if DECAYS:
        da = add_terms(da, k * dk, False, UNITS, DOT)
    if ERASE:
        b = load_per_token(keys.erase, chunk).to(tl.float32)[:, None]
        dE = from_start(dE, decay)
        if DECAYS:
            da = add_terms(da, b * k * dE, True, UNITS, DOT)
        dE, dk, da = add_pairs(
            dE, dk, da, weights, b * k, k, keys.sums, decay, chunk, first, last, columns, UNITS, DOT
        )
        tl.store(results.erase + token * BLOCKS + block, sum_of_products(k, dE, 1), mask=chunk.inside)
        if ANGLES:
            turned += angle_gradients(b * k, dE)
            of_own = b * dE
        else:
            dk += b * dE
    if dout.pointer is not None:
        for r in range(group):
            queries = Chunk(batch, kv_head * group + r, chunk.rows, chunk.inside)
            x = load_values(q, queries, f, FW, 2 * W).to(tl.float32)
            dx, weights = tl.zeros([C, 2 * W], tl.float32), tl.zeros([C, C], tl.float32)
            for e0 in range(0, E, BE):
                e = e0 + tl.arange(0, BE)
                d = operand(load_values(dout, queries, e, E, BE), DOT)
                dx = dot(d, operand(load_chunk_state(STATES, state_index, e, f, E, FW), DOT), dx, DOT)
                weights = dot(d, tl.trans(operand(load_values(u, chunk, e, E, BE), DOT)), weights, DOT)
            dx = from_start(dx, decay)
            if DECAYS:
                da = add_terms(da, x * dx, True, UNITS, DOT)
            own = tl.sum(tl.where(i == j, weights, 0.0), 1)[:, None]
            dx, dk, da = add_pairs(
                dx, dk, da, weights, x, k, keys.sums, decay, chunk, first, last, columns, UNITS, DOT
            )
            if ANGLES:
                turned += angle_gradients(x, dx)
                of_own += own * x
            else:
                dk += own * x
            store_values(results.q, dx + own * k, queries, f, FW, 2 * W)
    if ANGLES:
        turned += angle_gradients(k, dk)
        store_angle_gradients(results.angles, turned, token, chunk.inside, w0, P)
        dk += of_own
    store_values(results.k, dk, chunk, f, FW, 2 * W)
    if DECAYS:
        products = over_chunk(product[None, :], decay)
        if UNITS:
            store_units(results.log_decay, log, da + products, chunk, token, w0, PAIRS)
        else:
            d_log = da + tl.sum(products)
            d_log = tl.where(load_per_token(log, chunk) < MIN_LOG_DECAY, 0.0, d_log)  # clamped to it
            tl.store(results.log_decay + token * BLOCKS + block, d_log, mask=chunk.inside)

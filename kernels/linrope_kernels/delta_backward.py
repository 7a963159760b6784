"""Gradients of the delta rule and of a decay per unit, for g the gradient of num and T that of the state after a chunk:

    dU      = (I + L)^-T (scores^T g + e^(D_end - D) K^ T)
    T      <- e^(D_end) T + (e^D Q^)^T g - (b e^D K^)^T dU
    dq^_i   = e^(D_i) S g_i     + sum_(j<=i) e^(D_i - D_j) <g_i, u_j> k^_j
    dE_i    = -e^(D_i) S dU_i   - sum_(j<i)  e^(D_i - D_j) <dU_i, u_j> k^_j          E = b k^: one more query
    dk^_j   = e^(D_end - D_j) T u_j + sum_(i>=j) e^(D_i - D_j) <g_i, u_j> q^_i - sum_(i>j) .. <dU_i, u_j> E_i + b dE_j
    da_t    = e^(D_end) <S, T> + sum_(i>=t) <q^_i, e^(D_i) S g_i> + sum_(j<t) <k^_j, e^(D_end - D_j) T u_j>
              + sum_(j<t<=i) e^(D_i - D_j) <q^_i, k^_j> <g_i, u_j>                   with E_i and -dU_i, too

S is the state before the chunk. So one sweep finds S of all chunks, one in reverse dU and T, and then a chunk needs no
other: ``delta_dqk_kernel`` computes the rest for all of them side by side. In da each pair of a reader and a writer
counts once, with the factor e^(a_t) of every token between them: nothing cancels. Without erase there is no E, and U is
w V.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from linrope_kernels.angles import Phases, make_tables
from linrope_kernels.chunk_scores import chunks_of, levels
from linrope_kernels.decay import MIN_LOG_DECAY, load_per_token
from linrope_kernels.delta_forward import (
    add_written,
    chunks_of_sequence,
    keeps_u,
    read,
)
from linrope_kernels.features import d_features
from linrope_kernels.gradients import Gradients
from linrope_kernels.launch import (
    NO_STATE,
    State,
    delta_tile,
    features_dtype,
    launch_delta,
    new_like,
    new_state,
)
from linrope_kernels.memory import (
    Chunk,
    Pairs,
    Rows,
    feature_offsets,
    load_state,
    load_values,
    load_write,
    program_of,
    rows_of,
    rows_of_units,
    seen,
    segment_span,
    store_angle_gradients,
    store_state,
    store_values,
    store_z,
)
from linrope_kernels.pieces import (
    add_rows_where,
    angle_gradients,
    dot,
    dot_rows,
    members,
    operand,
    precise_dot,
    rounded_products,
    side_by_side,
    sum_of_products,
    through_registers,
)
from linrope_kernels.unit_decay import (
    between_halves,
    from_start,
    halving,
    load_row_decay,
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
def store_chunk_state(STATES, index, s, e, f, E: tl.constexpr, FW: tl.constexpr):
    at, inside = chunk_state_pointers(STATES, index, e, f, E, FW)
    tl.store(at, s.to(STATES.dtype.element_ty), mask=inside)


@triton.jit
def load_chunk_state(STATES, index, e, f, E: tl.constexpr, FW: tl.constexpr):
    at, inside = chunk_state_pointers(STATES, index, e, f, E, FW)
    return tl.load(at, mask=inside, other=0)


@triton.jit(do_not_specialize=["n", "g", "chunks"])
def delta_states_kernel(
    keys, u, start,  # as in delta_fwd_kernel
    STATES,  # (b g chunks, e, f): S before each chunk, transposed
    n, g, chunks,
    F: tl.constexpr, E: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr,
    UNITS: tl.constexpr, DOT: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, BE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """S before each chunk; one program per (key/value head of a sequence, pair block, value block)."""
    PAIRS: tl.constexpr = Pairs(F, P, INTERLEAVED, W)
    FW: tl.constexpr = (F + 1) // 2 * 2
    BLOCKS: tl.constexpr = (FW // 2 + W - 1) // W
    VALUE_BLOCKS: tl.constexpr = (E + BE - 1) // BE
    program = tl.program_id(0)
    w0, e0 = program % BLOCKS * W, program // BLOCKS % VALUE_BLOCKS * BE
    index = (program // BLOCKS // VALUE_BLOCKS).to(tl.int64)
    kv_head, f, e = index % g, 2 * w0 + tl.arange(0, 2 * W), e0 + tl.arange(0, BE)
    batch, begin, stop = chunks_of_sequence(keys.first_spans, index // g, chunks)
    columns = unit_columns(w0, UNITS, PAIRS)
    s = load_state(start, index, feature_offsets(w0, PAIRS), e, F, E)
    for segment in tl.range(begin, stop, num_stages=STAGES):
        first, end, _ = segment_span(keys.spans, segment, C, n)
        rows = first + tl.arange(0, C)
        chunk = Chunk(batch, kv_head, rows, rows < end)
        store_chunk_state(STATES, (batch * g + kv_head) * chunks + segment, s, e, f, E, FW)
        decay = None
        if keys.sums.rest.pointer is not None:
            decay = load_row_decay(keys.sums, chunk, first, end - 1, columns, UNITS, DOT)
        k = operand(load_values(keys.writes, chunk, f, FW, 2 * W), DOT)
        s = add_written(s, load_values(u, chunk, e, E, BE), k, decay, rows < end, DOT)


@triton.jit(do_not_specialize=["n", "g", "group", "chunks"])
def delta_dv_kernel(
    q, keys, v,  # as in delta_fwd_kernel
    after,  # (sequences g, f, e): the gradient of the state after each sequence; None: 0
    dout,  # Rows (b, n, h, e); None: there are no queries
    du,  # Rows (b, n, g, e)
    dv,  # Rows (b, n, g, e)
    WRITE_TERMS,  # (b, n, g, value blocks) float32: <v, du>; None: not wanted
    STATES,  # (b g chunks, e, f): T after each chunk, transposed
    d_start,  # states: the gradient of that before each sequence; None: not wanted
    n, g, group, chunks,
    F: tl.constexpr, E: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr,
    UNITS: tl.constexpr, DOT: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, BE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dU, dv and T; one program per (key/value head of a sequence, value block)."""
    PAIRS: tl.constexpr = Pairs(F, P, INTERLEAVED, W)
    FW: tl.constexpr = (F + 1) // 2 * 2
    BLOCKS: tl.constexpr = (E + BE - 1) // BE
    block, index = tl.program_id(0) % BLOCKS, (tl.program_id(0) // BLOCKS).to(tl.int64)
    kv_head, f, e = index % g, tl.arange(0, 2 * W), block * BE + tl.arange(0, BE)
    batch, begin, stop = chunks_of_sequence(keys.first_spans, index // g, chunks)
    columns, features, i = unit_columns(0, UNITS, PAIRS), feature_offsets(0, PAIRS), tl.arange(0, C)
    t = load_state(after, index, features, e, F, E)
    for later in tl.range(begin, stop, num_stages=STAGES):
        segment = begin + stop - 1 - later
        first, end, _ = segment_span(keys.spans, segment, C, n)
        rows = first + tl.arange(0, C)
        chunk = Chunk(batch, kv_head, rows, rows < end)
        store_chunk_state(STATES, (batch * g + kv_head) * chunks + segment, t, e, f, E, FW)
        decay = None
        if keys.sums.rest.pointer is not None:
            decay = load_row_decay(keys.sums, chunk, first, end - 1, columns, UNITS, DOT)
        k = operand(load_values(keys.writes, chunk, f, FW, 2 * W), DOT)
        d = to_end(read(k, t, DOT), decay)
        t = over_chunk(t, decay)
        if dout.pointer is not None:
            for r in range(group):
                queries = Chunk(batch, kv_head * group + r, rows, rows < end)
                # With fewer than 64 values a copy could overwrite dout while Hopper's matrix unit still reads it.
                d_outputs = through_registers(load_values(dout, queries, e, E, BE), rows < end)
                scores = operand(load_values(keys.scores, queries, i, C, C), DOT)
                d = dot(tl.trans(scores), operand(d_outputs, DOT), d, DOT)
                x = operand(load_values(q, queries, f, FW, 2 * W), DOT)
                t = dot(tl.trans(operand(from_start(d_outputs, decay), DOT)), x, t, DOT)
        if keys.erase.pointer is not None:
            inverse = tl.trans(load_values(keys.inverse, chunk, i, C, C))
            d = precise_dot(inverse, d, tl.zeros([C, BE], tl.float32), DOT)
            erased = -load_per_token(keys.erase, chunk).to(tl.float32)[:, None] * d
            if UNITS:
                k = operand(load_values(keys.reads, chunk, f, FW, 2 * W), DOT)
            t = dot(tl.trans(operand(from_start(erased, decay), DOT)), k, t, DOT)
        store_values(du, d, chunk, e, E, BE)
        d = tl.where(seen(keys.mask, chunk, n).inside[:, None], d, 0.0)
        if keys.write.pointer is not None:
            values = load_values(v, seen(keys.mask, chunk, n), e, E, BE).to(tl.float32)
            if WRITE_TERMS is not None:
                at = ((batch * n + rows) * g + kv_head) * BLOCKS + block
                tl.store(WRITE_TERMS + at, sum_of_products(values, d, 1), mask=rows < end)
            d *= load_write(keys.write, seen(keys.mask, chunk, n))[:, None]
        store_values(dv, d, chunk, e, E, BE)
    if d_start[0] is not None:
        store_state(d_start, index, t, features, e, F, E)
        if block == 0:
            store_z(d_start, index, tl.zeros([2 * W], tl.float32), features, F)


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
    """What ``delta_dqk_kernel`` computes; None: not wanted. Blocks are blocks of pairs, whose terms add up."""

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
    batch, kv_head, state_index = (
        (bg // g).to(tl.int64),
        (bg % g).to(tl.int64),
        bg.to(tl.int64) * chunks + segment,
    )
    first, end, _ = segment_span(keys.spans, segment, C, n)
    last = tl.maximum(end - 1, 0)
    w0, i, j = block * W, tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    rows, f, columns = first + tl.arange(0, C), 2 * w0 + tl.arange(0, 2 * W), unit_columns(w0, UNITS, PAIRS)
    chunk, token = Chunk(batch, kv_head, rows, rows < end), (batch * n + rows) * g + kv_head
    k = load_values(keys.k, chunk, f, FW, 2 * W).to(tl.float32)
    decay = load_unit_decay(keys.sums, chunk, first, last, columns, DOT) if DECAYS else None
    # What the states before and after the chunk contribute
    dE, dk, product = (
        tl.zeros([C, 2 * W], tl.float32),
        tl.zeros([C, 2 * W], tl.float32),
        tl.zeros([2 * W], tl.float32),
    )
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
            queries = Chunk(batch, kv_head * group + r, rows, rows < end)
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


def delta_bwd(
    call: Any, phases: Phases | None, start: State | None, saved: list[Tensor], d_out: Tensor | None,
    d_end: State | None,
) -> Gradients:  # fmt: skip
    """The gradients of a call. saved: the tensors that ``delta_fwd`` saved. d_out: None if there are no queries."""
    (b, n, g, e), f, tables = call.v.shape, call.k.shape[3], make_tables(call, phases)
    chunks = chunks_of(call, tables, saved[-1] if call.erase is not None else None, solved=True)
    number, width = chunks.segments.number, -(-f // 2) * 2
    q, keys, values = rows_of(chunks.q), chunks.keys, rows_of(call.v)
    u = rows_of(saved[0] if keeps_u(call) else call.v)

    def new(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return new_like(call.v, chunks.segments, b, n, *sizes, dtype=dtype)

    dtype, d_out_rows = features_dtype(call), rows_of(d_out)
    states, d_states = (call.k.new_empty(b * g * number, e, width, dtype=dtype) for _ in range(2))
    launch_delta(call, delta_states_kernel, "delta_states", call.sequences * g, keys, u, start or NO_STATE, states,
                 n, g, number)  # fmt: skip
    du, dv = new(g, e, dtype=dtype), new(g, e, dtype=call.v.dtype)
    d_write = None if call.write is None else new(g, -(-e // delta_tile(call, "delta_dv").values))
    d_start = None if start is None else new_state(call, start)
    launch_delta(
        call, delta_dv_kernel, "delta_dv", call.sequences * g, rows_of(chunks.q_reads), keys, values,
        d_end or NO_STATE, d_out_rows, rows_of(du), rows_of(dv), d_write, d_states, d_start or NO_STATE,
        n, g, call.group, number,
    )  # fmt: skip
    pair_blocks = -(-(width // 2) // delta_tile(call, "delta_dqk").pairs)
    log, dq_hat = call.log_decay, None if d_out is None else new(g * call.group, width, dtype=dtype)
    results = Results(
        rows_of(dq_hat),
        rows_of(dk_hat := new(g, width, dtype=dtype)),
        None if call.erase is None else new(g, pair_blocks),
        None if log is None else new(g, log.shape[3] if call.decays_by_unit else pair_blocks),
        None if call.angle_steps is None else new(g, call.pairs),
    )
    launch_delta(
        call, delta_dqk_kernel, "delta_dqk", b * g * number, q, keys, rows_of_units(log), u, rows_of(du),
        d_out_rows, states, d_states, results, n, g, call.group, number,
    )  # fmt: skip
    dq = None if call.q is None else torch.zeros_like(call.q)  # if only the last state has a gradient
    if dq_hat is not None:
        dq = d_features(call, call.q, tables[0], dq_hat, False)
    return Gradients(
        dq,
        d_features(call, call.k, tables[1], dk_hat, True),
        dv, d_start, results.log_decay, d_write, results.erase, results.angles,
    )  # fmt: skip

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

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from linrope_kernels.angles import Phases, make_tables
from linrope_kernels.chunk_scores import chunk_of, chunks_of
from linrope_kernels.decay import load_per_token
from linrope_kernels.delta_dqk import Results, chunk_state_pointers, delta_dqk_kernel
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
    feature_offsets,
    load_state,
    load_values,
    load_write,
    rows_of,
    rows_of_units,
    seen,
    store_state,
    store_values,
    store_z,
)
from linrope_kernels.pieces import (
    dot,
    operand,
    precise_dot,
    sum_of_products,
    through_registers,
)
from linrope_kernels.unit_decay import (
    from_start,
    load_row_decay,
    over_chunk,
    to_end,
    unit_columns,
)


@triton.jit
def store_chunk_state(STATES, index, s, e, f, E: tl.constexpr, FW: tl.constexpr):
    at, inside = chunk_state_pointers(STATES, index, e, f, E, FW)
    tl.store(at, s.to(STATES.dtype.element_ty), mask=inside)


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
    DECAYS: tl.constexpr = keys.sums.rest.pointer is not None
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
        first, last, chunk = chunk_of(keys, segment, batch, kv_head, n, C)
        store_chunk_state(STATES, (batch * g + kv_head) * chunks + segment, s, e, f, E, FW)
        decay = load_row_decay(keys.sums, chunk, first, last, columns, UNITS, DOT) if DECAYS else None
        k = operand(load_values(keys.writes, chunk, f, FW, 2 * W), DOT)
        s = add_written(s, load_values(u, chunk, e, E, BE), k, decay, chunk.inside, DOT)


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
    DECAYS: tl.constexpr = keys.sums.rest.pointer is not None
    BLOCKS: tl.constexpr = (E + BE - 1) // BE
    block, index = tl.program_id(0) % BLOCKS, (tl.program_id(0) // BLOCKS).to(tl.int64)
    kv_head, f, e = index % g, tl.arange(0, 2 * W), block * BE + tl.arange(0, BE)
    batch, begin, stop = chunks_of_sequence(keys.first_spans, index // g, chunks)
    columns, features, i = unit_columns(0, UNITS, PAIRS), feature_offsets(0, PAIRS), tl.arange(0, C)
    t = load_state(after, index, features, e, F, E)
    for later in tl.range(begin, stop, num_stages=STAGES):
        segment = begin + stop - 1 - later
        first, last, chunk = chunk_of(keys, segment, batch, kv_head, n, C)
        store_chunk_state(STATES, (batch * g + kv_head) * chunks + segment, t, e, f, E, FW)
        decay = load_row_decay(keys.sums, chunk, first, last, columns, UNITS, DOT) if DECAYS else None
        k = operand(load_values(keys.writes, chunk, f, FW, 2 * W), DOT)
        d = to_end(read(k, t, DOT), decay)
        t = over_chunk(t, decay)
        if dout.pointer is not None:
            for r in range(group):
                queries = Chunk(batch, kv_head * group + r, chunk.rows, chunk.inside)
                # With fewer than 64 values a copy could overwrite dout while Hopper's matrix unit still reads it.
                d_outputs = through_registers(load_values(dout, queries, e, E, BE), chunk.inside)
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
                at = ((batch * n + chunk.rows) * g + kv_head) * BLOCKS + block
                tl.store(WRITE_TERMS + at, sum_of_products(values, d, 1), mask=chunk.inside)
            d *= load_write(keys.write, seen(keys.mask, chunk, n))[:, None]
        store_values(dv, d, chunk, e, E, BE)
    if d_start[0] is not None:
        store_state(d_start, index, t, features, e, F, E)
        if block == 0:
            store_z(d_start, index, tl.zeros([2 * W], tl.float32), features, F)


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
    dq = None if dq_hat is None else d_features(call, call.q, tables[0], dq_hat, False)
    if dq is None and call.q is not None:  # only the last state has a gradient
        dq = torch.zeros_like(call.q)
    return Gradients(
        dq,
        d_features(call, call.k, tables[1], dk_hat, True),
        dv, d_start, results.log_decay, d_write, results.erase, results.angles,
    )  # fmt: skip

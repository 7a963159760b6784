"""The delta rule and a decay per unit: a scan over the chunks of a sequence, with the state on chip.

    R   = w V - b e^D K^ S           what the values lack, as the state predicts them
    U   = (I + L)^-1 R               what the tokens write: (I + L) U = R, chunk_scores.py
    num = e^D Q^ S + scores U
    S  <- e^(D_end) S + (e^(D_end - D) K^)^T U

e^D is a number per token, or one per token and feature. Without erase U is w V. There is no normalizer: the caller
makes it of a second call whose values are 1.

The axis letters are those of forward.py; here a segment is a chunk, and a program goes through those of a sequence.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from linrope_kernels.angles import Phases, make_tables
from linrope_kernels.chunk_scores import chunk_of, chunks_of
from linrope_kernels.decay import load_per_token
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
    seen,
    store_state,
    store_values,
    store_z,
)
from linrope_kernels.pieces import dot, fenced, operand, precise_dot
from linrope_kernels.unit_decay import from_start, load_row_decay, over_chunk, to_end, unit_columns


@triton.jit
def chunks_of_sequence(FIRST_SPANS, sequence, chunks):
    """The batch row of a sequence, and its first chunk and last + 1."""
    if FIRST_SPANS is None:
        return sequence.to(tl.int64), 0, chunks
    else:
        FIRST_SPANS += sequence
        return tl.zeros([], tl.int64), tl.load(FIRST_SPANS), tl.load(FIRST_SPANS + 1)


@triton.jit
def values_written(keys, v, chunk, n, e, E: tl.constexpr, BE: tl.constexpr):
    """w V (C, BE) in float32, 0 for masked tokens."""
    visible = seen(keys.mask, chunk, n)
    values = fenced(load_values(v, visible, e, E, BE), visible.inside).to(tl.float32)
    return values if keys.write.pointer is None else values * load_write(keys.write, visible)[:, None]


@triton.jit
def read(x, s, DOT: tl.constexpr):
    """X S (C, BE), for features X (C, 2 W), an operand, and S^T (BE, 2 W)."""
    return dot(x, tl.trans(operand(s, DOT)), tl.zeros([x.shape[0], s.shape[0]], tl.float32), DOT)


@triton.jit
def add_written(s, u, k, decay, inside, DOT: tl.constexpr):
    """S^T after the chunk: e^(D_end) S^T + (e^(D_end - D) U)^T K. u: float32; k: an operand."""
    k = fenced(k, inside)
    return dot(tl.trans(operand(to_end(u, decay), DOT)), k, over_chunk(s, decay), DOT)


@triton.jit(do_not_specialize=["n", "g", "group", "chunks"])
def delta_fwd_kernel(
    q,  # Rows (b, n, h, f): q^, per unit e^D q^; None: there are no queries
    keys,  # Keys
    v,  # Rows (b, n, g, e)
    start,  # states (sequences g, f, e) before each sequence; None: 0
    out,  # Rows (b, n, h, e)
    u,  # Rows (b, n, g, e): U, for the backward pass; None: not wanted
    last_state,  # the states after each sequence; None: not wanted
    n, g, group, chunks,
    F: tl.constexpr, E: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr,
    UNITS: tl.constexpr, DOT: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, BE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out, U and the last states; one program per (key/value head of a sequence, value block)."""
    PAIRS: tl.constexpr = Pairs(F, P, INTERLEAVED, W)
    FW: tl.constexpr = (F + 1) // 2 * 2
    DECAYS: tl.constexpr = keys.sums.rest.pointer is not None
    BLOCKS: tl.constexpr = (E + BE - 1) // BE
    block, index = tl.program_id(0) % BLOCKS, (tl.program_id(0) // BLOCKS).to(tl.int64)
    kv_head, f, e = index % g, tl.arange(0, 2 * W), block * BE + tl.arange(0, BE)
    batch, begin, stop = chunks_of_sequence(keys.first_spans, index // g, chunks)
    columns, features = unit_columns(0, UNITS, PAIRS), feature_offsets(0, PAIRS)
    s = load_state(start, index, features, e, F, E)
    for segment in tl.range(begin, stop, num_stages=STAGES):
        first, last, chunk = chunk_of(keys, segment, batch, kv_head, n, C)
        decay = load_row_decay(keys.sums, chunk, first, last, columns, UNITS, DOT) if DECAYS else None
        k = operand(load_values(keys.reads, chunk, f, FW, 2 * W), DOT)
        values = values_written(keys, v, chunk, n, e, E, BE)
        if keys.erase.pointer is not None:
            b = load_per_token(keys.erase, chunk).to(tl.float32)[:, None]
            inverse = load_values(keys.inverse, chunk, tl.arange(0, C), C, C)
            lacking = values - b * from_start(read(k, s, DOT), decay)
            values = precise_dot(inverse, lacking, tl.zeros([C, BE], tl.float32), DOT)
        if u.pointer is not None:
            store_values(u, values, chunk, e, E, BE)
        if q.pointer is not None:
            for r in range(group):
                queries = Chunk(batch, kv_head * group + r, chunk.rows, chunk.inside)
                phi_hat = fenced(operand(load_values(q, queries, f, FW, 2 * W), DOT), chunk.inside)
                num = from_start(read(phi_hat, s, DOT), decay)
                scores = operand(load_values(keys.scores, queries, tl.arange(0, C), C, C), DOT)
                num = dot(fenced(scores, chunk.inside), operand(values, DOT), num, DOT)
                store_values(out, num, queries, e, E, BE)
        if UNITS:
            k = operand(load_values(keys.writes, chunk, f, FW, 2 * W), DOT)
        s = add_written(s, values, k, decay, chunk.inside, DOT)
    if last_state[0] is not None:
        store_state(last_state, index, s, features, e, F, E)
        if block == 0:
            store_z(last_state, index, tl.zeros([2 * W], tl.float32), features, F)


def keeps_u(call: Any) -> bool:
    """True if U is not just v, so that the forward pass saves it for the backward pass."""
    return call.erase is not None or call.write is not None or call.key_mask is not None


def delta_saved(call: Any) -> list[Tensor]:
    """Empty tensors for what the forward pass saves: U, and with erase the inverse."""
    b, n, g, e = call.v.shape
    saved = []
    if keeps_u(call):
        saved.append(call.v.new_empty(b, n, g, e, dtype=features_dtype(call)))
    if call.erase is not None:
        saved.append(call.v.new_empty(b, n, g, delta_tile(call, "delta_fwd").chunk, dtype=torch.float32))
    return saved


def delta_fwd(
    call: Any, phases: Phases | None, start: State | None, save: bool
) -> tuple[Tensor | None, State | None, list[Tensor]]:
    """out (b, n, h, e), the last state if wanted, with a z of 0, and if ``save`` the tensors of ``delta_saved``."""
    b, n, g, e = call.v.shape
    saved = delta_saved(call) if save else []
    chunks = chunks_of(
        call, make_tables(call, phases), saved[-1] if save and call.erase is not None else None
    )
    end = new_state(call, start) if call.return_state else None
    out = None if call.q is None else new_like(call.v, chunks.segments, b, n, g * call.group, e)
    launch_delta(
        call, delta_fwd_kernel, "delta_fwd", call.sequences * g, rows_of(chunks.q_reads), chunks.keys, rows_of(call.v),
        start or NO_STATE, rows_of(out), rows_of(saved[0] if save and keeps_u(call) else None), end or NO_STATE,
        n, g, call.group, chunks.segments.number,
    )  # fmt: skip
    return out, end, saved

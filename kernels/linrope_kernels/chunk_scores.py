"""The scores and the triangular system of each chunk of the delta rule, which need neither values nor state.

    scores_ij = e^(D_i - D_j) <q^_i, k^_j>  (j <= i)
    L_ij      = b_i e^(D_i - D_j) <k^_i, k^_j>  (j < i)
    inverse   = (I + L)^-1,  so that U = inverse (w V - b e^D K^ S) solves  u_i + sum_(j<i) L_ij u_j = ..

The inverse X is found by rows in the blocks of 16 tokens on the diagonal, all at once, and then block by block:

    X_I = (I + L_II)^-1 (I_I - sum_(J<I) L_IJ X_J)

No power of L is formed: with nearly equal keys it may be as large as 1e28, while the inverse has entries of at most 2.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from linrope_kernels.angles import Tables
from linrope_kernels.decay import load_per_token
from linrope_kernels.features import features_of_keys, features_of_queries
from linrope_kernels.launch import cut, delta_tile, launch_delta
from linrope_kernels.memory import (
    Chunk,
    Pairs,
    Rows,
    broadcast_rows,
    load_values,
    program_of,
    rows_of,
    segment_span,
    store_values,
)
from linrope_kernels.pieces import dot, dot_rows, fenced, operand, sum_of_products
from linrope_kernels.segments import Segments
from linrope_kernels.unit_decay import (
    Sums,
    between_halves,
    halving,
    load_chunk_exponents,
    load_unit_decay,
    score_decay,
    sums_of_decay,
    unit_columns,
)


class Keys(NamedTuple):
    """The keys of a call as the delta rule's kernels read them, with their gates, scores and inverse."""

    k: Rows  # (b, n, g, f): k^ = R psi(k), as ``features`` stores it
    reads: Rows  # per unit e^D k^, by which a token reads the state before its chunk; else k^
    writes: Rows  # per unit e^(D_end - D) k^, with which it writes to the state after the chunk; else k^
    sums: Sums  # D
    write: Rows  # (b or 1, n, g or 1): the factors of the values; None: 1
    erase: Rows  # (b or 1, n, g or 1): b; None: nothing is erased
    scores: Rows  # (b, n, h, C) of the queries with these keys
    inverse: Rows  # (b, n, g, C) float32: the rows of (I + L)^-1; None: nothing is erased
    mask: Any  # (b, n) bool: the keys that queries may see; None: all
    spans: Any  # (chunks, 3) int32, as in Tokens; None: not packed
    first_spans: Any  # (sequences + 1,) int32: the first chunk of each packed sequence


@triton.constexpr_function
def levels(C: int) -> int:
    """How often a chunk can be halved."""
    return C.bit_length() - 1


@triton.jit
def chunk_of(keys, segment, batch, kv_head, n, C: tl.constexpr):
    """A chunk's first token, its last, and its rows of a key/value head. Without tokens the last precedes the first."""
    first, end, _ = segment_span(keys.spans, segment, C, n)
    rows = first + tl.arange(0, C)
    return first, end - 1, Chunk(batch, kv_head, rows, rows < end)


@triton.jit
def inverse_of(L, DOT: tl.constexpr):
    """(I + L)^-1 for L (C, C) float32, 0 but below its diagonal. Products of bfloat16 would lose all of its digits."""
    PRECISION: tl.constexpr = "ieee" if DOT == "ieee" else "tf32x3"
    C: tl.constexpr = L.shape[0]
    BLOCKS: tl.constexpr = C // 16
    block, row, i = tl.arange(0, BLOCKS)[:, None, None], tl.arange(0, 16)[None, :, None], tl.arange(0, 16)
    rows = tl.reshape(L, [BLOCKS, 16, C])
    of_block = tl.arange(0, C)[None, None, :] // 16 == block
    own = tl.sum(tl.reshape(tl.where(of_block, rows, 0.0), [BLOCKS, 16, BLOCKS, 16]), 2)
    x = tl.where(row == i[None, None, :], 1.0, tl.zeros([BLOCKS, 16, 16], tl.float32))
    for at in range(1, 16):
        of_row = tl.sum(tl.where(row == at, own, 0.0), 1)
        x = tl.where(row == at, x - sum_of_products(of_row[:, :, None], x, 1)[:, None, :], x)
    inverse = tl.zeros([C, C], tl.float32)
    for at in range(BLOCKS):  # the block's rows of the inverse, from those above
        right = tl.where(tl.arange(0, C)[None, :] == 16 * at + i[:, None], 1.0, 0.0)
        right = dot(-tl.sum(tl.where(block == at, rows, 0.0), 0), inverse, right, PRECISION)
        of_own = tl.sum(tl.where(block == at, x, 0.0), 0)
        found = dot(of_own, right, tl.zeros([16, C], tl.float32), PRECISION)
        found = tl.where(block == at, found[None, :, :], tl.reshape(inverse, [BLOCKS, 16, C]))
        inverse = tl.reshape(found, [C, C])
    return inverse


@triton.jit
def add_scores(qk, kk, q, k, sums, D, chunk, first, last, columns, UNITS: tl.constexpr, DOT: tl.constexpr):
    """Adds a part of the features to the scores (C, C) of queries and of keys with keys: D is inside per unit."""
    C: tl.constexpr = k.shape[0]
    if UNITS:
        i = tl.arange(0, C)
        qk += tl.where(i[:, None] == i[None, :], sum_of_products(q, k, 1)[:, None], 0.0)
        for level in range(levels(C)):
            factor, is_query = halving(sums, D, chunk, first, last, columns, level, DOT)
            keys = operand(tl.where(is_query, 0.0, k * factor), DOT)
            pairs = between_halves(i[:, None], i[None, :], level)
            qk += tl.where(pairs, dot_rows(operand(tl.where(is_query, q * factor, 0.0), DOT), keys, DOT), 0.0)
            kk += tl.where(pairs, dot_rows(operand(tl.where(is_query, k * factor, 0.0), DOT), keys, DOT), 0.0)
        return qk, kk
    else:
        k = fenced(operand(k, DOT), chunk.inside)
        return dot(operand(q, DOT), tl.trans(k), qk, DOT), dot(k, tl.trans(k), kk, DOT)


@triton.jit(do_not_specialize=["n", "g", "group", "chunks"])
def chunk_scores_kernel(
    q,  # Rows (b, n, h, f): q^; None: there are no queries
    keys,  # Keys, whose scores and inverse are results, and per unit reads and writes
    q_reads,  # Rows (b, n, h, f): per unit e^D q^
    n, g, group, chunks,
    F: tl.constexpr, E: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr,
    UNITS: tl.constexpr, DOT: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, BE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """scores of all queries of a key/value head, and the inverse; one program per (head, chunk)."""
    PAIRS: tl.constexpr = Pairs(F, P, INTERLEAVED, W)
    FW: tl.constexpr = (F + 1) // 2 * 2
    QUERIES: tl.constexpr = q.pointer is not None
    _, segment, bg = program_of(1, chunks)
    batch, kv_head = (bg // g).to(tl.int64), (bg % g).to(tl.int64)
    first, last, chunk = chunk_of(keys, segment, batch, kv_head, n, C)
    if first > last:
        return
    i = tl.arange(0, C)
    kk = tl.zeros([C, C], tl.float32)
    for r in range(group):
        queries = Chunk(batch, kv_head * group + r, chunk.rows, chunk.inside)
        qk, kk = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
        for w0 in range(0, FW // 2, W):
            f, columns, D = 2 * w0 + tl.arange(0, 2 * W), unit_columns(w0, UNITS, PAIRS), None
            k = load_values(keys.k, chunk, f, FW, 2 * W)
            x = load_values(q, queries, f, FW, 2 * W) if QUERIES else k
            if UNITS:
                x, k = x.to(tl.float32), k.to(tl.float32)
                decay = load_unit_decay(keys.sums, chunk, first, last, columns, DOT)
                D = decay.D
                store_values(keys.reads, k * decay.from_start, chunk, f, FW, 2 * W)
                store_values(keys.writes, k * decay.to_end, chunk, f, FW, 2 * W)
                if QUERIES:
                    store_values(q_reads, x * decay.from_start, queries, f, FW, 2 * W)
            qk, kk = add_scores(qk, kk, x, k, keys.sums, D, chunk, first, last, columns, UNITS, DOT)
        if keys.sums.rest.pointer is not None and not UNITS:
            tile = score_decay(load_chunk_exponents(keys.sums, chunk, first, last, tl.arange(0, 1)), DOT)
            qk, kk = qk * tile, kk * tile
        if QUERIES:
            store_values(keys.scores, tl.where(i[:, None] >= i[None, :], qk, 0.0), queries, i, C, C)
    if keys.erase.pointer is not None:
        b = load_per_token(keys.erase, chunk).to(tl.float32)
        L = tl.where(i[:, None] > i[None, :], kk * b[:, None], 0.0)
        store_values(keys.inverse, inverse_of(L, DOT), chunk, i, C, C)


class Chunks(NamedTuple):
    """A call that is ready for the kernels that go through its chunks."""

    q: Tensor | None  # q^
    q_reads: Tensor | None  # as ``Keys.reads``
    keys: Keys
    segments: Segments  # each is a chunk


def chunks_of(call: Any, tables: Tables, inverse: Tensor | None, solved: bool = False) -> Chunks:
    """Computes the features of q and k, the sums of decay, the scores and the inverse.

    inverse: where it goes; None: to a new tensor. solved: it has been computed.
    """
    b, n, g, _ = call.v.shape
    length, (table, key_table) = delta_tile(call, "delta_fwd").chunk, tables
    segments = cut(call, n, length)
    if n == 0:  # a chunk would have no token whose decay it could read
        segments = segments._replace(number=0)
    (k, erase), q, scores = features_of_keys(call, key_table), None, None
    if call.q is not None:
        q = features_of_queries(call, table)
        scores = q.new_empty(b, n, q.shape[2], length)
    reads, writes, q_reads = k, k, q
    if call.decays_by_unit:
        reads, writes = torch.empty_like(k), torch.empty_like(k)
        q_reads = None if q is None else torch.empty_like(q)
    if erase is not None and inverse is None:
        inverse = k.new_empty(b, n, g, length, dtype=torch.float32)
    keys = Keys(
        rows_of(k), rows_of(reads), rows_of(writes), sums_of_decay(call, segments), broadcast_rows(call.write, 3),
        broadcast_rows(erase, 3), rows_of(scores), rows_of(inverse),
        None if call.key_mask is None else call.key_mask.contiguous(), segments.spans, segments.first_spans,
    )  # fmt: skip
    solves = erase is not None and not solved
    if q is not None or call.decays_by_unit or solves:
        launch_delta(
            call, chunk_scores_kernel, "chunk_scores", b * g * segments.number, rows_of(q),
            keys if solves else keys._replace(erase=broadcast_rows(None, 3)), rows_of(q_reads),
            n, g, max(call.group, 1), segments.number,
        )  # fmt: skip
    return Chunks(q, q_reads, keys, segments)

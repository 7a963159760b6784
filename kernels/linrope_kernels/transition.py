"""The change of a state by a segment of tokens: S -> e^a S + S_segment and z -> e^a z + z_segment.

``states_kernel`` computes S_segment, z_segment and a, the segment's log decay; ``prefix_kernel`` applies them in order.
REVERSE: the same for the state's gradient, from the last segment to the first, T -> e^a T + T_segment.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from linrope_kernels.decay import decay_state, exponent, load_decay, power, state_factor
from linrope_kernels.launch import NO_STATE, State, launch, new_states, scans_states, tokens_of
from linrope_kernels.memory import (
    Chunk,
    Pairs,
    broadcast_rows,
    feature_offsets,
    load_features,
    load_rotation,
    load_values,
    load_write,
    mask_features,
    program_of,
    rows_of,
    seen,
    segment_span,
    store_state,
    store_z,
)
from linrope_kernels.pieces import divisor, dot, feature_map, operand, rotate, rounded_products
from linrope_kernels.segments import Segments
from linrope_kernels.start import start_kernel

PREFIX_BLOCK = 1024


@triton.jit(do_not_specialize=["m", "g", "segments", "length"])
def states_kernel(
    x,  # Rows (b, m, heads, f): k; REVERSE: q
    y,  # Rows (b, m, heads, e): v; REVERSE: dout
    tokens,  # Tokens; its table is that of x
    DEN, DELTA,  # (b, h, m) float32; REVERSE only
    own,  # (b g, s, f, e), (b g, s, f): the result
    TOTALS,  # (b g, s) float64: log decay summed over each segment
    m, g, group, segments, length, eps,
    F: tl.constexpr, E: tl.constexpr, P: tl.constexpr,
    MAP: tl.constexpr, INTERLEAVED: tl.constexpr, ADD: tl.constexpr,
    NORMALIZE: tl.constexpr, REVERSE: tl.constexpr,
    DOT: tl.constexpr, C: tl.constexpr, W: tl.constexpr, BE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The state of each segment alone: S = sum R psi (w v)^T, z = sum psi; one program per (b g, segment, block).

    REVERSE: their gradients, T = sum R phi dout^T / den and dz = sum delta phi / den over all query heads.

    With decay S and z are decayed to the segment's last token, T and dz to the token before the segment. The
    scan starts at that edge and moves away from it: the log decay between a chunk and the edge is then known,
    and nothing that was added to the state has to decay any further.
    """
    PAIRS: tl.constexpr = Pairs(F, P, INTERLEAVED, W)
    block, segment, bg = program_of((E + BE - 1) // BE, segments)
    batch, kv_head, bg = (bg // g).to(tl.int64), bg % g, bg.to(tl.int64)
    f = feature_offsets(0, PAIRS)
    e = block * BE + tl.arange(0, BE)
    s, z = tl.zeros([BE, 2 * W], tl.float32), tl.zeros([2 * W], tl.float64)
    first, end, _ = segment_span(tokens.spans, segment, length, m)
    log_to_edge = tl.full([], 0, tl.float64)
    chunks = tl.cdiv(end - first, C)
    for i in tl.range(0, chunks, num_stages=STAGES):
        rows = first + (i if REVERSE else chunks - 1 - i) * C + tl.arange(0, C)
        inside = rows < end
        chunk = Chunk(batch, kv_head.to(tl.int64), rows, inside)
        visible = seen(tokens.mask, chunk, m)
        write = None if tokens.write.pointer is None else load_write(tokens.write, visible)
        rotation = load_rotation(tokens.table, chunk, 0, PAIRS)
        if tokens.log.pointer is not None:
            D, D_end = load_decay(tokens.log, chunk, DOT)
            to_edge = exponent(log_to_edge + (D if REVERSE else D_end - D), DOT)
            factor = power(to_edge, (0, 0), DOT)[:, None]
            log_to_edge += D_end
        for r in range(group if REVERSE else 1):
            head = (kv_head * group + r if REVERSE else kv_head).to(tl.int64)
            phi = feature_map(load_features(x, Chunk(batch, head, rows, inside), 0, PAIRS), MAP)
            values = load_values(y, Chunk(batch, head, rows, visible.inside), e, E, BE)
            phi = mask_features(phi, visible.inside, 0, PAIRS)
            if tokens.log.pointer is not None:
                phi = phi * factor
            token = (bg * group + r) * m + rows
            if REVERSE and NORMALIZE:
                phi *= (1 / divisor(tl.load(DEN + token, mask=inside, other=1), eps, ADD))[:, None]
            phi_hat = rotate(phi, rotation, P)
            if write is not None:
                phi_hat = phi_hat * write[:, None]
            if REVERSE and NORMALIZE:
                phi = phi * tl.load(DELTA + token, mask=inside, other=0)[:, None]
            s = dot(tl.trans(operand(values, DOT)), operand(phi_hat, DOT), s, DOT)
            if NORMALIZE or not REVERSE:
                z += tl.sum(rounded_products(phi), 0).to(tl.float64)

    state_index = bg * segments + segment
    store_state(own, state_index, s, f, e, F, E)
    if block == 0:
        store_z(own, state_index, z, f, F)
        if TOTALS is not None:
            tl.store(TOTALS + state_index, log_to_edge)


@triton.jit
def load_elements(state, index, elements, f, inside, has_z, F: tl.constexpr, E: tl.constexpr):
    """The elements of S[index], and z[index] in float64 in the programs that have it; 0 outside."""
    s = tl.load(state[0] + index * F * E + elements, mask=inside, other=0)
    return s, tl.load(state[1] + index * F + f, mask=has_z, other=0).to(tl.float64)


@triton.jit(do_not_specialize=["g", "segments"])
def prefix_kernel(
    TOTALS,  # (b g, s) float64: log decay summed over each segment; None: no decay
    FIRST_SPANS,  # (sequences + 1,) int32: the first segment of each packed sequence; None: not packed
    states,  # (b g, s, f, e), (b g, s, f): each segment's own, then the state before it
    start,  # (b g, f, e), (b g, f): the first state (REVERSE: gradient of the last); None: 0
    end,  # the sum over all segments; None: not wanted
    g, segments,
    F: tl.constexpr, E: tl.constexpr, REVERSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replaces each segment's own state with the state before it (REVERSE: after it), in place and in order."""
    BLOCKS: tl.constexpr = (F * E + BLOCK - 1) // BLOCK
    S, Z = states
    block = tl.program_id(0) % BLOCKS
    bg = (tl.program_id(0) // BLOCKS).to(tl.int64)
    elements = block * BLOCK + tl.arange(0, BLOCK)
    f = elements % BLOCK  # the first block does z as well
    inside, has_z = elements < F * E, elements < (F if block == 0 else 0)
    s, z = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float64)
    if start[0] is not None:
        s, z = load_elements(start, bg, elements, f, inside, has_z, F, E)
    first, last, base = 0, segments, bg * segments
    if FIRST_SPANS is not None:
        FIRST_SPANS += bg // g
        first, last, base = tl.load(FIRST_SPANS), tl.load(FIRST_SPANS + 1), bg % g * segments
    for segment in range(first, last):
        index = base + (first + last - 1 - segment if REVERSE else segment)
        s_segment, z_segment = load_elements(states, index, elements, f, inside, has_z, F, E)
        tl.debug_barrier()  # the threads that store a number may be others than those that loaded it
        tl.store(S + index * F * E + elements, s, mask=inside)
        tl.store(Z + index * F + f, z, mask=has_z)
        if TOTALS is not None:
            total = tl.load(TOTALS + index)
            s, z = decay_state(s, state_factor(total)), z * tl.exp(total)
        s += s_segment
        z += z_segment
    if end[0] is not None:
        tl.store(end[0] + bg * F * E + elements, s, mask=inside)
        tl.store(end[1] + bg * F + f, z.to(end[1].dtype.element_ty), mask=has_z)


class Queries(NamedTuple):
    """The queries and their gradients, as a backward pass reads them."""

    q: Tensor  # (b, n, h, f)
    d_out: Tensor  # (b, n, h, e)
    den: Tensor | None  # (b, h, n)
    delta: Tensor | None  # (b, h, n)
    group: int  # query heads per key/value head; 0: there are none, and q and d_out are not read


def own_states(
    call: Any, segments: Segments, table: Tensor | None, states: State, totals: Tensor | None,
    queries: Queries | None = None,
) -> None:  # fmt: skip
    """Computes the state of each segment alone, and its log decay if wanted; with queries, the state's gradient."""
    tokens = tokens_of(call, table, None, segments)
    x, y, den, delta, group = queries or Queries(call.k, call.v, None, None, call.group)
    if queries is not None:
        tokens = tokens._replace(mask=None, write=broadcast_rows(None, 3))
    launch(
        call, states_kernel, "states", call.k.shape[0] * call.k.shape[2] * segments.number,
        rows_of(x), rows_of(y), tokens, den, delta, states, totals, x.shape[1], call.k.shape[2], group,
        segments.number, segments.length, call.eps, REVERSE=queries is not None,
    )  # fmt: skip


def segment_states(
    call: Any, segments: Segments, table: Tensor | None, start: State | None, states: State | None,
    end: State | None, queries: Queries | None = None,
) -> None:  # fmt: skip
    """Computes the state before each segment and the last state; for queries its gradient after each segment.

    start: the first state, or None. states, end: where the results go, or None if not wanted.
    """
    g = call.k.shape[2]
    # A single segment with no state before it: its own state is the last one, and needs no prefix.
    single = states is None and start is None and not scans_states(segments)
    states = (end if single else states) or new_states(call, segments.number)
    totals = None
    if call.log_decay is not None:
        rows = states[0].shape[0] * (g if single else 1)
        totals = states[0].new_empty(rows, segments.number, dtype=torch.float64)
    own_states(call, segments, table, states, totals, queries)
    f, e = call.k.shape[3], call.v.shape[3]
    if not single:
        start_kernel(
            prefix_kernel, call.sequences * g * -(-f * e // PREFIX_BLOCK),
            totals, segments.first_spans, states, start or NO_STATE, end or NO_STATE,
            g, segments.number, F=f, E=e, REVERSE=queries is not None, BLOCK=PREFIX_BLOCK,
        )  # fmt: skip

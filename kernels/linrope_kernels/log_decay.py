"""The gradient of log decay a at token t of a segment that begins at token s:

    da_t = <S, dS> + <z, dz> before token s + sum_(s <= i < t) (<psi_i, dpsi_i> - <phi_i, dphi_i>)

Summed over the whole segment, the right-hand side is <S, dS> + <z, dz> after the segment. The difference that rounding
leaves is divided evenly among the segment's tokens, which halves the error of their sum.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from linrope_kernels.angles import Tables
from linrope_kernels.backward import Terms
from linrope_kernels.decay import MIN_LOG_DECAY, decay_state, load_per_token, state_factor
from linrope_kernels.launch import NO_STATE, State, cut, new_like, new_states
from linrope_kernels.memory import Chunk, broadcast_rows, program_of, segment_span
from linrope_kernels.pieces import sum_of_products
from linrope_kernels.start import start_kernel
from linrope_kernels.tiles import power_of_two
from linrope_kernels.transition import PREFIX_BLOCK, Queries, load_elements, own_states

# Every ANCHOR tokens the gradient is computed from the state and its gradient. In between it is a running sum, so a
# rounding error reaches at most ANCHOR tokens. A shorter distance is more exact, but each anchor writes and reads two
# states.
ANCHOR = 128


@triton.jit(do_not_specialize=["g", "segments", "boundaries"])
def boundary_products_kernel(
    TOTALS,  # (b g, s) float64: log decay summed over each segment
    FIRST_SPANS,  # (sequences + 1,) int32: the first segment of each packed sequence; None: not packed
    states,  # (b g, s, f, e), (b g, s, f): of each segment alone; overwritten by the state before it
    gradients,  # the state's gradient likewise, but not overwritten
    start,  # (b g, f, e), (b g, f): the first state; None: 0
    d_end,  # the gradient of the last state, likewise
    PRODUCTS,  # (b g, boundaries, BLOCKS) float64
    g, segments, boundaries,
    F: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """<S, dS> + <z, dz> between segments, before the first and after the last; each program has BLOCK elements of S."""
    BLOCKS: tl.constexpr = (F * E + BLOCK - 1) // BLOCK
    S, Z = states
    block = tl.program_id(0) % BLOCKS
    bg = (tl.program_id(0) // BLOCKS).to(tl.int64)
    elements = block * BLOCK + tl.arange(0, BLOCK)
    f = elements % BLOCK  # the first block has z as well
    inside, has_z = elements < F * E, elements < (F if block == 0 else 0)
    s, z = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float64)
    ds, dz = s, z
    if start[0] is not None:
        s, z = load_elements(start, bg, elements, f, inside, has_z, F, E)
    if d_end[0] is not None:
        ds, dz = load_elements(d_end, bg, elements, f, inside, has_z, F, E)
    first, last, base = 0, segments, bg * segments
    PRODUCTS += bg * boundaries * BLOCKS + block
    if FIRST_SPANS is not None:
        FIRST_SPANS += bg // g
        first, last, base = tl.load(FIRST_SPANS), tl.load(FIRST_SPANS + 1), bg % g * segments
        PRODUCTS += (bg % g * boundaries + bg // g - bg * boundaries) * BLOCKS
    # Each iteration loads what the next one adds, because there may be few programs with many segments.
    s_next, z_next = load_elements(
        states, base + first, elements, f, inside & (first < last), has_z & (first < last), F, E
    )
    for segment in range(first, last):
        index, s_segment, z_segment = base + segment, s_next, z_next
        more = inside & (segment + 1 < last)
        s_next, z_next = load_elements(states, index + 1, elements, f, more, has_z & more, F, E)
        tl.debug_barrier()  # the threads that store a number may be others than those that loaded it
        tl.store(S + index * F * E + elements, s, mask=inside)
        tl.store(Z + index * F + f, z, mask=has_z)
        total = tl.load(TOTALS + index)
        s, z = decay_state(s, state_factor(total)) + s_segment, z * tl.exp(total) + z_segment
    tl.debug_barrier()  # the states that were stored are loaded again
    more = inside & (first < last)
    s_next, z_next = load_elements(states, base + last - 1, elements, f, more, has_z & more, F, E)
    ds_next, dz_next = load_elements(gradients, base + last - 1, elements, f, more, has_z & more, F, E)
    for step in range(first, last):
        segment = first + last - 1 - step
        ds_segment, dz_segment, s_before, z_before = ds_next, dz_next, s_next, z_next
        more = inside & (segment > first)
        s_next, z_next = load_elements(states, base + segment - 1, elements, f, more, has_z & more, F, E)
        ds_next, dz_next = load_elements(gradients, base + segment - 1, elements, f, more, has_z & more, F, E)
        product = sum_of_products(s, ds, 0).to(tl.float64) + sum_of_products(z, dz, 0)
        tl.store(PRODUCTS + (segment + 1) * BLOCKS, product)
        total = tl.load(TOTALS + base + segment)
        ds, dz = decay_state(ds, state_factor(total)) + ds_segment, dz * tl.exp(total) + dz_segment
        s, z = s_before, z_before
    product = sum_of_products(s, ds, 0).to(tl.float64) + sum_of_products(z, dz, 0)
    tl.store(PRODUCTS + first * BLOCKS, product)


@triton.jit(do_not_specialize=["m", "g", "segments", "boundaries"])
def log_decay_kernel(
    PRODUCTS,  # (b g, boundaries, BLOCKS) float64
    log,  # Rows (b or 1, m, g or 1)
    SPANS,  # (s, 3) int32, as in Tokens
    TERMS_K, TERMS_Q,  # (b, m, g, KEY_BLOCKS), (b, m, g group, QUERY_BLOCKS) float32; TERMS_Q None: 0
    WRITE_TERMS,  # (b, m, g, WRITE_BLOCKS) float32; None: the gradient of write is not wanted here
    D_LOG, D_WRITE,  # (b, m, g)
    m, g, segments, boundaries,
    GROUP: tl.constexpr, BLOCKS: tl.constexpr, KEY_BLOCKS: tl.constexpr, QUERY_BLOCKS: tl.constexpr,
    WRITE_BLOCKS: tl.constexpr, C: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """The gradient in one segment, of at most C tokens, of one head; and that of write, which is a sum over blocks."""
    _, segment, bg = program_of(1, segments)
    batch, kv_head = (bg // g).to(tl.int64), (bg % g).to(tl.int64)
    first, end, sequence = segment_span(SPANS, segment, C, m)
    if first >= end:  # no token: nothing may have been written to its PRODUCTS
        return
    rows = first + tl.arange(0, C)
    inside = rows < end
    token = (batch * m + rows) * g + kv_head
    x = tl.zeros([C], tl.float64)
    for block in tl.static_range(KEY_BLOCKS):
        x += tl.load(TERMS_K + token * KEY_BLOCKS + block, mask=inside, other=0).to(tl.float64)
    if TERMS_Q is not None:
        for block in tl.static_range(GROUP * QUERY_BLOCKS):
            at = TERMS_Q + token * (GROUP * QUERY_BLOCKS) + block
            x -= tl.load(at, mask=inside, other=0).to(tl.float64)
    blocks = tl.arange(0, B)
    PRODUCTS += (bg.to(tl.int64) * boundaries + segment + sequence) * BLOCKS + blocks
    low = tl.sum(tl.load(PRODUCTS, mask=blocks < BLOCKS, other=0), 0)
    high = tl.sum(tl.load(PRODUCTS + BLOCKS, mask=blocks < BLOCKS, other=0), 0)
    missing = (high - low - tl.sum(x, 0)) / (end - first)
    d_log = low + (tl.cumsum(x, 0) - x) + missing * (rows - first)
    a = load_per_token(log, Chunk(batch, kv_head, rows, inside))
    d_log = tl.where(a < MIN_LOG_DECAY, 0.0, d_log)  # lower gates are clamped to it
    tl.store(D_LOG + token, d_log.to(D_LOG.dtype.element_ty), mask=inside)
    if WRITE_TERMS is not None:
        d_write = tl.zeros([C], tl.float32)
        for block in tl.static_range(WRITE_BLOCKS):
            d_write += tl.load(WRITE_TERMS + token * WRITE_BLOCKS + block, mask=inside, other=0)
        tl.store(D_WRITE + token, d_write, mask=inside)


def d_log_decay(
    call: Any, terms_q: Terms, terms_k: Terms, tables: Tables, start: State | None, d_end: State | None,
    queries: Queries,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The gradients of log decay (b, m, g), in its dtype or in float64, and of write in float32.

    terms_q, terms_k: what dq and dk stored. start: the first state. d_end: the gradient of the last one.
    """
    (b, m, g, f), e, (table, key_table) = call.k.shape, call.v.shape[3], tables
    segments = cut(call, m, ANCHOR)
    states, gradients = new_states(call, segments.number), new_states(call, segments.number)
    totals = states[0].new_empty(states[0].shape[:2], dtype=torch.float64)
    own_states(call, segments, key_table, states, totals)
    own_states(call, segments, table, gradients, None, queries)
    blocks, boundaries = (
        -(-f * e // PREFIX_BLOCK),
        segments.number + (1 if segments.spans is None else call.sequences),
    )
    products = totals.new_empty(b * g, boundaries, blocks)
    start_kernel(
        boundary_products_kernel, call.sequences * g * blocks, totals, segments.first_spans, states, gradients,
        start or NO_STATE, d_end or NO_STATE, products, g, segments.number, boundaries, F=f, E=e, BLOCK=PREFIX_BLOCK,
    )  # fmt: skip
    whole = call.log_decay.shape == (b, m, g)  # else the caller sums it
    d_log = new_like(call.k, segments, b, m, g, dtype=call.log_decay.dtype if whole else torch.float64)
    d_write = None if terms_k.write is None else new_like(call.k, segments, b, m, g, dtype=torch.float32)
    query_blocks = 1 if terms_q.log is None else terms_q.log.shape[3]
    start_kernel(
        log_decay_kernel, b * g * segments.number, products, broadcast_rows(call.log_decay, 3), segments.spans,
        terms_k.log, terms_q.log, terms_k.write, d_log, d_write, m, g, segments.number, boundaries,
        GROUP=max(queries.group, 1), BLOCKS=blocks, KEY_BLOCKS=terms_k.log.shape[3], QUERY_BLOCKS=query_blocks,
        WRITE_BLOCKS=1 if terms_k.write is None else terms_k.write.shape[3], C=ANCHOR, B=power_of_two(blocks),
    )  # fmt: skip
    return d_log, d_write

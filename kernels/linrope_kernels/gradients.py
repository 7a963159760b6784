"""The backward pass: starts its kernels, and sums the terms they store into the gradient of log decay."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from linrope_kernels.backward import dk_kernel, dq_kernel, dv_kernel
from linrope_kernels.launch import (
    NO_STATE,
    Call,
    State,
    new_state,
    new_states,
    new_tables,
    rows_of,
    segment_states,
    unpack_sums,
)
from linrope_kernels.segments import RunningSums, Segments, rising_bounds, sums_between

# Every ANCHOR tokens the gradient of log decay is computed from the state and its gradient. In between it is
# a running sum, so a rounding error reaches at most ANCHOR tokens. A shorter distance is more exact, but each
# anchor writes and reads two states.
ANCHOR = 128


class Gradients(NamedTuple):
    q: Tensor | None
    k: Tensor
    v: Tensor
    start: State | None  # gradient of the first state, if there was one
    log_decay: Tensor | None  # (b, m, g), float64
    angles: Tensor | None  # (b, m, g, P), float64: each token's <J phi, R^T dphi^> + <J psi, R^T dpsi^>


def attend_bwd(
    call: Call,
    start: State | None,
    saved: list[Tensor],
    out: Tensor | None,
    d_out: Tensor,
    d_end: State | None,
) -> Gradients:
    """The gradients of a call.

    saved: the tensors that attend_fwd saved. out: attend_fwd's output if call.reads_out, else None.
    """
    assert call.q is not None
    b, n, h, _ = call.q.shape
    _, m, g, _ = call.k.shape
    q, k, v = rows_of(call.q), rows_of(call.k), rows_of(call.v)
    dq, dk, dv = (call.new(*x.shape, dtype=x.dtype) for x in (call.q, call.k, call.v))
    table, key_table, saved = _saved_tables(call, saved)
    den, states = unpack_sums(call, saved)
    delta = None if den is None else torch.empty_like(den)
    log_terms = angle_terms = None
    if call.log_decay is not None:
        log_terms = _new_log_terms(call, call.q, "dq"), _new_log_terms(call, call.k, "dk")
    if call.phases is not None:
        angle_terms = _new_angle_terms(call, call.q), _new_angle_terms(call, call.k)
    (log_q, log_k), (angles_q, angles_k) = log_terms or (None, None), angle_terms or (None, None)
    d_start = new_state(call, start) if start is not None or not call.causal else None

    segments = call.segments(n)
    query_angles, key_angles = table, table if key_table is None else key_table
    states_before = start
    if not call.causal:
        states_before, key_table = states, None
    elif call.scans_states(segments):
        states_before = states
        if states_before is None:
            states_before = new_states(call, segments.number)
            segment_states(call, segments, key_angles, start, states_before, None)
    call.launch(
        dq_kernel, "dq", b * h * segments.number,
        q, k, v, call.tokens(table, key_table, segments), states_before or NO_STATE,
        rows_of(out), rows_of(d_out), den, delta, rows_of(dq),
        (log_q, angles_q), n, h, call.group, segments.number, segments.length, call.eps, CAUSAL=call.causal,
    )  # fmt: skip

    gradients_after = d_end
    if call.scans_states(segments) or not call.causal:
        gradients_after = new_states(call, segments.number) if call.causal else None
        segment_states(call, segments, table, d_end, gradients_after, d_start, (d_out, den, delta))
    if not call.causal:
        gradients_after, table = d_start, key_angles
    segments = call.segments(m)
    tokens, after = call.tokens(table, key_table, segments), gradients_after or NO_STATE
    sizes = m, g, call.group, segments.number, segments.length, call.eps
    call.launch(
        dk_kernel, "dk", b * g * segments.number, q, k, v, tokens, after, rows_of(d_out), den, delta, rows_of(dk),
        (log_k, angles_k), d_start or NO_STATE, *sizes, CAUSAL=call.causal,
    )  # fmt: skip
    call.launch(
        dv_kernel, "dv", b * g * segments.number, q, k, tokens, after, rows_of(d_out), den, rows_of(dv), *sizes,
        CAUSAL=call.causal,
    )  # fmt: skip
    d_log = None
    if log_terms is not None:
        terms = _per_key_head(log_terms[1], g).sum(3) - _per_key_head(log_terms[0], g).sum(3)
        segments = call.segments_of(m, ANCHOR)
        gradients_after = new_states(call, segments.number)
        segment_states(call, segments, query_angles, d_end, gradients_after, None, (d_out, den, delta))
        d_log = _d_log_decay(call, segments, terms, key_angles, start, d_start, gradients_after, d_end)
    d_angles = None
    if angle_terms is not None:
        d_angles = _per_key_head(angle_terms[1], g) + _per_key_head(angle_terms[0], g)
    return Gradients(dq, dk, dv, d_start if start is not None else None, d_log, d_angles)


def state_bwd(call: Call, start: State | None, d_end: State) -> Gradients:
    """Gradients of a call that computes only the last state, from T and dz decayed to each segment's end.

        dv_j = e^(L_n - L_j) T^T psi^_j      dpsi_j = e^(L_n - L_j) (R^T T v_j + dz)

    It runs the backward pass's last kernel with no query heads, so that nothing is added to T and dz.
    """
    call = replace(call, normalize=False)
    (b, m, g, _), (table, key_table) = call.k.shape, call.tables()
    table = table if key_table is None else key_table
    dk, dv = (call.new(*x.shape, dtype=x.dtype) for x in (call.k, call.v))
    segments = call.segments(m)
    factors, total = _decay_after_segments(call, segments)
    gradients_after = tuple(_at_segment_ends(x, segments, factors) for x in d_end)
    log_terms = None if call.log_decay is None else _new_log_terms(call, call.k, "dk")
    angle_terms = None if call.phases is None else _new_angle_terms(call, call.k)
    k, v, tokens = rows_of(call.k), rows_of(call.v), call.tokens(table, None, segments)
    sizes = m, g, 0, segments.number, segments.length, call.eps
    call.launch(
        dk_kernel, "dk", b * g * segments.number, k, k, v, tokens, gradients_after, v, None, None, rows_of(dk),
        (log_terms, angle_terms), NO_STATE, *sizes, CAUSAL=True,
    )  # fmt: skip
    call.launch(
        dv_kernel, "dv", b * g * segments.number, k, k, tokens, gradients_after, v, None, rows_of(dv), *sizes,
        CAUSAL=True,
    )  # fmt: skip
    d_start = None
    if start is not None:
        kv, z = ((x * total.view(*total.shape, *[1] * (x.ndim - 2))).to(x.dtype) for x in d_end)
        d_start = kv, z
    d_log = None
    if log_terms is not None:
        segments = call.segments_of(m, ANCHOR)
        factors, _ = _decay_after_segments(call, segments)
        kv_after, z_after = (_at_segment_ends(x, segments, factors) for x in d_end)
        terms = _per_key_head(log_terms, g).sum(3)
        d_log = _d_log_decay(call, segments, terms, table, start, d_start, (kv_after, z_after), d_end)
    d_angles = None if angle_terms is None else _per_key_head(angle_terms, g)
    return Gradients(None, dk, dv, d_start, d_log, d_angles)


def _d_log_decay(
    call: Call, segments: Segments, terms: Tensor, key_angles: Tensor | None,
    start: State | None, d_start: State | None, gradients_after: State, d_end: State | None,
) -> Tensor:  # fmt: skip
    """The gradient of log decay a at token t of a segment that begins at token s:

        da_t = <S, dS> + <z, dz> before token s + sum_(s <= i < t) (<psi_i, dpsi_i> - <phi_i, dphi_i>)

    Summed over the whole segment, the right-hand side is <S, dS> + <z, dz> after the segment. The difference
    that rounding leaves is divided evenly among the segment's tokens, which halves the error of their sum.

    terms (b, m, g): the terms of the sum. gradients_after: the state's gradient, dS and dz, after each segment.
    """
    b, _, g, _ = call.k.shape
    states_before, end = new_states(call, segments.number), None if d_end is None else new_state(call, None)
    segment_states(call, segments, key_angles, start, states_before, end)
    first, last = _inner_product(call, start, d_start), _inner_product(call, end, d_end)
    between = terms.new_zeros(b * g, segments.number - 1)
    for x, dx in zip(states_before, gradients_after):
        between += x[:, 1:].mul_(dx[:, :-1]).flatten(2).sum(2, dtype=torch.float64)
    between = between.view(b, g, segments.number - 1).transpose(1, 2)
    lows, highs = (terms.new_zeros(b, segments.number, g) for _ in range(2))
    lows[:, 1:], highs[:, :-1] = between, between
    if segments.spans is None or segments.first_spans is None:
        lows[:, 0], highs[:, -1] = first, last
    else:
        owner, number = segments.spans[:, 2].long(), torch.arange(segments.number, device=terms.device)
        lows = torch.where((number == segments.first_spans[owner])[:, None], first[owner], lows)
        highs = torch.where((number + 1 == segments.first_spans[owner + 1])[:, None], last[owner], highs)
    return sums_between(terms, segments, lows, highs)


def _inner_product(call: Call, x: State | None, dx: State | None) -> Tensor:
    """<S, dS> + <z, dz> of each sequence, (sequences, g) float64; None: 0."""
    total = call.k.new_zeros(call.sequences, call.k.shape[2], dtype=torch.float64)
    for part, d_part in zip(x or (), dx or ()):
        total += (part.double() * d_part).flatten(2).sum(2)
    return total


def _decay_after_segments(call: Call, segments: Segments) -> tuple[Tensor, Tensor]:
    """e^L from each segment's end to its sequence's end, (b, segments, g), and over whole sequences, (b, g).

    For packed sequences (1, segments, g) and (sequences, g).
    """
    b, m, g, _ = call.k.shape
    if call.log_decay is None:
        one = call.k.new_ones((), dtype=torch.float64)
        return one.expand(b, segments.number, g), one.expand(call.sequences, g)
    log = call.log_decay.double().expand(b, m, g)
    sums = RunningSums(log, packed=call.cu_seqlens is not None)
    if call.cu_seqlens is None or segments.spans is None:
        ends = (torch.arange(1, segments.number + 1, device=log.device) * segments.length).clamp(max=m)
        return (sums.sums[:, -1:] - sums.sums[:, ends]).exp(), sums.sums[:, -1].exp()
    bounds = rising_bounds(call.cu_seqlens, m)
    ends, owner = segments.spans[:, 1].long(), segments.spans[:, 2].long()
    return sums.between(ends, bounds[owner + 1]).exp(), sums.between(bounds[:-1], bounds[1:])[0].exp()


def _at_segment_ends(x: Tensor, segments: Segments, factors: Tensor) -> Tensor:
    """The last state's gradient x (sequences, g, ..), decayed to each segment's end: (b g, segments, ..)."""
    x = x[:, None] if segments.spans is None else x[segments.spans[:, 2].long()][None]  # (b, s or 1, g, ..)
    decayed = (x * factors.view(*factors.shape, *[1] * (x.ndim - 3))).to(x.dtype)
    return decayed.transpose(1, 2).contiguous().flatten(0, 1)


def _saved_tables(call: Call, saved: list[Tensor]) -> tuple[Tensor | None, Tensor | None, list[Tensor]]:
    """The tables of cos and sin for queries and, if they differ, keys; and the other saved tensors."""
    number = len(new_tables(call))
    if number == 0:
        return *call.tables(), saved
    return saved[0], saved[1] if number == 2 else None, saved[number:]


def _new_log_terms(call: Call, x: Tensor, name: str) -> Tensor:
    """A tensor for a number per token, head and pair block of the kernel."""
    blocks = -(-((x.shape[3] + 1) // 2) // call.tile(name).pairs)
    return call.new(*x.shape[:3], blocks, dtype=torch.float32)


def _new_angle_terms(call: Call, x: Tensor) -> Tensor:
    """A tensor for a number per token, head and pair that turns."""
    return call.new(*x.shape[:3], call.pairs, dtype=torch.float32)


def _per_key_head(x: Tensor, g: int) -> Tensor:
    """x (b, n, h, ..) summed over the query heads of each key/value head, float64."""
    b, n, h, last = x.shape
    return x.double().view(b, n, g, h // g, last).sum(3)

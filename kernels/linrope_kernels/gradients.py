"""Starts the kernels of the backward pass."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linrope_kernels.angles import Phases, Tables, make_tables
from linrope_kernels.backward import Terms, dq_kernel
from linrope_kernels.backward_keys import dkv_kernel
from linrope_kernels.forward import new_tables, unpack_sums
from linrope_kernels.launch import (
    NO_STATE,
    State,
    blocks_of,
    cut,
    launch,
    merged,
    new_like,
    new_state,
    new_states,
    scans_states,
    tokens_of,
)
from linrope_kernels.log_decay import d_log_decay
from linrope_kernels.memory import rows_of
from linrope_kernels.segments import Segments
from linrope_kernels.transition import Queries, segment_states


class Gradients(NamedTuple):
    """The gradients of a call. A sum over a last axis of blocks is left to the caller."""

    q: Tensor | None
    k: Tensor
    v: Tensor
    start: State | None  # gradient of the first state, if there was one
    log_decay: Tensor | None  # (b, m, g), (b, m, g, blocks) or (b, m, g, units)
    write: Tensor | None  # (b, m, g) or (b, m, g, blocks), float32
    erase: Tensor | None  # (b, m, g, blocks), float32
    angles: Tensor | None  # (b, m, g, P): each token's <J phi, R^T dphi^> + <J psi, R^T dpsi^>


def new_terms(call: Any, x: Tensor, kernel: str, segments: Segments, writes: str = "") -> Terms:
    """Empty terms of x's tokens and heads, for the gradients that the call has. writes: the kernel of dv; "": none."""

    def new(size: int) -> Tensor:
        return new_like(x, segments, *x.shape[:3], size, dtype=torch.float32)

    return Terms(
        None if call.log_decay is None else new(blocks_of(call, kernel)[0]),
        None if call.angle_steps is None else new(call.pairs),
        None if call.write is None or not writes else new(blocks_of(call, writes)[1]),
    )


def attend_bwd(
    call: Any, phases: Phases | None, start: State | None, saved: list[Tensor], out: Tensor | None,
    d_out: Tensor, d_end: State | None,
) -> Gradients:  # fmt: skip
    """The gradients of a call.

    saved: the tensors that attend_fwd saved. out: attend_fwd's output if ``reads_out(call)``, else None.
    """
    b, n, h, _ = call.q.shape
    segments = cut(call, n)
    (table, key_table), saved = _saved_tables(call, phases, saved)
    den, states = unpack_sums(call, saved)
    queries = Queries(call.q, d_out, den, None if den is None else torch.empty_like(den), call.group)
    dq, terms = new_like(call.q, segments), new_terms(call, call.q, "dq", segments)
    states_before = start
    if not call.causal:
        states_before = states
    elif scans_states(segments):
        states_before = states
        if states_before is None:
            states_before = new_states(call, segments.number)
            segment_states(call, segments, key_table, start, states_before, None)
    launch(
        call, dq_kernel, "dq", b * h * segments.number, rows_of(call.q), rows_of(call.k), rows_of(call.v),
        tokens_of(call, table, key_table if call.causal else None, segments), states_before or NO_STATE,
        rows_of(out), rows_of(d_out), den, queries.delta, rows_of(dq), terms,
        n, h, call.group, segments.number, segments.length, call.eps, CAUSAL=call.causal,
    )  # fmt: skip
    return _key_gradients(call, queries, segments, (table, key_table), terms, start, d_end)._replace(q=dq)


def state_bwd(call: Any, phases: Phases | None, start: State | None, d_end: State) -> Gradients:
    """Gradients of a call that computes only the last state, from its T and dz:

        dv_j = e^(L_n - L_j) T^T psi^_j      dpsi_j = e^(L_n - L_j) (R^T T v_j + dz)

    They are the gradients of keys with no query heads, so that nothing is added to T and dz.
    """
    call = replace(call, normalize=False, causal=True)
    _, table = make_tables(call, phases)
    queries, segments = Queries(call.k, call.v, None, None, 0), cut(call, call.k.shape[1])
    return _key_gradients(call, queries, segments, (table, table), Terms(None, None, None), start, d_end)


def _key_gradients(
    call: Any, queries: Queries, query_segments: Segments, tables: Tables, terms_q: Terms,
    start: State | None, d_end: State | None,
) -> Gradients:  # fmt: skip
    """dk and dv, and the gradients of the first state, of log decay and of the angles.

    tables: those of the queries and of the keys. terms_q: what dq stored.
    """
    (b, m, g, _), (table, key_table) = call.k.shape, tables
    segments = query_segments if queries.q.shape[1] == m else cut(call, m)
    dk, dv = new_like(call.k, segments), new_like(call.v, segments)
    terms_k = new_terms(call, call.k, *(("dkv", segments, "dkv") if merged(call) else ("dk", segments, "dv")))
    d_start = new_state(call, start) if start is not None or not call.causal else None
    after = d_end
    if scans_states(query_segments) or not call.causal:
        after = new_states(call, segments.number) if call.causal else None
        segment_states(call, query_segments, table, d_end, after, d_start, queries)
    if not call.causal:
        after, tables = d_start, (key_table, key_table)
    q, k, v, d_out = (rows_of(x) for x in (queries.q, call.k, call.v, queries.d_out))
    tokens, (_, _, den, delta, group) = tokens_of(call, *tables, segments), queries
    sizes = m, g, group, segments.number, segments.length, call.eps
    # One program has all pairs and values of a head, or dk and dv are two launches of the same kernel.
    wanted = {"dkv": (dk, dv)} if merged(call) else {"dk": (dk, None), "dv": (None, dv)}
    for name, results in wanted.items():
        launch(
            call, dkv_kernel, name, b * g * segments.number, q, k, v, tokens, after or NO_STATE, d_out, den, delta,
            *map(rows_of, results), terms_k, d_start or NO_STATE, *sizes, CAUSAL=call.causal,
            GROUPED=group != 1 or not call.causal,
        )  # fmt: skip
    d_log = d_write = None
    if terms_k.log is not None:
        d_log, d_write = d_log_decay(call, terms_q, terms_k, (table, key_table), start, d_end, queries)
    elif terms_k.write is not None:  # summed by the caller, as a pass with a sum could not be repeated
        d_write = terms_k.write
    d_angles = None if terms_k.angles is None else _per_key_head(terms_k.angles, g)
    if d_angles is not None and terms_q.angles is not None:
        d_angles = d_angles + _per_key_head(terms_q.angles, g)
    return Gradients(None, dk, dv, d_start if start is not None else None, d_log, d_write, None, d_angles)


def _saved_tables(call: Any, phases: Phases | None, saved: list[Tensor]) -> tuple[Tables, list[Tensor]]:
    """The tables of cos and sin, and the other saved tensors."""
    number = len(new_tables(call))
    if number == 0:
        return make_tables(call, phases), saved
    return (saved[0], saved[number - 1]), saved[number:]


def _per_key_head(x: Tensor, g: int) -> Tensor:
    """x (b, n, h, ..) summed over the query heads of each key/value head, float64."""
    b, n, h, last = x.shape
    return x.double().view(b, n, g, h // g, last).sum(3)

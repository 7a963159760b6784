"""The backward pass: launches of its kernels, and the gradient of log decay from the parts they store."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from linrope_kernels.backward import dkv_kernel, dq_kernel
from linrope_kernels.launch import (
    NO_STATE,
    Call,
    State,
    new_state,
    new_states,
    new_tables,
    segment_states,
    strides_of,
    unpack,
    with_strides,
)
from linrope_kernels.segments import Segments, rising_bounds, sums_between

# Every ANCHOR tokens the state and its gradient give the gradient of log decay directly; in between it is a
# running sum. A rounding error therefore reaches at most ANCHOR tokens. Fewer tokens are more exact, but each
# anchor writes and reads two states.
ANCHOR = 128


class Gradients(NamedTuple):
    q: Tensor | None
    k: Tensor
    v: Tensor
    start: State | None  # of the first state, if there was one
    log_decay: Tensor | None  # (b, m, g), float64
    angles: Tensor | None  # (b, m, g, P), float64: each token's part, <J phi, R^T dphi^> + <J psi, R^T dpsi^>


def attend_bwd(
    call: Call,
    start: State | None,
    saved: list[Tensor],
    out: Tensor | None,
    g_out: Tensor,
    g_end: State | None,
) -> Gradients:
    """saved and out (if it is read) are attend_fwd's."""
    assert call.q is not None
    b, n, h, _ = call.q.shape
    _, m, g, _ = call.k.shape
    tensors = (call.q, call.q.stride(), call.k, call.k.stride(), call.v, call.v.stride(), call.key_mask)
    dq, dk, dv = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (call.q, call.k, call.v)
    )
    table, key_table, saved = _saved_tables(call, saved)
    den, states = unpack(call, saved)
    delta = None if den is None else torch.empty_like(den)
    logs = angles = None
    if call.log_decay is not None:
        logs = _log_part(call, call.q, "dq"), _log_part(call, call.k, "dk")
    if call.phases is not None:
        angles = _part(call, call.q, call.pairs), _part(call, call.k, call.pairs)
    (log_q, log_k), (angles_q, angles_k) = logs or (None, None), angles or (None, None)
    g_start = new_state(call, start) if start is not None or not call.causal else None

    cut = call.segments(n)
    queries, keys = table, table if key_table is None else key_table
    before = start
    if not call.causal:
        before, key_table = states, None
    elif call.scans_states(cut):
        before = states
        if before is None:
            before = new_states(call, cut.number)
            segment_states(call, cut, keys, start, before, None)
    call.launch(
        dq_kernel, "dq", b * h * cut.number,
        *tensors, *with_strides(table), *with_strides(key_table), *call.decay, cut.slots,
        *(before or NO_STATE), out, strides_of(out, 4), g_out, g_out.stride(), den, delta, dq, dq.stride(),
        log_q, angles_q, n, h, call.group, cut.number, cut.length, call.eps, CAUSAL=call.causal,
    )  # fmt: skip

    after = g_end
    if call.scans_states(cut) or not call.causal:
        after = new_states(call, cut.number) if call.causal else None
        segment_states(call, cut, table, g_end, after, g_start, (g_out, den, delta))
    if not call.causal:
        after, table = g_start, keys
    cut = call.segments(m)
    for name in ("dk", "dv"):
        call.launch(
            dkv_kernel, name, b * g * cut.number,
            *tensors, *with_strides(table), *with_strides(key_table), *call.decay, cut.slots,
            *(after or NO_STATE), g_out, g_out.stride(), den, delta, dk, dk.stride(), dv, dv.stride(),
            log_k, angles_k, *(g_start or NO_STATE), m, g, call.group, cut.number, cut.length, call.eps,
            CAUSAL=call.causal, WANT_DK=name == "dk", WANT_DV=name == "dv",
        )  # fmt: skip
    d_log = None
    if logs is not None:
        parts = _per_key_head(logs[1], g).sum(3) - _per_key_head(logs[0], g).sum(3)
        cut = call.segments_of(m, ANCHOR)
        after = new_states(call, cut.number)
        segment_states(call, cut, queries, g_end, after, None, (g_out, den, delta))
        d_log = _d_log_decay(call, cut, parts, keys, start, g_start, after, g_end)
    d_angles = None if angles is None else _per_key_head(angles[1], g) + _per_key_head(angles[0], g)
    return Gradients(dq, dk, dv, g_start if start is not None else None, d_log, d_angles)


def state_bwd(call: Call, start: State | None, g_end: State) -> Gradients:
    """Of a call for the last state alone: dk and dv with T and W as each segment's last token sees them.

        dv_j = e^(D_N - D_j) T^T psi^_j      dpsi_j = e^(D_N - D_j) (R^T T v_j + W)

    This is the backward pass's last kernel, with no query heads that would add to T and W.
    """
    call = replace(call, normalize=False)
    (b, m, g, _), keys = call.k.shape, call.tables()
    table = keys[0] if keys[1] is None else keys[1]
    dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (call.k, call.v))
    cut = call.segments(m)
    fade, total = _after_segments(call, cut)
    after = tuple(_of_segments(call, x, cut, fade) for x in g_end)
    log = None if call.log_decay is None else _log_part(call, call.k, "dk")
    angles = None if call.phases is None else _part(call, call.k, call.pairs)
    for name in ("dk", "dv"):
        call.launch(
            dkv_kernel, name, b * g * cut.number,
            *(call.k, call.k.stride()) * 2, call.v, call.v.stride(), call.key_mask,
            *with_strides(table), *with_strides(None), *call.decay, cut.slots,
            *after, call.v, call.v.stride(), None, None, dk, dk.stride(), dv, dv.stride(),
            log, angles, *NO_STATE, m, g, 0, cut.number, cut.length, call.eps,
            CAUSAL=True, WANT_DK=name == "dk", WANT_DV=name == "dv",
        )  # fmt: skip
    g_start = None
    if start is not None:
        kv, z = ((x * total.view(*total.shape, *[1] * (x.ndim - 2))).to(x.dtype) for x in g_end)
        g_start = kv, z
    d_log = None
    if log is not None:
        cut = call.segments_of(m, ANCHOR)
        fade, _ = _after_segments(call, cut)
        after = _of_segments(call, g_end[0], cut, fade), _of_segments(call, g_end[1], cut, fade)
        parts = _per_key_head(log, g).sum(3)
        d_log = _d_log_decay(call, cut, parts, table, start, g_start, after, g_end)
    return Gradients(
        None,
        dk,
        dv,
        g_start,
        d_log,
        None if angles is None else _per_key_head(angles, g),
    )


def _d_log_decay(
    call: Call, cut: Segments, parts: Tensor, keys: Tensor | None, start: State | None, g_start: State | None,
    after: State, g_end: State | None,
) -> Tensor:  # fmt: skip
    """The gradient of log decay at token t of a segment that begins at token s:

        da_t = <S, dS> + <z, dz> before token s + sum_(s <= i < t) (<psi_i, dpsi_i> - <phi_i, dphi_i>)

    Summed over the whole segment, the right-hand side is <S, dS> + <z, dz> after the segment. The difference
    that rounding leaves is divided evenly among the segment's tokens, which halves the error of their sum.

    parts (b, m, g): the terms of the sum. after: T and W after each segment, the values of dS and dz there.
    """
    b, _, g, _ = call.k.shape
    before, end = new_states(call, cut.number), None if g_end is None else new_state(call, None)
    segment_states(call, cut, keys, start, before, end)
    first, last = _product(call, start, g_start), _product(call, end, g_end)
    between = parts.new_zeros(b * g, cut.number - 1)
    for x, dx in zip(before, after):
        between += x[:, 1:].mul_(dx[:, :-1]).flatten(2).sum(2, dtype=torch.float64)
    between = between.view(b, g, cut.number - 1).transpose(1, 2)
    lows, highs = (parts.new_zeros(b, cut.number, g) for _ in range(2))
    lows[:, 1:], highs[:, :-1] = between, between
    if cut.slots is None or cut.firsts is None:
        lows[:, 0], highs[:, -1] = first, last
    else:
        owner, number = cut.slots[:, 2].long(), torch.arange(cut.number, device=parts.device)
        lows = torch.where((number == cut.firsts[owner])[:, None], first[owner], lows)
        highs = torch.where((number + 1 == cut.firsts[owner + 1])[:, None], last[owner], highs)
    return sums_between(parts, cut, lows, highs)


def _product(call: Call, x: State | None, dx: State | None) -> Tensor:
    """<S, dS> + <z, dz> of each sequence, (sequences, g) float64; None: 0."""
    total = call.k.new_zeros(call.entries, call.k.shape[2], dtype=torch.float64)
    for one, other in zip(x or (), dx or ()):
        total += (one.double() * other).flatten(2).sum(2)
    return total


def _after_segments(call: Call, cut: Segments) -> tuple[Tensor, Tensor]:
    """What fades between each segment's end and its sequence's, (b, s, g), and over all, (b, g): e^D.

    Of packed sequences (1, slots, g) and (sequences, g).
    """
    b, m, g, _ = call.k.shape
    if call.log_decay is None:
        one = call.k.new_ones((), dtype=torch.float64)
        return one.expand(b, cut.number, g), one.expand(call.entries, g)
    log = call.log_decay.double().expand(b, m, g)
    sums = torch.cat((log.new_zeros(b, 1, g), log.cumsum(1)), 1)
    if call.cu_seqlens is None or cut.slots is None:
        ends = (torch.arange(1, cut.number + 1, device=log.device) * cut.length).clamp(max=m)
        return (sums[:, -1:] - sums[:, ends]).exp(), sums[:, -1].exp()
    bounds = rising_bounds(call.cu_seqlens, m)
    ends, owner = cut.slots[:, 1].long(), cut.slots[:, 2].long()
    return (sums[:, bounds[owner + 1]] - sums[:, ends]).exp(), (
        sums[0, bounds[1:]] - sums[0, bounds[:-1]]
    ).exp()


def _of_segments(call: Call, x: Tensor, cut: Segments, fade: Tensor) -> Tensor:
    """x (sequences, g, ..) as the last token of each segment sees it: (b g, segments, ..)."""
    x = x[:, None] if cut.slots is None else x[cut.slots[:, 2].long()][None]  # (b, s or 1, g, ..)
    faded = (x * fade.view(*fade.shape, *[1] * (x.ndim - 3))).to(x.dtype)
    return faded.transpose(1, 2).contiguous().flatten(0, 1)


def _saved_tables(call: Call, saved: list[Tensor]) -> tuple[Tensor | None, Tensor | None, list[Tensor]]:
    """The tables of angles, of queries and of keys if they differ, and what else was saved."""
    number = len(new_tables(call))
    if number == 0:
        return *call.tables(), saved
    return saved[0], saved[1] if number == 2 else None, saved[number:]


def _part(call: Call, x: Tensor, numbers: int) -> Tensor:
    """(b, n, heads, numbers) float32 for x's tokens, not filled in; packed sequences may not cover all."""
    new = torch.empty if call.cu_seqlens is None else torch.zeros
    return new(*x.shape[:3], numbers, dtype=torch.float32, device=x.device)


def _log_part(call: Call, x: Tensor, name: str) -> Tensor:
    """A number for each block of pairs that a program of that kernel has."""
    return _part(call, x, -(-((x.shape[3] + 1) // 2) // call.tile(name).pairs))


def _per_key_head(x: Tensor, g: int) -> Tensor:
    """x (b, n, h, ..) summed over the query heads of each key/value head, float64."""
    b, n, h, last = x.shape
    return x.double().view(b, n, g, h // g, last).sum(3)

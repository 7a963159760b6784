"""Angles Theta, exact at any position, and tables of their cos and sin.

An angle is a 64-bit integer number of 2^-64 turns, which wraps around at one full turn.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from linrope_kernels.memory import strides_of
from linrope_kernels.start import start_kernel
from linrope_kernels.tiles import power_of_two_from_16, precision

Tables = tuple[
    Tensor | None, Tensor | None
]  # cos and sin for queries and for keys: one table if their angles agree
Phases = tuple[Tensor, Tensor | None]  # (1 or b, n, 1 or g, P): angles of queries and, if they differ, keys


@triton.jit
def cos_sin(phase):
    """cos and sin of an angle, given as an int64 number of 2^-64 turns: overflow drops whole turns.

    So p theta needs no float64 and no range reduction. Its error is p times that of theta, which a float64 gave.
    Dropping the low 32 bits costs less than 2^-32 turns. Quarter turns are split off, so that float32 holds the rest to
    1e-7.
    """
    high = (phase >> 32).to(tl.int32)  # in 2^-32 turns
    quarter = (high + 0x20000000) >> 30  # the nearest quarter turn, -2 .. 1; the sum may wrap around
    rest = (high - (quarter << 30)).to(tl.float32) * 1.4629180792671596e-09  # 2 pi / 2^32
    square = rest * rest  # minimax polynomials of Cephes' sinf and cosf
    s = -1.9515295891e-4 * square + 8.3321608736e-3
    s = rest + rest * square * (s * square - 1.6666654611e-1)
    c = 2.443315711809948e-5 * square - 1.388731625493765e-3
    c = 1 - 0.5 * square + square * square * (c * square + 4.166664568298827e-2)
    odd = (quarter & 1) != 0
    cos = tl.where(odd, s, c)
    sin = tl.where(odd, c, s)
    return tl.where(((quarter + 1) & 2) != 0, -cos, cos), tl.where((quarter & 2) != 0, -sin, sin)


@triton.jit
def load_theta(THETA, axis, heads, head, pairs, P: tl.constexpr):
    """theta (W,) of one axis and head from THETA (axes, 1 or g, P); 0 for pairs that do not rotate."""
    row = axis * heads + (head if heads > 1 else 0)
    return tl.load(THETA + row * P + pairs, mask=pairs < P, other=0)


@triton.jit(do_not_specialize=["n", "heads"])
def table_fwd_kernel(
    THETA,  # (axes, 1 or g, P) int64, 2^-64 turns per position; None: PHASES
    POSITIONS, position_stride,  # (1 or b, n or 1) int64, with axes (1 or b, n, axes)
    PHASES, phase_strides,  # (1 or b, n, 1 or g, P) int64, in 2^-64 turns
    TABLE,  # (1 or b, 1 or g, n, 2 P)
    n, heads,
    P: tl.constexpr, AXES: tl.constexpr, CONSECUTIVE: tl.constexpr, INTERLEAVED: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """The table of cos and sin, of p theta or of PHASES.

    cos and sin lie as the two members of a pair do in q and k, so that each thread loads the angles of its
    own features. CONSECUTIVE: POSITIONS holds only the first position.
    """
    chunk = tl.program_id(0) % tl.cdiv(n, C)
    head = tl.program_id(0) // tl.cdiv(n, C) % heads
    batch = (tl.program_id(0) // tl.cdiv(n, C) // heads).to(tl.int64)
    rows, pairs = chunk * C + tl.arange(0, C), tl.arange(0, W)
    inside = (rows < n)[:, None] & (pairs < P)[None, :]
    if THETA is None:
        PHASES += batch * phase_strides[0] + head.to(tl.int64) * phase_strides[2]
        offsets = rows.to(tl.int64)[:, None] * phase_strides[1] + pairs[None, :] * phase_strides[3]
        phase = tl.load(PHASES + offsets, mask=inside, other=0)
    else:
        POSITIONS += batch * position_stride
        phase = tl.zeros([C, W], tl.int64)
        for a in tl.static_range(AXES):
            if CONSECUTIVE:
                positions = tl.load(POSITIONS) + rows
            else:
                positions = tl.load(POSITIONS + rows.to(tl.int64) * AXES + a, mask=rows < n, other=0)
            phase += positions[:, None] * load_theta(THETA, a, heads, head, pairs, P)[None, :]
    cos, sin = cos_sin(phase)
    TABLE += ((batch * heads + head) * n + rows)[:, None].to(tl.int64) * (2 * P)
    if INTERLEAVED:
        both, i = tl.reshape(tl.join(cos, sin), [C, 2 * W]), tl.arange(0, 2 * W)
        inside = (rows < n)[:, None] & (i < 2 * P)[None, :]
        tl.store(TABLE + i[None, :], both.to(TABLE.dtype.element_ty), mask=inside)
    else:
        tl.store(TABLE + pairs[None, :], cos.to(TABLE.dtype.element_ty), mask=inside)
        tl.store(TABLE + P + pairs[None, :], sin.to(TABLE.dtype.element_ty), mask=inside)


def new_table(call: Any, positions: Tensor, phases: Tensor | None, n: int) -> Tensor:
    """An empty table of cos and sin (1 or b, 1 or g, n, 2 P).

    It is float16 for bfloat16 inputs: half of float32's bytes, and more precise than bfloat16.
    """
    if phases is None:
        rows, heads = positions.shape[0], call.theta_turns.shape[1]
    else:
        rows, heads = phases.shape[0], phases.shape[2]
    dtype = torch.float16 if precision(call.v) == "bf16" else torch.float32
    return positions.new_empty(rows, heads, n, 2 * call.pairs, dtype=dtype)


def make_table(call: Any, positions: Tensor, phases: Tensor | None, n: int) -> Tensor | None:
    """The table for the angles ``phases`` or, if these are None, for theta and positions."""
    if not call.pairs:
        return None
    table, positions = new_table(call, positions, phases, n), positions.contiguous()
    theta = call.theta_turns if phases is None else None
    (rows, heads, _, _), axes, chunk = table.shape, 1 if theta is None else theta.shape[0], 32
    start_kernel(
        table_fwd_kernel, rows * heads * -(-n // chunk),
        theta, positions, strides_of(positions, 1)[0], phases, strides_of(phases, 4), table, n, heads,
        P=call.pairs, AXES=axes, CONSECUTIVE=positions.ndim == 2 and positions.shape[1] == 1,
        INTERLEAVED=call.layout == "interleaved", C=chunk, W=power_of_two_from_16(call.pairs),
    )  # fmt: skip
    return table


def make_tables(call: Any, phases: Phases | None) -> Tables:
    """The tables of cos and sin for the queries and the keys; None: nothing rotates."""
    n, m = (call.k if call.q is None else call.q).shape[1], call.k.shape[1]
    of_queries, of_keys = phases or (None, None)
    table = make_table(call, call.positions, of_queries, n)
    return table, table if call.key_positions is None else make_table(call, call.key_positions, of_keys, m)

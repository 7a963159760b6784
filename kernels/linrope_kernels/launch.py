"""Launchers: choose tiles and segments and start the kernels, with no copies of q, k, v and no syncs."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linrope_kernels import tiles
from linrope_kernels.angles import table_fwd_kernel
from linrope_kernels.forward import scan_fwd_kernel
from linrope_kernels.memory import Rows, Tokens
from linrope_kernels.segments import Segments, cut_packed
from linrope_kernels.step import step_fwd_kernel
from linrope_kernels.transition import prefix_kernel, states_kernel

Tables = tuple[Tensor | None, Tensor | None]  # cos and sin for queries, and for keys if their angles differ
State = tuple[Tensor, Tensor]  # S (b, g, f, e) float32 and z (b, g, f) float64 or float32, contiguous
NO_STATE = (None, None)
PREFIX_BLOCK = 1024


@dataclass(frozen=True, kw_only=True)
class Call:
    """The inputs of one call; names as in linrope."""

    q: Tensor | None  # (b, n, h, f), any strides, like k and v; None: only the last state is wanted
    k: Tensor  # (b, m, g, f)
    v: Tensor  # (b, m, g, e)
    log_decay: Tensor | None = None  # (b or 1, m, g or 1) <= 0, any strides
    theta: Tensor | None = None  # (axes, 1 or g, P) int64, 2^-64 turns per position
    positions: Tensor  # (1 or b, n or, if consecutive, 1) or (1 or b, n, axes), int64 contiguous
    key_positions: Tensor | None = None  # the same with m; None: equal to positions
    key_mask: Tensor | None = None  # (b, m) bool, contiguous
    cu_seqlens: Tensor | None = None  # (sequences + 1,) bounds of packed sequences; b is then 1
    layout: str = "half"
    feature_map: str = "elu+1"
    causal: bool = True
    normalize: bool = True
    eps: float = 1e-6
    eps_mode: str = "clamp"
    dot: str  # precision of matrix products: "bf16", "tf32", "ieee"
    # In place of theta: angles (1 or b, n, 1 or g, P) in 2^-64 turns, of queries and, if they differ, keys
    phases: tuple[Tensor, Tensor | None] | None = None

    @property
    def q_or_k(self) -> Tensor:
        """q, or k if there are no queries; only its shape is used."""
        return self.k if self.q is None else self.q

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.q_or_k.shape[2] // self.k.shape[2]

    @property
    def pairs(self) -> int:
        """P: the number of pairs that rotate."""
        angles = self.theta if self.phases is None else self.phases[0]
        return 0 if angles is None else angles.shape[-1]

    @property
    def sequences(self) -> int:
        """b, or the number of packed sequences."""
        return self.k.shape[0] if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    @property
    def num_states(self) -> int:
        """The number of states: one per sequence and key/value head."""
        return self.sequences * self.k.shape[2]

    def tile(self, name: str) -> tiles.Tile:
        return tiles.tile(name, self.k.shape[3], self.v.shape[3], self.dot, _device(self.k).capability)

    @property
    def reads_out(self) -> bool:
        """True if the backward pass reads out, because no program has all feature pairs."""
        if self.q is None:
            return False
        return self.normalize and self.tile("dq").pairs < (self.k.shape[3] + 1) // 2

    def most_segments(self) -> int:
        tile, (b, _, h, _) = self.tile("scan_fwd"), self.q_or_k.shape
        blocks = -(-self.v.shape[3] // tile.values)
        return tiles.most_segments(b * h, blocks, _device(self.k).multiprocessors, tile.warps)

    def new_table(self, positions: Tensor, phases: Tensor | None, n: int) -> Tensor:
        """An empty table of cos and sin (1 or b, 1 or g, n, 2 P).

        It is float16 for bfloat16 inputs: half of float32's bytes, and more precise than bfloat16.
        """
        if phases is None:
            assert self.theta is not None
            rows, heads = positions.shape[0], self.theta.shape[1]
        else:
            rows, heads = phases.shape[0], phases.shape[2]
        dtype = torch.float16 if self.dot == "bf16" else torch.float32
        return positions.new_empty(rows, heads, n, 2 * self.pairs, dtype=dtype)

    def make_table(self, positions: Tensor, phases: Tensor | None, n: int) -> Tensor | None:
        if not self.pairs:
            return None
        table = self.new_table(positions, phases, n)
        (rows, heads, _, _), axes = table.shape, 1 if self.theta is None else self.theta.shape[0]
        chunk = 32
        programs = rows * heads * -(-n // chunk)
        if programs:
            table_fwd_kernel[(programs,)](
                self.theta, positions, _row_stride(positions), phases, strides_of(phases, 4), table, n, heads,
                P=self.pairs, AXES=axes, CONSECUTIVE=positions.ndim == 2 and positions.shape[1] == 1,
                INTERLEAVED=self.layout == "interleaved", C=chunk, W=tiles.power_of_two_from_16(self.pairs),
            )  # fmt: skip
        return table

    def tables(self) -> Tables:
        """The tables of cos and sin for the queries and, if their positions differ, the keys."""
        n, m = self.q_or_k.shape[1], self.k.shape[1]
        phases, key_phases = self.phases or (None, None)
        keys = None if self.key_positions is None else self.make_table(self.key_positions, key_phases, m)
        return self.make_table(self.positions, phases, n), keys

    def new(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A tensor for results of the tokens: empty, but 0 if packed, as cu_seqlens may leave out tokens."""
        new = self.k.new_empty if self.cu_seqlens is None else self.k.new_zeros
        return new(*shape, dtype=dtype)

    def tokens(self, table: Tensor | None, key_table: Tensor | None, segments: Segments) -> Tokens:
        log = Rows(self.log_decay, strides_of(self.log_decay, 3))
        key_table = None if key_table is None else with_strides(key_table)
        return Tokens(self.key_mask, with_strides(table), key_table, log, segments.spans)

    def segments(self, n: int) -> Segments:
        """The segments of a sequence of n tokens, or of all packed sequences together."""
        if self.cu_seqlens is not None:
            return self._packed_segments
        return Segments(*tiles.segments(n, self.most_segments()), None, None)

    @cached_property
    def _packed_segments(self) -> Segments:
        n = self.k.shape[1]
        return self.segments_of(n, tiles.segments(n, self.most_segments())[1])

    def segments_of(self, n: int, length: int) -> Segments:
        """Segments of ``length`` tokens; the last one of each sequence may be shorter."""
        if self.cu_seqlens is not None:
            return cut_packed(self.cu_seqlens, n, length)
        return Segments(max(1, -(-n // length)), length, None, None)

    def scans_states(self, segments: Segments) -> bool:
        """True if ``states`` and ``prefix`` run, which give every segment the state that it starts from."""
        return segments.number > 1 or segments.spans is not None

    def launch(self, kernel: Any, name: str, copies: int, *args: Any, **constants: Any) -> None:
        """Starts ``copies`` programs for each block of the output, with the tile called ``name``."""
        f, e, tile = self.k.shape[3], self.v.shape[3], self.tile(name)
        if not name.startswith("step"):
            copies *= -(-((f + 1) // 2) // tile.pairs) * -(-e // tile.values)
            constants |= {"DOT": self.dot, "C": tile.chunk, "STAGES": tile.stages}
        if copies:
            kernel[(copies,)](
                *args, F=f, E=e, P=self.pairs, MAP=self.feature_map, NORMALIZE=self.normalize,
                INTERLEAVED=not self.pairs or self.layout == "interleaved", ADD=self.eps_mode == "add",
                W=tile.pairs, BE=tile.values, num_warps=tile.warps, num_stages=tile.stages, **constants,
            )  # fmt: skip


class _Device(NamedTuple):
    capability: int
    multiprocessors: int


def _device(x: Tensor) -> _Device:
    if not x.is_cuda:  # Triton's interpreter runs the programs one by one
        return _Device(90, 1)
    properties = torch.cuda.get_device_properties(x.device)
    return _Device(10 * properties.major + properties.minor, properties.multi_processor_count)


def strides_of(x: Tensor | None, axes: int) -> tuple[int, ...]:
    """x's strides, 0 along axes of length 1, which broadcast."""
    if x is None:
        return (0,) * axes
    return tuple(0 if size == 1 else stride for size, stride in zip(x.shape, x.stride()))


def rows_of(x: Tensor | None) -> Rows:
    return Rows(x, (0,) * 4 if x is None else x.stride())


def with_strides(table: Tensor | None) -> Rows:
    """A table of cos and sin with the strides of its first two axes, as kernels take it."""
    return Rows(table, strides_of(table, 4)[:2])


def _row_stride(x: Tensor) -> int:
    return strides_of(x, 1)[0]


def saved_segments(call: Call) -> int:
    """States per sequence and head that the forward pass saves; independent of n, which may be symbolic."""
    most = call.most_segments()
    return 0 if most == 1 or not call.causal or call.cu_seqlens is not None else most


def new_states(call: Call, number: int) -> State:
    """Empty states for ``number`` segments, per sequence or, if sequences are packed, in total."""
    f, e, rows = call.k.shape[3], call.v.shape[3], call.k.shape[0] * call.k.shape[2]
    s = call.k.new_empty(rows, number, f, e, dtype=torch.float32)
    return s, s.new_empty(rows, number, f, dtype=torch.float64)


def new_state(call: Call, like: State | None) -> State:
    """An empty state for each sequence; z has the dtype of that in ``like``."""
    (_, _, g, f), e = call.k.shape, call.v.shape[3]
    s = call.k.new_empty(call.sequences, g, f, e, dtype=torch.float32)
    return s, s.new_empty(*s.shape[:3], dtype=torch.float64 if like is None else like[1].dtype)


def new_tables(call: Call) -> list[Tensor]:
    """Empty tables of cos and sin, as the forward pass saves them; it saves none if angles come from data."""
    if call.theta is None or call.q is None:
        return []
    sides = [(call.positions, call.q)]
    if call.key_positions is not None:
        sides.append((call.key_positions, call.k))
    return [call.new_table(positions, None, x.shape[1]) for positions, x in sides]


def new_sums(call: Call) -> list[Tensor]:
    """Empty den (b, h, n) and, unless it is cheap to recompute, a state, which the forward pass saves.

    A bidirectional call saves the state of all keys; a causal one with few heads saves the states before its
    segments. Short sequences have fewer segments and leave some of these states unwritten.
    """
    if call.q is None:
        return []
    b, n, h, _ = call.q.shape
    saved = [call.q.new_empty(b, h, n, dtype=torch.float32)] if call.normalize else []
    if not call.causal:
        return [*saved, *new_state(call, None)]
    most = saved_segments(call)
    return [*saved, *new_states(call, most)] if most else saved


def new_saved(call: Call) -> list[Tensor]:
    """Empty tensors for all that the forward pass saves."""
    return [*new_tables(call), *new_sums(call)]


def unpack_sums(call: Call, saved: list[Tensor]) -> tuple[Tensor | None, State | None]:
    """Splits the tensors of new_sums into den and the state or states."""
    den, *states = saved if call.normalize else (None, *saved)
    return den, (states[0], states[1]) if states else None  # type: ignore[return-value]


def segment_states(
    call: Call, segments: Segments, table: Tensor | None, start: State | None, states: State | None,
    end: State | None, backward: tuple[Tensor, Tensor | None, Tensor | None] | None = None,
) -> None:  # fmt: skip
    """Computes the state before each segment (backward: its gradient after each segment) and the last state.

    start: the first state, or None. states, end: where the results go, or None if not wanted. backward: dout,
    den and delta.
    """
    if backward is None:
        x, y, mask, den, delta = call.k, call.v, call.key_mask, None, None
    else:
        assert call.q is not None
        x, (y, den, delta), mask = call.q, backward, None
    length, g = x.shape[1], call.k.shape[2]
    # A single segment with no state before it: its own state is the last one, and needs no prefix.
    single = states is None and start is None and not call.scans_states(segments)
    states = (end if single else states) or new_states(call, segments.number)
    totals = None
    if call.log_decay is not None:
        rows = states[0].shape[0] * (g if single else 1)
        totals = states[0].new_empty(rows, segments.number, dtype=torch.float64)
    call.launch(
        states_kernel, "states", call.k.shape[0] * g * segments.number,
        rows_of(x), rows_of(y), call.tokens(table, None, segments)._replace(mask=mask), den, delta,
        states, totals, length, g, call.group, segments.number, segments.length, call.eps,
        REVERSE=backward is not None,
    )  # fmt: skip
    f, e = call.k.shape[3], call.v.shape[3]
    if not single and call.num_states:
        prefix_kernel[(call.num_states * -(-f * e // PREFIX_BLOCK),)](
            totals, segments.first_spans, states, start or NO_STATE, end or NO_STATE,
            g, segments.number, F=f, E=e, REVERSE=backward is not None, BLOCK=PREFIX_BLOCK,
        )  # fmt: skip


def attend_fwd(
    call: Call, start: State | None, *, want_end: bool, save: bool
) -> tuple[Tensor | None, State | None, list[Tensor]]:
    """out (b, n, h, e), the last state if wanted, and if ``save`` the tensors that new_saved describes."""
    table, key_table = call.tables()
    key_angles = table if key_table is None else key_table
    end = new_state(call, start) if want_end else None
    if call.q is None:
        segment_states(call, call.segments(call.k.shape[1]), key_angles, start, None, end)
        return None, end, []
    saved = new_sums(call) if save else []
    den, states = unpack_sums(call, saved) if save else (None, None)
    b, n, h, _ = call.q.shape
    segments, states_before = call.segments(n), start
    if not call.causal:
        states_before, key_table = states or end or new_state(call, None), None
        segment_states(call, call.segments(call.k.shape[1]), key_angles, start, None, states_before)
        if end is not None and end is not states_before:
            end = end[0].copy_(states_before[0]), end[1].copy_(states_before[1])
    elif call.scans_states(segments):
        states_before = states or new_states(call, segments.number)
        segment_states(call, segments, key_angles, start, states_before, end)
    out = call.new(b, n, h, call.v.shape[3], dtype=call.v.dtype)
    call.launch(
        scan_fwd_kernel, "scan_fwd", b * h * segments.number,
        rows_of(call.q), rows_of(call.k), rows_of(call.v), call.tokens(table, key_table, segments),
        states_before or NO_STATE, rows_of(out), den, end or NO_STATE,
        n, h, call.group, segments.number, segments.length, call.eps, CAUSAL=call.causal,
    )  # fmt: skip
    if save and call.theta is not None and table is not None:
        saved = [table, *([] if key_angles is None or key_angles is table else [key_angles]), *saved]
    return out, end, saved


def step_fwd(call: Call, start: State | None, end: State | None, slots: Tensor | None) -> Tensor:
    """out of one token of every sequence. end may be start, which is then updated in place.

    slots (b,): start and end are pools of states, and sequence i has row slots[i].
    """
    assert call.q is not None
    g, e = call.k.shape[2], call.v.shape[3]
    # In place a single program handles a sequence and head: each program reads z, and one overwrites it.
    in_place = start is not None and end is not None and start[1] is end[1]
    key_positions = call.positions if call.key_positions is None else call.key_positions
    axes, heads = (1, 1) if call.theta is None else call.theta.shape[:2]
    phases, key_phases = call.phases or (None, None)
    key_phases = phases if key_phases is None else key_phases
    name = "step_in_place" if in_place else "step_fwd"
    parts = 1 if in_place else -(-e // call.tile(name).values)
    out = call.v.new_empty(*call.q.shape[:3], e)
    call.launch(
        step_fwd_kernel, name, call.num_states * parts,
        rows_of(call.q), rows_of(call.k), rows_of(call.v), call.key_mask,
        (call.theta, heads), (call.positions, _row_stride(call.positions)),
        (key_positions, _row_stride(key_positions)),
        Rows(phases, strides_of(phases, 4)), Rows(key_phases, strides_of(key_phases, 4)),
        Rows(call.log_decay, strides_of(call.log_decay, 3)), slots,
        start or NO_STATE, end or NO_STATE, rows_of(out), g, call.group, parts, call.eps,
        AXES=axes,
    )  # fmt: skip
    return out

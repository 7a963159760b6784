"""Launchers: they choose tiles and segments and start the kernels. No copies of q, k, v, no syncs."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linrope_kernels import tiles
from linrope_kernels.angles import table_fwd_kernel
from linrope_kernels.forward import prefix_kernel, scan_fwd_kernel, states_kernel
from linrope_kernels.segments import Segments, cut_packed
from linrope_kernels.step import step_fwd_kernel

Tables = tuple[Tensor | None, Tensor | None]  # of angles: of queries, and of keys if their positions differ
State = tuple[Tensor, Tensor]  # S (b, g, f, e) float32 and z (b, g, f) float64 or float32, contiguous
NO_STATE = (None, None)
PREFIX_BLOCK = 1024


@dataclass(frozen=True, kw_only=True)
class Call:
    """What one call works on; names and defaults as in linrope."""

    q: Tensor | None  # (b, n, h, f), any strides, as k and v; None: the last state alone is wanted
    k: Tensor  # (b, m, g, f)
    v: Tensor  # (b, m, g, e)
    log_decay: Tensor | None = None  # (b or 1, m, g or 1) <= 0, any strides
    theta: Tensor | None = None  # (axes, 1 or g, P) int64, 2^-64 turns per position
    positions: Tensor  # (1 or b, n) int64 contiguous, or (1 or b, 1): consecutive; or (1 or b, n, axes)
    key_positions: Tensor | None = None  # (1 or b, m), likewise; None: as positions
    key_mask: Tensor | None = None  # (b, m) bool, contiguous
    cu_seqlens: Tensor | None = None  # (s + 1,) of packed sequences: then b is 1
    layout: str = "half"
    feature_map: str = "elu+1"
    causal: bool = True
    normalize: bool = True
    eps: float = 1e-6
    eps_mode: str = "clamp"
    dot: str  # how products are computed: "bf16", "tf32", "ieee"
    # In place of theta all angles (1 or b, n, 1 or g, P), in 2^-64 turns: of queries; of keys if they differ
    phases: tuple[Tensor, Tensor | None] | None = None

    @property
    def queries(self) -> Tensor:
        """q, or k where there are no queries: for shapes."""
        return self.k if self.q is None else self.q

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.queries.shape[2] // self.k.shape[2]

    @property
    def pairs(self) -> int:
        """P: how many pairs turn."""
        angles = self.theta if self.phases is None else self.phases[0]
        return 0 if angles is None else angles.shape[-1]

    @property
    def entries(self) -> int:
        """b, of packed sequences s."""
        return self.k.shape[0] if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    @property
    def sequences(self) -> int:
        """b g, of packed sequences s g: how many states there are."""
        return self.entries * self.k.shape[2]

    def tile(self, name: str) -> tiles.Tile:
        return tiles.tile(name, self.k.shape[3], self.v.shape[3], self.dot, _device(self.k).capability)

    @property
    def reads_out(self) -> bool:
        """Whether the backward pass needs out: where no program has all feature pairs."""
        if self.q is None:
            return False
        return self.normalize and self.tile("dq").pairs < (self.k.shape[3] + 1) // 2

    def most_segments(self) -> int:
        tile, (b, _, h, _) = self.tile("scan_fwd"), self.queries.shape
        blocks = -(-self.v.shape[3] // tile.values)
        return tiles.most_segments(b * h, blocks, _device(self.k).multiprocessors, tile.warps)

    def new_table(self, positions: Tensor, phases: Tensor | None, n: int) -> Tensor:
        """For cos and sin (1 or b, 1 or g, n, 2 P) of the angles; float16 holds more digits than bfloat16."""
        if phases is None:
            assert self.theta is not None
            rows, heads = positions.shape[0], self.theta.shape[1]
        else:
            rows, heads = phases.shape[0], phases.shape[2]
        dtype = torch.float16 if self.dot == "bf16" else torch.float32
        return positions.new_empty(rows, heads, n, 2 * self.pairs, dtype=dtype)

    def table(self, positions: Tensor, phases: Tensor | None, n: int) -> Tensor | None:
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
                INTERLEAVED=self.layout == "interleaved", C=chunk, W=tiles.power_of_two(self.pairs),
            )  # fmt: skip
        return table

    def tables(self) -> Tables:
        """Of queries and, if their positions are others, of keys."""
        n, m = self.queries.shape[1], self.k.shape[1]
        phases, key_phases = self.phases or (None, None)
        keys = None if self.key_positions is None else self.table(self.key_positions, key_phases, m)
        return self.table(self.positions, phases, n), keys

    @property
    def decay(self) -> tuple[Any, ...]:
        """log_decay and its strides."""
        return self.log_decay, strides_of(self.log_decay, 3)

    def segments(self, n: int) -> Segments:
        """How the n tokens of a sequence, or of all packed ones, are cut; without asking the device."""
        if self.cu_seqlens is not None:
            return self._packed
        return Segments(*tiles.segments(n, self.most_segments()), None, None)

    @cached_property
    def _packed(self) -> Segments:
        n = self.k.shape[1]
        return self.segments_of(n, tiles.segments(n, self.most_segments())[1])

    def segments_of(self, n: int, length: int) -> Segments:
        """Segments of ``length`` tokens, but for the last one of each sequence."""
        if self.cu_seqlens is not None:
            return cut_packed(self.cu_seqlens, n, length)
        return Segments(max(1, -(-n // length)), length, None, None)

    def scans_states(self, cut: Segments) -> bool:
        """Whether the states of segments have kernels of their own."""
        return cut.number > 1 or cut.slots is not None

    def launch(self, kernel: Any, name: str, copies: int, *args: Any, **constants: Any) -> None:
        """Starts ``copies`` programs for every block of the output, with the tile of that name."""
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


GIVEN = tuple(x.name for x in fields(Call) if x.name not in ("dot", "phases"))  # linrope's Call has these


class _Device(NamedTuple):
    capability: int
    multiprocessors: int


def _device(x: Tensor) -> _Device:
    if not x.is_cuda:  # Triton's interpreter runs one program after another
        return _Device(90, 1)
    properties = torch.cuda.get_device_properties(x.device)
    return _Device(10 * properties.major + properties.minor, properties.multi_processor_count)


def strides_of(x: Tensor | None, axes: int) -> tuple[int, ...]:
    """0 for axes of length 1: one entry for all."""
    if x is None:
        return (0,) * axes
    return tuple(0 if size == 1 else stride for size, stride in zip(x.shape, x.stride()))


def with_strides(table: Tensor | None) -> tuple[Any, ...]:
    return table, strides_of(table, 4)[:2]


def _row_stride(x: Tensor | None) -> int:
    return strides_of(x, 1)[0]


def saved_segments(call: Call) -> int:
    """How many states the forward pass saves for the backward pass; no branch on n, which may be symbolic."""
    most = call.most_segments()
    return 0 if most == 1 or not call.causal or call.cu_seqlens is not None else most


def new_states(call: Call, number: int) -> State:
    """Of ``number`` segments of each sequence (of packed ones: of all together), not filled in."""
    f, e, rows = call.k.shape[3], call.v.shape[3], call.k.shape[0] * call.k.shape[2]
    s = call.k.new_empty(rows, number, f, e, dtype=torch.float32)
    return s, s.new_empty(rows, number, f, dtype=torch.float64)


def new_state(call: Call, like: State | None) -> State:
    """Of each sequence, not filled in; z in the dtype that it has there."""
    (_, _, g, f), e = call.k.shape, call.v.shape[3]
    s = call.k.new_empty(call.entries, g, f, e, dtype=torch.float32)
    return s, s.new_empty(*s.shape[:3], dtype=torch.float64 if like is None else like[1].dtype)


def new_tables(call: Call) -> list[Tensor]:
    """The tables of angles that the forward pass saves; those made from data are made again."""
    if call.theta is None or call.q is None:
        return []
    given = [(call.positions, call.q)]
    if call.key_positions is not None:
        given.append((call.key_positions, call.k))
    return [call.new_table(positions, None, x.shape[1]) for positions, x in given]


def new_sums(call: Call) -> list[Tensor]:
    """den (b, h, n) and, unless it is cheap to make again, a state, for the backward pass.

    That is the state of all keys or, where few heads are cut into segments, the states before those; short
    sequences leave some of these as they came.
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
    """What the backward pass needs, not filled in."""
    return [*new_tables(call), *new_sums(call)]


def unpack(call: Call, saved: list[Tensor]) -> tuple[Tensor | None, State | None]:
    """den and the state or states of new_sums."""
    den, *states = saved if call.normalize else (None, *saved)
    return den, (states[0], states[1]) if states else None  # type: ignore[return-value]


def segment_states(
    call: Call, cut: Segments, table: Tensor | None, start: State | None, own: State | None,
    end: State | None, backward: tuple[Tensor, Tensor | None, Tensor | None] | None = None,
) -> None:  # fmt: skip
    """own: the states before (backward: after) each segment of cut; end: the last. backward: g, den, delta.

    None: no state to start from, not wanted.
    """
    if backward is None:
        x, y, mask, den, delta = call.k, call.v, call.key_mask, None, None
    else:
        assert call.q is not None
        x, (y, den, delta), mask = call.q, backward, None
    length, g = x.shape[1], call.k.shape[2]
    alone = (
        own is None and start is None and not call.scans_states(cut)
    )  # a segment's own state is the last one
    own = (end if alone else own) or new_states(call, cut.number)
    totals = None
    if call.log_decay is not None:
        totals = own[0].new_empty(
            own[0].shape[0] * g if alone else own[0].shape[0], cut.number, dtype=torch.float64
        )
    call.launch(
        states_kernel, "states", call.k.shape[0] * g * cut.number,
        x, x.stride(), y, y.stride(), mask, den, delta, *with_strides(table), *call.decay, cut.slots,
        *own, totals, length, g, call.group, cut.number, cut.length, call.eps, REVERSE=backward is not None,
    )  # fmt: skip
    f, e = call.k.shape[3], call.v.shape[3]
    if not alone and call.sequences:
        prefix_kernel[(call.sequences * -(-f * e // PREFIX_BLOCK),)](
            totals, cut.firsts, *own, *(start or NO_STATE), *(end or NO_STATE), g, cut.number,
            F=f, E=e, REVERSE=backward is not None, BLOCK=PREFIX_BLOCK,
        )  # fmt: skip


def attend_fwd(
    call: Call, start: State | None, *, want_end: bool, save: bool, tables: Tables | None = None
) -> tuple[Tensor | None, State | None, list[Tensor]]:
    """out (b, n, h, e), the last state where it is wanted, and what new_saved says.

    tables: those of call.tables(), where they are there already.
    """
    table, key_table = tables or call.tables()
    keys = table if key_table is None else key_table
    end = new_state(call, start) if want_end else None
    if call.q is None:
        segment_states(call, call.segments(call.k.shape[1]), keys, start, None, end)
        return None, end, []
    saved = new_sums(call) if save else []
    den, states = unpack(call, saved) if save else (None, None)
    b, n, h, _ = call.q.shape
    cut, before = call.segments(n), start
    if not call.causal:
        before, key_table = states or end or new_state(call, None), None
        segment_states(call, call.segments(call.k.shape[1]), keys, start, None, before)
        if end is not None and end is not before:
            end = end[0].copy_(before[0]), end[1].copy_(before[1])
    elif call.scans_states(cut):
        before = states or new_states(call, cut.number)
        segment_states(call, cut, keys, start, before, end)
    out = call.v.new_empty(b, n, h, call.v.shape[3])
    call.launch(
        scan_fwd_kernel, "scan_fwd", b * h * cut.number,
        call.q, call.q.stride(), call.k, call.k.stride(), call.v, call.v.stride(), call.key_mask,
        *with_strides(table), *with_strides(key_table), *call.decay, cut.slots, *(before or NO_STATE),
        out, out.stride(), den, *(end or NO_STATE), n, h, call.group, cut.number, cut.length, call.eps,
        CAUSAL=call.causal,
    )  # fmt: skip
    if save and call.theta is not None and table is not None:
        saved = [table, *([] if keys is None or keys is table else [keys]), *saved]
    return out, end, saved


def step_fwd(call: Call, start: State | None, end: State | None, slots: Tensor | None) -> Tensor:
    """out of one token of every sequence; end may be start, to update it; with slots (b,) both are pools."""
    assert call.q is not None
    g, e = call.k.shape[2], call.v.shape[3]
    # One program then does all of a sequence, since each program reads z, and one writes it.
    in_place = start is not None and end is not None and start[1] is end[1]
    keys = call.positions if call.key_positions is None else call.key_positions
    axes, heads = (1, 1) if call.theta is None else call.theta.shape[:2]
    phases, key_phases = call.phases or (None, None)
    key_phases = phases if key_phases is None else key_phases
    name = "step_in_place" if in_place else "step_fwd"
    parts = 1 if in_place else -(-e // call.tile(name).values)
    out = call.v.new_empty(*call.q.shape[:3], e)
    call.launch(
        step_fwd_kernel, name, call.sequences * parts,
        call.q, call.q.stride(), call.k, call.k.stride(), call.v, call.v.stride(), call.key_mask,
        call.theta, heads, call.positions, _row_stride(call.positions), keys, _row_stride(keys),
        phases, strides_of(phases, 4), key_phases, strides_of(key_phases, 4), *call.decay, slots,
        *(start or NO_STATE), *(end or NO_STATE), out, out.stride(), g, call.group, parts, call.eps,
        AXES=axes,
    )  # fmt: skip
    return out

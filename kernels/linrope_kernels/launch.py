"""Launchers: they choose tiles and segments and start the kernels. No copies of q, k, v, no syncs."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linrope_kernels import tiles
from linrope_kernels.angles import table_fwd_kernel
from linrope_kernels.backward import dkv_kernel, dq_kernel
from linrope_kernels.forward import prefix_kernel, scan_fwd_kernel, states_kernel
from linrope_kernels.step import step_fwd_kernel

State = tuple[Tensor, Tensor]  # S (b, g, f, e) float32 and z (b, g, f) float64, contiguous
PREFIX_BLOCK = 1024


@dataclass(frozen=True)
class Call:
    """What one call works on."""

    q: Tensor  # (b, n, h, f), any strides, as k and v
    k: Tensor  # (b, m, g, f)
    v: Tensor  # (b, m, g, e)
    key_mask: Tensor | None  # (b, m) bool, contiguous
    theta: Tensor | None  # (axes, 1 or g, P) int64, 2^-64 turns per position; None: no rotation
    layout: str
    positions: Tensor  # (1 or b, n) int64 contiguous, or (1 or b, 1): consecutive; or (1 or b, n, axes)
    key_positions: Tensor | None  # (1 or b, m), likewise; None: as positions
    feature_map: str
    causal: bool
    normalize: bool
    eps: float
    dot: str  # how products are computed: "bf16", "tf32", "ieee"
    decay: Tensor | None = None  # (g,)
    start: Tensor | None = None  # (1 or b,) int64, of packed sequences (s,): the state's position
    cu_seqlens: Tensor | None = None  # (s + 1,) of packed sequences: then b is 1

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.q.shape[2] // self.k.shape[2]

    @property
    def sequences(self) -> int:
        """b g, of packed sequences s g: how many states there are."""
        entries = self.k.shape[0] if self.cu_seqlens is None else len(self.cu_seqlens) - 1
        return entries * self.k.shape[2]

    def tile(self, name: str) -> tiles.Tile:
        return tiles.tile(name, self.q.shape[3], self.v.shape[3], self.dot, _device(self.q).capability)

    @property
    def reads_out(self) -> bool:
        """Whether the backward pass needs out: where no program has all feature pairs."""
        return self.tile("dq").pairs < (self.q.shape[3] + 1) // 2

    def most_segments(self) -> int:
        tile, (b, _, h, _) = self.tile("scan_fwd"), self.q.shape
        blocks = -(-self.v.shape[3] // tile.values)
        return tiles.most_segments(b * h, blocks, _device(self.q).multiprocessors, tile.warps)

    def table(self, positions: Tensor, n: int) -> Tensor | None:
        """cos and sin (1 or b, 1 or g, n, 2 P) of the angles; float16 holds more digits than bfloat16."""
        if self.theta is None:
            return None
        axes, heads, pairs = self.theta.shape
        dtype = torch.float16 if self.dot == "bf16" else torch.float32
        table = positions.new_empty(positions.shape[0], heads, n, 2 * pairs, dtype=dtype)
        chunk = 32
        programs = table.shape[0] * heads * -(-n // chunk)
        if programs:
            table_fwd_kernel[(programs,)](
                self.theta, positions, _row_stride(positions), table, n, heads, P=pairs, AXES=axes,
                CONSECUTIVE=positions.ndim == 2 and positions.shape[1] == 1, C=chunk,
                W=tiles.power_of_two(pairs),
            )  # fmt: skip
        return table

    def tables(self) -> tuple[Tensor | None, Tensor | None]:
        """Of queries and, if their positions are others, of keys."""
        n, m = self.q.shape[1], self.k.shape[1]
        keys = None if self.key_positions is None else self.table(self.key_positions, m)
        return self.table(self.positions, n), keys

    @cached_property
    def distances(self) -> tuple[Any, ...]:
        """log of the decay (g,); where each token and the one before it is (1 or b, n), and the stride."""
        if self.decay is None or self.start is None:
            return None, None, None, 0
        n = self.k.shape[1]
        where = self.positions
        if where.shape[1] != n:
            where = where + torch.arange(n, device=where.device)
        before = where.roll(1, 1)
        if self.cu_seqlens is None:
            before[:, :1] = self.start[:, None] - 1
        else:
            tokens, bounds = torch.arange(n, device=where.device), _bounds(self.cu_seqlens, n)
            owner = _owner(bounds, tokens)
            before = torch.where(tokens == bounds[owner], self.start[owner] - 1, before)
        return self.decay.double().log().float(), where, before, _row_stride(where)

    def segments(self, n: int) -> "Segments":
        """How the n tokens of a sequence, or of all packed ones, are cut; without asking the device."""
        if self.cu_seqlens is not None:
            return self.packed
        return Segments(*tiles.segments(n, self.most_segments()), None, None)

    @cached_property
    def packed(self) -> "Segments":
        assert self.cu_seqlens is not None
        n = self.q.shape[1]
        _, length = tiles.segments(n, self.most_segments())
        bounds = _bounds(self.cu_seqlens, n)
        counts = (bounds.diff() + length - 1) // length
        firsts = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
        number = n // length + len(counts)  # at least as many as there are; the rest stays empty
        slots = torch.arange(number, device=bounds.device)
        owner = _owner(firsts, slots)
        low = bounds[owner] + (slots - firsts[owner]) * length
        high = torch.minimum(low + length, bounds[owner + 1])
        used = slots < firsts[-1]
        table = torch.stack((torch.where(used, low, 0), torch.where(used, high, 0), owner), 1)
        return Segments(number, length, table.int(), firsts.int())

    def scans_states(self, cut: "Segments") -> bool:
        """Whether the states of segments have kernels of their own."""
        return cut.number > 1 or cut.slots is not None

    def launch(self, kernel: Any, name: str, copies: int, *args: Any, **constants: Any) -> None:
        """Starts ``copies`` programs for every block of the output, with the tile of that name."""
        f, e, tile = self.q.shape[3], self.v.shape[3], self.tile(name)
        pairs = 0 if self.theta is None else self.theta.shape[2]
        if name != "step_fwd":
            copies *= -(-((f + 1) // 2) // tile.pairs) * -(-e // tile.values)
            constants |= {"DOT": self.dot, "C": tile.chunk, "STAGES": tile.stages}
        if copies:
            kernel[(copies,)](
                *args, F=f, E=e, P=pairs, MAP=self.feature_map, NORMALIZE=self.normalize,
                INTERLEAVED=pairs > 0 and self.layout == "interleaved", W=tile.pairs, BE=tile.values,
                num_warps=tile.warps, num_stages=tile.stages, **constants,
            )  # fmt: skip


class Segments(NamedTuple):
    number: int
    length: int
    slots: Tensor | None  # (number, 3) int32 of packed sequences: first token, last + 1, sequence
    firsts: Tensor | None  # (s + 1,) int32: the first slot of each packed sequence


def _bounds(cu_seqlens: Tensor, n: int) -> Tensor:
    """Whatever the device holds: numbers that rise, within the sequence."""
    return cu_seqlens.long().clamp(0, n).cummax(0).values


def _owner(bounds: Tensor, x: Tensor) -> Tensor:
    """In which part each of x lies, for parts that begin at bounds; the last one has all that is beyond."""
    return torch.searchsorted(bounds[1:], x, right=True).clamp_(max=len(bounds) - 2)


class _Device(NamedTuple):
    capability: int
    multiprocessors: int


def _device(x: Tensor) -> _Device:
    if not x.is_cuda:  # Triton's interpreter runs one program after another
        return _Device(90, 1)
    properties = torch.cuda.get_device_properties(x.device)
    return _Device(10 * properties.major + properties.minor, properties.multi_processor_count)


def _with_strides(table: Tensor | None) -> tuple[Any, ...]:
    return table, (0, 0) if table is None else (_row_stride(table), _row_stride(table[0]))


def _row_stride(x: Tensor | None) -> int:
    """Of a table with a row for each, or one row for all."""
    return 0 if x is None or x.shape[0] == 1 else x.stride(0)


def saved_segments(call: Call) -> int:
    """How many states the forward pass saves for the backward pass; no branch on n, which may be symbolic."""
    most = call.most_segments()
    return 0 if most == 1 or not call.causal or call.cu_seqlens is not None else most


def _states(
    call: Call, table: Tensor | None, start: State, own: State, end: State,
    backward: tuple[Tensor, Tensor | None, Tensor | None] | None = None,
) -> None:  # fmt: skip
    """own: the states before (backward: after) each segment; end: the last. backward: g, den, delta."""
    if backward is None:
        x, y, mask, den, delta = call.k, call.v, call.key_mask, None, None
    else:
        x, (y, den, delta), mask = call.q, backward, None
    length, g = x.shape[1], call.k.shape[2]
    cut, distances = call.segments(length), call.distances
    call.launch(
        states_kernel, "states", call.k.shape[0] * g * cut.number,
        x, x.stride(), y, y.stride(), mask, den, delta, *_with_strides(table), *distances, cut.slots, *own,
        length, g, call.group, cut.number, cut.length, call.eps, REVERSE=backward is not None,
    )  # fmt: skip
    f, e = call.q.shape[3], call.v.shape[3]
    prefix_kernel[(call.sequences * -(-f * e // PREFIX_BLOCK),)](
        *distances, cut.slots, cut.firsts, *own, *start, *end, length, g, cut.number, cut.length,
        F=f, E=e, REVERSE=backward is not None, BLOCK=PREFIX_BLOCK,
    )  # fmt: skip


def new_states(call: Call, length: int) -> State:
    f, e = call.q.shape[3], call.v.shape[3]
    b, g, number = call.k.shape[0], call.k.shape[2], call.segments(length).number
    s = call.q.new_empty(b * g, number, f, e, dtype=torch.float32)
    return s, s.new_empty(b * g, number, f, dtype=torch.float64)


def attend_fwd(
    call: Call, start: State, out: Tensor, den: Tensor | None, end: State, saved: State | None
) -> None:
    """Fills out (b, n, h, e), den (b, h, n), the last state and, if wanted, those before the segments."""
    b, n, h, _ = call.q.shape
    m = call.k.shape[1]
    cut = call.segments(n)
    table, key_table = call.tables()
    keys = table if key_table is None else key_table
    before = start
    if not call.causal:
        _states(call, keys, start, new_states(call, m), end)
        before, key_table = end, None
    elif call.scans_states(cut):
        before = saved or new_states(call, n)
        _states(call, keys, start, before, end)
    call.launch(
        scan_fwd_kernel, "scan_fwd", b * h * cut.number,
        call.q, call.q.stride(), call.k, call.k.stride(), call.v, call.v.stride(), call.key_mask,
        *_with_strides(table), *_with_strides(key_table), *call.distances, cut.slots, *before,
        out, out.stride(), den, *end, n, h, call.group, cut.number, cut.length, call.eps, CAUSAL=call.causal,
    )  # fmt: skip


def attend_bwd(
    call: Call, start: State, saved: State | None, end: State, out: Tensor | None, den: Tensor | None,
    g_out: Tensor, g_end: State, dq: Tensor, dk: Tensor, dv: Tensor, g_start: State,
) -> None:  # fmt: skip
    """Fills dq, dk, dv and the gradient of the first state; out (if read), den, saved, end: attend_fwd's."""
    b, n, h, f = call.q.shape
    (_, m, g, _), e = call.k.shape, call.v.shape[3]
    tensors = (call.q, call.q.stride(), call.k, call.k.stride(), call.v, call.v.stride(), call.key_mask)
    delta = None if den is None else torch.empty_like(den)

    cut, distances = call.segments(n), call.distances
    table, key_table = call.tables()
    keys = table if key_table is None else key_table
    before = end if not call.causal else saved if saved and cut.number > 1 else start
    if call.causal and call.cu_seqlens is not None:
        before = new_states(call, n)
        _states(call, keys, start, before, (torch.empty_like(start[0]), torch.empty_like(start[1])))
    if not call.causal:
        key_table = None
    call.launch(
        dq_kernel, "dq", b * h * cut.number,
        *tensors, *_with_strides(table), *_with_strides(key_table), *distances, cut.slots, *before,
        out, (0,) * 4 if out is None else out.stride(), g_out, g_out.stride(), den, delta, dq, dq.stride(),
        n, h, call.group, cut.number, cut.length, call.eps, CAUSAL=call.causal,
    )  # fmt: skip

    after = g_end
    if call.scans_states(cut) or not call.causal:
        after = new_states(call, n)
        _states(call, table, g_end, after, g_start, (g_out, den, delta))
    if not call.causal:
        after, table = g_start, keys
    cut = call.segments(m)
    for name in ("dkv",) if tiles.fused(f, e) else ("dk", "dv"):
        call.launch(
            dkv_kernel, name, b * g * cut.number,
            *tensors, *_with_strides(table), *_with_strides(key_table), *distances, cut.slots, *after,
            g_out, g_out.stride(), den, delta, dk, dk.stride(), dv, dv.stride(), *g_start,
            m, g, call.group, cut.number, cut.length, call.eps,
            CAUSAL=call.causal, WANT_DK=name != "dv", WANT_DV=name != "dk",
        )  # fmt: skip


def step_fwd(call: Call, start: State, out: Tensor, end: State) -> None:
    """One token of every sequence. ``end`` may be ``start``: the state is then updated in place."""
    g, e = call.k.shape[2], call.v.shape[3]
    in_place = start[1].data_ptr() == end[1].data_ptr()  # all of a sequence reads z before one writes it
    keys = call.positions if call.key_positions is None else call.key_positions
    axes, heads = (1, 1) if call.theta is None else call.theta.shape[:2]
    rates = None if call.decay is None else call.decay.double().log()
    parts = 1 if in_place else -(-e // call.tile("step_fwd").values)
    call.launch(
        step_fwd_kernel, "step_fwd", call.sequences * parts,
        call.q, call.q.stride(), call.k, call.k.stride(), call.v, call.v.stride(), call.key_mask,
        call.theta, heads, call.positions, _row_stride(call.positions), keys, _row_stride(keys),
        rates, call.start, _row_stride(call.start), *start, *end, out, out.stride(),
        g, call.group, parts, call.eps, AXES=axes,
    )  # fmt: skip

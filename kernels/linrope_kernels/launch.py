"""How a call becomes launches, with no copies of q, k, v and no syncs: tile, segments, and what kernels share.

``call`` is in all of this package linrope's record of a call (linrope/recurrence/call.py). The package does not import
linrope, and only reads the record's fields.
"""

import math
from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linrope_kernels import tiles
from linrope_kernels.memory import Tokens, broadcast_rows
from linrope_kernels.repeat import repeat_alike
from linrope_kernels.segments import Segments, cut_packed
from linrope_kernels.start import start_kernel

State = tuple[Tensor, Tensor]  # S (b, g, f, e) float32 and z (b, g, f) float64 or float32, contiguous
NO_STATE = (None, None)


# All fields of a call that a backend receives, but those of xPos, which these kernels do not compute
SETTINGS = ("feature_map", "causal", "normalize", "eps", "eps_mode", "return_state", "query_factor", "layout")
TENSORS = (
    *("q", "k", "v", "log_decay", "angle_steps", "write", "erase"),
    *("positions", "key_positions", "key_mask", "cu_seqlens", "theta_turns"),
)
_settings_of, _tensors_of = attrgetter(*SETTINGS), attrgetter(*TENSORS)


def repeat(call: Any, kind: str, others: tuple[Tensor | None, ...], run: Callable[[], Any]) -> Any:
    """run(), a pass of the call. others: what it reads besides the call's tensors. kind: what it computes."""
    settings = kind, _settings_of(call), type(call.eps), tiles.precision(call.v)
    return repeat_alike(settings, (*_tensors_of(call), *others), run)


class _Device(NamedTuple):
    capability: int
    multiprocessors: int


def _device(x: Tensor) -> _Device:
    if not x.is_cuda:  # Triton's interpreter runs the programs one by one
        return _Device(90, 1)
    return _gpu(x.get_device())


def stages_of(x: Tensor, stages: int) -> int:
    """How far loops over a sum are pipelined on x's device; for the reason see ``tiles.tile``."""
    return 1 if _device(x).capability >= 100 else stages


@cache  # PyTorch takes several microseconds, and a call asks a dozen times
def _gpu(index: int) -> _Device:
    properties = torch.cuda.get_device_properties(index)
    return _Device(10 * properties.major + properties.minor, properties.multi_processor_count)


def _table(call: Any) -> tuple[str, int, bool]:
    """The last arguments of ``tiles.tile``: the precision, the compute capability, and whether there is decay."""
    return tiles.precision(call.v), _device(call.k).capability, call.log_decay is not None


def tile_of(call: Any, name: str) -> tiles.Tile:
    f, e = int(call.k.shape[3]), int(call.v.shape[3])  # not symbolic: kernels are compiled for them
    return tiles.tile(name, f, e, *_table(call))


def merged(call: Any) -> bool:
    """True if one launch computes both dk and dv."""
    f, e = int(call.k.shape[3]), int(call.v.shape[3])
    return tiles.merged(f, e, *_table(call))


def blocks_of(call: Any, name: str) -> tuple[int, int]:
    """How many programs share the pairs, and the values, of a head."""
    f, e = int(call.k.shape[3]), int(call.v.shape[3])
    return tiles.blocks(name, f, e, *_table(call))


def launch(call: Any, kernel: Any, name: str, copies: int, *args: Any, **constants: Any) -> None:
    """Starts ``copies`` programs for each block of the output, with the tile called ``name``."""
    f, e, tile = call.k.shape[3], call.v.shape[3], tile_of(call, name)
    if not name.startswith("step"):
        copies *= math.prod(blocks_of(call, name))
        if name not in ("dq", "states"):
            constants |= {"WP": tile.pair_parts, "EP": tile.value_parts}
        constants |= {"DOT": tiles.precision(call.v), "C": tile.chunk, "STAGES": tile.stages}
    start_kernel(
        kernel, copies, *args, F=f, E=e, P=call.pairs, MAP=call.feature_map, NORMALIZE=call.normalize,
        INTERLEAVED=not call.pairs or call.layout == "interleaved", ADD=call.eps_mode == "add",
        W=tile.pairs, BE=tile.values, num_warps=tile.warps, num_stages=tile.stages, **constants,
    )  # fmt: skip


def delta_precision(call: Any) -> str:
    """The precision of the delta rule's products: the lower one of those of k and v."""
    found = tiles.precision(call.k), tiles.precision(call.v)
    return next(x for x in ("bf16", "tf32", "ieee") if x in found)


def features_dtype(call: Any) -> torch.dtype:
    """The dtype of features and values that the delta rule's kernels store: that of the products' operands."""
    return torch.bfloat16 if delta_precision(call) == "bf16" else torch.float32


def delta_tile(call: Any, name: str) -> tiles.Tile:
    f, e = int(call.k.shape[3]), int(call.v.shape[3])
    name += " by unit" if name in ("chunk_scores", "delta_dqk") and call.decays_by_unit else ""
    return tiles.tile(name, f, e, delta_precision(call), _device(call.k).capability, False)


def launch_delta(call: Any, kernel: Any, name: str, copies: int, *args: Any) -> None:
    """Starts ``copies`` programs of one of the delta rule's kernels for each block of the output."""
    f, e, tile = call.k.shape[3], call.v.shape[3], delta_tile(call, name)
    start_kernel(
        kernel, copies * tiles.delta_blocks(name, f, e, tile), *args, F=f, E=e, P=call.pairs,
        INTERLEAVED=not call.pairs or call.layout == "interleaved", UNITS=call.decays_by_unit,
        DOT=delta_precision(call), C=tile.chunk, W=tile.pairs, BE=tile.values, STAGES=tile.stages,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def most_segments(call: Any) -> int:
    tile, (b, _, h, _) = tile_of(call, "scan_fwd"), (call.k if call.q is None else call.q).shape
    return tiles.most_segments(
        b * h, blocks_of(call, "scan_fwd")[1], _device(call.k).multiprocessors, tile.warps
    )


def cut(call: Any, n: int, length: int | None = None) -> Segments:
    """The segments of a sequence of n tokens, or of all packed sequences together.

    They have ``length`` tokens, by default as many as fill the GPU; the last one of a sequence may be shorter.
    """
    if length is None:
        length = tiles.segments(n, most_segments(call))[1]
    if (bounds := call.bounds) is not None:
        return cut_packed(bounds, n, length)
    return Segments(max(1, -(-n // length)), length, None, None)


def scans_states(segments: Segments) -> bool:
    """True if ``states`` and ``prefix`` run, which give every segment the state that it starts from."""
    return segments.number > 1 or segments.spans is not None


def tokens_of(call: Any, table: Tensor | None, key_table: Tensor | None, segments: Segments) -> Tokens:
    return Tokens(
        mask=None if call.key_mask is None else call.key_mask.contiguous(),
        table=broadcast_rows(table, 2),
        key_table=None if key_table is None or key_table is table else broadcast_rows(key_table, 2),
        log=broadcast_rows(call.log_decay, 3),
        write=broadcast_rows(call.write, 3),
        spans=segments.spans,
    )


def new_like(x: Tensor, segments: Segments, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """For results of x's tokens: empty, but 0 if packed, because the bounds may leave out tokens."""
    new = x.new_empty if segments.spans is None else x.new_zeros
    return new(*(shape or x.shape), dtype=dtype or x.dtype)


def new_states(call: Any, number: int) -> State:
    """Empty states for ``number`` segments, per sequence or, if sequences are packed, in total."""
    f, e, rows = call.k.shape[3], call.v.shape[3], call.k.shape[0] * call.k.shape[2]
    s = call.k.new_empty(rows, number, f, e, dtype=torch.float32)
    return s, s.new_empty(rows, number, f, dtype=torch.float64)


def new_state(call: Any, like: State | None) -> State:
    """An empty state for each sequence; z has the dtype of that in ``like``."""
    f, (g, e) = call.k.shape[3], call.v.shape[2:]
    s = call.k.new_empty(call.sequences, g, f, e, dtype=torch.float32)
    return s, s.new_empty(*s.shape[:3], dtype=torch.float64 if like is None else like[1].dtype)

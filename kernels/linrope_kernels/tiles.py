"""The tile of each kernel: one fixed table, so that equal calls give equal bits on equal devices.

In bfloat16 each is, up to 128 features, the fastest of several that were timed on an H200 (benchmarks/gpu/tiles.py),
but for those of "bf16 with decay", those of other GPUs, and the scan of 64 features. All others were chosen by what the
compilers make of them (kernels/README.md).
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor


class Tile(NamedTuple):
    chunk: int  # C: tokens per iteration of the main loop
    pairs: int  # W: feature pairs of a tile
    values: int  # BE: value columns of a tile
    warps: int
    stages: int
    pair_parts: int = 1  # WP: tiles of pairs per program
    value_parts: int = 1  # EP: tiles of values per program


UNSPLIT = 256  # no split: one program has all pairs or all values

# Scan and dq have chunks of 16 in "ieee" only. In float16 and bfloat16 Triton 3.6 to 3.8 compile chunks of 16 with a
# key mask wrongly: a product adds half of the chunk's tokens twice and leaves out the others (kernels/README.md,
# "Versions of Triton"). Before you allow chunks of 16, run `make test-ptx`, which finds such results, with every
# version of Triton that linrope supports.
#
# TABLE[precision of products][kernel, size] is a tile. size: the least of 64, 128, 256 that holds the
# features and the values of a head.
TABLE: dict[str, dict[tuple[str, int], Tile]] = {
    "bf16": {
        # With 4 warps ptxas 12.8 made a kernel for 9.0 whose output was wrong for heads of few features.
        ("scan_fwd", 64): Tile(64, UNSPLIT, 64, 8, 3),
        ("scan_fwd", 128): Tile(64, 32, 64, 4, 2, pair_parts=2, value_parts=2),
        ("scan_fwd", 256): Tile(64, UNSPLIT, 64, 8, 1),
        ("states", 64): Tile(64, UNSPLIT, 64, 4, 3),
        ("states", 128): Tile(64, UNSPLIT, 128, 8, 3),
        ("states", 256): Tile(64, UNSPLIT, 64, 8, 2),
        ("dq", 64): Tile(64, 32, UNSPLIT, 4, 3),
        ("dq", 128): Tile(64, 32, UNSPLIT, 4, 2),
        ("dq", 256): Tile(64, 16, UNSPLIT, 8, 2),
        ("dk", 64): Tile(64, 32, UNSPLIT, 4, 2),
        ("dk", 128): Tile(64, 32, 64, 4, 2, value_parts=2),
        ("dk", 256): Tile(64, 32, 64, 4, 1, value_parts=4),
        ("dv", 64): Tile(64, UNSPLIT, 64, 4, 3),
        ("dv", 128): Tile(64, 32, 64, 4, 2, pair_parts=2, value_parts=2),
        ("dv", 256): Tile(64, UNSPLIT, 64, 8, 2),
        ("dkv", 64): Tile(64, 32, 64, 4, 2),  # dk and dv in one program
    },
    "tf32": {
        ("scan_fwd", 64): Tile(32, UNSPLIT, 64, 8, 2),
        ("scan_fwd", 128): Tile(32, UNSPLIT, 64, 8, 1),
        ("scan_fwd", 256): Tile(32, UNSPLIT, 32, 8, 1),
        ("states", 64): Tile(32, UNSPLIT, 64, 4, 1),
        ("states", 128): Tile(32, UNSPLIT, 64, 8, 1),
        ("states", 256): Tile(32, UNSPLIT, 32, 8, 1),
        ("dq", 64): Tile(32, 32, UNSPLIT, 8, 1),
        ("dq", 128): Tile(32, 32, UNSPLIT, 8, 1),
        ("dq", 256): Tile(32, 16, UNSPLIT, 8, 1),
        ("dk", 64): Tile(16, 32, UNSPLIT, 8, 1),
        ("dv", 64): Tile(16, UNSPLIT, 64, 8, 1),
        ("dk", 128): Tile(16, 32, UNSPLIT, 8, 1),
        ("dk", 256): Tile(16, 16, UNSPLIT, 8, 1),
        ("dv", 128): Tile(32, UNSPLIT, 64, 8, 1),
        ("dv", 256): Tile(16, UNSPLIT, 32, 8, 1),
    },
    "ieee": {
        ("scan_fwd", 64): Tile(16, UNSPLIT, 64, 4, 1),
        ("scan_fwd", 128): Tile(16, UNSPLIT, 64, 8, 1),
        ("scan_fwd", 256): Tile(16, UNSPLIT, 32, 8, 1),
        ("states", 64): Tile(32, UNSPLIT, 64, 4, 1),
        ("states", 128): Tile(32, UNSPLIT, 64, 8, 1),
        ("states", 256): Tile(32, UNSPLIT, 32, 8, 1),
        ("dq", 64): Tile(16, 32, UNSPLIT, 4, 1),
        ("dq", 128): Tile(16, 32, UNSPLIT, 8, 1),
        ("dq", 256): Tile(16, 8, UNSPLIT, 8, 1),
        ("dk", 64): Tile(16, 32, UNSPLIT, 8, 1),
        ("dv", 64): Tile(16, UNSPLIT, 64, 4, 1),
        ("dk", 128): Tile(16, 32, UNSPLIT, 8, 1),
        ("dk", 256): Tile(16, 8, UNSPLIT, 8, 1),
        ("dv", 128): Tile(16, UNSPLIT, 64, 8, 1),
        ("dv", 256): Tile(16, UNSPLIT, 16, 8, 1),
    },
}

# With decay a program has more to hold: dk and dv of one head are two programs, dv of 128 values as well.
TABLE["bf16 with decay"] = {key: tile for key, tile in TABLE["bf16"].items() if key[0] != "dkv"} | {
    ("scan_fwd", 128): Tile(64, UNSPLIT, 64, 4, 2),
    ("dv", 128): Tile(64, 32, 64, 4, 2, pair_parts=2),
}

# Ampere's and consumer Blackwell's matrix units take both operands from registers: fewer tokens fit.
TABLE["bf16 from registers"] = TABLE["bf16 with decay"] | {
    ("scan_fwd", 64): Tile(64, UNSPLIT, 64, 4, 3),
    ("states", 128): Tile(64, UNSPLIT, 64, 4, 2),
    ("scan_fwd", 128): Tile(32, UNSPLIT, 64, 4, 2),
    ("dq", 64): Tile(32, 32, UNSPLIT, 4, 3),
    ("dq", 128): Tile(32, 16, UNSPLIT, 4, 2),
    ("dk", 128): Tile(32, 32, UNSPLIT, 4, 2),
    ("dv", 128): Tile(32, UNSPLIT, 64, 4, 2),
    ("scan_fwd", 256): Tile(32, UNSPLIT, 32, 8, 2),
    ("dk", 256): Tile(64, 16, UNSPLIT, 8, 2),
    ("dv", 256): Tile(32, UNSPLIT, 64, 8, 2),
}


def delta_rule_tiles(
    chunk: int, stages: int, values: tuple[int, ...], warps: tuple[int, ...], *, dqk: Tile
) -> dict[tuple[str, int], Tile]:
    """The tiles of the delta rule's kernels, which share their chunks.

    values, warps: those of the kernels that hold a state of all features, for sizes 64, 128 and 256.
    """
    found: dict[tuple[str, int], Tile] = {}
    for size, of_size, warps_of_size in zip((64, 128, 256), values, warps, strict=True):
        state = Tile(chunk, UNSPLIT, of_size, warps_of_size, stages)
        found |= {
            ("chunk_scores", size): Tile(chunk, 32, 16, 4, stages),
            ("chunk_scores by unit", size): Tile(chunk, 16, 16, 4, stages),
            ("delta_fwd", size): state,
            ("delta_states", size): Tile(chunk, 32, 64, 4, stages),
            ("delta_dv", size): state,
            ("delta_dqk", size): dqk,
            ("delta_dqk by unit", size): dqk._replace(pairs=16),
        }
    return found


# On an H200 delta_dqk was wrong and read outside its memory, with 8 warps, and with 4 and half as many pairs. The
# emulator finds no fault in either.
TABLE["bf16"] |= delta_rule_tiles(64, 2, (64, 32, 32), (4, 4, 8), dqk=Tile(64, 32, 32, 4, 1))
TABLE["bf16 from registers"] |= delta_rule_tiles(32, 2, (64, 32, 32), (4, 4, 8), dqk=Tile(32, 16, 32, 4, 1))
TABLE["tf32"] |= delta_rule_tiles(32, 1, (32, 32, 16), (8, 8, 8), dqk=Tile(32, 16, 32, 8, 1))
TABLE["ieee"] |= delta_rule_tiles(16, 1, (32, 32, 16), (8, 8, 8), dqk=Tile(16, 16, 32, 8, 1))


def precision(v: Tensor) -> str:
    """The precision of matrix products with v: "bf16", "tf32" or "ieee".

    float16 is multiplied in tf32: the precision is the same, and sums of features cannot overflow.
    """
    if v.dtype == torch.bfloat16:
        return "bf16"
    exact = v.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    return "ieee" if exact else "tf32"


def table_of(dot: str, capability: int, decay: bool) -> dict[tuple[str, int], Tile]:
    """The entries of TABLE for GPUs of a compute capability, 90 for 9.0."""
    if dot != "bf16":
        return TABLE[dot]
    if capability < 90 or capability >= 120:
        return TABLE["bf16 from registers"]
    return TABLE["bf16 with decay" if decay else "bf16"]


def power_of_two(n: int) -> int:
    """n, at least 1, rounded up to a power of two."""
    return 1 << (n - 1).bit_length()


def power_of_two_from_16(n: int) -> int:
    """n rounded up to a power of two of at least 16, the smallest size that a matrix product takes."""
    return max(16, power_of_two(n))


@cache  # a call asks for a dozen tiles
def tile(kernel: str, f: int, e: int, dot: str, capability: int, decay: bool) -> Tile:
    """The tile for f features and e values per head; capability: 90 for compute capability 9.0."""
    pairs, values = power_of_two_from_16((f + 1) // 2), power_of_two_from_16(e)
    if kernel == "step_fwd":
        return Tile(1, pairs, min(values, max(16, 1024 // pairs)), 4, 1)
    if kernel == "step_in_place":  # up to 16,384 elements of state at once: loads need not wait
        return Tile(1, pairs, min(values, max(16, 8192 // pairs)), 8, 1)
    entry = table_of(dot, capability, decay)[kernel, size_of(f, e)]
    # From capability 10.0 on Triton 3.5 to 3.7 pipelines loops over a state wrongly: state-spaces/mamba#997.
    # With few values more than one stage would be a race on Hopper: wgmma would still read dout of one query
    # head while cp.async overwrites it with that of the next head but one. Triton counts the buffers by
    # another product of dout, which is too small for wgmma.
    if capability >= 100 or (kernel in ("dk", "dv", "dkv") and values < 64):
        entry = entry._replace(stages=1)
    if dot == "bf16" and kernel in ("dk", "dv", "dkv"):
        # With 16 pairs and ptxas 12.8, which Triton 3.6 brings, dk read outside of its memory on an H200, though the
        # emulator finds no fault in its PTX. So the tiles of small heads have 32 pairs, too.
        pairs = max(32, pairs)
    entry = entry._replace(pairs=min(entry.pairs, pairs), values=min(entry.values, values))
    parts = min(entry.pair_parts, pairs // entry.pairs), min(entry.value_parts, values // entry.values)
    return entry._replace(pair_parts=parts[0], value_parts=parts[1])


@cache
def blocks(kernel: str, f: int, e: int, dot: str, capability: int, decay: bool) -> tuple[int, int]:
    """How many programs share the feature pairs, and the values, of a head."""
    own = tile(kernel, f, e, dot, capability, decay)
    return -(-((f + 1) // 2) // (own.pair_parts * own.pairs)), -(-e // (own.value_parts * own.values))


def delta_blocks(kernel: str, f: int, e: int, tile: Tile) -> int:
    """How many programs of one of the delta rule's kernels share the feature pairs and the values of a head."""
    pairs, values = -(-((f + 1) // 2) // tile.pairs), -(-e // tile.values)
    blocks = {"chunk_scores": 1, "delta_fwd": values, "delta_states": pairs * values, "delta_dv": values}
    return blocks.get(kernel, pairs)


def size_of(f: int, e: int) -> int:
    """The size in TABLE of heads of f features and e values."""
    return max(64, 2 * power_of_two_from_16((f + 1) // 2), power_of_two_from_16(e))


def merged(f: int, e: int, dot: str, capability: int, decay: bool) -> bool:
    """True if one program computes both dk and dv of a head."""
    return ("dkv", size_of(f, e)) in table_of(dot, capability, decay)


# A sequence is cut into as many segments as fill the GPU once or twice, or not at all, whichever takes least: the
# states before segments take about STATES as long as the scan. Only the last segment may be shorter than
# SHORTEST_SEGMENT, since each costs a state to write and to read.
SHORTEST_SEGMENT = 512
SEGMENT_MULTIPLE = 128  # whole chunks
STATES = 0.4


def most_segments(heads: int, value_blocks: int, multiprocessors: int, warps: int) -> int:
    """The number of segments of a long sequence."""
    resident, programs = multiprocessors * (2 if warps == 4 else 1), max(1, heads * value_blocks)

    def cost(number: int) -> float:
        waves = -(-programs * number // resident)
        return waves / number * (1 + STATES if number > 1 else 1)

    return min(max(1, resident // programs), max(1, 2 * resident // programs), 1, key=cost)


def segments(n: int, most: int) -> tuple[int, int]:
    """Number and length of the segments of n tokens. Only the last segment may end with a partial chunk."""
    if most == 1:
        return 1, torch.sym_max(1, n)  # n may be symbolic
    length = torch.sym_max(SHORTEST_SEGMENT, -(-n // (SEGMENT_MULTIPLE * most)) * SEGMENT_MULTIPLE)
    return torch.sym_max(1, -(-n // length)), length

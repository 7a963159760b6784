"""Which tiles a kernel takes: one fixed table, so that equal calls give equal bits on equal devices.

Chosen by compiling and by a model of the compiled code, not yet by timing (kernels/README.md): tune.py times
candidates on a GPU.
"""

from typing import NamedTuple


class Tile(NamedTuple):
    chunk: int  # C: tokens per step
    pairs: int  # W: feature pairs per program
    values: int  # BE: value columns per program
    warps: int
    stages: int


ALL = 256  # as many as there are

# In scan and dq no chunk is under 32 but for "ieee". Triton 3.6 and 3.7 choose an operand's layout by the
# narrowest load that it comes from, here the mask's 8 bits, halved again where pairs are joined; that layout
# has 32 rows, and of 16 it counts half twice.
# How products are computed -> (kernel, least of 64, 128, 256 that holds features and values) -> tile
TABLE: dict[str, dict[tuple[str, int], Tile]] = {
    "bf16": {
        ("scan_fwd", 64): Tile(64, ALL, 64, 4, 3),
        ("scan_fwd", 128): Tile(64, ALL, 64, 4, 2),
        ("scan_fwd", 256): Tile(32, ALL, 32, 8, 2),
        ("states", 64): Tile(64, ALL, 64, 4, 3),
        ("states", 128): Tile(64, ALL, 64, 4, 3),
        ("states", 256): Tile(64, ALL, 64, 8, 2),
        ("dq", 64): Tile(64, 32, ALL, 4, 3),
        ("dq", 128): Tile(64, 32, ALL, 4, 2),
        ("dq", 256): Tile(64, 16, ALL, 8, 2),
        ("dk", 64): Tile(64, 32, ALL, 4, 2),
        ("dk", 128): Tile(64, 32, ALL, 4, 2),
        ("dk", 256): Tile(64, 16, ALL, 8, 2),
        ("dv", 64): Tile(64, ALL, 64, 4, 3),
        ("dv", 128): Tile(64, ALL, 64, 4, 2),
        ("dv", 256): Tile(32, ALL, 64, 8, 2),
    },
    "tf32": {
        ("scan_fwd", 64): Tile(32, ALL, 64, 8, 2),
        ("scan_fwd", 128): Tile(32, ALL, 64, 8, 1),
        ("scan_fwd", 256): Tile(32, ALL, 32, 8, 1),
        ("states", 64): Tile(32, ALL, 64, 4, 1),
        ("states", 128): Tile(32, ALL, 64, 8, 1),
        ("states", 256): Tile(32, ALL, 32, 8, 1),
        ("dq", 64): Tile(32, 32, ALL, 8, 1),
        ("dq", 128): Tile(32, 32, ALL, 8, 1),
        ("dq", 256): Tile(32, 16, ALL, 8, 1),
        ("dk", 64): Tile(16, 32, ALL, 8, 1),
        ("dv", 64): Tile(16, ALL, 64, 8, 1),
        ("dk", 128): Tile(16, 32, ALL, 8, 1),
        ("dk", 256): Tile(16, 16, ALL, 8, 1),
        ("dv", 128): Tile(32, ALL, 64, 8, 1),
        ("dv", 256): Tile(16, ALL, 32, 8, 1),
    },
    "ieee": {
        ("scan_fwd", 64): Tile(16, ALL, 64, 4, 1),
        ("scan_fwd", 128): Tile(16, ALL, 64, 8, 1),
        ("scan_fwd", 256): Tile(16, ALL, 32, 8, 1),
        ("states", 64): Tile(32, ALL, 64, 4, 1),
        ("states", 128): Tile(32, ALL, 64, 8, 1),
        ("states", 256): Tile(32, ALL, 32, 8, 1),
        ("dq", 64): Tile(16, 32, ALL, 4, 1),
        ("dq", 128): Tile(16, 32, ALL, 8, 1),
        ("dq", 256): Tile(16, 8, ALL, 8, 1),
        ("dk", 64): Tile(16, 32, ALL, 8, 1),
        ("dv", 64): Tile(16, ALL, 64, 4, 1),
        ("dk", 128): Tile(16, 32, ALL, 8, 1),
        ("dk", 256): Tile(16, 8, ALL, 8, 1),
        ("dv", 128): Tile(16, ALL, 64, 8, 1),
        ("dv", 256): Tile(16, ALL, 16, 8, 1),
    },
}

# Ampere's matrix unit and consumer Blackwell's take both operands from registers: fewer tokens fit beside.
TABLE["bf16 from registers"] = TABLE["bf16"] | {
    ("scan_fwd", 128): Tile(32, ALL, 64, 4, 2),
    ("dq", 64): Tile(32, 32, ALL, 4, 3),
    ("dq", 128): Tile(32, 16, ALL, 4, 2),
    ("dk", 128): Tile(32, 32, ALL, 4, 2),
    ("dv", 128): Tile(32, ALL, 64, 4, 2),
}


def table_of(dot: str, capability: int) -> dict[tuple[str, int], Tile]:
    """The entries for GPUs of that compute capability, 90 for 9.0."""
    from_registers = dot == "bf16" and (capability < 90 or capability >= 120)
    return TABLE["bf16 from registers" if from_registers else dot]


def power_of_two(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())  # 16: the least a matrix product takes


def tile(kernel: str, f: int, e: int, dot: str, capability: int) -> Tile:
    """The tile for f features and e values per head; capability: 90 for compute capability 9.0."""
    pairs, values = power_of_two((f + 1) // 2), power_of_two(e)
    if kernel == "step_fwd":
        return Tile(1, pairs, min(values, max(16, 1024 // pairs)), 4, 1)
    if kernel == "step_in_place":  # all that a program may hold at once: no chain of loads one after another
        return Tile(1, pairs, min(values, max(16, 8192 // pairs)), 8, 1)
    key = kernel, max(64, 2 * pairs, values)
    entry = table_of(dot, capability)[key]
    # From 10.0 on Triton 3.5 to 3.7 pipelines loops over a state wrongly: state-spaces/mamba#997. With few
    # values Hopper's wgmma would still read g of one query head while cp.async writes the next but one over
    # it: Triton counts buffers by another product of g, which is too small for wgmma.
    if capability >= 100 or (kernel in ("dk", "dv") and values < 64):
        entry = entry._replace(stages=1)
    return entry._replace(pairs=min(entry.pairs, pairs), values=min(entry.values, values))


# Segments: as many as fill the programs that run at once, once or, where that leaves many idle, twice; none
# shorter than SHORTEST, as each costs a state to write and to read.
SHORTEST = 512
SEGMENT_MULTIPLE = 128  # whole chunks


def most_segments(heads: int, value_blocks: int, multiprocessors: int, warps: int) -> int:
    """How many segments a long sequence is cut into."""
    slots, programs = multiprocessors * (2 if warps == 4 else 1), max(1, heads * value_blocks)
    if programs >= 0.9 * slots:
        return 1
    once = slots // programs
    return once if once * programs >= 0.9 * slots else 2 * slots // programs


def segments(n: int, most: int) -> tuple[int, int]:
    """Number of segments and tokens in each, for n tokens; whole chunks but for the last."""
    length = max(1, n) if most == 1 else max(SHORTEST, -(-n // (SEGMENT_MULTIPLE * most)) * SEGMENT_MULTIPLE)
    return max(1, -(-n // length)), length

"""Times every kernel with other tiles than those of linrope_kernels/tiles.py, to choose that table by.

A training step runs in bfloat16 with each candidate in place of one entry; the profiler gives the time of that
kernel's launches alone. A candidate whose results differ from those of the table by more than rounding is reported and
not timed. The delta rule's kernels share their chunks: where a candidate has others, so have they all.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from multiprocessing import get_context

import torch
from linrope_kernels import repeat
from linrope_kernels import tiles as table
from linrope_kernels.tiles import Tile
from torch import Tensor

from benchmarks.bench.cases import AttentionCase
from benchmarks.gpu.delta import GDN, KDA, DeltaCase
from benchmarks.gpu.machine import Machine, Row, each
from benchmarks.gpu.operation import case_of

Key = tuple[str, int]  # kernel, size
BY_UNIT = " by unit"  # ends the names of kernels that have other tiles for a decay per unit
DELTA = [
    kernel for kernel, size in table.TABLE["bf16"] if size == 128 and kernel.startswith(("chunk_", "delta_"))
]
MANY_HEADS, FEW_HEADS = (8, 2048, 64), (1, 65_536, 8)  # batch, length, heads
DELTA_CASES = ((GDN, (8, 2048, 16)), (KDA, (8, 2048, 16)), (GDN, (1, 16_384, 16)))
REPEATS = 8
# Chunk, pairs and values of a tile, warps, stages, and if a program has several tiles, those of pairs and of values.
# Those of the delta rule spill least of many that were compiled for 9.0.
CANDIDATES: dict[Key, list[tuple[int, ...]]] = {
    ("chunk_scores", 128): [
        (64, 16, 16, 4, 1), (64, 16, 16, 8, 1), (64, 32, 16, 4, 1), (64, 32, 16, 8, 1), (64, 32, 16, 8, 2),
        (64, 64, 16, 8, 1),
    ],
    ("chunk_scores by unit", 128): [
        (64, 16, 16, 8, 1), (64, 16, 16, 4, 1), (64, 32, 16, 8, 1), (64, 64, 16, 8, 1), (32, 32, 16, 4, 1),
    ],
    ("delta_fwd", 128): [
        (64, 64, 16, 4, 1), (64, 64, 16, 8, 1), (64, 64, 32, 4, 1), (64, 64, 32, 8, 1), (64, 64, 32, 8, 2),
        (64, 64, 64, 8, 1), (64, 64, 64, 8, 2), (64, 64, 64, 8, 3), (64, 64, 128, 8, 1), (32, 64, 64, 4, 1),
        (32, 64, 32, 4, 1),
    ],
    ("delta_states", 128): [
        (64, 16, 64, 4, 2), (64, 32, 64, 4, 3), (64, 32, 64, 8, 2), (64, 32, 128, 4, 2), (64, 64, 64, 4, 2),
        (64, 64, 128, 8, 2), (64, 64, 128, 8, 3),
    ],
    ("delta_dv", 128): [
        (64, 64, 16, 4, 1), (64, 64, 16, 8, 1), (64, 64, 32, 4, 1), (64, 64, 32, 8, 1), (64, 64, 32, 8, 2),
        (64, 64, 64, 8, 1), (64, 64, 64, 8, 2), (64, 64, 128, 8, 1), (32, 64, 64, 4, 1),
    ],
    ("delta_dqk", 128): [
        (64, 32, 16, 4, 1), (64, 32, 64, 4, 1), (64, 16, 16, 4, 1), (64, 16, 64, 4, 1), (64, 8, 32, 4, 1),
        (32, 32, 64, 4, 1), (32, 16, 64, 4, 1),
    ],
    ("delta_dqk by unit", 128): [
        (64, 8, 16, 4, 1), (64, 8, 64, 4, 1), (64, 16, 64, 4, 1), (32, 16, 64, 4, 1),
    ],
    ("delta_fwd", 64): [(64, 32, 32, 4, 1), (64, 32, 64, 4, 1), (64, 32, 64, 8, 1), (64, 32, 64, 8, 2)],
    ("delta_dv", 64): [(64, 32, 32, 4, 1), (64, 32, 64, 4, 1), (64, 32, 64, 8, 1), (64, 32, 64, 8, 2)],
    ("delta_dqk", 64): [(64, 16, 64, 4, 1), (64, 8, 32, 4, 1)],
    ("delta_dqk by unit", 64): [(64, 8, 16, 4, 1), (32, 16, 64, 4, 1)],
    ("delta_fwd", 256): [(64, 128, 16, 8, 1), (64, 128, 32, 8, 1), (64, 128, 32, 8, 2), (32, 128, 32, 8, 1)],
    ("delta_dv", 256): [(64, 128, 16, 8, 1), (64, 128, 32, 8, 1), (64, 128, 32, 8, 2), (32, 128, 32, 8, 1)],
    ("delta_dqk", 256): [(64, 16, 64, 4, 1), (64, 8, 32, 4, 1), (32, 32, 64, 8, 1)],
    ("delta_dqk by unit", 256): [(64, 8, 16, 4, 1), (32, 16, 64, 4, 1), (32, 16, 64, 8, 1)],
    ("scan_fwd", 128): [
        (64, 64, 64, 4, 2), (64, 32, 64, 4, 2, 2, 1), (64, 64, 64, 4, 2, 1, 2), (64, 64, 64, 4, 3), (64, 64, 128, 8, 2),
        (64, 64, 128, 8, 3), (128, 64, 128, 8, 1),
    ],
    ("dq", 128): [(64, 32, 128, 4, 1), (64, 32, 128, 4, 3), (64, 16, 128, 4, 2), (64, 64, 128, 8, 2)],
    ("dk", 128): [(64, 32, 128, 4, 2), (64, 32, 128, 4, 1), (64, 64, 128, 8, 1), (64, 64, 128, 8, 2)],
    ("dv", 128): [
        (64, 64, 64, 4, 2, 1, 2), (64, 64, 64, 4, 2), (64, 32, 64, 4, 2, 2, 1), (64, 64, 64, 4, 1, 1, 2),
        (64, 64, 128, 8, 2),
    ],
    ("dkv", 128): [(64, 32, 64, 4, 2, 2, 2), (64, 32, 64, 4, 1, 2, 2), (64, 64, 128, 8, 1), (64, 64, 128, 8, 2)],
    ("states", 128): [(64, 64, 64, 4, 2), (64, 64, 64, 4, 3), (64, 64, 128, 8, 2)],
    ("scan_fwd", 64): [(64, 32, 64, 4, 2), (64, 32, 64, 4, 4), (64, 16, 64, 4, 3, 2, 1), (128, 32, 64, 8, 3)],
    ("dq", 64): [(64, 32, 64, 4, 2), (64, 16, 64, 4, 2), (64, 16, 64, 4, 3)],
    ("dkv", 64): [(64, 32, 64, 4, 1), (64, 32, 64, 4, 3), (64, 32, 64, 8, 3)],
    ("dk", 64): [(64, 32, 64, 4, 1), (64, 32, 64, 4, 3), (64, 32, 32, 4, 2, 1, 2)],
    ("dv", 64): [(64, 32, 64, 4, 1), (64, 32, 64, 4, 2), (64, 32, 32, 4, 3)],
    ("states", 64): [(64, 32, 64, 4, 1), (64, 32, 64, 4, 2), (64, 32, 64, 8, 2), (64, 32, 64, 4, 4)],
    ("scan_fwd", 256): [
        (32, 128, 32, 4, 1), (64, 128, 32, 4, 2), (64, 128, 32, 8, 1), (64, 64, 64, 8, 1, 2, 1), (64, 128, 64, 4, 1),
        (32, 128, 64, 4, 2), (64, 64, 32, 8, 1, 2, 2),
    ],
    ("dq", 256): [(64, 16, 256, 4, 1), (64, 16, 256, 4, 2), (64, 32, 256, 8, 1)],
    ("dk", 256): [(64, 32, 64, 4, 2, 1, 4), (64, 32, 128, 4, 1, 1, 2), (64, 32, 128, 8, 1, 1, 2)],
    ("dv", 256): [(64, 128, 32, 4, 1), (64, 64, 32, 4, 1, 2, 1), (64, 64, 64, 8, 1, 2, 1), (64, 128, 64, 8, 1)],
    ("states", 256): [(64, 128, 64, 4, 1), (64, 128, 64, 4, 2), (64, 128, 64, 8, 1)],
}  # fmt: skip


def candidates(key: Key) -> list[Tile]:
    """The tiles to try for a kernel and a size; the first one is the table's own, if it has one."""
    own = table.TABLE["bf16"].get(key)
    return [*dict.fromkeys([*([] if own is None else [own]), *(Tile(*x) for x in CANDIDATES[key])])]


def training_step(case: AttentionCase) -> tuple[Tensor, ...]:
    out = case.linrope()
    return out, *torch.autograd.grad(out, case.leaves, case.g_out)


def least_times(on: Machine, case: AttentionCase) -> dict[str, float]:
    """The milliseconds of each kernel's launches in the training step of several in which they are least, by name."""
    times: dict[str, list[float]] = {}
    repeats = on.sizes(REPEATS, 1)
    for name, milliseconds in on.kernels(partial(training_step, case), repeats=repeats):
        if name.endswith("_kernel"):
            times.setdefault(name.removesuffix("_kernel"), []).append(milliseconds)
    if len(of_keys := times.get("dkv", [])) == 2 * repeats:
        del times["dkv"]
        times |= {"dk": of_keys[::2], "dv": of_keys[1::2]}
    return {name: least_sum(found, max(1, len(found) // repeats)) for name, found in times.items()}


def least_sum(numbers: list[float], count: int) -> float:
    """The least sum of ``count`` numbers that follow each other, from each multiple of ``count`` on."""
    return min(sum(numbers[i : i + count]) for i in range(0, len(numbers) - count + 1, count))


def difference(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """The largest |actual - expected| / |expected|, in the 2-norm; NaN if any number is."""
    with torch.no_grad():
        errors = [(x.float() - y.float()).norm() / y.float().norm() for x, y in zip(actual, expected)]
        return float(torch.stack(errors).max())


def tiles(on: Machine) -> Iterator[Row]:
    keys = on.sizes([*CANDIDATES], [("chunk_scores by unit", 128), ("scan_fwd", 128)])
    if (
        on.on_gpu and not on.small
    ):  # before this process uses the GPU, others compile all candidates side by side
        with get_context("fork").Pool(max(1, (os.cpu_count() or 1) - 2)) as pool:
            tasks = [(replace(on, small=True), key, tile) for key in CANDIDATES for tile in candidates(key)]
            pool.starmap(compile_one, tasks, chunksize=1)
    for key in keys:
        yield from rows_of(on, key, candidates(key) if on.on_gpu else candidates(key)[:2])


def compile_one(on: Machine, key: Key, tile: Tile) -> None:
    for _ in rows_of(on, key, [tile]):
        pass


def rows_of(on: Machine, key: Key, found: list[Tile]) -> Iterator[Row]:
    for case, row in cases_of(on, *key):
        rows = each(found, partial(tile_row, on, key, case, training_step(case)))
        yield from ({"kernel": key[0], "size": key[1]} | row | of_tile for of_tile in rows)


def cases_of(on: Machine, kernel: str, size: int) -> Iterator[tuple[AttentionCase, Row]]:
    """The cases that a kernel's tiles are timed with, and what their rows say of them."""
    if kernel not in DELTA:
        full = FEW_HEADS if kernel == "states" else MANY_HEADS
        yield case_of(on, (*on.sizes(full, (1, 40, 1)), size)), {}
        return
    left_out = GDN if kernel.endswith(BY_UNIT) else KDA if kernel + BY_UNIT in DELTA else None
    for rule, full in on.sizes(DELTA_CASES, DELTA_CASES[:2]):
        if rule != left_out:
            yield DeltaCase(on, rule, (*on.sizes(full, (1, 40, 1)), size)), {"rule": rule, "tokens": full[:2]}


def tile_row(on: Machine, key: Key, case: AttentionCase, expected: tuple[Tensor, ...], tile: Tile) -> Row:
    entries = table.TABLE[table.precision(case.g_out)]  # on a CPU float16, in tf32
    before, row = dict(entries), Row(tile=tile._asdict())
    try:
        entries[key] = tile
        for name in DELTA if key[0] in DELTA else ():
            entries[name, key[1]] = entries[name, key[1]]._replace(chunk=tile.chunk)
        if key[0] in ("dk", "dv"):  # not both in one launch
            entries.pop(("dkv", key[1]), None)
        forget()
        row["difference"] = difference(training_step(case), expected)
        assert row["difference"] <= 2.0**-6, f"other results: {row['difference']:.3g}"
        times = least_times(on, case)
        return row | {"ms": times.get(key[0].removesuffix(BY_UNIT)), "all ms": sum(times.values())}
    finally:
        entries.clear()
        entries.update(before)
        forget()


def forget() -> None:
    """Makes the next call read the table of tiles again."""
    table.tile.cache_clear()
    table.blocks.cache_clear()
    repeat.forget()

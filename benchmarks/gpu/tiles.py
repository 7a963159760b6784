"""Times every kernel with other tiles than those of linrope_kernels/tiles.py, to choose that table by.

A training step runs in bfloat16 with each candidate in place of one entry; the profiler gives the time of that
kernel alone. A candidate whose results differ from those of the table by more than rounding is reported and not timed.
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

from benchmarks.gpu.machine import Machine, Row, each
from benchmarks.gpu.operation import case_of
from linrope.cli.bench.cases import AttentionCase

Key = tuple[str, int]  # kernel, size
MANY_HEADS, FEW_HEADS = (8, 2048, 64), (1, 65_536, 8)  # batch, length, heads
REPEATS = 8
# Chunk, pairs and values of a tile, warps, stages, and if a program has several tiles, those of pairs and of values.
CANDIDATES: dict[Key, list[tuple[int, ...]]] = {
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
    """The least milliseconds of each kernel in several training steps, by name."""
    times: dict[str, list[float]] = {}
    repeats = on.sizes(REPEATS, 1)
    for name, milliseconds in on.kernels(partial(training_step, case), repeats=repeats):
        if name.endswith("_kernel"):
            times.setdefault(name.removesuffix("_kernel"), []).append(milliseconds)
    if len(of_keys := times.get("dkv", [])) == 2 * repeats:
        del times["dkv"]
        times |= {"dk": of_keys[::2], "dv": of_keys[1::2]}
    return {name: min(found) for name, found in times.items()}


def difference(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """The largest |actual - expected| / |expected|, in the 2-norm; NaN if any number is."""
    with torch.no_grad():
        errors = [(x.float() - y.float()).norm() / y.float().norm() for x, y in zip(actual, expected)]
        return float(torch.stack(errors).max())


def tiles(on: Machine) -> Iterator[Row]:
    keys = on.sizes([*CANDIDATES], [*CANDIDATES][:1])
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
    full = FEW_HEADS if key[0] == "states" else MANY_HEADS
    case = case_of(on, (*on.sizes(full, (1, 40, 1)), key[1]))
    rows = each(found, partial(tile_row, on, key, case, training_step(case)))
    yield from ({"kernel": key[0], "size": key[1]} | row for row in rows)


def tile_row(on: Machine, key: Key, case: AttentionCase, expected: tuple[Tensor, ...], tile: Tile) -> Row:
    entries = table.TABLE[table.precision(case.g_out)]  # on a CPU float16, in tf32
    before, row = dict(entries), Row(tile=tile._asdict())
    try:
        entries[key] = tile
        if key[0] in ("dk", "dv"):  # not both in one launch
            entries.pop(("dkv", key[1]), None)
        forget()
        row["difference"] = difference(training_step(case), expected)
        assert row["difference"] <= 2.0**-6, f"other results: {row['difference']:.3g}"
        times = least_times(on, case)
        return row | {"ms": times.get(key[0]), "all ms": sum(times.values())}
    finally:
        entries.clear()
        entries.update(before)
        forget()


def forget() -> None:
    """Makes the next call read the table of tiles again."""
    table.tile.cache_clear()
    table.blocks.cache_clear()
    repeat.forget()

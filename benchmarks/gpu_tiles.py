"""Times every kernel with other tiles than those of linrope_kernels/tiles.py, to choose that table by.

    PYTHONPATH=.:kernels python3 benchmarks/gpu_tiles.py --out tiles.json

A training step runs in bfloat16 with each candidate in place of one entry; the profiler gives the time of that
kernel alone. A candidate whose results differ from those of the table by more than rounding is reported and not timed.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from linrope_kernels import tiles
from linrope_kernels.tiles import UNSPLIT, Tile
from torch import Tensor

from linrope.cli.bench.cases import AttentionCase

Key = tuple[str, int]  # kernel, size
MANY_HEADS, FEW_HEADS = (8, 2048, 64), (1, 65_536, 8)  # batch, length, heads
REPEATS = 8
# Chunk, pairs or values per program, warps, stages
CANDIDATES: dict[Key, list[tuple[int, int, int, int]]] = {
    ("scan_fwd", 64): [
        (64, 64, 4, 1), (64, 64, 4, 2), (64, 64, 4, 4), (64, 64, 8, 2), (64, 64, 8, 3), (128, 64, 8, 2),
        (128, 64, 8, 3), (64, 32, 4, 2), (64, 32, 4, 3), (32, 64, 4, 3), (32, 64, 4, 4),
    ],
    ("scan_fwd", 128): [
        (64, 64, 4, 1), (64, 64, 4, 3), (64, 64, 8, 2), (64, 64, 8, 3), (64, 128, 8, 1), (64, 128, 8, 2),
        (64, 32, 4, 2), (32, 64, 4, 2), (32, 64, 4, 3), (128, 64, 8, 1), (128, 128, 8, 1),
    ],
    ("dq", 64): [
        (64, 32, 4, 1), (64, 32, 4, 2), (64, 32, 8, 2), (64, 32, 8, 3), (32, 32, 4, 2), (32, 32, 4, 3),
        (128, 32, 8, 2), (64, 16, 4, 2), (64, 16, 4, 3),
    ],
    ("dq", 128): [
        (64, 32, 4, 1), (64, 32, 4, 3), (64, 32, 8, 1), (64, 32, 8, 2), (64, 64, 8, 1), (64, 64, 8, 2),
        (32, 32, 4, 2), (32, 32, 4, 3), (64, 16, 4, 2), (64, 16, 4, 3),
    ],
    ("dk", 64): [
        (64, 32, 4, 1), (64, 32, 4, 3), (64, 32, 8, 1), (64, 32, 8, 2), (64, 32, 8, 3), (32, 32, 4, 2),
        (32, 32, 4, 3), (64, 16, 4, 2), (64, 16, 4, 3),
    ],
    ("dk", 128): [
        (64, 32, 4, 1), (64, 32, 8, 1), (64, 32, 8, 2), (64, 64, 8, 1), (64, 64, 8, 2), (32, 32, 4, 2),
        (32, 32, 4, 3), (64, 16, 4, 2), (64, 16, 4, 3),
    ],
    ("dv", 64): [
        (64, 64, 4, 1), (64, 64, 4, 2), (64, 64, 8, 2), (64, 64, 8, 3), (32, 64, 4, 2), (32, 64, 4, 3),
        (128, 64, 8, 2), (64, 32, 4, 2), (64, 32, 4, 3),
    ],
    ("dv", 128): [
        (64, 64, 4, 1), (64, 64, 4, 3), (64, 64, 8, 1), (64, 64, 8, 2), (64, 128, 8, 1), (64, 128, 8, 2),
        (32, 64, 4, 2), (32, 64, 4, 3), (64, 32, 4, 2),
    ],
    ("states", 64): [(64, 64, 4, 1), (64, 64, 4, 2), (64, 64, 8, 2), (128, 64, 8, 2), (32, 64, 4, 3), (64, 32, 4, 3)],
    ("states", 128): [(64, 64, 4, 1), (64, 64, 4, 3), (64, 64, 8, 2), (64, 128, 8, 2), (32, 64, 4, 3), (64, 32, 4, 3)],
    ("scan_fwd", 256): [
        (32, 32, 4, 1), (32, 32, 4, 2), (64, 32, 4, 1), (64, 32, 4, 2), (64, 32, 8, 1), (64, 64, 8, 1), (64, 64, 4, 1),
        (64, 64, 8, 2), (32, 64, 4, 2), (32, 64, 8, 2), (32, 32, 8, 2),
    ],
    ("dq", 256): [(64, 16, 4, 1), (64, 16, 4, 2), (64, 32, 4, 1), (64, 32, 8, 1), (32, 16, 4, 2)],
    ("dk", 256): [(64, 16, 4, 2), (64, 32, 4, 1), (32, 16, 4, 1)],
    ("dv", 256): [
        (32, 64, 4, 2), (64, 32, 4, 1), (64, 32, 4, 2), (64, 64, 4, 1), (64, 64, 8, 1), (32, 64, 8, 2), (32, 32, 4, 2),
    ],
    ("states", 256): [(64, 64, 4, 1), (64, 64, 4, 2), (64, 32, 4, 2), (64, 64, 8, 1), (64, 128, 8, 1)],
}  # fmt: skip


def tile_of(kernel: str, chunk: int, block: int, warps: int, stages: int) -> Tile:
    pairs, values = (block, UNSPLIT) if kernel in ("dq", "dk") else (UNSPLIT, block)
    return Tile(chunk, pairs, values, warps, stages)


def candidates(only: list[str] | None) -> Iterator[tuple[Key, Tile]]:
    """The tiles to try; the first one of each kernel and size is the table's own."""
    for (kernel, size), others in CANDIDATES.items():
        if only is None or f"{kernel}-{size}" in only:
            own = tiles.TABLE["bf16"][kernel, size]
            yield from (
                ((kernel, size), tile)
                for tile in dict.fromkeys([own, *(tile_of(kernel, *x) for x in others)])
            )


def training_step(case: AttentionCase) -> tuple[Tensor, ...]:
    out = case.linrope(backend="triton")
    return out, *torch.autograd.grad(out, case.leaves, case.g_out)


def milliseconds(run: Callable[[], Any]) -> dict[str, float]:
    """The least time of each kernel in several runs, by name."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
    ) as profile:
        for _ in range(REPEATS):
            run()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in profile.events():
        if event.name.endswith("_kernel"):
            times.setdefault(event.name.removesuffix("_kernel"), []).append(event.device_time / 1e3)
    return {name: min(values) for name, values in times.items()}


def difference(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """The largest |actual - expected| / |expected|, in the 2-norm; NaN if any number is."""
    with torch.no_grad():
        errors = [(x.float() - y.float()).norm() / y.float().norm() for x, y in zip(actual, expected)]
        return float(torch.stack(errors).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gates", action="store_true", help="with a forget gate per head")
    parser.add_argument("--only", nargs="+", help="for example dq-64; default: all")
    options = parser.parse_args()
    table, rows = tiles.TABLE["bf16"], []
    cases: dict[tuple[bool, int], tuple[AttentionCase, tuple[Tensor, ...]]] = {}
    for (kernel, size), tile in candidates(options.only):
        few, before = kernel == "states", table[kernel, size]
        if (few, size) not in cases:
            b, n, h = FEW_HEADS if few else MANY_HEADS
            case = AttentionCase(n, b, h, size, "cuda", torch.bfloat16, gates=options.gates)
            cases[few, size] = case, training_step(case)
        case, expected = cases[few, size]
        row: dict[str, Any] = {"kernel": kernel, "size": size, **tile._asdict()}
        try:
            table[kernel, size] = tile
            tiles.tile.cache_clear()
            row["difference"] = difference(training_step(case), expected)
            if not row["difference"] <= 2.0**-6:
                raise AssertionError(f"other results: {row['difference']:.3g}")
            times = milliseconds(lambda case=case: training_step(case))  # type: ignore[misc]
            row |= {"ms": times[kernel], "all ms": sum(times.values())}
        except Exception as error:  # too much shared memory, ..: the others go on
            row["failure"] = repr(error)[:200]
        finally:
            table[kernel, size] = before
            tiles.tile.cache_clear()
        rows.append(row)
        print(" ".join(f"{x:.4g}" if isinstance(x, float) else str(x) for x in row.values()), flush=True)
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

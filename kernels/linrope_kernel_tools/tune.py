"""Times candidate tiles on a GPU and prints the fastest as entries for the table in tiles.py.

    PYTHONPATH=kernels python -m linrope_kernel_tools.tune --size 64 --dot bf16

A candidate replaces its entry of the table while the whole forward or backward pass is timed, so that its
effect on neighbouring kernels counts too. A candidate that does not fit the GPU, or whose results are wrong,
is reported and left out.
"""

import argparse
from collections.abc import Callable, Iterator
from itertools import product

import torch
import triton
from linrope_kernels import gradients, launch, tiles
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "tf32": torch.float16, "ieee": torch.float32}
BACKWARD = ("dq", "dk", "dv")
Pass = Callable[[], tuple[Tensor, ...]]


def candidates(kernel: str, size: int) -> Iterator[tiles.Tile]:
    """Candidate tiles. A kernel that sums over pairs or over values takes all of them in each program."""
    whole_pairs, whole_values = kernel in ("scan_fwd", "states", "dv"), kernel in ("dq", "dk")
    pairs = (tiles.UNSPLIT,) if whole_pairs else [w for w in (16, 32, 64) if w <= size // 2]
    values = (tiles.UNSPLIT,) if whole_values else [e for e in (16, 32, 64, 128) if e <= size]
    for numbers in product((16, 32, 64, 128), pairs, values, (4, 8), (1, 2, 3)):
        yield tiles.Tile(*numbers)


def table_of(dot: str) -> dict[tuple[str, int], tiles.Tile]:
    """The table's entries for this machine's GPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return tiles.table_of(dot, launch._device(torch.empty(0, device=device)).capability)


def passes(size: int, dot: str, b: int, n: int, h: int, device: str) -> tuple[Pass, Pass]:
    """The forward and the backward pass of a random problem, whose inputs exist already."""
    q, k, v, d_out = torch.randn(4, b, n, h, size, device=device, dtype=DTYPES[dot])
    theta = (torch.rand(1, 1, size // 2, device=device, dtype=torch.float64) * 2.0**62).to(torch.int64)
    first = torch.zeros(1, 1, dtype=torch.int64, device=device)
    call = launch.Call(q=q, k=k, v=v, theta=theta, positions=first, dot=dot)

    def forward() -> tuple[Tensor, ...]:
        out, _, saved = launch.attend_fwd(call, None, want_end=True, save=True)
        assert out is not None
        return out, *saved[:1]

    def backward() -> tuple[Tensor, ...]:
        out, _, saved = launch.attend_fwd(call, None, want_end=True, save=True)
        grads = gradients.attend_bwd(call, None, saved, out if call.reads_out else None, d_out, None)
        return tuple(x for x in grads[:3] if x is not None)

    return forward, backward


def best(
    kernel: str, size: int, dot: str, run: Pass, timer: Callable[[Pass], float]
) -> list[tuple[float, tiles.Tile]]:
    """(ms, tile) of the candidates that run and agree with the table's current tile, fastest first."""
    table, key = table_of(dot), (kernel, size)
    shipped = table[key]
    expected = [x.double() for x in run()]
    measured: list[tuple[float, tiles.Tile]] = []
    try:
        for tile in candidates(kernel, size):
            table[key] = tile
            try:
                results = run()
                errors = [(x.double() - y).abs().max() / y.abs().max() for x, y in zip(results, expected)]
                worst = max(float(error) for error in errors)
                if not worst <= 0.05:
                    print(f"{kernel} {size} {dot} {tuple(tile)}: results differ by {worst:.1e}", flush=True)
                    continue
                measured.append((timer(run), tile))
            except (triton.runtime.errors.OutOfResources, triton.CompilationError, RuntimeError) as error:
                print(f"{kernel} {size} {dot} {tuple(tile)}: {str(error).splitlines()[0][:60]}", flush=True)
    finally:
        table[key] = shipped
    return sorted(measured)


def tune(
    kernels: list[str],
    size: int,
    dot: str,
    shape: tuple[int, int, int],  # b, n, h
    device: str,
    timer: Callable[[Pass], float],  # in ms
) -> None:
    """Prints the time of the table's tile, and the five fastest candidates as entries for the table."""
    forward, backward = passes(size, dot, *shape, device)
    for kernel in kernels:
        if (kernel, size) not in table_of(dot):
            continue
        run = backward if kernel in BACKWARD else forward
        shipped = timer(run)
        print(f"{kernel} {size} {dot}: {shipped:.3f} ms with {tuple(table_of(dot)[kernel, size])}")
        for ms, tile in best(kernel, size, dot, run, timer)[:5]:
            print(f'    ("{kernel}", {size}): Tile{tuple(tile)},  # {ms:.3f} ms')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=64, choices=(64, 128, 256))
    parser.add_argument("--dot", default="bf16", choices=DTYPES)
    parser.add_argument("--shape", type=int, nargs=3, default=(4, 8192, 16), metavar=("B", "N", "H"))
    parser.add_argument("--kernel", nargs="+", default=["scan_fwd", "states", "dq", "dk", "dv"])
    options = parser.parse_args()
    tune(
        options.kernel, options.size, options.dot, tuple(options.shape), "cuda",
        lambda run: triton.testing.do_bench(run, warmup=20, rep=100, return_mode="median"),
    )  # fmt: skip


if __name__ == "__main__":
    main()

"""The host's time for a call: what Python and PyTorch cost if launches take no time, and on a GPU also with launches.

    python3 benchmarks/gpu/host_times.py --before FOLDER                    # this version and another one, on a CPU
    python3 benchmarks/gpu/host_times.py --before FOLDER --backend native   # short calls of the CPU's kernels
    python3 benchmarks/gpu/host_times.py --before FOLDER --device cuda      # with launches, and without

``in_turn`` runs this file with either version on the path, so it uses only names that both have.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
SHAPES = {
    "triton": [(8, 512, 16, 64)],
    "native": [(1, 1, 8, 64), (1, 16, 8, 64), (1, 128, 8, 64), (1, 512, 8, 64)],
}
SMALL = (1, 20, 1, 16)
CALLS, SECONDS = 2000, 1.0  # as many calls as fit into the time; the fastest counts
QUEUE = 50  # calls after which the GPU may catch up
ROUNDS = 3  # in which the versions take turns


class Nothing:
    """A compiled kernel that does nothing, in whichever way a version of linrope calls it."""

    function = packed_metadata = None

    def __getitem__(self, grid: Any) -> Callable[..., "Nothing"]:
        return self.run

    def run(self, *_: Any, **__: Any) -> "Nothing":
        return self


@contextmanager
def without_launches() -> Iterator[None]:
    """Makes every launch of a linrope kernel do nothing, so that only the time of Python and PyTorch is left."""
    from linrope_kernels import start
    from linrope_kernels.forward import scan_fwd_kernel

    kind, nothing = type(scan_fwd_kernel), Nothing()
    passes = getattr(sys.modules.get("linrope_kernels.repeat"), "_PASSES", {})  # absent in earlier versions
    memories = [(memory, dict(memory)) for memory in (start._LAUNCHES, passes)]
    before = kind.__getitem__
    kind.__getitem__ = lambda kernel, grid: nothing[grid]
    for memory, _ in memories:
        memory.clear()
    try:
        yield
    finally:
        kind.__getitem__ = before
        for memory, known in memories:
            memory.clear()
            memory.update(known)


def fastest(run: Callable[[], Any], device: str, calls: int) -> float:
    """The microseconds until a call returns, without waiting for the GPU."""
    best, end = float("inf"), time.perf_counter() + SECONDS
    for i in range(calls):
        begun = time.perf_counter()
        run()
        now = time.perf_counter()
        best = min(best, 1e6 * (now - begun))
        if now > end:
            break
        if device == "cuda" and i % QUEUE == QUEUE - 1:
            torch.cuda.synchronize()
    return best


def times(device: str, backend: str, small: bool) -> dict[str, float]:
    """The times of a forward pass and of a training call, for each shape."""
    from linrope import Rotary, linear_rope_attention

    torch.set_num_threads(1)
    dtype = torch.bfloat16 if device == "cuda" else torch.float16 if backend == "triton" else torch.float32
    calls, found = 3 if small else CALLS, {}
    for shape in [SMALL] if small else SHAPES[backend]:
        inputs = [x.requires_grad_() for x in torch.randn(3, *shape, device=device, dtype=dtype)]
        forward = partial(linear_rope_attention, *inputs, rotary=Rotary(shape[3]), backend=backend)
        ones = torch.ones(shape, device=device, dtype=dtype)
        training = partial(train, forward, inputs, ones)
        for name, run in (("forward", torch.no_grad()(forward)), ("training", training)):
            what = f"{backend} {'x'.join(map(str, shape))} {name}"
            if device == "cuda" or backend != "triton":
                found[f"{what} us"] = fastest(run, device, calls)
            if backend == "triton":
                with without_launches():
                    found[f"{what} us without launches"] = fastest(run, device, calls)
    return found


def train(forward: Callable[[], torch.Tensor], inputs: list[torch.Tensor], ones: torch.Tensor) -> None:
    torch.autograd.grad(forward(), inputs, ones)


def in_turn(before: Path, device: str, backend: str = "triton", small: bool = False) -> dict[str, float]:
    """The times of the version in another folder and of this one, in processes that take turns."""
    best: dict[str, float] = {}
    for _ in range(1 if small else ROUNDS):
        for name, folder in (("before", before), ("now", ROOT)):
            command = [sys.executable, str(Path(__file__)), "--device", device, "--backend", backend]
            environment = os.environ | {
                "PYTHONPATH": f"{folder}{os.pathsep}{folder / 'kernels'}",
                "TRITON_INTERPRET": "0" if device == "cuda" else "1",
            }
            done = subprocess.run(
                command + ["--small"] * small, env=environment, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise RuntimeError(f"{name}: {done.stderr[-500:]}")
            for key, x in json.loads(done.stdout).items():
                best[f"{name}, {key}"] = min(x, best.get(f"{name}, {key}", x))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, help="a folder with another version of linrope")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--backend", choices=tuple(SHAPES), default="triton")
    parser.add_argument("--small", action="store_true", help="one small shape, few calls")
    options = parser.parse_args()
    if options.before is None:
        print(json.dumps(times(options.device, options.backend, options.small)))
        return
    found = in_turn(options.before, options.device, options.backend, options.small)
    for key, now in found.items():
        if key.startswith("now, "):
            name = key.removeprefix("now, ")
            before = found[f"before, {name}"]
            print(f"{name:50} {before:8.1f} -> {now:8.1f}  {now / before:.2f}")


if __name__ == "__main__":
    main()

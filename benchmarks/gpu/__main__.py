"""Runs the steps of steps.py: tests first, then what was never measured, then the rest.

    PYTHONPATH=.:kernels python3 -m benchmarks.gpu --list
    PYTHONPATH=.:kernels python3 -m benchmarks.gpu --out benchmarks/results/gpu-2026-12-01.json
    PYTHONPATH=.:kernels python3 -m benchmarks.gpu --out .. --from block       # goes on where a run was cut
    PYTHONPATH=.:kernels python3 -m benchmarks.gpu --dry-run                   # without a GPU: all code, small sizes

Each row is in the JSON as soon as it is measured; build/gpu-logs has what the steps print. The rehearsal comes first:
all steps in small sizes side by side, which compiles their kernels. Compiled kernels stay in build/gpu-cache, which may
be copied to another machine. The exit status is 1 if a step failed or was stopped.
"""

import argparse
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
TODAY = time.strftime("%Y-%m-%d")
DRY_RESULTS, LOGS = Path("build/gpu-dry-run.json"), Path("build/gpu-logs")
REHEARSAL = 90  # seconds, expected
LONGEST = 150  # seconds of a step of the rehearsal


def parsed(arguments: list[str] | None, names: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path(f"benchmarks/results/gpu-{TODAY}.json"))
    add("--from", dest="first", choices=names, default=names[0], help="begin with this step")
    add("--only", nargs="+", choices=names, default=names, help="only these steps")
    add("--commit", help="the commit of the code, if there is no git")
    add("--seconds", type=float, default=3600, help="begin no step that may take longer than is left")
    add("--before", type=Path, help="a folder with another version of linrope: host times of both, in turn")
    add("--dry-run", action="store_true", help="all code in small sizes on a CPU")
    add("--list", action="store_true", help="print the steps and their times")
    return parser.parse_args(arguments)


def prepare_environment(on_gpu: bool) -> None:
    """Sets the variables that Triton and PyTorch read on import, for this process and for those of the steps."""
    os.chdir(ROOT)  # the cache's paths are relative
    os.environ["TRITON_INTERPRET"] = "0" if on_gpu else "1"
    os.environ["TRITON_CACHE_DIR"] = "build/gpu-cache/triton"
    os.environ["TRITON_CACHE_AUTOTUNING"] = "1"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(ROOT / "build/gpu-cache/inductor")
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # is_available() must not start CUDA before a fork
    os.environ["TEARDOWN_CUPTI"] = "0"  # the profiler runs again after CUDA graphs
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"


def main(arguments: list[str] | None = None) -> int:
    begun = time.monotonic()
    dry = "--dry-run" in (sys.argv[1:] if arguments is None else arguments)
    prepare_environment(on_gpu=not dry)
    import torch

    from benchmarks.gpu.machine import Machine
    from benchmarks.gpu.runner import Results
    from benchmarks.gpu.steps import STEPS

    options = parsed(arguments, ["rehearsal", *STEPS])
    names = ["rehearsal", *STEPS]
    chosen = [name for name in names[names.index(options.first) :] if name in options.only]
    steps = {name: STEPS[name] for name in chosen if name in STEPS} or STEPS
    if options.list:
        for name, step in steps.items():
            print(f"{name:10} {step.seconds:4} s, at most {step.limit:4} s: {step.tells}")
        total = sum(step.seconds for step in steps.values())
        print(f"{total:15} s in all, and {REHEARSAL} s for a rehearsal")
        return 0
    if not dry and not torch.cuda.is_available():
        print("PyTorch sees no CUDA device; --dry-run runs all steps without one", file=sys.stderr)
        return 2
    results = Results(DRY_RESULTS if dry else options.out, LOGS)
    if options.commit is not None:
        results.found["commit"] = options.commit
    if dry or "rehearsal" in chosen:
        ahead = {name: step.run for name, step in steps.items() if dry or step.ahead}
        on = Machine("cpu" if dry else "cuda", limit=LONGEST, before=options.before)
        results.rehearse(ahead, on, 2 if dry else max(1, (os.cpu_count() or 1) - 2))
    for name in () if dry else (name for name in chosen if name in STEPS):
        left = begun + options.seconds - time.monotonic()
        if left < STEPS[name].seconds:
            results.add(name, results.found.get(name, []), "skipped: too little time was left", 0)
            print(
                f"{name}: skipped, as {left:.0f} s are left and it may take {STEPS[name].seconds}", flush=True
            )
            continue
        on = Machine(limit=min(STEPS[name].limit, left), before=options.before)
        results.measure(name, STEPS[name].run, on)
    print(*([f"FAILED: {line}" for line in results.failures] or ["nothing failed"]), sep="\n")
    print(f"{results.path}: {time.monotonic() - begun:.0f} s")
    return int(bool(results.failures))


if __name__ == "__main__":
    raise SystemExit(main())

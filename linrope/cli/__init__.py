"""The ``linrope`` command: demo, bench, train, eval, generate, convert, env."""

import os
import sys


def main() -> None:
    """Runs the command line; says how to install its dependencies where they are missing."""
    _let_threads_sleep()
    try:
        from linrope.cli.app import run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"linrope: {error.name} is missing; install linrope[cli]")
    sys.exit(run(sys.argv[1:]))


def _let_threads_sleep() -> None:
    """Starts this process anew with OpenMP's threads asleep while they wait for each other.

    A training step has thousands of short parallel regions. Where other processes run too, a thread that
    spins takes the core from the one that it waits for: beside two of them on two cores, a step takes five
    times as long. OpenMP reads the choice when PyTorch is imported, as it has been by now.
    """
    chosen = {"OMP_WAIT_POLICY", "OMP_NUM_THREADS", "GOMP_SPINCOUNT"} & os.environ.keys()
    command = next((part for part in sys.argv[1:] if not part.startswith("-")), None)
    measured = command in (None, "bench", "env")  # what users' own programs would have
    if chosen or measured or not sys.platform.startswith("linux"):
        return
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)

"""The ``linrope`` command: demo, bench, train, plot, eval, generate, convert, env, check."""

import os
import sys


def main() -> None:
    """Runs the command line, or says how to install its dependencies if they are missing."""
    _let_threads_sleep()
    try:
        from linrope.cli.app import run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"linrope: {error.name} is missing; install linrope[cli]")
    sys.exit(run(sys.argv[1:]))


def _let_threads_sleep() -> None:
    """Restarts this process with OpenMP threads that sleep, rather than spin, while they wait for each other.

    A training step has thousands of short parallel regions. If other processes run too, a spinning thread
    takes the core from the thread it waits for: with two such processes on two cores, a step takes five
    times as long. OpenMP reads this setting when PyTorch is imported, which has already happened here.
    """
    user_chose = {"OMP_WAIT_POLICY", "OMP_NUM_THREADS", "GOMP_SPINCOUNT"} & os.environ.keys()
    command = next((part for part in sys.argv[1:] if not part.startswith("-")), None)
    measures = command in (None, "bench", "env")  # these measure or show what users' programs get
    if user_chose or measures or not sys.platform.startswith("linux"):
        return
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)

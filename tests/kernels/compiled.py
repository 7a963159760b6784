"""Processes that compile the kernels; this one interprets them, and Triton decides that when it starts."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
CAPABILITIES = (80, 90, 100)


def run_compiled(*arguments: str) -> "subprocess.Popen[str]":
    """Python with those arguments, in the background."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}",
    }
    command = [sys.executable, *arguments]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@cache
def start_report() -> "subprocess.Popen[str]":
    """The report on the whole tile table, a line of JSON each."""
    return run_compiled("-m", "linrope_kernels.report", "--json", "--capability", *map(str, CAPABILITIES))


@cache
def start_launches() -> "subprocess.Popen[str]":
    """What the launchers start for all kinds of calls, compiled for the least GPU."""
    return run_compiled(str(Path(__file__).parent / "launch_without_gpu.py"), str(CAPABILITIES[0]))

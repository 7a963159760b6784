"""Processes that compile the kernels; this one interprets them, and Triton decides that when it starts."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CAPABILITIES = (80, 90, 100, 120)


def run_compiled(*arguments: str) -> list[dict[str, Any]]:
    """The lines of JSON that Python prints with those arguments."""
    return [json.loads(line) for line in run_compiled_text(*arguments).splitlines()]


def run_compiled_text(*arguments: str) -> str:
    """Runs Python with those arguments and returns what it prints."""
    paths = f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout

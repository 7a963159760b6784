"""Counts the launches again that kernels/README.md tells of."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_a_layer_launches_no_more_than_the_page_says() -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(ROOT / "benchmarks" / "launches.py"), "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    page = (ROOT / "kernels" / "README.md").read_text()
    for line in map(json.loads, done.stdout.splitlines()):
        counts = [sum(line[p][kind].values()) for p in ("forward", "backward") for kind in line[p]]
        # The page says that "short" has the numbers of "many heads".
        heads = line["name"].replace("short", "many heads")
        assert "| {} | {} | {} + {} | {} + {} |".format(heads, line["layer"], *counts) in page

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
    rows: dict[str, dict[str, str]] = {}  # by layer and size: the cells of its row
    for line in map(json.loads, done.stdout.splitlines()):
        counts = [sum(line[p][kind].values()) for p in ("forward", "backward") for kind in line[p]]
        rows.setdefault(line["layer"], {})[line["name"]] = "{} + {} | {} + {}".format(*counts)
    for layer, cells in rows.items():
        assert f"| {layer} | {cells['many heads']} | {cells['few heads']} |" in page
        assert cells["short"] == cells["many heads"]  # as the page says

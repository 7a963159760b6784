"""Counts the launches again that kernels/README.md tells of."""

import json
from pathlib import Path

from tests.kernels.compiled import run_compiled_text

ROOT = Path(__file__).parents[2]
MOST = {"forward": 10, "backward": 27}  # launches of the default block's layer


def test_a_layer_launches_no_more_than_the_page_says() -> None:
    page, rows = (ROOT / "kernels" / "README.md").read_text(), {}  # by layer and size: the cells of its row
    for line in map(
        json.loads, run_compiled_text(str(ROOT / "benchmarks/launches.py"), "--json").splitlines()
    ):
        counts = {p: [sum(line[p][kind].values()) for kind in ("kernels", "operations")] for p in MOST}
        cells = "{} + {} | {} + {}".format(*counts["forward"], *counts["backward"])
        rows.setdefault(line["layer"], {})[line["name"]] = cells
        if line["layer"] == "default block" and line["name"] != "few heads":
            assert {p: sum(counts[p]) for p in MOST} == MOST
    for layer, cells in rows.items():
        assert f"| {layer} | {cells['many heads']} | {cells['few heads']} |" in page
        assert cells["short"] == cells["many heads"]  # as the page says

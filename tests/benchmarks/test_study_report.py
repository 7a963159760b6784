"""benchmarks/study: tables and plots of its lines, and that pages have what the tables say."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.study import lines, plan, plots, report
from benchmarks.study.runner import Run
from benchmarks.study.tasks import Task

TASKS = {task.name: task for task, _ in plan.PLAN}
ROOT = Path(__file__).parents[2]


def test_the_page_has_the_tables_of_the_committed_results() -> None:
    page = (ROOT / "docs/evidence.md").read_text()
    for task, rows in report.counted(ROOT / "benchmarks/results/study").items():
        assert report.table(task, rows) in page, f"{task}: python -m benchmarks.study table prints another"


@pytest.mark.parametrize("name", ["README.md", "docs/recipes.md"])
def test_figures_that_other_pages_quote_are_those_of_the_tables(name: str) -> None:
    tables, text = (ROOT / "docs/evidence.md").read_text(), (ROOT / name).read_text()
    if name == "README.md":
        text = text.split("<!-- study -->")[1].split("<!-- /study -->")[0]
    quoted = re.findall(r"-?\d\.\d{3}(?: ± \d\.\d{3})?|\d+,\d{3} \|", text)
    assert len(quoted) > 10
    assert [figure for figure in quoted if figure not in tables] == []


def made_up(task: Task, model: str, seed: int, results: dict[str, Any] | None) -> lines.Line:
    return Run(task, model, seed, 3e-3, "run").key() | {
        "results": results, "floor": {"1x": 0.5}, "ceiling": {"1x": 1.0}, "machine": {"commit": "0123456789"},
        "parameters": 1234, "state_numbers": 64, "tokens_per_second": 1e4, "memory_bytes": 2_000_000,
        "seconds": 14.0, "cpu_seconds": 7.0, "tokens_per_step": 1024,
    }  # fmt: skip


def test_a_table_has_means_and_spreads_from_the_lines_alone(tmp_path) -> None:
    for seed, share in enumerate((0.5, 0.6, 0.9), 1):
        lines.append(tmp_path, made_up(TASKS["parity"], "eq19", seed, {"1x": share, "curve": [1.0]}))
    lines.append(tmp_path, made_up(TASKS["parity"], "gate", 1, {"1x": 1.0, "curve": [1.0]}))
    lines.append(tmp_path, made_up(TASKS["parity"], "gate", 2, None))
    lines.append(tmp_path, made_up(TASKS["parity"], "eq19", 0, {"1x": 0.0}) | {"phase": "grid"})
    found = report.tables(tmp_path)
    assert found.splitlines()[0].startswith("**parity**: 600 steps of about 1,024 tokens, 2 to 3 seeds")
    assert re.search(r"\| guessing \| 0.500 \|", found)
    assert re.search(r"\| a perfect solver \| 1.000 \|", found)
    assert "| eq19 | 0.667 ± 0.200 | 1,234 | 64 | 0.003 | 20,000 | 7 | 2 |" in found
    assert "| gate | 1 of 2 diverged |" in found
    assert "curve" not in found


def test_lines_that_do_not_belong_together_are_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="at least one run"):
        report.tables(tmp_path)
    line = made_up(TASKS["parity"], "eq19", 1, {"1x": 0.5})
    lines.append(tmp_path, line)
    lines.append(tmp_path, line)
    with pytest.raises(ValueError, match="two lines of one seed"):
        report.tables(tmp_path)
    other = replace(TASKS["parity"], steps=3)
    lines.append(tmp_path, made_up(other, "gate", 1, {"1x": 0.5}))
    with pytest.raises(ValueError, match="several settings"):
        report.tables(tmp_path)
    (tmp_path / lines.NAME).write_text('{"task": 1}\n{"ta\n{"task": 2}\n')
    with pytest.raises(ValueError, match="line 2"):
        lines.read(tmp_path)


def test_plots_are_drawn_from_the_lines_alone(tmp_path) -> None:
    language = {"bits": 2.0, "by position": [2.0] * 64, "by position, 1x": [2.5] * 64}
    for model in ("softmax-rope", "eq19"):
        lines.append(tmp_path, made_up(TASKS["language"], model, 1, language))
        lines.append(tmp_path, made_up(TASKS["parity"], model, 1, {"1x": 1.0, "2x": 0.5, "4x": 0.5}))
        for size in (256, 512):
            lines.append(tmp_path, made_up(TASKS[f"recall-{size}"], model, 1, {"6 pairs": 0.5}))
    lines.append(tmp_path, made_up(TASKS["parity"], "gate", 1, None))
    drawn = plots.plots(tmp_path, tmp_path)
    names = ("language", "language-positions", "parity", "recall-256", "recall-512", "recall")
    assert {path.name for path in drawn} == {f"{name}.png" for name in names}
    assert all(path.read_bytes()[1:4] == b"PNG" for path in drawn)

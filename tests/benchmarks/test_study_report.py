"""benchmarks/study: tables and plots of its lines, and that pages have what the tables say."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.study import lines, plan, plots, report, steps
from benchmarks.study.published import PUBLISHED
from benchmarks.study.runner import Run
from benchmarks.study.tasks import Task
from benchmarks.study.variants import VARIANTS, WORDS

TASKS = {task.name: task for task, _ in plan.PLAN}
ROOT = Path(__file__).parents[2]


def test_the_page_of_tables_is_what_the_command_writes() -> None:
    page = (ROOT / "docs/evidence_tables.md").read_text()
    assert report.page(ROOT / "benchmarks/results/study") == page, (
        "python -m benchmarks.study table writes another"
    )


@pytest.mark.parametrize("name", ["docs/evidence.md", "docs/recipes.md"])
def test_figures_that_other_pages_quote_are_those_of_the_tables(name: str) -> None:
    tables, text = (ROOT / "docs/evidence_tables.md").read_text(), (ROOT / name).read_text()
    quoted = re.findall(r"-?\d\.\d{3} ± \d\.\d{3}", text)
    times = [] if name == "docs/recipes.md" else re.findall(r"(?<=\| )\d+\.\d\d(?= \|)", text)
    assert len(quoted) > 10
    assert len(times) > 5 or name == "docs/recipes.md"
    assert [figure for figure in quoted if figure not in tables] == []
    assert [time for time in times if f"| {time} |" not in tables] == []


def test_every_model_and_task_has_words() -> None:
    assert WORDS.keys() == VARIANTS.keys()
    assert report.TASKS.keys() == {task.name for task, _ in [*plan.PLAN, *plan.LONG]}


def made_up(task: Task, model: str, seed: int, results: dict[str, Any] | None) -> lines.Line:
    return Run(task, model, seed, 3e-3, "run").key() | {
        "results": results, "floor": {"1x": 0.5}, "ceiling": {"1x": 1.0}, "machine": {"commit": "0123456789"},
        "parameters": 1234, "state_numbers": 64, "options": {}, "tokens_per_step": 1024,
    }  # fmt: skip


def test_a_table_has_means_and_spreads_from_the_lines_alone(tmp_path) -> None:
    for seed, share in enumerate((0.5, 0.6, 0.9), 1):
        lines.append(tmp_path, made_up(TASKS["copying"], "eq19", seed, {"1x": share, "curve": [1.0]}))
    lines.append(tmp_path, made_up(TASKS["copying"], "block-all-rotated", 1, {"1x": 1.0, "curve": [1.0]}))
    lines.append(tmp_path, made_up(TASKS["copying"], "block-all-rotated", 2, None))
    lines.append(tmp_path, made_up(TASKS["copying"], "eq19", 0, {"1x": 0.0}) | {"phase": "grid"})
    found = report.page(tmp_path)
    assert "\n**copying**: 600 steps of about 1,024 tokens, 2 to 3 seeds, 1,234 parameters ± 1%" in found
    assert "parameters ± 1%, learning rate 0.003. Guessing gets 0.500.\n" in found
    assert "| eq19 | 0.667 ± 0.200 | 64 |\n" in found
    assert "| block-all-rotated | 1 of 2 diverged |" in found
    assert "curve" not in found


def test_what_others_published_stands_below_our_models(tmp_path) -> None:
    task = next(task for task, _ in plan.LONG if task.name == "shakespeare-64")
    lines.append(tmp_path, made_up(task, "block", 1, {"loss": 1.5}))
    table = report.page(tmp_path).partition("**shakespeare-64**")[2].splitlines()
    assert table[-2:] == ["| block | 1.500 | 64 |", "| nanoGPT, published | 1.88 |  |"]
    assert PUBLISHED.keys() < report.TASKS.keys()


def test_tasks_of_one_kind_share_a_table(tmp_path) -> None:
    names = ("mad-compress", "mad-fuzzy-recall")
    for task in (task for task, _ in plan.LONG if task.name in names):
        for seed, share in enumerate((0.5, 0.7), 1):
            lines.append(tmp_path, made_up(task, "block", seed, {"accuracy": share}))
    lines.append(tmp_path, made_up(task, "eq19+init", 1, None) | {"learning_rate": 1e-3})
    found = report.page(tmp_path)
    assert "\n|  | compression | fuzzy recall | mean |\n" in found
    assert "\n| block | 0.600 ± 0.100 | 0.600 ± 0.100 | 0.600 |\n" in found
    assert "\n| eq19+init |  | 1 of 1 diverged |  |\n" in found
    assert "\n| transformer, published | 0.516 | 0.298 | 0.407 |\n" in found
    assert "learning rate 0.001; 0.003 for block." in found


def test_lines_that_do_not_belong_together_are_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="at least one run"):
        report.page(tmp_path)
    line = made_up(TASKS["copying"], "eq19", 1, {"1x": 0.5})
    lines.append(tmp_path, line)
    lines.append(tmp_path, line)
    with pytest.raises(ValueError, match="two lines of one seed"):
        report.page(tmp_path)
    other = replace(TASKS["copying"], steps=3)
    lines.append(tmp_path, made_up(other, "block-all-rotated", 1, {"1x": 0.5}))
    with pytest.raises(ValueError, match="several settings"):
        report.page(tmp_path)
    (tmp_path / lines.NAME).write_text('{"task": 1}\n{"ta\n{"task": 2}\n')
    with pytest.raises(ValueError, match="line 2"):
        lines.read(tmp_path)


def test_the_times_of_steps_are_relative_to_the_default_block(tmp_path) -> None:
    lines.append(tmp_path, made_up(TASKS["language"], "block", 1, {"bits": 2.0}))
    assert "Time of a step" not in report.page(tmp_path).split("## The models")[1]
    steps.save(tmp_path, TASKS["language"], 8, SECONDS)
    found = report.page(tmp_path)
    assert "| mamba-2 | 1.50 | 4.00 |\n" in found
    assert found.index("| block | 1.00 |  |") < found.index("| mamba-2 | 1.50")


SECONDS = {"mamba-2": {"fastest": 0.3, "plain": 0.8}, "block": {"fastest": 0.2}}


def test_plots_are_drawn_from_the_lines_alone(tmp_path) -> None:
    language = {"bits": 2.0, "by position": [2.0] * 64, "by position, 1x": [2.5] * 64}
    for model in ("block", "mamba-2"):
        lines.append(tmp_path, made_up(TASKS["language"], model, 1, language))
        recall = made_up(TASKS["recall-256"], model, 1, {"6 pairs": 0.5}) | {"floor": {"6 pairs": 0.1}}
        lines.append(tmp_path, recall)
    lines.append(tmp_path, made_up(TASKS["recall-256"], "block-all-rotated", 1, None))
    assert {path.name for path in plots.plots(tmp_path, tmp_path)} == {
        "positions.svg",
        "look-up.svg",
    }
    steps.save(tmp_path, TASKS["language"], 8, SECONDS)
    drawn = plots.plots(tmp_path, tmp_path)
    assert {path.name for path in drawn} == {"price.svg", "positions.svg", "look-up.svg"}
    assert all(path.read_text().startswith("<?xml") for path in drawn)
    shown = {*plots.PRICE, *plots.POSITIONS, *plots.LOOK_UP}
    assert shown == plots.MODELS.keys() <= VARIANTS.keys()

"""The runner of ``make gpu-run``: rows are kept as they come, steps end in time, and a run goes on where it was cut."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import steps
from benchmarks.gpu.machine import Machine, Row
from benchmarks.gpu.runner import Results, Step, failures

ROOT = Path(__file__).parents[2]
CHILD = "import time; time.sleep(60)"


def two_rows(on: Machine) -> Iterator[Row]:
    print("said")
    yield {"shape": [1], "x": 1.0}
    yield {"shape": [2], "failure": "ValueError: wrong"}


def hangs(on: Machine) -> Iterator[Row]:
    child = subprocess.Popen([sys.executable, "-c", CHILD])
    yield {"child": child.pid}
    time.sleep(60)


def raises(on: Machine) -> Iterator[Row]:
    yield {"x": 1}
    raise RuntimeError("broken")


def dies(on: Machine) -> Iterator[Row]:
    yield {"x": 1}
    os._exit(3)


def ran(run: Any, tmp_path: Path, limit: float = 60.0) -> tuple[list[Row], Step, str]:
    step = Step(run, Machine("cpu", small=True, limit=limit), tmp_path / "log")
    rows = list(step.rows())
    return rows, step, (tmp_path / "log").read_text()


def test_rows_and_what_is_printed_are_kept(tmp_path: Path) -> None:
    rows, step, log = ran(two_rows, tmp_path)
    assert [row["shape"] for row in rows] == [[1], [2]]
    assert step.status == "done"
    assert "said" in log
    assert failures("two", rows, step.status) == ["two [2]: ValueError: wrong"]


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_step_that_hangs_is_stopped_with_its_children_and_its_rows_stay(tmp_path: Path) -> None:
    ran(two_rows, tmp_path)  # the server has imported everything
    rows, step, _ = ran(hangs, tmp_path, limit=3.0)
    assert step.status == "stopped after 3 s"
    assert 3 <= step.seconds < 5
    (row,) = rows
    for _ in range(50):
        if not alive(row["child"]):
            break
        time.sleep(0.1)
    assert not alive(row["child"])


@pytest.mark.parametrize(
    ("run", "status"), [(raises, "RuntimeError: broken"), (dies, "ended with exit code 3")]
)
def test_a_step_that_breaks_says_so_and_its_rows_stay(run: Any, status: str, tmp_path: Path) -> None:
    rows, step, _ = ran(run, tmp_path)
    assert rows == [{"x": 1}]
    assert step.status == status
    assert failures("it", rows, step.status) == [f"it: {status}"]


def test_results_are_continued_and_a_step_that_runs_again_replaces_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "new" / "gpu.json"
    Results(path, tmp_path / "logs").add("gates", [{"x": 1}], status="stopped after 3 s", seconds=3)
    again = Results(path, tmp_path / "logs")
    again.add("gates", [{"x": 2}], status="done", seconds=1)
    again.add("block", [{"x": 3}], status="done", seconds=2)
    found = json.loads(path.read_text())
    assert (found["gates"], found["block"]) == ([{"x": 2}], [{"x": 3}])
    assert found["steps"]["gates"] == {"status": "done", "seconds": 1}
    assert [x.name for x in path.parent.iterdir()] == ["gpu.json"]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs the program with steps of this file in place of its own, as if a GPU were there."""
    fake = {
        "machine": steps.Step(two_rows, "a failure", 1, 30),
        "gates": steps.Step(raises, "an error", 1, 30),
        "block": steps.Step(dies, "a crash", 40, 50),
    }
    monkeypatch.setattr(steps, "STEPS", fake)
    monkeypatch.setattr(program, "prepare_environment", lambda on_gpu: None)
    monkeypatch.setattr(program, "LOGS", tmp_path / "logs")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)

    def run(*arguments: str) -> tuple[int, Any]:
        path = tmp_path / "new" / "gpu.json"
        status = program.main([*arguments, "--out", str(path)])
        return status, json.loads(path.read_text()) if path.exists() else None

    return run


def test_a_run_goes_on_after_failures_and_its_exit_status_is_1(main: Any, capsys) -> None:
    status, found = main("--from", "machine")
    assert status == 1
    assert {name: x["status"] for name, x in found["steps"].items()} == {
        "machine": "done", "gates": "RuntimeError: broken", "block": "ended with exit code 3",
    }  # fmt: skip
    assert len(found["machine"]) == 2
    assert capsys.readouterr().out.count("FAILED: ") == 3


def test_without_a_gpu_one_line_says_what_runs(main: Any, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main() == (2, None)
    assert capsys.readouterr().err == "PyTorch sees no CUDA device; --dry-run runs all steps without one\n"


def test_what_was_measured_stays_where_a_second_call_begins_later(main: Any, capsys) -> None:
    main("--only", "machine")
    _, found = main("--from", "gates", "--seconds", "20")
    assert len(found["machine"]) == 2
    assert found["steps"]["block"]["status"] == "skipped: too little time was left"
    assert main("--list")[0] == 0
    printed = capsys.readouterr().out
    assert "a crash" in printed
    assert "block: skipped, as " in printed


def test_the_rehearsal_runs_everything_side_by_side_and_reports_each_failure(main: Any) -> None:
    status, found = main("--only", "rehearsal")
    assert status == 1
    assert {row["case"]: len(row["failures"]) for row in found["rehearsal"]} == {
        "machine": 1,
        "gates": 1,
        "block": 1,
    }
    assert found.keys() == {"date", "steps", "rehearsal"}


@pytest.mark.long
def test_the_program_runs_from_a_shell(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry-run", "--only", "machine", "decode"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "nothing failed" in done.stdout

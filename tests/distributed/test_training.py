"""Runs whose processes share rows, tokens and heads have the numbers of one process."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import training
from tests.distributed.processes import Processes

HOW: dict[str, dict[str, Any]] = {
    "accumulation": {"accumulation": 2},
    "pieces": {"pieces": 3},
    "pieces whose gradients go through": {"pieces": 2, "gradients_through_pieces": True},
}
ORDINARY = "pieces whose gradients go through"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == ORDINARY else pytest.mark.long) for name in HOW]
)
def test_tokens_and_heads_are_shared(processes: Processes, name: str) -> None:
    size = processes.size
    for tokens, heads in [(2, 1), (1, 2)] if size == 2 else [(2, 2)]:
        processes.run(training.arrangement, tokens, heads, HOW[name])


@pytest.mark.long
@pytest.mark.parametrize("name", HOW)
@pytest.mark.parametrize(("tokens", "heads"), [(4, 1), (1, 4), (2, 1), (1, 2), (1, 1)])
def test_every_arrangement(processes: Processes, name: str, tokens: int, heads: int) -> None:
    if tokens * heads > processes.size:
        pytest.skip("needs four processes")
    processes.run(training.arrangement, tokens, heads, HOW[name])


def test_a_run_goes_on_with_another_arrangement(processes: Processes, tmp_path: Path) -> None:
    processes.run(training.another_arrangement, str(tmp_path))


def test_processes_that_share_heads_start_with_the_same_model(processes: Processes) -> None:
    processes.run(training.one_start)

"""Processes with some of the heads each find what one process with all of them finds."""

from pathlib import Path

import pytest

from tests.distributed import heads
from tests.distributed.processes import Processes


@pytest.mark.parametrize("name", heads.LAYERS)
def test_a_layer_with_shared_heads_gives_the_numbers_of_one_process(processes: Processes, name: str) -> None:
    processes.run(heads.layer, name, processes.size // 2)


@pytest.mark.long
@pytest.mark.parametrize("name", heads.LAYERS)
def test_a_layer_whose_heads_are_shared_by_all(processes: Processes, name: str) -> None:
    processes.run(heads.layer, name, 1)


def test_rows_sequences_and_heads_are_shared_together(processes: Processes) -> None:
    for arrangement in [(1, 1, 2)] if processes.size == 2 else [(1, 2, 2), (2, 1, 2)]:
        processes.run(heads.language_model, *arrangement)


def test_what_cannot_be_shared_is_refused_with_the_reason(processes: Processes) -> None:
    processes.run(heads.refusals)


def test_transformers_shares_a_model_as_it_loads_it(processes: Processes, tmp_path: Path) -> None:
    processes.run(heads.hugging_face, str(tmp_path))

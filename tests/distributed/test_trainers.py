"""transformers' Trainer over processes has the losses, gradient norms and weights of one process."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed import trainers
from tests.distributed.processes import Processes

pytestmark = pytest.mark.long

WAYS = [
    trainers.shared_rows, trainers.shared_heads, trainers.shared_weights, trainers.shared_heads_and_weights,
    trainers.shared_tokens,
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_trainer_has_the_numbers_of_one_process(
    processes: Processes, way: Callable[[str], None], tmp_path: Path
) -> None:
    processes.run(way, str(tmp_path))


def test_context_parallelism_of_accelerate_is_refused(processes: Processes, tmp_path: Path) -> None:
    processes.run(trainers.context_parallelism_is_refused, str(tmp_path))

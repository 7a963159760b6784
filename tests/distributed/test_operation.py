"""Several processes with a part of each sequence find what one process with all of them finds."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.distributed import cases, checks
from tests.distributed.processes import Processes

DTYPES = [(torch.float64, "eager"), (torch.float32, "auto")]


@pytest.mark.parametrize(("dtype", "backend"), DTYPES, ids=["float64", "float32"])
def test_every_option_gives_the_numbers_of_one_process(
    processes: Processes, dtype: torch.dtype, backend: str
) -> None:
    processes.run(cases.several, list(cases.CASES), False, dtype, backend)
    processes.run(cases.several, list(cases.PACKED), False, dtype, backend, True)


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "backend"), DTYPES, ids=["float64", "float32"])
@pytest.mark.parametrize("name", cases.CASES)
def test_every_option_with_every_cut(
    processes: Processes, name: str, dtype: torch.dtype, backend: str
) -> None:
    processes.run(cases.several, [name], True, dtype, backend)


@pytest.mark.parametrize(
    "check",
    [
        checks.repeats_bit_for_bit, checks.overflow_stays_behind, checks.separate_documents,
        checks.half_precision, checks.pool_of_states, checks.prefill_then_decode,
    ],
)  # fmt: skip
def test_on_every_rank(processes: Processes, check: Callable[[], None]) -> None:
    processes.run(check)


def test_traffic_does_not_grow_with_the_sequence(processes: Processes) -> None:
    found = processes.run(checks.traffic, [256, 2048])
    for short, long in found:
        assert short == long
        collectives, sent = short
        assert collectives == 2  # one forward, one backward
        state = 8 * 64 * (64 * 4 + 8) + 8  # kv in float32, z in float64, the position
        assert sent == (processes.size - 1) * (state + state - 8)  # a position has no gradient


@pytest.mark.parametrize("what", checks.DISAGREEMENTS)
def test_ranks_that_disagree_are_told_so_everywhere(processes: Processes, what: str) -> None:
    for message in processes.run(checks.disagree, what):
        for part in ("rank 0", f"rank {processes.size - 1}", *checks.DISAGREEMENTS[what]):
            assert part in message, message


def test_when_a_rank_dies_the_others_say_what_they_waited_for(tmp_path: Path) -> None:
    doomed = Processes(2, tmp_path)
    with pytest.raises(pytest.fail.Exception) as error:
        doomed.run(checks.one_rank_dies)
    doomed.close()
    assert "rank 1: ended" in str(error.value)
    assert "shard: rank 0 of 2 could not exchange with the others" in str(error.value)

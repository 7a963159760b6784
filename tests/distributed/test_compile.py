"""Under torch.compile a shard gives the numbers that it gives without."""

from collections.abc import Callable

import pytest

from tests.distributed import compiled
from tests.distributed.processes import Processes

pytestmark = pytest.mark.long


@pytest.mark.parametrize("what", [compiled.layer, compiled.language_model])
def test_compiled_calls_with_a_shard_have_equal_numbers(
    processes: Processes, what: Callable[[], None]
) -> None:
    if processes.size > 2:
        pytest.skip("each process compiles for itself: two show what four do")
    processes.run(what)

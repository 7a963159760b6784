"""Groups of two and of four processes, started once."""

from collections.abc import Iterator

import pytest

from tests.distributed.processes import Processes

# All tests with one group of processes go to one of xdist's workers, so that no other starts such a group.
SIZES = [
    pytest.param(2, marks=pytest.mark.xdist_group("2 processes")),
    pytest.param(4, marks=[pytest.mark.xdist_group("4 processes"), pytest.mark.long]),
]


@pytest.fixture(scope="session", params=SIZES, ids="{} processes".format)
def processes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Processes]:
    group = Processes(request.param, tmp_path_factory.mktemp("group"))
    yield group
    group.close()

"""Groups of two and of four processes, started once."""

from collections.abc import Iterator

import pytest

from tests.distributed.processes import Processes


@pytest.fixture(scope="session", params=[2, 4], ids="{} processes".format)
def processes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Processes]:
    group = Processes(request.param, tmp_path_factory.mktemp("group"))
    yield group
    group.close()

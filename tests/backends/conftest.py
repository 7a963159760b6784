"""For the backend triton: a quick interpreter, and NaN in fresh memory."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _interpreted(request: pytest.FixtureRequest) -> Iterator[None]:
    """For tests of the backend triton: fresh memory holds NaN, so that what a kernel does not write shows."""
    parameters = getattr(request.node, "callspec", None)
    names = () if parameters is None else (getattr(x, "backend", x) for x in parameters.params.values())
    if not any(name == "triton" for name in names if isinstance(name, str)):
        yield
        return
    request.getfixturevalue("quick_interpreter")
    request.getfixturevalue("poison")
    yield

"""A quick interpreter, and memory that holds NaN for the kernels that it runs."""

import pytest


@pytest.fixture(autouse=True)
def _for_triton(request: pytest.FixtureRequest) -> None:
    if "triton" in request.node.name:
        request.getfixturevalue("quick_interpreter")
        request.getfixturevalue("poison")

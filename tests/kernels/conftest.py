"""A quick interpreter for all tests of the kernels."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def _quick(quick_interpreter: None) -> None:
    pass

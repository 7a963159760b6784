"""A quick interpreter for all tests of the kernels, and a GPU for those that need one."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def _quick(quick_interpreter: None) -> None:
    pass


@pytest.fixture
def gpu(poison: None) -> None:
    from linrope_kernels import INTERPRETED

    if INTERPRETED:
        pytest.skip("needs a GPU: make gpu-run")

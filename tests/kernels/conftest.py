"""A quick interpreter for all tests of the kernels, and a GPU for those that need one."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _quick(quick_interpreter: None) -> None:
    pass


@pytest.fixture
def gpu(poison: None) -> Iterator[None]:
    from linrope_kernels import INTERPRETED

    if INTERPRETED:
        pytest.skip("needs a GPU: make test-gpu")
    yield
    torch.cuda.synchronize()  # an error belongs to the test that caused it

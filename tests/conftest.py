"""Property-based tests draw the same examples in every run; --hypothesis-profile=thorough draws many more."""

import os

import pytest
import torch
from hypothesis import settings

settings.register_profile("ordinary", deadline=None, derandomize=True, max_examples=100)
settings.register_profile("thorough", deadline=None, max_examples=2000)
settings.load_profile("ordinary")


def pytest_configure(config: pytest.Config) -> None:
    """Before anything imports Triton: on the CPU its interpreter runs the kernels."""
    device = torch.device(config.getoption("--device"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: PyTorch sees no CUDA device")
    os.environ["TRITON_INTERPRET"] = "0" if device.type == "cuda" else "1"
    if device.type == "cuda":
        torch.set_default_device(device)


@pytest.fixture(scope="session")
def quick_interpreter() -> None:
    from tests.interpreter import quicken

    quicken()


torch.set_num_threads(1)  # the tensors are small: more threads only wait for each other on a busy machine

"""Property-based tests draw the same examples in every run; --hypothesis-profile=thorough draws many more."""

import os
from typing import Any

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
    """Triton's interpreter without a third of its work.

    It makes the language its own at each call of a function by a kernel. Once for each module does as well.
    """
    from triton.runtime import interpreter

    function, launch = interpreter.InterpretedFunction, interpreter.GridExecutor.__call__
    if "_patch_lang" not in function.__call__.__code__.co_names:  # a version that does not do so
        return
    patched: set[int] = set()

    def call(self: Any, *args: Any, **more: Any) -> Any:
        if id(self.fn.__globals__) not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(id(self.fn.__globals__))
        return self.rewrite()(*args, **more)

    def start(self: Any, *args: Any, **more: Any) -> Any:  # before and after it the language is as it was
        patched.clear()
        return launch(self, *args, **more)

    function.__call__, interpreter.GridExecutor.__call__ = call, start


torch.set_num_threads(1)  # the tensors are small: more threads only wait for each other on a busy machine

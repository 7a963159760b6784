"""Randomized tests draw the same examples in every run and on every machine.

--hypothesis-profile=other draws as many others, from --hypothesis-seed; thorough draws twenty times as many.
"""

import gc
import os
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture import providers

from linrope.backends import native
from tests.support.modes import kept_modes
from tests.support.releases import other_releases

# No draw depends on a clock, on earlier failures, or on what else a process has imported: without the last
# line Hypothesis would also draw the constants of those of our modules that are loaded.
never: dict[str, Any] = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
never["phases"] = [Phase.explicit, Phase.generate]
settings.register_profile("ordinary", **never, derandomize=True, max_examples=100)
settings.register_profile("other", **never, max_examples=100)
settings.register_profile("thorough", **never, max_examples=2000)
settings.load_profile("ordinary")
providers.is_local_module_file = lambda path: False


def pytest_configure(config: pytest.Config) -> None:
    """Before anything imports Triton: on the CPU its interpreter runs the kernels."""
    device = torch.device(config.getoption("--device"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: PyTorch sees no CUDA device")
    os.environ["TRITON_INTERPRET"] = "0" if device.type == "cuda" else "1"
    if device.type == "cuda":
        torch.set_default_device(device)
        draw_on_the_cpu()
    if (name := config.getoption("--instruction-set")) is not None:
        try:
            native.use_instruction_set(name)
        except RuntimeError as error:
            raise pytest.UsageError(f"--instruction-set {name}: {error}") from error


def draw_on_the_cpu() -> None:
    """From here on what a generator draws comes from the CPU: the same numbers for any default device."""

    def draw(make: Callable[..., torch.Tensor], *sizes: Any, **how: Any) -> torch.Tensor:
        device = how.pop("device", None) or torch.get_default_device()
        drawn_on = device if how.get("generator") is None else how["generator"].device
        return make(*sizes, device=drawn_on, **how).to(device)

    for name in ("rand", "randn", "randint"):
        setattr(torch, name, partial(draw, getattr(torch, name)))


def pytest_runtest_logfinish() -> None:
    """Ends a process of pytest-xdist whose GPU no longer answers: else all its later tests would fail, too."""
    if "PYTEST_XDIST_WORKER" in os.environ and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:  # after an illegal access, for example, CUDA refuses all calls of this process
            os._exit(1)


def pytest_collection_finish() -> None:
    """The garbage collector need not look through 9,000 tests again and again, which takes it half a second."""
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """After a failure, names the releases that are not those of constraints.txt: they may be the cause."""
    if terminalreporter.stats.keys() & {"failed", "error"} and (others := other_releases()):
        terminalreporter.section("releases that differ from constraints.txt")
        terminalreporter.write_line("\n".join(others))


HAS_TRITON = find_spec("triton") is not None  # the tests of the native library run without it


@pytest.fixture(scope="session")
def quick_interpreter() -> None:
    if HAS_TRITON:
        from tests.support.interpreter import quicken

        quicken()


@pytest.fixture(autouse=True)
def _quick_for_triton(request: pytest.FixtureRequest) -> None:
    if "triton" in request.node.name:
        request.getfixturevalue("quick_interpreter")


torch.set_num_threads(1)  # the tensors are small: more threads only wait for each other on a busy machine


@pytest.fixture(autouse=True)
def _modes() -> Iterator[None]:
    with kept_modes():
        yield


@pytest.fixture
def poison() -> Iterator[None]:
    """Fresh memory holds NaN: what a kernel does not write shows."""
    if not HAS_TRITON or import_module("linrope_kernels").INTERPRETED:
        torch.use_deterministic_algorithms(True)
        yield
        return
    torch.full((2**28,), float("nan"))  # freed at once, and given out again in pieces
    yield
    torch.cuda.synchronize()  # an error belongs to the test that caused it
    torch.cuda.empty_cache()  # many processes share the GPU


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three segments of 64 tokens and more, as on a GPU that one sequence does not fill."""
    if not HAS_TRITON:
        return
    from linrope_kernels import repeat, tiles

    monkeypatch.setattr(repeat, "_PASSES", {})
    monkeypatch.setattr(tiles, "SHORTEST_SEGMENT", 64)
    monkeypatch.setattr(tiles, "SEGMENT_MULTIPLE", 64)
    monkeypatch.setattr(tiles, "most_segments", lambda *_: 3)

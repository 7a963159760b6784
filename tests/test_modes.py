"""A mode that a test sets does not reach the next test, even if the test fails."""

from pathlib import Path

import pytest
import torch

from linrope.backends import native
from tests.support.modes import MODES, kept_modes

OTHERS = {
    "deterministic algorithms": True,
    "default dtype": torch.float64,
    "gradients": False,
    "precision of float32 products": "medium",
    "threads": 3,
    "instruction set": "baseline",
    "waiting for the GPU": 1,
}


@pytest.mark.parametrize("name", MODES)
def test_a_mode_is_restored_after_a_failure(name: str) -> None:
    read, write = MODES[name]
    before = read()
    if name == "instruction set" and len(native.instruction_sets()) == 1:
        pytest.skip("this machine has one instruction set")

    def fails() -> None:
        write(OTHERS[name])
        assert read() != before
        raise RuntimeError("failed")

    with pytest.raises(RuntimeError, match="failed"), kept_modes():
        fails()
    assert read() == before


@pytest.mark.parametrize("worker", [True, False])
def test_only_a_worker_whose_gpu_no_longer_answers_ends(
    worker: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    if worker:
        monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    conftest = request.config.pluginmanager.get_plugin(str(Path(__file__).with_name("conftest.py")))
    conftest.pytest_runtest_logfinish()
    assert ended == ([1] if worker else [])


def test_every_test_runs_inside(request: pytest.FixtureRequest) -> None:
    assert "_modes" in request.fixturenames

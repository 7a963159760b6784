"""Signals that end linrope train: in every phase at once, with a checkpoint that --resume goes on from."""

import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from linrope.cli.training import _signals
from linrope.models import LanguageModel
from linrope.models.training import checkpoints
from tests.cli.commands import SMALL, last_config, metrics

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has other signals")


@pytest.mark.parametrize("names", ["SIGTERM SIGHUP", pytest.param("SIGINT", marks=pytest.mark.long)])
def test_signals_save_what_resume_goes_on_from(names: str, text, tmp_path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "linrope.cli", "train", str(text), "--out", str(out), *SMALL.split()]
    command += ["--steps", "100000", "--save-every", "1000000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    end = time.monotonic() + 120
    while not (out / "metrics.jsonl").exists() or not metrics(out):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert not checkpoints(out)
    numbers = [getattr(signal, name) for name in names.split()]
    for number in numbers:
        process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode in {128 + number for number in numbers}
    assert b"checkpoint: " in output
    assert last_config(out)["embed_dim"] == 32
    assert f"step-{metrics(out)[-1]['step']:08}" == checkpoints(out)[-1].name


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_each_signal_ends_a_run_with_its_own_status(name: str) -> None:
    number = getattr(signal, name)
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with _signals() as received:
            signal.raise_signal(number)
            assert received == [128 + number]
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_under_nohup_the_signal_of_a_closed_terminal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with _signals() as received:
            signal.raise_signal(signal.SIGHUP)
            assert received == []
            signal.raise_signal(signal.SIGTERM)
        assert received == [143]
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


TRAIN = "train {text} --out {tmp}/run {small} --pieces 4 --steps 4 --save-every 2"
UNDISTURBED: dict[str, dict[str, torch.Tensor]] = {}  # the last checkpoint of a run without a signal, by file
# Where the signal comes, whether in training, after which checkpoint, and the step of the checkpoint that remains
PHASES: dict[str, tuple[Any, str, bool | None, int, int]] = {
    "step": (LanguageModel, "forward", True, 2, 2),
    "update": (torch.optim.AdamW, "step", None, 2, 3),
    "checkpoint": (LanguageModel, "save", None, 0, 2),
    "evaluation": (LanguageModel, "forward", False, 2, 2),
    "last evaluation": (LanguageModel, "forward", False, 4, 4),
}


@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_ends_each_phase_and_the_resumed_run_ends_with_the_same_bits(
    phase: str, run, tmp_path, monkeypatch
) -> None:
    owner, name, training, after, remaining = PHASES[phase]
    out, function, went_on = tmp_path / "run", getattr(owner, name), []

    def with_signal(self: Any, *arguments: Any, **options: Any) -> Any:
        last = checkpoints(out)[-1].name if checkpoints(out) else "step-0"
        if int(last[5:]) == after and training in (None, getattr(self, "training", None)):
            monkeypatch.undo()
            signal.raise_signal(signal.SIGTERM)
            went_on.append(phase)
        return function(self, *arguments, **options)

    monkeypatch.setattr(owner, name, with_signal)
    run(TRAIN, status=143)
    assert getattr(owner, name) is function  # the signal was sent
    assert bool(went_on) is (training is None)  # an update or a checkpoint is finished
    assert int(checkpoints(out)[-1].name[5:]) == metrics(out)[-1]["step"] == remaining
    assert "held-out text: " in run("train --out {tmp}/run --resume")
    files = ("model.safetensors", "training.safetensors")
    if not UNDISTURBED:
        run(TRAIN.replace("/run", "/undisturbed"))
        UNDISTURBED.update((x, load_file(tmp_path / "undisturbed/step-00000004" / x)) for x in files)
    for file in files:
        found, expected = load_file(out / "step-00000004" / file), UNDISTURBED[file]
        assert found.keys() == expected.keys()
        assert all(torch.equal(x, expected[key]) for key, x in found.items())

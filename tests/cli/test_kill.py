"""kill -9 at random instants, --resume each time: the bits of a run that nothing interrupted."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from linrope.models.training import checkpoints, latest_checkpoint

SMALL = "--embed-dim 32 --layers 1 --heads 2 --batch-size 2 --sequence-length 32 --pieces 2 --steps 50"


def start(text: Path, out: Path, *more: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "linrope.cli", "train", str(text), "--out", str(out), *more]
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)


def finish(process: "subprocess.Popen[bytes]") -> None:
    assert process.wait(timeout=120) == 0


def wait_for_step(out: Path, step: int, process: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        if any(int(path.name[5:]) >= step for path in checkpoints(out)):
            return
        time.sleep(0.001)
    raise AssertionError(f"no checkpoint of step {step}")


@pytest.mark.long  # make test has the campaign of kills for a few instants
def test_a_run_killed_at_random_ends_with_the_same_bits(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question. " * 100)
    runs, chance = [tmp_path / "whole", tmp_path / "killed"], random.Random(0)
    whole = start(text, runs[0], *SMALL.split())

    # Nearly all of the time is spent in saving, so that most kills fall into it.
    process = start(text, runs[1], "--save-every", "1", *SMALL.split())
    for step in (1, 25):
        wait_for_step(runs[1], step, process)
        time.sleep(chance.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert int(latest_checkpoint(runs[1]).name[5:]) < 50
        process = start(text, runs[1], "--resume", "--save-every", "1")
    finish(process)
    finish(whole)

    ends = [latest_checkpoint(run) for run in runs]
    assert [end.name for end in ends] == ["step-00000050"] * 2
    for name in ("model.safetensors", "training.safetensors"):
        expected, found = (load_file(end / name) for end in ends)
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    assert [path for path in runs[1].iterdir() if path.name.startswith(".")] == []

    logs = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in runs]
    for log in logs:
        assert [line["step"] for line in log] == list(range(1, 51))
    for a, b in zip(*logs, strict=True):
        assert [a[k] for k in ("bits_per_byte", "gradient_norm")] == [
            b[k] for k in ("bits_per_byte", "gradient_norm")
        ]

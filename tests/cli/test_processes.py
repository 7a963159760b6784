"""Two processes on the CPU, as torchrun starts them, do what one does with batches twice as large."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from linrope.cli.app import run
from linrope.models.training import checkpoints

SMALL = [
    "--embed-dim",
    "32",
    "--layers",
    "1",
    "--heads",
    "2",
    "--sequence-length",
    "64",
    "--accumulation",
    "2",
]


@pytest.mark.long
def test_two_processes_share_a_batch(tmp_path: Path) -> None:
    lines = (f"line {i}: to be or not to be. " * (1 + i % 5) for i in range(200))
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    train = ["train", str(tmp_path / "text.jsonl"), *SMALL, "--steps", "5"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "linrope.cli", *train, "--batch-size", "2", "--out", str(tmp_path / "two")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(command, env=environment)
    try:
        assert process.wait(timeout=120) == 0
    finally:
        process.terminate()  # takes the two with it, as a kill would not
    assert run([*train, "--batch-size", "4", "--out", str(tmp_path / "one")]) == 0

    files = [checkpoints(tmp_path / name)[-1] / "training.safetensors" for name in ("one", "two")]
    one, two = (load_file(file) for file in files)
    assert one.keys() == two.keys()
    for name, expected in one.items():
        if name.startswith("exp_avg"):
            torch.testing.assert_close(two[name], expected, rtol=1e-3, atol=1e-7)
    logs = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("one", "two")]
    assert len(logs[1]) == 5
    for a, b in zip(*logs, strict=True):
        assert abs(json.loads(a)["bits_per_byte"] - json.loads(b)["bits_per_byte"]) < 1e-5
    # another number of processes would read other rows
    assert run(["train", train[1], "--out", str(tmp_path / "two"), "--resume"]) == 2

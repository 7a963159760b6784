"""A rank that is killed, and torchrun's restart from the last checkpoint: the bits of an undisturbed run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from linrope.models.training import checkpoints
from tests.campaigns.kills import bits

pytestmark = pytest.mark.long

SMALL = "--embed-dim 32 --layers 1 --heads 2 --batch-size 2 --sequence-length 32 --pieces 2 --steps 20"


def start(text: Path, out: Path, log: Path, restarts: int) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", str(restarts), "-m", "linrope.cli", "train", str(text), "--out", str(out)]
    command += [*SMALL.split(), "--save-every", "1", "--sequence-parallel", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # docs/distributed.md, "Training"
    with log.open("wb") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=file)


def kill_last_rank(parent: int) -> None:
    """Of the processes that torchrun has started."""
    lists = Path(f"/proc/{parent}/task").glob("*/children")
    children = [child for file in lists for child in file.read_text().split()]
    (last,) = (x for x in children if b"\0RANK=1\0" in Path(f"/proc/{x}/environ").read_bytes())
    os.kill(int(last), signal.SIGKILL)


@pytest.mark.skipif(not Path("/proc/thread-self/children").exists(), reason="/proc lists no children")
def test_a_killed_rank_ends_all_and_a_restart_goes_on_bit_for_bit(tmp_path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question. " * 100)
    logs = {}
    for name in ("whole", "ended", "killed"):
        out, log = tmp_path / name, tmp_path / f"{name}.log"
        process = start(text, out, log, restarts=int(name == "killed"))
        if name != "whole":
            end = time.monotonic() + 300
            while not any(int(path.name[5:]) >= 3 for path in checkpoints(out)):
                assert process.poll() is None and time.monotonic() < end, log.read_text()  # noqa: PT018
                time.sleep(0.01)
            kill_last_rank(process.pid)
        failed, logs[name] = process.wait(timeout=300) != 0, log.read_text()
        assert failed == (name == "ended"), logs[name]
    assert "Signal 9 (SIGKILL)" in logs["ended"]
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in logs["killed"]
    assert bits(tmp_path / "killed") == bits(tmp_path / "whole")

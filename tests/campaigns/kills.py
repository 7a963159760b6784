"""Training killed at random instants and resumed each time, until it ends: with the bits of a run left alone.

``python -m tests.campaigns.kills --count 200 --seed 0``
"""

import json
import random
import tempfile
import time
from pathlib import Path

from safetensors.torch import load_file

from linrope.cli.app import run as command
from linrope.models.training import checkpoints, latest_checkpoint
from tests.campaigns.command import numbers
from tests.campaigns.processes import finish, kill, start

SIZES = "--embed-dim 16 --layers 1 --heads 2 --batch-size 2 --sequence-length 32"
KINDS = (  # of runs: one after the other
    "--pieces 2",
    "--forget-gate --rotary selective --accumulation 2",
    "--feature-map softmax --short-conv 3 --decay learned --pieces 2 --gradients-through-pieces",
    "--attention softmax",
)
STEPS = 12
LIMIT = 120.0  # seconds, of a run that takes one


def begin(text: Path, out: Path, options: list[str], *, resume: bool) -> int:
    """A run in a process of its own, which spends nearly all of its time in saving."""
    more = ["--resume"] if resume else options
    arguments = ["train", str(text), "--out", str(out), "--save-every", "1", *more]
    return start(lambda: command(arguments))


def bits(out: Path) -> dict[str, object]:
    """All that a run ends with: its last checkpoint, and its log without the times."""
    end = latest_checkpoint(out)
    found: dict[str, object] = {"name": end.name, "config": (end / "config.json").read_text()}
    for name in ("model.safetensors", "training.safetensors"):
        found |= {f"{name} {key}": x.numpy().tobytes() for key, x in load_file(end / name).items()}
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found["log"] = [(x["step"], x["bits_per_byte"], x["gradient_norm"]) for x in lines]
    found["hidden"] = [path.name for path in out.iterdir() if path.name.startswith(".")]
    return found


def run(count: int, seed: int) -> tuple[int, int, int]:
    """Kills, those before the first checkpoint, and runs that ended; AssertionError at other bits."""
    chance = random.Random(seed)
    kills = early = runs = 0
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text("To be, or not to be, that is the question. " * 50)
        wholes: dict[str, tuple[dict[str, object], float]] = {}
        while kills < count:
            kind = KINDS[runs % len(KINDS)]
            options = [*SIZES.split(), *kind.split(), "--steps", str(STEPS)]
            if kind not in wholes:
                began = time.monotonic()
                out = Path(folder) / f"whole {len(wholes)}"
                assert finish(begin(text, out, options, resume=False), LIMIT) == 0, kind
                wholes[kind] = bits(out), time.monotonic() - began
            whole, seconds = wholes[kind]
            out = Path(folder) / f"run {runs}"
            while True:
                there = out.is_dir() and bool(checkpoints(out))
                process = begin(text, out, options, resume=there)
                time.sleep(chance.uniform(0, seconds * 0.6))
                status = kill(process)
                if status == 0:
                    break
                assert status == -9, f"{kind}, after {kills} kills: exit status {status}"
                kills += 1
                early += not there
                if kills == count:
                    there = out.is_dir() and bool(checkpoints(out))
                    assert finish(begin(text, out, options, resume=there), LIMIT) == 0, kind
                    break
            found = bits(out)
            different = [name for name in whole if found.get(name) != whole[name]]
            assert not different, f"{kind}: after kills other {different}"
            runs += 1
            if runs % 10 == 0:
                print(f"{kills} kills, {runs} runs ended with the same bits", flush=True)
    return kills, early, runs


if __name__ == "__main__":
    kills, early, runs = run(**numbers(__doc__, count=200, seed=0))
    ended = f"{runs} runs ended with the bits of one left alone"
    print(f"{kills} kills ({early} before the first checkpoint): {ended}")

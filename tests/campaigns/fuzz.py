"""Command lines, configurations, states, checkpoints drawn at random: a named error, or they work.

``python -m tests.campaigns.fuzz --count 50000 --seed 0``. No case may end in a traceback, in a crash,
after its time limit, or with a file half written. What does is shown with its number; ``--only`` repeats it.
"""

import contextlib
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from linrope import LinearAttentionState, Rotary, linear_rope_state
from linrope.cli.app import run as command
from linrope.models import LanguageModel, LanguageModelConfig
from linrope.models.language_model import config_digest
from linrope.models.training import Corpus, Trainer, TrainingConfig
from tests.campaigns import mangle
from tests.campaigns.command import numbers
from tests.campaigns.processes import finish, start
from tests.common.full_disk import full_disk

SOFT, HARD = 20.0, 1200.0  # seconds: of one case, which is then stopped; of all cases of one process
AT_ONCE = 50  # cases of a process
MEMORY = 3 * 2**30  # bytes that a case may take
SIZES = {"vocab_size": 256, "embed_dim": 8, "num_layers": 1, "num_heads": 2, "hidden_dim": 8}
TINY = mangle.TINY.split()
TEXT = "To be, or not to be, that is the question. " * 40


class Stopped(BaseException):
    """A case that was at work until its limit."""


class Material:
    """A folder with what the cases start from."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.text, self.run = folder, folder / "text.txt", folder / "run"
        self.text.write_text(TEXT)
        torch.manual_seed(0)
        self.config = LanguageModelConfig(**SIZES, decay={"name": "spread", "longest": 8})
        training = TrainingConfig(steps=3, batch_size=1, sequence_length=16)
        trainer = Trainer(LanguageModel(self.config), Corpus.load(self.text), training)
        for _ in range(2):  # a run of two checkpoints, that could go on
            trainer.train_step()
            trainer.save(self.run)
        self.trainer = trainer
        k = v = torch.randn(2, 3, 2, 4)
        self.state = linear_rope_state(k, v, rotary=Rotary(4), angle_steps=torch.randn(2, 3, 1, 2))
        self.state.save(folder / "state")
        self.corpus = trainer.corpus
        with contextlib.redirect_stdout(io.StringIO()):  # what commands import, they import here and once
            for name in ("train", "generate", "eval"):
                assert command([name, *mangle.working(name, self.text, self.run, folder / "warm")]) == 0

    def work(self, index: int) -> Path:
        """A folder for one case."""
        place = self.folder / f"case {index}"
        place.mkdir()
        return place


def _end(arguments: list[str], what: object, allowed: tuple[int, ...] = (0, 2)) -> tuple[int, str]:
    """The exit status of a command, and what it said on stderr."""
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        status = command(arguments)
    if status not in allowed:
        raise AssertionError(f"{what}: exit status {status}: {errors.getvalue()}")
    return status, errors.getvalue()


def _command(chance: random.Random, material: Material, place: Path) -> None:
    arguments = mangle.command_line(chance, material.text, material.run, place)
    status, said = _end(arguments, arguments, (0, 2, 130))
    if status == 2 and not (said.startswith("linrope: ") and said.count("\n") == 1):
        raise AssertionError(f"exit status 2 with {said!r}: {arguments}")
    _check_written(place)


def _options(chance: random.Random, material: Material, place: Path) -> None:
    """A file of options for train."""
    path = place / chance.choice(["options.yaml", "options.json", "options"])
    path.write_bytes(mangle.options(chance))
    arguments = ["train", str(material.text), "--config", str(path), "--out", str(place / "run"), *TINY]
    _end(arguments, path.read_bytes()[:300])
    _check_written(place)


def _loads(load: Callable[[], object]) -> bool:
    """Whether it loads; no other error than those that are promised."""
    with contextlib.suppress(ValueError, OSError):
        load()
        return True
    return False


def _model(chance: random.Random, material: Material, place: Path) -> None:
    """A damaged config.json beside its own weights, and beside weights that vouch for it."""
    shutil.copytree(material.run / "step-00000002", place / "model")
    path = place / "model" / "config.json"
    path.write_bytes(mangle.json_like(chance, path.read_text()))
    if chance.random() < 0.7:
        with contextlib.suppress(ValueError, RecursionError):
            digest = config_digest(json.loads(path.read_bytes()))
            mangle.change_metadata(place / "model" / "model.safetensors", config=digest)
    _loads(lambda: LanguageModel.load(place / "model"))


def _state(chance: random.Random, material: Material, place: Path) -> None:
    path, content = place / "state", (material.folder / "state").read_bytes()
    honest = chance.random() < 0.6  # the digest is there, and sees what changed
    path.write_bytes(mangle.damaged(chance, content) if honest else mangle.safetensors_like(chance, content))
    before = torch.random.get_rng_state()
    if _loads(lambda: LinearAttentionState.load(path)) and honest:
        found = LinearAttentionState.load(path)
        for name, x in material.state.tensors().items():
            if not torch.equal(found.tensors()[name], x):
                raise AssertionError(f"a damaged state was loaded: {name} differs")
    if not torch.equal(torch.random.get_rng_state(), before):
        raise AssertionError("loading changed the random state")


def _checkpoint(chance: random.Random, material: Material, place: Path) -> None:
    run = place / "run"
    shutil.copytree(material.run, run)
    said = mangle.checkpoint(chance, run, material.text)
    before = torch.random.get_rng_state()
    if chance.random() < 0.2:
        _end(["generate", "--checkpoint", str(run), "--max-new-tokens", "2", "--seed", "1"], said)
        return
    loaded = _loads(lambda: Trainer.load(run, material.corpus))
    if not loaded and not torch.equal(torch.random.get_rng_state(), before):
        raise AssertionError(f"{said}: a refused checkpoint changed the random state")


def _write(chance: random.Random, material: Material, place: Path) -> None:
    """On a disk that fills up at a random byte of a file, or in a folder that cannot be written to."""
    disk: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    target, what = place / "out", chance.choice(["state", "model", "trainer", "command"])
    if chance.random() < 0.3:
        target = Path(chance.choice(["/proc/out", "/dev/full", place / "file" / "out", "/dev/null/x"]))
        (place / "file").write_text("")
    else:
        disk = full_disk(int(2 ** chance.uniform(0, 16)))
    written = False
    with disk:
        if what == "state":
            written = _loads(lambda: material.state.save(target / "state"))
        elif what == "model":
            written = _loads(lambda: material.trainer.model.save(target))
        elif what == "trainer":
            written = _loads(lambda: material.trainer.save(target))
        else:
            written = _end(["train", str(material.text), "--out", str(target), *TINY], target)[0] == 0
    if target.is_relative_to(place):
        _check_written(place)
    if written and what == "state":
        LinearAttentionState.load(target / "state")


KINDS: dict[str, Callable[[random.Random, Material, Path], None]] = {
    "command": _command, "options": _options, "model": _model, "state": _state, "checkpoint": _checkpoint,
    "write": _write,
}  # fmt: skip
WEIGHTS = (30, 10, 15, 25, 15, 5)


def _check_written(place: Path) -> None:
    """No file that is hidden is left, and each that is there is whole."""
    for path in place.rglob("*"):
        if path.name.startswith("."):
            raise AssertionError(f"{path} was left behind")
        if path.name == "state":
            LinearAttentionState.load(path)
        if path.name.startswith("step-") and path.is_dir():
            LanguageModel.load(path)


def case(index: int, seed: int, material: Material) -> str:
    """Runs it; returns its kind."""
    chance = random.Random(f"{seed}/{index}")
    kind = chance.choices(list(KINDS), WEIGHTS)[0]
    place = material.work(index)
    os.chdir(place)  # where files go whose name is drawn

    stopped = []

    def stop(*_: object) -> None:
        stopped.append(True)
        raise Stopped

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SOFT, 1)  # once more where the first was swallowed
    try:
        KINDS[kind](chance, material, place)
    except (Stopped, Exception):
        if not stopped:
            raise
        kind = f"{kind}, at work for {SOFT:.0f} s"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.chdir(material.folder)
        shutil.rmtree(place, ignore_errors=True)
    return kind


def _some(indices: list[int], seed: int, material: Material, report: Path) -> int:
    """Cases in this process; a line for each that fails, and the number of the one at work."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    with open(report, "a", buffering=1, errors="backslashreplace") as out:
        for index in indices:
            out.write(f"begin {index}\n")
            try:
                out.write(f"done {case(index, seed, material)}\n")
            except (Exception, SystemExit) as error:
                out.write(f"failed {index} {type(error).__name__}: {' '.join(str(error).split())[:600]}\n")
    return 0


def run(count: int, seed: int, *, first: int = 0, report: int = 1000) -> tuple[Counter[str], list[str]]:
    """How many cases of each kind there were, and what failed."""
    done: Counter[str] = Counter()
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        material = Material(Path(folder))
        left = list(range(first, first + count))
        while left:
            now, log = left[:AT_ONCE], Path(folder) / "log"
            log.write_text("")
            status = finish(start(lambda now=now, log=log: _some(now, seed, material, log)), HARD)
            lines = log.read_text().splitlines()
            begun = [int(line.split()[1]) for line in lines if line.startswith("begin")]
            done.update(line.removeprefix("done ") for line in lines if line.startswith("done"))
            bad = [line for line in lines if line.startswith("failed")]
            if status != 0:  # the last one begun took the process with it
                ended = f"exit status {status}" if status is not None else f"no end within {HARD:.0f} s"
                bad.append(f"failed {begun[-1] if begun else now[0]} {ended}")
            for line in bad:
                print(line, flush=True)
            failed += bad
            left = left[len(begun) :] if begun else left[1:]
            over = count - len(left)
            if over // report > (over - len(begun)) // report:
                print(f"{over} cases, {len(failed)} failed", flush=True)
    return done, failed


def main(count: int, seed: int, first: int, only: int | None) -> int:
    """only: the number of one case, to run in this process."""
    if only is not None:
        with tempfile.TemporaryDirectory() as folder:
            print(case(only, seed, Material(Path(folder))))
        return 0
    done, failed = run(count, seed, first=first)
    print(f"{sum(done.values())} cases of {count} ended well, {len(failed)} failed")
    print(", ".join(f"{name}: {number}" for name, number in sorted(done.items())))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(**numbers(__doc__, count=50000, seed=0, first=0, only=None)))

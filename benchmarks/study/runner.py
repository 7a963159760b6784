"""Runs what is missing: first the runs that choose learning rates, then those that count."""

import hashlib
import json
import multiprocessing
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import machine
from benchmarks.study import lines, peers, plan
from benchmarks.study.lines import Line
from benchmarks.study.tasks import Task
from benchmarks.study.training import BETAS, CLIP, WARM_UP, WEIGHT_DECAY, train
from benchmarks.study.variants import VARIANTS, build, family, state_numbers
from linrope.versions import versions


@dataclass(frozen=True)
class Run:
    """A model, trained once on a task; phase: "grid" where it only serves to choose a learning rate."""

    task: Task
    model: str
    seed: int
    learning_rate: float
    phase: str

    def key(self) -> Line:
        """The values that identify a run. A run whose values are in the results is skipped."""
        return {
            "task": self.task.name,
            "model": self.model,
            "seed": self.seed,
            "learning_rate": self.learning_rate,
            "phase": self.phase,
            "settings": _plain(self.task.settings()),
            "variant": _plain(VARIANTS[self.model][1]),
        }

    def checkpoint(self, folder: Path) -> Path:
        digest = hashlib.sha256(json.dumps(self.key(), sort_keys=True).encode()).hexdigest()
        return folder / "unfinished" / f"{digest[:16]}.pt"


def _plain(value: Any) -> Any:
    """As JSON gives it back: tuples as lists."""
    return json.loads(json.dumps(value))


def is_done(run: Run, found: Sequence[Line]) -> bool:
    key = run.key()
    return any(key.items() <= {name: line.get(name) for name in key}.items() for line in found)


def grid(selected: Sequence[tuple[Task, list[str]]]) -> list[Run]:
    runs = [
        Run(task.rate_task(), model, plan.GRID_SEED, rate, "grid")
        for task, names in selected
        for model in plan.representatives(task, names).values()
        for rate in task.learning_rates
    ]
    return list(dict.fromkeys(runs))  # tasks may share one that chooses their rates


def best_rate(task: Task, model: str, found: Sequence[Line]) -> float:
    """The learning rate with the least final training loss among the grid runs of that model.

    The last steps saw data that was new to the model. Test rows are never used for selection.

    Raises:
        RuntimeError: all of them diverged.
    """
    runs = [Run(task.rate_task(), model, plan.GRID_SEED, rate, "grid") for rate in task.learning_rates]
    losses = [
        (line["final_loss"], run.learning_rate)
        for run in runs
        for line in found
        if is_done(run, [line]) and line["final_loss"] is not None
    ]
    if not losses:
        raise RuntimeError(f"{task.name}, {model}: diverged at all of {task.learning_rates}")
    return min(losses)[1]


def counting(selected: Sequence[tuple[Task, list[str]]], seeds: int, found: Sequence[Line]) -> list[Run]:
    runs = []
    for task, names in selected:
        first = plan.representatives(task, names)
        rates = {name: best_rate(task, model, found) for name, model in first.items()}
        # Seed by seed, so that a study that is cut short has all models.
        for seed in range(plan.GRID_SEED + 1, plan.GRID_SEED + 1 + seeds):
            runs += [Run(task, model, seed, rates[family(model)], "run") for model in names]
    return runs


def study(folder: Path, only: Sequence[str], scale: float, seeds: int, jobs: int, device: str) -> None:
    """Runs what the folder has no line of; prints each run as it ends.

    Raises:
        ValueError, RuntimeError: as in plan.chosen and best_rate; jobs under 1.
    """
    if jobs < 1 or seeds < 1:
        raise ValueError(f"jobs={jobs}, seeds={seeds}: expected at least 1")
    selected = []
    for task, names in plan.chosen(only, scale):
        here = plan.representatives(task, names)
        missing = {name: peers.why_not(name) for name in {*names, *here.values()}}
        for reason in filter(None, missing.values()):
            print(f"{task.name}: left out {reason}", flush=True)
        selected.append((task, [name for name in names if missing[name] is None]))
    _run_missing(grid(selected), folder, jobs, device)
    _run_missing(counting(selected, seeds, lines.read(folder)), folder, jobs, device)


def _run_missing(runs: Iterable[Run], folder: Path, jobs: int, device: str) -> None:
    found = lines.read(folder)
    todo = [(run, folder, device) for run in runs if not is_done(run, found)]
    if jobs == 1:
        for number, arguments in enumerate(todo, 1):
            _note(perform(arguments), folder, f"{number}/{len(todo)}")
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for number, line in enumerate(pool.imap_unordered(perform, todo), 1):
            _note(line, folder, f"{number}/{len(todo)}")


def _note(line: Line, folder: Path, number: str) -> None:
    lines.append(folder, line)
    (folder / line["checkpoint"]).unlink(missing_ok=True)
    shown = {name: x for name, x in (line["results"] or {}).items() if isinstance(x, float)}
    figures = ", ".join(f"{name} {x:.3f}" for name, x in shown.items()) or "diverged"
    print(
        f"{number} {line['phase']} {line['task']} {line['model']} seed {line['seed']} "
        f"rate {line['learning_rate']:g}: {line['seconds']:.0f} s, {figures}",
        flush=True,
    )


def perform(arguments: tuple[Run, Path, str]) -> Line:
    """Trains and measures one model; returns its line."""
    run, folder, device = arguments
    if device == "cpu":
        torch.set_num_threads(1)  # the models are small: more threads only wait for each other
    task, checkpoint = run.task, run.checkpoint(folder)
    model = build(run.model, task, run.seed).to(device)
    with peers.on_linrope(run.model):
        progress = train(model, task, run.seed, run.learning_rate, checkpoint)
        results = None if progress.diverged else task.measure(model)
    diverged = progress.diverged
    return run.key() | {
        "results": results,
        "floor": task.floor(),
        "ceiling": task.ceiling(),
        "final_loss": None if diverged else progress.final_loss,
        "diverged_at": len(progress.losses) if diverged else None,
        "losses": _thinned(progress.losses[:-1] if diverged else progress.losses),
        "family": family(run.model),
        "options": _plain(model.options),
        "optimizer": {"betas": BETAS, "weight_decay": WEIGHT_DECAY, "clip": CLIP, "warm_up": WARM_UP},
        "parameters": sum(p.numel() for p in model.parameters()),
        "state_numbers": state_numbers(model),
        "tokens_per_step": task.tokens,
        "seconds": progress.seconds,
        "cpu_seconds": progress.cpu_seconds,
        "tokens_per_second": len(progress.losses) * task.tokens / progress.seconds,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": device if device == "cpu" else torch.cuda.get_device_name(),
        "machine": machine(),
        "modified": _modified(),
        "versions": versions() | peers.versions(run.model),
        "checkpoint": str(checkpoint.relative_to(folder)),
    }


def _thinned(losses: list[float], most: int = 50) -> list[float]:
    """Means over at most so many equal parts."""
    part = -(-len(losses) // most) or 1
    return [sum(x) / len(x) for x in (losses[i : i + part] for i in range(0, len(losses), part))]


def _modified() -> bool | None:
    """Whether the checkout differs from its commit, but for results; None: it is none."""
    others = ":(top,exclude)benchmarks/results"
    command = ["git", "-C", str(Path(__file__).parent), "status", "--porcelain", "--", ":(top)", others]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return None if found.returncode else bool(found.stdout.strip())

"""How long a training step of several models takes on one task, side by side in one process."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import measuring
from benchmarks.measuring import measured
from benchmarks.study import peers
from benchmarks.study.tasks import Task
from benchmarks.study.training import update
from benchmarks.study.variants import build

NAME = "steps.json"


def step_seconds(task: Task, names: Sequence[str], rounds: int) -> dict[str, dict[str, float]]:
    """CPU seconds of one thread per step, forward to update: the least of the rounds, which take the models in turn.

    "fastest": with the kernels that are fastest on a CPU. "plain": the linear layers of other people's models in plain
    PyTorch, as transformers runs them there by itself.
    """
    torch.set_num_threads(1)
    models = {name: build(name, task) for name in names}
    optimizers = {
        name: torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True) for name, model in models.items()
    }
    batch = task.batch(0, 0)
    runs = {name: partial(update, model, optimizers[name], *batch) for name, model in models.items()}
    slower = {name: run for name, run in runs.items() if name in peers.PEERS and peers.PEERS[name].family}
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(peers.on_linrope(name))
        seconds = {name: {"fastest": timing.seconds} for name, timing in measured(runs, rounds, 0.0).items()}
    for name, timing in measured(slower, rounds, 0.0).items() if slower else ():
        seconds[name]["plain"] = timing.seconds
    return seconds


def save(folder: Path, task: Task, rounds: int, seconds: dict[str, dict[str, float]]) -> None:
    """Writes the times, and where they were measured, beside the results."""
    measuring.save(folder / NAME, {"task": task.name, "rounds": rounds, "seconds": seconds})


def read(folder: Path) -> dict[str, Any] | None:
    path = folder / NAME
    found: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return found

"""How long a training step of several models takes on one task, side by side in one process."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.study import peers
from benchmarks.study.tasks import Task
from benchmarks.study.training import update
from benchmarks.study.variants import build
from linrope.cli.bench.benchmark import machine

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
    seconds: dict[str, dict[str, list[float]]] = {name: {"fastest": []} for name in names}
    for step in range(rounds + 1):
        batch = task.batch(0, step)
        for name, model in models.items():
            with peers.on_linrope(name):
                seconds[name]["fastest"].append(_step(model, optimizers[name], *batch))
            if name in peers.PEERS and peers.PEERS[name].family is not None:
                seconds[name].setdefault("plain", []).append(_step(model, optimizers[name], *batch))
    return {name: {side: min(x[1:]) for side, x in sides.items()} for name, sides in seconds.items()}


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> float:
    start = time.thread_time()
    update(model, optimizer, inputs, targets)
    return time.thread_time() - start


def save(folder: Path, task: Task, rounds: int, seconds: dict[str, dict[str, float]]) -> None:
    """Writes the times, and where they were measured, beside the results."""
    found = {"task": task.name, "rounds": rounds, "machine": machine(), "seconds": seconds}
    (folder / NAME).write_text(json.dumps(found, indent=1) + "\n")


def read(folder: Path) -> dict[str, Any] | None:
    path = folder / NAME
    found: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return found

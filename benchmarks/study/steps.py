"""How long a training step of several models takes on one task, side by side in one process."""

import time
from collections.abc import Sequence

import torch

from benchmarks.study.tasks import Task
from benchmarks.study.training import update
from benchmarks.study.variants import build


def step_seconds(task: Task, names: Sequence[str], rounds: int) -> dict[str, float]:
    """CPU seconds of one thread per step, forward to update: the least of the rounds, which take the models in turn."""
    torch.set_num_threads(1)
    models = {name: build(name, task) for name in names}
    optimizers = {
        name: torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True) for name, model in models.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for step in range(rounds + 1):
        inputs, targets = task.batch(0, step)
        for name, model in models.items():
            start = time.thread_time()
            update(model, optimizers[name], inputs, targets)
            seconds[name].append(time.thread_time() - start)
    return {name: min(times[1:]) for name, times in seconds.items()}

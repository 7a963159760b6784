"""One training run: equal steps for every model; interrupted and resumed it ends with the same bits."""

import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.study.tasks import Task
from linrope.common.files import replace_file
from linrope.models.training.batch import NO_TARGET

WARM_UP, WEIGHT_DECAY, BETAS, CLIP = 0.05, 0.1, (0.9, 0.95), 1.0  # warm-up as a part of the steps
SAVE_EVERY = 60.0  # seconds


@dataclass
class Progress:
    """A run's figures so far; those of a diverged run end at the step whose loss was not finite."""

    losses: list[float] = field(default_factory=list)  # nats, a step each
    solved: bool = False  # so that training ended early
    seconds: float = 0.0  # of training, by the wall clock
    cpu_seconds: float = 0.0

    @property
    def diverged(self) -> bool:
        return bool(self.losses) and not math.isfinite(self.losses[-1])

    @property
    def final_loss(self) -> float:
        """Mean over the last tenth of the steps, each of which saw new data."""
        last = self.losses[-max(1, len(self.losses) // 10) :]
        return sum(last) / len(last)


def train(model: nn.Module, task: Task, seed: int, learning_rate: float, checkpoint: Path) -> Progress:
    """AdamW with warm-up and a cosine down to a tenth. Goes on from checkpoint, and writes it as it goes."""
    device = next(model.parameters()).device
    optimizer = optimizer_of(model, learning_rate)
    progress = _load(checkpoint, model, optimizer)
    begun = saved = time.perf_counter()
    cpu, before = time.process_time(), (progress.seconds, progress.cpu_seconds)
    model.train()
    while len(progress.losses) < task.steps and not progress.diverged and not progress.solved:
        step = len(progress.losses)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * _schedule(step, task.steps)
        inputs, targets = (x.to(device) for x in task.batch(seed, step))
        progress.losses.append(update(model, optimizer, inputs, targets))
        progress.solved = task.solved(model, step + 1)
        now = time.perf_counter()
        progress.seconds = before[0] + now - begun
        progress.cpu_seconds = before[1] + time.process_time() - cpu
        if now - saved > SAVE_EVERY:
            _save(checkpoint, model, optimizer, progress)
            saved = now
    model.eval()
    return progress


def optimizer_of(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """AdamW, without weight decay for vectors."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=BETAS, fused=True)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> float:
    """One step of training. Returns the loss before it, in nats."""
    logits = model(inputs).float().flatten(0, -2)
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=NO_TARGET)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    return loss.item()


def _schedule(step: int, steps: int) -> float:
    warm = min(1.0, (step + 1) / max(1.0, WARM_UP * steps))
    return warm * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def _save(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "progress": asdict(progress)}
    replace_file(checkpoint, lambda path: torch.save(parts, path))


def _load(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    if not checkpoint.exists():
        return Progress()
    parts: dict[str, Any] = torch.load(checkpoint, weights_only=True)
    model.load_state_dict(parts["model"])
    optimizer.load_state_dict(parts["optimizer"])
    return Progress(**parts["progress"])

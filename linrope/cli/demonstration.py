"""What ``linrope demo`` does: it trains two models for a minute, generates text, and compares speed."""

import shutil
import statistics
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from linrope.cli.console import console, plain_table
from linrope.cli.generation import stream
from linrope.cli.training import describe, run_steps
from linrope.models import LanguageModel, LanguageModelConfig
from linrope.models.training import Corpus, Trainer, TrainingConfig, checkpoints
from linrope.models.training.checkpoint import load_training

_ROW = 256
_SIZES: dict[str, Any] = {"embed_dim": 128, "num_layers": 4, "num_heads": 8}
# The default block of docs/evidence.md. Half-lives start at up to the length of a training row.
LINEAR = LanguageModelConfig(**_SIZES, forget_gate={"longest": _ROW})
# The same block, with softmax attention in place of linear attention and its gates: the sizes differ by 1%.
SOFTMAX = LanguageModelConfig(**_SIZES, attention="softmax")
_TRIAL = 4  # steps
_LENGTHS = (1024, 4096, 16384)  # tokens, of which the demo times one forward pass each
# As in the study: of 0.001, 0.003 and 0.01 the one with the least training loss, for each model (120 steps, seed 0).
RATES = {"linear": 1e-2, "softmax": 1e-2}


def demonstrate(seconds: float, out: Path, prompt: str) -> int:
    """Trains linear and softmax attention for that time each, continues the prompt, and measures; the exit status."""
    earlier = checkpoints(out)
    if others := [path.name for path in earlier if not _of_a_demo(path)]:
        raise ValueError(f"--out={out}: has {others[0]} of another run, expected a folder for the demo alone")
    corpus = Corpus.load()
    _heading("1. A language model on linear attention with RoPE")
    trainer, status = _train(LINEAR, corpus, seconds)
    for path in earlier:  # one with more steps would count as the latest
        shutil.rmtree(path)
    console.print(f"checkpoint: {trainer.save(out)}")
    if status:
        return status
    _heading("2. Softmax attention in the same block, trained for the same time")
    other, status = _train(SOFTMAX, corpus, seconds)
    if status:
        return status
    linear_bits, softmax_bits = trainer.evaluate(), other.evaluate()
    console.print(
        f"bits per byte on held-out files after {seconds:g} s each: {linear_bits:.2f} linear, "
        f"{softmax_bits:.2f} softmax attention; {trainer.step} and {other.step} steps"
    )
    console.print(
        "What this shows: two models of one size after equal time here, with one seed, each at the best of three "
        "learning rates. In few steps models learn what is near. docs/evidence.md compares more."
    )
    _heading("3. Text from the linear model, at constant memory per byte")
    console.print(f"after {trainer.step} steps; with more --seconds, such as 600, the text gets better")
    stream(trainer.model.eval(), None, prompt, 300, temperature=0.7, top_k=None, top_p=0.9, seed=0)
    _heading("4. Speed of both models, by the length of the text")
    console.print(_speeds({"linear": trainer.model, "softmax": other.model}), soft_wrap=False)
    return 0


def _heading(text: str) -> None:
    console.print(f"\n{text}", style="bold")


def _of_a_demo(checkpoint: Path) -> bool:
    """True if an earlier demo wrote this checkpoint, so that this one may remove it."""
    try:
        config, _, _ = load_training(checkpoint)
        return (
            replace(config, steps=1) == _training(LINEAR) and LanguageModel.load(checkpoint).config == LINEAR
        )
    except (OSError, ValueError):
        return False


def _training(config: LanguageModelConfig) -> TrainingConfig:
    return TrainingConfig(steps=1, sequence_length=_ROW, learning_rate=RATES[config.attention])


def _train(config: LanguageModelConfig, corpus: Corpus, seconds: float) -> tuple[Trainer, int]:
    """Trains for about that time; also returns the exit status if a signal stopped it, else 0."""
    torch.manual_seed(0)
    trainer = Trainer(LanguageModel(config), corpus, _training(config))
    describe(trainer, console)
    # The schedule requires a number of steps: estimate it from the speed of some steps. The very first is slower.
    trainer.train_step()
    start = time.perf_counter()
    for _ in range(_TRIAL):
        trainer.train_step()
    steps = max(_TRIAL + 2, round(seconds / (time.perf_counter() - start) * _TRIAL))
    trainer.config = replace(trainer.config, steps=steps)
    return trainer, run_steps(trainer, console)


def _speeds(models: dict[str, LanguageModel]) -> Table:
    """The time in which each model reads a text, and that of one more byte after it."""
    table = plain_table("Milliseconds to read a text, and for the next byte after it")
    for column in ("bytes", *(f"{name}: {what}" for what in ("text", "next byte") for name in models)):
        table.add_column(column, justify="right")
    for n in _LENGTHS:
        times = [_seconds(model.eval(), n) for model in models.values()]
        cells = [f"{1e3 * x:,.1f}" for both in zip(*times, strict=True) for x in both]
        table.add_row(f"{n:,}", *cells)
    return table


@torch.no_grad()
def _seconds(model: LanguageModel, length: int) -> tuple[float, float]:
    tokens = torch.randint(256, (1, length + 1))
    start = time.perf_counter()
    _, states = model(tokens[:, :-1], logits_to_keep=1)
    ends = [time.perf_counter()]
    for _ in range(9):
        _, states = model(tokens[:, -1:], states)
        ends.append(time.perf_counter())
    return ends[0] - start, statistics.median(end - begun for begun, end in pairwise(ends))

"""The command ``linrope demo``: two models' first minute, text from one of them, and a race."""

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from linrope.cli.bench.benchmark import Effort
from linrope.cli.bench.cases import Case
from linrope.cli.bench.command import measure
from linrope.cli.generation import stream
from linrope.cli.training import describe, run_steps
from linrope.models import LanguageModel, LanguageModelConfig
from linrope.models.training import Corpus, Trainer, TrainingConfig, checkpoints

console = Console()

PROMPT = "def main("
_ROW = 256
_SIZES: dict[str, Any] = {"embed_dim": 128, "num_layers": 4, "num_heads": 4}
# What does best in docs/evidence.md; half-lives start up to the rows it is trained on.
LINEAR = LanguageModelConfig(**_SIZES, forget_gate={"longest": _ROW})
# Wider where the other one has the gate silu(W x): as many parameters, within 1%.
SOFTMAX = LanguageModelConfig(**_SIZES, attention="softmax", hidden_dim=392)
_TRIAL = 4  # steps


def demo(
    seconds: Annotated[float, typer.Option(help="How long to train each of two models.")] = 60.0,
    out: Annotated[Path, typer.Option(help="Folder for all results.")] = Path("runs/demo"),
) -> int:
    """Train a small model on real text, generate from it, and outrun softmax attention: 4 minutes.

    A model with softmax attention and as many parameters is trained for the same time, to compare with.
    """
    corpus = Corpus.load()
    console.rule("1. A language model on linear attention with RoPE")
    trainer, stopped = _train(LINEAR, corpus, seconds)
    for earlier in checkpoints(out):  # of another demo: a longer one would count as the latest
        shutil.rmtree(earlier)
    console.print(f"checkpoint: {trainer.save(out)}")
    if stopped:
        return 130
    console.rule("2. The same with softmax attention, for the same time")
    other, stopped = _train(SOFTMAX, corpus, seconds)
    if stopped:
        return 130
    after, softmax = trainer.evaluate(), other.evaluate()
    console.print(
        f"bits per byte on held-out files after {seconds:g} s each: [bold]{after:.2f} linear, {softmax:.2f} "
        f"softmax attention[/bold]; {trainer.step} and {other.step} steps"
    )
    console.rule("3. Text from the first, at constant memory per byte")
    stream(trainer.model.eval(), None, PROMPT, 300, temperature=0.7, top_k=None, top_p=0.9, seed=0)
    console.rule("4. Against softmax attention with RoPE")
    measure(Case(), [2**i for i in range(8, 15)], [1024, 65536], Effort(2.0, 0.5, 2), out, "demo", console)
    return 0


def _train(config: LanguageModelConfig, corpus: Corpus, seconds: float) -> tuple[Trainer, bool]:
    """For about so long, and whether Ctrl-C cut it short."""
    torch.manual_seed(0)
    trainer = Trainer(LanguageModel(config), corpus, TrainingConfig(steps=1, sequence_length=_ROW))
    describe(trainer, console)
    # The schedule needs a number of steps: as many as the time allows at the speed of the first ones.
    start = time.perf_counter()
    for _ in range(_TRIAL):
        trainer.train_step()
    steps = max(_TRIAL + 1, round(seconds / (time.perf_counter() - start) * _TRIAL))
    trainer.config = replace(trainer.config, steps=steps)
    return trainer, run_steps(trainer, console)

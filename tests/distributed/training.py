"""What each rank of a group asserts about runs that share rows, tokens and heads; run by tests."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # once: the first step of an optimizer would import it in each process
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.distributed.tensor import DTensor

from linrope.models import LanguageModel, LanguageModelConfig
from linrope.models.training import Corpus, Trainer, TrainingConfig

MODEL = LanguageModelConfig(
    embed_dim=16, num_layers=2, num_heads=4, forget_gate=True, short_conv=3, rotary="selective"
)
STEPS, ROWS = 3, 4
CONFIG = TrainingConfig(steps=8, sequence_length=30, warmup_steps=1, learning_rate=1e-2, clip=0.5)


def corpus() -> Corpus:
    return Corpus.from_texts([f"text {i}: the quick brown fox jumps. " * (1 + i % 5) for i in range(40)])


class Alone:
    """What a Trainer asks of accelerate, of one process in a group of several."""

    device, num_processes, process_index, is_main_process = torch.device("cpu"), 1, 0, True
    mixed_precision, distributed_type = "no", "NO"

    def prepare(self, *both: Any) -> Any:
        return both if len(both) > 1 else both[0]

    def reduce(self, x: Any, _: str) -> Any:
        return x

    def no_sync(self, _: Any) -> Any:
        return nullcontext()

    def backward(self, loss: Any) -> None:
        loss.backward()

    def clip_grad_norm_(self, parameters: Any, largest: float) -> Any:
        return torch.nn.utils.clip_grad_norm_(parameters, largest)


def together() -> Any:
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True)


def trainer(config: TrainingConfig, accelerator: Any, **parallel: int) -> Trainer:
    torch.manual_seed(0)
    return Trainer(LanguageModel(MODEL), corpus(), config, accelerator, **parallel)


def steps(run: Trainer, count: int = STEPS) -> list[dict[str, float]]:
    return [run.train_step() for _ in range(count)]


def compare(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for a, b in zip(found, expected, strict=True):
        for name in ("bits_per_byte", "gradient_norm", "learning_rate"):
            assert abs(a[name] - b[name]) <= 2e-5 * max(1.0, abs(b[name])), (name, a, b)


def arrangement(tokens: int, heads: int, options: dict[str, Any]) -> None:
    """Losses, gradient norms, evaluation and weights of one process with all rows."""
    rows = dist.get_world_size() // (tokens * heads)
    whole = trainer(replace(CONFIG, batch_size=ROWS, **options), Alone())
    expected = steps(whole)
    parallel = {"sequence_parallel": tokens, "tensor_parallel": heads}
    # Rows of a step are the same in both: of several processes each reads its part of the batches.
    own = replace(CONFIG, batch_size=ROWS // rows, **options)
    run = trainer(own, together(), **parallel)
    compare(steps(run), expected)
    assert abs(run.evaluate(8) - whole.evaluate(8)) < 2e-5
    for a, b in zip(run.model.parameters(), whole.model.parameters(), strict=True):
        a = a.full_tensor() if isinstance(a, DTensor) else a
        torch.testing.assert_close(a, b, rtol=0, atol=2e-3)  # AdamW's first steps are signs of gradients


def one_start() -> None:
    """All processes that share heads start with the first one's weights, projections and seeds."""
    torch.manual_seed(dist.get_rank())
    model = LanguageModel(replace(MODEL, feature_map="favor+"))
    Trainer(model, corpus(), CONFIG, together(), tensor_parallel=dist.get_world_size())
    fmap: Any = model.blocks[0].attention.feature_map
    sums = [float(x.detach().sum()) for x in (fmap.projection, model.embed.weight)]
    starts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(starts, (fmap.seed, *sums))
    assert len(set(starts)) == 1, starts


def another_arrangement(folder: str) -> None:
    """Processes share tokens; others that share heads go on, then others that share both."""
    size, path = dist.get_world_size(), Path(folder)
    config = replace(CONFIG, batch_size=ROWS)
    one = trainer(config, Alone())
    expected, seen = steps(one, 6), []
    first = trainer(config, together(), sequence_parallel=size)
    seen += steps(first, 2)
    first.save(path)
    second = Trainer.load(path, corpus(), together(), tensor_parallel=size)
    seen += steps(second, 2)
    second.save(path)
    third = Trainer.load(path, corpus(), together(), sequence_parallel=2, tensor_parallel=size // 2)
    seen += steps(third, 2)
    compare(seen, expected)

"""Runs whose processes share rows, tokens and heads have the numbers of one process."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo  # once: the first step of an optimizer would import it in each process
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.distributed.tensor import DTensor

from linrope.models import LanguageModel, LanguageModelConfig
from linrope.models.training import Corpus, Trainer, TrainingConfig
from tests.distributed.processes import on_each_rank

MODEL = LanguageModelConfig(
    embed_dim=16, num_layers=2, num_heads=4, forget_gate=True, short_conv=3, rotary="selective"
)
STEPS, ROWS = 2, 4
CONFIG = TrainingConfig(steps=8, sequence_length=30, warmup_steps=1, learning_rate=1e-2, clip=0.5)


def corpus() -> Corpus:
    return Corpus.from_texts([f"text {i}: the quick brown fox jumps. " * (1 + i % 5) for i in range(40)])


# Stands in for accelerate's Accelerator: a process of a group that trains by itself.
ALONE = SimpleNamespace(
    device=torch.device("cpu"), num_processes=1, process_index=0, is_main_process=True, mixed_precision="no",
    distributed_type="NO", no_sync=lambda _: nullcontext(), reduce=lambda x, _: x,
    prepare=lambda *both: both if len(both) > 1 else both[0], backward=lambda loss: loss.backward(),
    clip_grad_norm_=torch.nn.utils.clip_grad_norm_,
)  # fmt: skip


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
    """Compares losses, gradient norms, evaluation and weights with those of one process that has all rows."""
    rows = dist.get_world_size() // (tokens * heads)
    whole = trainer(replace(CONFIG, batch_size=ROWS, **options), ALONE)
    expected = steps(whole)
    parallel = {"sequence_parallel": tokens, "tensor_parallel": heads}
    # Both take the same rows in a step: several processes read a part of them each.
    own = replace(CONFIG, batch_size=ROWS // rows, **options)
    run = trainer(own, together(), **parallel)
    compare(steps(run), expected)
    assert abs(run.evaluate(8) - whole.evaluate(8)) < 2e-5
    for a, b in zip(run.model.parameters(), whole.model.parameters(), strict=True):
        a = a.full_tensor() if isinstance(a, DTensor) else a
        torch.testing.assert_close(a, b, rtol=0, atol=2e-3)  # AdamW's first steps are signs of gradients


HOW: dict[str, dict[str, Any]] = {
    "accumulation": {"accumulation": 2},
    "pieces": {"pieces": 3},
    "pieces whose gradients go through": {"pieces": 2, "gradients_through_pieces": True},
}
ORDINARY = "pieces whose gradients go through"
CASES = [
    pytest.param(
        name, *parts, marks=[] if name == ORDINARY and parts in [(2, 1), (1, 2)] else pytest.mark.long
    )
    for name in HOW
    for parts in [(2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (1, 1)]
]


@pytest.mark.parametrize(("name", "tokens", "heads"), CASES)
def test_rows_tokens_and_heads_are_shared(processes, name: str, tokens: int, heads: int) -> None:
    if tokens * heads > processes.size:
        pytest.skip("needs four processes")
    processes.run(arrangement, tokens, heads, HOW[name])


@on_each_rank
def test_processes_that_share_heads_start_with_the_same_model() -> None:
    """All take the weights, projections and seeds of the first process."""
    torch.manual_seed(dist.get_rank())
    model = LanguageModel(replace(MODEL, feature_map="favor+"))
    Trainer(model, corpus(), CONFIG, together(), tensor_parallel=dist.get_world_size())
    fmap: Any = model.blocks[0].attention.feature_map
    sums = [float(x.detach().sum()) for x in (fmap.projection, model.embed.weight)]
    starts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(starts, (fmap.seed, *sums))
    assert len(set(starts)) == 1, starts


@on_each_rank
def test_a_run_goes_on_with_another_arrangement(tmp_path) -> None:
    """The first processes share tokens. Others resume and share heads, then others that share both."""
    size, config = dist.get_world_size(), replace(CONFIG, batch_size=ROWS)
    expected = steps(trainer(config, ALONE), 6)
    run = trainer(config, together(), sequence_parallel=size)
    seen = steps(run, 2)
    both = {"sequence_parallel": 2, "tensor_parallel": size // 2}
    for parallel in ({"tensor_parallel": size}, both):
        run.save(tmp_path)
        run = Trainer.load(tmp_path, corpus(), together(), **parallel)
        seen += steps(run, 2)
    compare(seen, expected)

"""transformers' Trainer over processes has the losses, gradient norms and weights of one process."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState
from torch.distributed.device_mesh import init_device_mesh
from transformers import Trainer, TrainingArguments
from transformers.distributed.configuration_utils import DistributedConfig

from linrope.models.huggingface import LinRopeConfig, LinRopeForCausalLM
from tests.distributed.processes import on_each_rank
from tests.support.examples import load

pytestmark = pytest.mark.long

STEPS, RATE, ROWS = 3, 0.1, 4


# Four rows, two of them partly without labels. Each step takes all four.
TOKENS = torch.randint(20, (ROWS, 12), generator=torch.Generator().manual_seed(1))
LABELS = TOKENS.clone()
LABELS[0, 5:] = LABELS[3, :3] = -100
DATA = [{"input_ids": x, "labels": y} for x, y in zip(TOKENS, LABELS, strict=True)]


def sequence_trainer(dp: int, cp: int) -> Any:
    """The example's class: processes of "cp" share the tokens of a row, those of "dp" the rows."""
    trainer = load("sequence_trainer").SequenceTrainer
    trainer.mesh = init_device_mesh("cpu", (dp, cp), mesh_dim_names=("dp", "cp"))
    return trainer


def expected(model: Any) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step of one process, and of an evaluation; leaves the model trained."""
    found = []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS + 1):
        loss, norm = model(TOKENS, labels=LABELS, use_cache=False).loss, 0.0
        if step < STEPS:
            optimizer.zero_grad()
            loss.backward()
            norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
        found.append((float(loss), norm))
    return found


def arguments(folder: Path, rows: int, **options: Any) -> TrainingArguments:
    return TrainingArguments(
        folder / "out", report_to="none", per_device_train_batch_size=rows,
        per_device_eval_batch_size=rows, learning_rate=RATE, use_cpu=True, logging_steps=1,
        disable_tqdm=True, lr_scheduler_type="constant", dataloader_pin_memory=False,
        max_steps=STEPS, optim="sgd", save_strategy="no", **options,
    )  # fmt: skip


def saved(folder: Path) -> Any:
    torch.manual_seed(0)
    config = LinRopeConfig(
        vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        forget_gate=True, short_conv=4,
    )  # fmt: skip
    model = LinRopeForCausalLM(config)
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    return LinRopeForCausalLM.from_pretrained(folder)


def compare(folder: Path, rows: int, trainer: type[Trainer] = Trainer, **shared: int) -> None:
    """Compares losses, gradient norms, evaluation and weights with one process's. rows: of each process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    one = saved(folder)
    losses = expected(one)
    how: dict[str, Any] = {"distributed_config": DistributedConfig(**shared)} if shared else {}
    model = LinRopeForCausalLM.from_pretrained(folder, **how)
    # accelerate requires GPUs to split heads. Here the processes only claim to have them.
    pretended = mock.PropertyMock(return_value=True)
    with mock.patch.object(Accelerator, "multi_device", pretended) if "tp_size" in shared else nullcontext():
        run = trainer(model, arguments(folder, rows), train_dataset=DATA, eval_dataset=DATA)
        run.train()
        evaluated = run.evaluate()["eval_loss"]
    found = [(e["loss"], float(e["grad_norm"])) for e in run.state.log_history if "loss" in e]
    found.append((evaluated, 0.0))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-5, atol=0)
    run.save_model(folder / "trained")
    dist.barrier()
    trained = LinRopeForCausalLM.from_pretrained(folder / "trained")
    weights, expected_weights = (dict(model.named_parameters()) for model in (trained, one))
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-5)


WAYS: dict[str, Callable[[int], tuple[int, dict[str, int]]]] = {  # for n processes: rows of each, and options
    "heads": lambda n: (ROWS, {"tp_size": n}),
    "weights": lambda n: (ROWS // n, {"fsdp_size": n}),
    "heads and weights": lambda n: (2 * ROWS // n, {"tp_size": 2, "fsdp_size": n // 2}),
}


@pytest.mark.parametrize(
    "shared", ["heads", "weights", pytest.param("heads and weights", marks=pytest.mark.long)]
)
@on_each_rank
def test_trainer_has_the_numbers_of_one_process(shared: str, tmp_path) -> None:
    rows, options = WAYS[shared](dist.get_world_size())
    compare(tmp_path, rows, **options)


@on_each_rank
def test_trainer_has_the_numbers_of_one_process_if_processes_share_tokens(tmp_path) -> None:
    size = dist.get_world_size()
    for dp in {1, size // 2}:
        compare(tmp_path, ROWS // dp, sequence_trainer(dp, size // dp))


@on_each_rank
def test_context_parallelism_of_accelerate_is_refused(tmp_path) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    config = ParallelismConfig(cp_size=dist.get_world_size())
    with mock.patch.object(Accelerator, "multi_device", mock.PropertyMock(return_value=True)):
        options = arguments(tmp_path, ROWS, parallelism_config=config)
        run = Trainer(saved(tmp_path), options, train_dataset=DATA)
        with pytest.raises(ValueError, match="does not support attention layers of type"):
            run.train()

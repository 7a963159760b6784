"""What each rank of a group asserts about transformers' Trainer, with its own switches; run by the tests."""

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import Trainer, TrainingArguments
from transformers.distributed.configuration_utils import DistributedConfig

from linrope.distributed import Shard
from linrope.models.huggingface import LinRopeConfig, LinRopeForCausalLM

STEPS, RATE, ROWS = 3, 0.1, 4


class Rows(Dataset[dict[str, Tensor]]):
    """Four rows, with and without labels, all of them in each step."""

    def __init__(self) -> None:
        self.tokens = torch.randint(20, (ROWS, 12), generator=torch.Generator().manual_seed(1))
        self.labels = self.tokens.clone()
        self.labels[0, 5:] = self.labels[3, :3] = -100

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


class SequenceTrainer(Trainer):
    """As docs/distributed.md has it: processes of "cp" share the tokens of a row, those of "dp" the rows."""

    mesh: Any

    def rows_of(self, dataset: Any, batch_size: int, shuffle: bool) -> Any:
        rows, row = self.mesh.size(0), self.mesh.get_local_rank("dp")
        sampler = DistributedSampler(dataset, rows, row, shuffle=shuffle, seed=self.args.seed)
        return DataLoader(dataset, batch_size, sampler=sampler, collate_fn=self.data_collator)

    def get_train_dataloader(self) -> Any:
        return self.rows_of(self.train_dataset, self.args.train_batch_size, shuffle=True)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self.rows_of(eval_dataset or self.eval_dataset, self.args.eval_batch_size, shuffle=False)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        tokens, cp, world = inputs["input_ids"], self.mesh.size(1), self.args.world_size
        shard = Shard(self.mesh, lengths=[len(x) for x in torch.arange(tokens.shape[1]).tensor_split(cp)])
        labels = shard.targets(inputs["labels"])
        count = num_items_in_batch / cp  # which counted each row on each process
        outputs = model(shard.take(tokens), labels=labels, shard=shard, num_items_in_batch=count)
        loss = outputs.loss * world  # gradients are averaged over all processes
        return (loss, outputs) if return_outputs else loss


def expected(model: Any) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step of one process, and of an evaluation; leaves the model trained."""
    rows, found = Rows(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(rows.tokens, labels=rows.labels, use_cache=False).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append((float(loss), float(norm)))
    with torch.no_grad():
        loss = model(rows.tokens, labels=rows.labels, use_cache=False).loss
    return [*found, (float(loss), 0.0)]


def arguments(folder: str, rows: int, **options: Any) -> TrainingArguments:
    return TrainingArguments(
        f"{folder}/out", report_to="none", per_device_train_batch_size=rows,
        per_device_eval_batch_size=rows, learning_rate=RATE, use_cpu=True, logging_steps=1,
        disable_tqdm=True, lr_scheduler_type="constant", dataloader_pin_memory=False,
        max_steps=STEPS, optim="sgd", save_strategy="no", **options,
    )  # fmt: skip


def saved(folder: str) -> Any:
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


def compare(folder: str, rows: int, trainer: type[Trainer] = Trainer, **shared: int) -> None:
    """Losses, gradient norms, evaluation and weights of one process; rows: of each process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    one = saved(folder)
    losses = expected(one)
    how: dict[str, Any] = {"distributed_config": DistributedConfig(**shared)} if shared else {}
    model = LinRopeForCausalLM.from_pretrained(folder, **how)
    # accelerate wants GPUs for heads shared out; that these are none makes no other difference here.
    pretended = mock.PropertyMock(return_value=True)
    with mock.patch.object(Accelerator, "multi_device", pretended) if "tp_size" in shared else nullcontext():
        run = trainer(model, arguments(folder, rows), train_dataset=Rows(), eval_dataset=Rows())
        run.train()
        evaluated = run.evaluate()["eval_loss"]
    found = [(e["loss"], float(e["grad_norm"])) for e in run.state.log_history if "loss" in e] + [
        (evaluated, 0.0)
    ]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-5, atol=0)
    run.save_model(f"{folder}/trained")
    dist.barrier()
    trained = LinRopeForCausalLM.from_pretrained(f"{folder}/trained")
    for (name, a), b in zip(trained.named_parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def shared_rows(folder: str) -> None:
    compare(folder, ROWS // dist.get_world_size())


def shared_heads(folder: str) -> None:
    compare(folder, ROWS, tp_size=dist.get_world_size())


def shared_weights(folder: str) -> None:
    compare(folder, ROWS // dist.get_world_size(), fsdp_size=dist.get_world_size())


def shared_heads_and_weights(folder: str) -> None:
    rows = dist.get_world_size() // 2
    compare(folder, ROWS // rows, tp_size=2, fsdp_size=rows)


def shared_tokens(folder: str) -> None:
    size = dist.get_world_size()
    for dp in {1, size // 2}:
        mesh = dist.init_device_mesh("cpu", (dp, size // dp), mesh_dim_names=("dp", "cp"))
        kind = type("Own", (SequenceTrainer,), {"mesh": mesh})
        compare(folder, ROWS // dp, kind)


def context_parallelism_is_refused(folder: str) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    config = ParallelismConfig(cp_size=dist.get_world_size())
    with mock.patch.object(Accelerator, "multi_device", mock.PropertyMock(return_value=True)):
        run = Trainer(saved(folder), arguments(folder, ROWS, parallelism_config=config), train_dataset=Rows())
        with pytest.raises(ValueError, match="does not support attention layers of type"):
            run.train()

"""transformers' Trainer on linrope's models, with the tokens of each row split over processes.

    torchrun --nproc-per-node 4 docs/examples/sequence_trainer.py     # two rows, the tokens of each on two processes

The processes form a mesh (dp, cp). The "cp" processes share the tokens of a row; the "dp" groups read different rows.
The script trains a small model on a nursery rhyme. Copy ``SequenceTrainer`` for a model of your own.

accelerate's ``ParallelismConfig(cp_size=..)`` splits softmax attention and raises an error for linrope's models.
"""

import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler
from transformers import Trainer, TrainingArguments

from linrope.distributed import Shard
from linrope.models.huggingface import LinRopeConfig, LinRopeForCausalLM

ROW = 256  # tokens
RHYME = b"For want of a nail the shoe was lost. For want of a shoe the horse was lost. "


class SequenceTrainer(Trainer):
    """Give it a mesh with the dimensions "dp" and "cp": ``SequenceTrainer.mesh = init_device_mesh(..)``.

    It ignores attention_mask: pad on the right only, with labels of -100.
    """

    mesh: DeviceMesh

    def rows_of(self, dataset: Any, batch_size: int, shuffle: bool) -> DataLoader[Any]:
        """All processes that share a sequence read the same rows."""
        rows, row = self.mesh.size(0), self.mesh.get_local_rank("dp")
        sampler = DistributedSampler(dataset, rows, row, shuffle=shuffle, seed=self.args.seed)
        return DataLoader(dataset, batch_size, sampler=sampler, collate_fn=self.data_collator)

    def get_train_dataloader(self) -> DataLoader[Any]:
        return self.rows_of(self.train_dataset, self.args.train_batch_size, shuffle=True)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        return self.rows_of(eval_dataset or self.eval_dataset, self.args.eval_batch_size, shuffle=False)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        tokens, cp, world = inputs["input_ids"], self.mesh.size(1), self.args.world_size
        shard = Shard(self.mesh, lengths=[len(x) for x in torch.arange(tokens.shape[1]).tensor_split(cp)])
        labels = shard.targets(inputs["labels"])
        # Trainer adds up the labels of all processes, but the cp processes that share a row count the same ones.
        count = num_items_in_batch / cp
        outputs = model(shard.take(tokens), labels=labels, shard=shard, num_items_in_batch=count)
        loss = outputs.loss * world  # gradients are averaged over all processes
        return (loss, outputs) if return_outputs else loss


def rows(number: int, length: int) -> list[dict[str, Tensor]]:
    text = torch.tensor(list(RHYME * (1 + length // len(RHYME))))
    return [{"input_ids": text.roll(i)[:length], "labels": text.roll(i)[:length]} for i in range(number)]


def main() -> None:
    cuda, world = torch.cuda.is_available(), int(os.environ["WORLD_SIZE"])
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    cp = 2 if world % 2 == 0 else 1
    SequenceTrainer.mesh = init_device_mesh(
        "cuda" if cuda else "cpu", (world // cp, cp), mesh_dim_names=("dp", "cp")
    )
    torch.manual_seed(0)
    config = LinRopeConfig(
        vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        forget_gate={"longest": ROW},
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=30, logging_steps=10, learning_rate=3e-3, per_device_train_batch_size=1,
            report_to="none", use_cpu=not cuda, disable_tqdm=True, dataloader_pin_memory=False,
            save_strategy="no", ddp_find_unused_parameters=False,
        )  # fmt: skip
        SequenceTrainer(LinRopeForCausalLM(config), arguments, train_dataset=rows(64, ROW)).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

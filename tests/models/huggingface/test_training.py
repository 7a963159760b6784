"""What users of transformers train with: Trainer and PEFT."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from linrope.models.huggingface import LORA_TARGETS, LinRopeForCausalLM
from tests.models.huggingface.tiny import HYBRID, causal_lm, tokens

pytestmark = [
    pytest.mark.skipif(torch.get_default_device().type != "cpu", reason="Trainer's generators are there"),
    # PEFT asks transformers by older names
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
]


class Rows(Dataset[dict[str, torch.Tensor]]):
    """One text of 12 tokens, again and again, the last of them padding."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = tokens(1, 12)[0]
        labels, mask = ids.clone(), torch.ones_like(ids)
        labels[-2:], mask[-2:] = -100, 0
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def trainer(model: LinRopeForCausalLM, folder: Path, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        str(folder), report_to="none", per_device_train_batch_size=4, learning_rate=1e-2, use_cpu=True,
        logging_steps=1, disable_tqdm=True, lr_scheduler_type="constant", dataloader_pin_memory=False,
        **options,
    )  # fmt: skip
    return Trainer(model, arguments, train_dataset=Rows(), eval_dataset=Rows())


def test_trainer_trains_and_resumes(tmp_path: Path) -> None:
    one = causal_lm(**HYBRID).float()
    run = trainer(one, tmp_path, max_steps=4, save_steps=2, gradient_checkpointing=True)
    run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    assert math.isfinite(run.evaluate()["eval_loss"])

    other = causal_lm(**HYBRID).float()
    resumed = trainer(other, tmp_path, max_steps=4, save_steps=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    torch.testing.assert_close(dict(one.named_parameters()), dict(other.named_parameters()))


@pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning")  # peft 0.18, without the hub
def test_lora_finds_its_targets_trains_itself_alone_and_merges(tmp_path: Path) -> None:
    model, ids = causal_lm(**HYBRID), tokens(2, 9)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tuned = get_peft_model(model, LoraConfig(r=2, task_type="CAUSAL_LM"))
    assert {name.rpartition(".")[2] for name in tuned.targeted_module_names} == set(LORA_TARGETS)
    optimizer = torch.optim.SGD([p for p in tuned.parameters() if p.requires_grad], lr=1.0)
    start = tuned(ids, labels=ids).loss
    start.backward()
    optimizer.step()
    out = tuned(ids, labels=ids)
    assert out.loss < start
    own = {name.replace(".base_layer", ""): tensor for name, tensor in model.state_dict().items()}
    assert all(torch.equal(own[name], tensor) for name, tensor in before.items())

    tuned.save_pretrained(tmp_path)
    tuned.eval()
    again = PeftModel.from_pretrained(causal_lm(**HYBRID), tmp_path)
    torch.testing.assert_close(again(ids).logits, out.logits)
    assert again.generate(input_ids=ids, max_new_tokens=3).shape == (2, 12)
    merged = tuned.merge_and_unload()
    assert isinstance(merged, LinRopeForCausalLM)
    torch.testing.assert_close(merged(ids).logits, out.logits)

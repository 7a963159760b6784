import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from linrope.models.huggingface import LinRopeForCausalLM
from linrope.models.huggingface.conversion import convert as to_linear
from tests.cli.commands import word_tokenizer

SHORT = "--batch-size 2 --sequence-length 16"


def llama(folder: Path, vocab_size: int = 256) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **sizes)).save_pretrained(folder)
    return folder


def losses(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "losses.json").read_text())


def test_convert_reports_four_losses_and_writes_a_model(run, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("linrope.cli.training._SECONDS", 0.0)
    llama(tmp_path / "llama")
    options = f"--text {{text}} --keep-softmax 1 --match-steps 4 --finetune-steps 4 {SHORT}"
    convert = f"convert {{tmp}}/llama {options} --out {{tmp}}/"
    printed = run(convert + "linear")
    names = ("before", "after replacement", "after matching", "after finetuning")
    assert all(f"{name:18} " in printed for name in names)
    assert all(f"{name}: step 2 of 4\n" in printed for name in ("matching", "finetuning"))
    found = losses(tmp_path / "linear")
    assert json.loads(next(line for line in printed.splitlines() if line.startswith("{"))) == found
    assert list(found) == [name.replace(" ", "_") for name in names]
    assert found["after_finetuning"] < found["after_matching"]
    assert found["before"] == pytest.approx(8, abs=1)  # bits per byte, of a model that was not trained
    assert f"before             {found['before']:.4f} bits per byte\n" in printed

    config = LinRopeForCausalLM.from_pretrained(tmp_path / "linear").config
    assert config.layer_types == ["linear_attention", "full_attention"]
    assert (config.feature_map, config.rope_order) == ("hedgehog", "before")
    run(convert + "again")
    assert losses(tmp_path / "again") == found


def test_convert_takes_the_tokenizer_of_the_folder_and_leaves_out_steps(run, text, tmp_path) -> None:
    tokenizer, out = word_tokenizer(text), tmp_path / "linear"
    tokenizer.save_pretrained(llama(tmp_path / "llama", vocab_size=20))
    options = "--feature-map elu+1 --rope-order after --gate --match-steps 0 --finetune none"
    run(f"convert {{tmp}}/llama --out {{tmp}}/linear --text {{text}} {options} {SHORT}")
    assert losses(out)["after_matching"] is losses(out)["after_finetuning"] is None
    assert AutoTokenizer.from_pretrained(out).encode("To be") == tokenizer.convert_tokens_to_ids(["To", "be"])
    config = LinRopeForCausalLM.from_pretrained(out).config
    assert (config.vocab_size, config.rope_order, config.gate, config.out_norm) == (20, "after", True, None)


def damaged(folder: Path) -> None:
    weights = llama(folder) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def partial(folder: Path) -> None:
    config = llama(folder) / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))


def linear(folder: Path) -> None:
    to_linear(LlamaForCausalLM.from_pretrained(llama(folder))).save_pretrained(folder)


MODELS = {
    "absent": lambda _: None, "llama": llama, "words": lambda folder: llama(folder, vocab_size=100),
    "damaged": damaged, "partial": partial, "linear": linear,
}  # fmt: skip
WRONG = {
    "{tmp}/absent --out {tmp}/new": "absent/config.json: no such file",
    "{tmp}/words --out {tmp}/new": "has no tokenizer",
    "{tmp}/damaged --out {tmp}/new": "damaged: ",
    "{tmp}/partial --out {tmp}/new": "are missing",
    "{tmp}/linear --out {tmp}/new": "model_type='linrope'",
    "{tmp}/llama": "--out",
    "{tmp}/llama --out {tmp}": "expected an empty or new folder",
    "{tmp}/llama --out {text}": "text.txt",
    "{tmp}/llama --out {tmp}/new --text absent.txt": "absent.txt: no such file",
    "{tmp}/llama --out {tmp}/new --text {text}":
        "--sequence-length=512: expected less than the held-out text, 215 tokens",
    "{tmp}/llama --out {tmp}/new --keep-softmax first": "--keep-softmax='first'",
    "{tmp}/llama --out {tmp}/new --keep-softmax 2": "--keep-softmax: got [2], expected",
    "{tmp}/llama --out {tmp}/new --finetune half": "--finetune='half'",
    "{tmp}/llama --out {tmp}/new --feature-map t2s": "did you mean 't2r'",
    "{tmp}/llama --out {tmp}/new --feature-map relu":
        "--match-steps=300: --feature-map=relu has no weights to match; expected 0, or",
    "{tmp}/llama --out {tmp}/new --feature-map identity":
        "--feature-map=identity: its features have both signs, expected one of elu+1, ",
    "{tmp}/llama --out {tmp}/new --erase-gate none --feature-map unit":
        "--feature-map=unit: its features have both signs, expected one of elu+1, ",
    "{tmp}/llama --out {tmp}/new --keep-softmax 0,1":
        "--keep-softmax=0,1: got all layers of the model, expected fewer, or --match-steps=0",
    "{tmp}/llama --out {tmp}/new --rank 0": "--rank=0: expected at least 1",
    "{tmp}/llama --out {tmp}/new --short-conv 1": "--short-conv=1: expected the number of taps",
    "{tmp}/llama --out {tmp}/new --rope-order up": "--rope-order='up'",
    "{tmp}/llama --out {tmp}/new --match-learning-rate -1":
        "--match-learning-rate=-1.0: expected a positive finite number",
    "{tmp}/llama --out {tmp}/new --sequence-length 1": "--sequence-length=1: expected at",
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "cause"), WRONG.items(), ids=WRONG)
def test_wrong_input_exits_2_with_one_line(arguments: str, cause: str, refused, tmp_path) -> None:
    name = arguments.split()[0].removeprefix("{tmp}/")
    MODELS[name](tmp_path / name)
    assert cause in refused(f"convert {arguments}")
    assert not (tmp_path / "new").exists()

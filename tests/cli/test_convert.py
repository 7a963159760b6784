import json
import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from linrope.cli.app import run
from linrope.models.huggingface import LinRopeForCausalLM
from linrope.models.huggingface.conversion import convert as to_linear

FEW = ["--match-steps", "4", "--finetune-steps", "4", "--batch-size", "2", "--sequence-length", "16"]


def llama(folder: Path, vocab_size: int = 256) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **sizes)).save_pretrained(folder)
    return folder


def test_convert_reports_four_losses_and_writes_a_model(
    text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("linrope.cli.training._SECONDS", 0.0)
    model, out = llama(tmp_path / "llama"), tmp_path / "linear"
    arguments = ["convert", str(model), "--text", str(text), "--keep-softmax", "1", *FEW]
    assert run([*arguments, "--out", str(out)]) == 0
    printed = capfd.readouterr().out
    names = ("before", "after replacement", "after matching", "after finetuning")
    for name in names:
        assert f"{name:18} " in printed
    for name in ("matching", "finetuning"):
        assert f"{name}: step 2 of 4\n" in printed
    losses = json.loads((out / "losses.json").read_text())
    assert json.loads(next(line for line in printed.splitlines() if line.startswith("{"))) == losses
    assert list(losses) == [name.replace(" ", "_") for name in names]
    assert losses["after_finetuning"] < losses["after_matching"]

    loaded = LinRopeForCausalLM.from_pretrained(out)
    assert loaded.config.layer_types == ["linear_attention", "full_attention"]
    assert (loaded.config.feature_map, loaded.config.rope_order) == ("hedgehog", "before")
    again = tmp_path / "again"
    assert run([*arguments, "--out", str(again)]) == 0
    assert json.loads((again / "losses.json").read_text()) == losses


def test_convert_takes_the_tokenizer_of_the_folder_and_leaves_out_steps(text: Path, tmp_path: Path) -> None:
    model, out = llama(tmp_path / "llama", vocab_size=20), tmp_path / "linear"
    words = ["?", *dict.fromkeys(re.findall(r"\w+|[^\w\s]", text.read_text()))]
    made = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="?"))
    made.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?").save_pretrained(model)
    arguments = ["--text", str(text), "--feature-map", "elu+1", "--rope-order", "after", "--gate"]
    steps = ["--match-steps", "0", "--finetune", "none", "--sequence-length", "16", "--batch-size", "2"]
    assert run(["convert", str(model), "--out", str(out), *arguments, *steps]) == 0
    losses = json.loads((out / "losses.json").read_text())
    assert losses["after_matching"] is losses["after_finetuning"] is None
    assert AutoTokenizer.from_pretrained(out).encode("To be") == [words.index("To"), words.index("be")]
    config = LinRopeForCausalLM.from_pretrained(out).config
    assert (config.vocab_size, config.rope_order, config.gate, config.out_norm) == (20, "after", True, False)


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["convert", "absent", "--out", "{tmp}/new"], "absent/config.json: no such file"),
        (["convert", "{model}"], "--out"),
        (["convert", "{model}", "--out", "{tmp}"], "expected an empty or new folder"),
        (["convert", "{model}", "--out", "{tmp}/text.txt"], "text.txt"),
        (["convert", "{model}", "--out", "{tmp}/new", "--text", "absent.txt"], "absent.txt: no such file"),
        (["convert", "{model}", "--out", "{tmp}/new", "--keep-softmax", "first"], "--keep-softmax='first'"),
        (
            ["convert", "{model}", "--out", "{tmp}/new", "--keep-softmax", "2"],
            "--keep-softmax: got [2], expected",
        ),
        (["convert", "{model}", "--out", "{tmp}/new", "--finetune", "half"], "--finetune='half'"),
        (["convert", "{model}", "--out", "{tmp}/new", "--feature-map", "t2s"], "did you mean 't2r'"),
        (["convert", "{model}", "--out", "{tmp}/new", "--rank", "0"], "--rank=0: expected at least 1"),
        (
            ["convert", "{model}", "--out", "{tmp}/new", "--short-conv", "1"],
            "--short-conv=1: expected at least 2 taps",
        ),
        (
            ["convert", "{model}", "--out", "{tmp}/new", "--feature-map", "relu"],
            "--match-steps=300: --feature-map=relu has no weights to match; expected 0, or",
        ),
        (["convert", "{model}", "--out", "{tmp}/new", "--rope-order", "up"], "--rope-order='up'"),
        (
            ["convert", "{model}", "--out", "{tmp}/new", "--match-learning-rate", "-1"],
            "--match-learning-rate=-1.0: expected a positive finite number",
        ),
        (
            ["convert", "{model}", "--out", "{tmp}/new", "--sequence-length", "1"],
            "--sequence-length=1: expected at",
        ),
        (
            ["convert", "{model}", "--out", "{tmp}/new", "--text", "{tmp}/text.txt"],
            "--sequence-length=512: expected less than the held-out text, 215 tokens",
        ),
        (["convert", "{tmp}/words", "--out", "{tmp}/new"], "has no tokenizer"),
        (["convert", "{tmp}/damaged", "--out", "{tmp}/new"], "damaged"),
        (["convert", "{tmp}/partial", "--out", "{tmp}/new"], "are missing"),
        (["convert", "{tmp}/linear", "--out", "{tmp}/new"], "model_type='linrope'"),
    ],
)
def test_wrong_input_exits_2_with_one_line(
    arguments: list[str], cause: str, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = llama(tmp_path / "llama")
    if "words" in arguments[1]:
        llama(tmp_path / "words", vocab_size=100)
    elif "damaged" in arguments[1]:
        weights = llama(tmp_path / "damaged") / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
    elif "partial" in arguments[1]:
        config = llama(tmp_path / "partial") / "config.json"
        config.write_text(config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    elif "linear" in arguments[1]:
        to_linear(LlamaForCausalLM.from_pretrained(model)).save_pretrained(tmp_path / "linear")
    capfd.readouterr()
    assert run([part.format(tmp=tmp_path, model=model) for part in arguments]) == 2
    message = capfd.readouterr().err
    assert message.startswith("linrope: ")
    assert message.count("\n") == 1
    assert cause in message
    assert not (tmp_path / "new").exists()

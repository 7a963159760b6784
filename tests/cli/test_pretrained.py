"""linrope generate and eval on folders in Hugging Face format."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    PreTrainedTokenizerFast,
)

from linrope.cli.app import run
from linrope.cli.generation import stream
from linrope.models import LanguageModel, LanguageModelConfig
from linrope.models.huggingface import LinRopeConfig, LinRopeForCausalLM, LinRopeForMaskedLM
from linrope.models.training import Corpus, bits_by_position

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture
def linear(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = LinRopeConfig(vocab_size=256, max_position_embeddings=16, full_attention_interval=2, **SIZES)
    LinRopeForCausalLM(config).save_pretrained(tmp_path / "linear")
    return tmp_path / "linear"


def words(text: Path) -> PreTrainedTokenizerFast:
    """A tokenizer of the text's words, whose last token ends a text."""
    names = ["?", *dict.fromkeys(re.findall(r"\w+|[^\w\s]", text.read_text())), "<eos>"]
    made = Tokenizer(WordLevel({word: index for index, word in enumerate(names)}, unk_token="?"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?", eos_token="<eos>")


def test_generate_continues_with_what_transformers_generates(
    linear: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    command = ["generate", "--checkpoint", str(linear), "--prompt", "To be", "--max-new-tokens", "7"]
    assert run([*command, "--temperature", "0"]) == 0
    model = LinRopeForCausalLM.from_pretrained(linear)
    expected = model.generate(torch.tensor([list(b"To be")]), max_new_tokens=7, do_sample=False)[0]
    assert (
        capfdbinary.readouterr().out == bytes(expected.tolist()).decode("utf-8", "replace").encode() + b"\n"
    )
    assert run([*command[:-1], "0"]) == 0
    assert capfdbinary.readouterr().out == b"To be\n"
    printed = []
    for seed in ("1", "1", "2"):
        assert run([*command, "--seed", seed, "--temperature", "2"]) == 0
        printed.append(capfdbinary.readouterr().out)
    assert printed[0] == printed[1] != printed[2]


def test_a_language_model_s_load_names_what_loads_such_a_folder(linear: Path) -> None:
    with pytest.raises(
        ValueError, match=r"model_type='linrope', a model in Hugging Face format; load it with "
    ):
        LanguageModel.load(linear)


def test_eval_compares_models_of_both_kinds_on_a_text(
    linear: Path, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **SIZES)).save_pretrained(tmp_path / "llama")
    own = tmp_path / "own"
    small = ["--embed-dim", "32", "--layers", "1", "--heads", "2", "--sequence-length", "32", "--steps", "1"]
    assert run(["train", str(text), "--out", str(own), *small]) == 0
    folders = [linear, tmp_path / "llama", own]
    checkpoints = [part for folder in folders for part in ("--checkpoint", str(folder))]
    assert run(["eval", str(text), *checkpoints, "--length", "40", "--out", str(tmp_path)]) == 0
    models = json.loads((tmp_path / "evaluation.json").read_text())["models"]
    assert [model["attention"] for model in models] == ["linear and softmax", "llama", "linear"]
    assert [model["trained_length"] for model in models] == [16, 2048, 32]
    assert [model["held_out"] for model in models] == [False, False, True]
    model = LinRopeForCausalLM.from_pretrained(linear)
    pieces = bits_by_position(_AtOnce(model), Corpus.load(text).all(), 40)
    for row, expected in zip(models[0]["bins"], pieces, strict=True):
        assert row == pytest.approx(expected, rel=1e-4)
    capfd.readouterr()
    assert run(["eval", "--checkpoint", str(linear)]) == 2
    assert "linear: does not record the text it was trained on; expected a PATH" in capfd.readouterr().err


class _AtOnce(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, states: None) -> tuple[torch.Tensor, None]:
        assert states is None
        return self.model(tokens).logits, None


def test_generate_ends_where_the_model_ends_the_text(
    text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = words(text)
    sequence = [tokenizer.encode(word)[0] for word in ("or", "not", "<eos>", "be")]
    monkeypatch.setattr(
        "linrope.cli.generation.generate", lambda *_, **__: iter(torch.tensor(sequence).split(1))
    )
    own = LanguageModel(LanguageModelConfig(len(tokenizer), embed_dim=32, num_layers=1, num_heads=2))
    sampling = {"temperature": 0.0, "top_k": None, "top_p": None, "seed": None}
    stream(own, tokenizer, "To be", 4, **sampling)
    assert capfd.readouterr().out == "To be or not\n"

    config = LlamaConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **SIZES)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():  # the end is the likeliest token after any other
        for parameter in model.parameters():
            parameter.zero_()
        model.model.norm.weight.fill_(1)
        model.model.embed_tokens.weight.fill_(1)
        model.lm_head.weight[tokenizer.eos_token_id] = 1
    model.save_pretrained(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    assert run(["generate", "--checkpoint", str(tmp_path / "llama"), "--prompt", "To be"]) == 0
    assert capfd.readouterr().out.split() == ["To", "be"]


def _convert(folder: Path, text: Path) -> list[str]:
    return ["convert", str(folder), "--out", str(folder / "new"), "--text", str(text)]


def _generate(folder: Path, text: Path) -> list[str]:
    return ["generate", "--checkpoint", str(folder)]


def _eval(folder: Path, text: Path) -> list[str]:
    return ["eval", str(text), "--checkpoint", str(folder)]


def _refuses(command: list[str], cause: str, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    assert run(command) == 2
    message = capfd.readouterr().err
    assert cause in message
    assert message.count("\n") == 1


ALL = pytest.mark.parametrize("command", [_convert, _generate, _eval])


@ALL
def test_code_in_a_folder_is_not_run_and_nobody_is_asked(
    command: Any,
    text: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **SIZES)).save_pretrained(tmp_path)
    code = {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}
    _change(tmp_path, model_type="mine", auto_map=code)
    marker = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    (tmp_path / "mine.py").write_text(
        marker + "from transformers import LlamaConfig as C, LlamaForCausalLM as M\n"
    )
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    _refuses(command(tmp_path, text), "brings code of its own, which linrope does not run", capfd)
    assert not (tmp_path / "ran").exists()


def _change(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@ALL
def test_a_tokenizer_and_a_config_that_do_not_fit_are_refused(
    command: Any, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    LlamaForCausalLM(LlamaConfig(vocab_size=10, **SIZES)).save_pretrained(tmp_path)
    _refuses(command(tmp_path, text), "has no tokenizer; expected one, or vocab_size=256", capfd)
    words(text).save_pretrained(tmp_path)
    _refuses(command(tmp_path, text), "the tokenizer has 13 tokens, the model 10", capfd)
    _change(tmp_path, vocab_size=256, tie_word_embeddings=3)
    _refuses(command(tmp_path, text), f"{tmp_path}: ", capfd)


def test_models_that_eval_cannot_read_are_refused(
    text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    masked = LinRopeConfig(vocab_size=256, forget_gate=False, short_conv=None, **SIZES)
    LinRopeForMaskedLM(masked).save_pretrained(tmp_path / "masked")
    for command in (_generate, _eval):
        _refuses(command(tmp_path / "masked", text), "is_causal", capfd)
    bloom = BloomConfig(vocab_size=256, hidden_size=32, n_layer=1, n_head=2)
    BloomForCausalLM(bloom).save_pretrained(tmp_path / "bloom")
    _refuses(_eval(tmp_path / "bloom", text), "does not record the trained length; expected --length", capfd)
    mamba = Mamba2Config(
        vocab_size=256, hidden_size=32, num_hidden_layers=1, num_heads=4, head_dim=16, n_groups=1
    )
    Mamba2ForCausalLM(mamba).save_pretrained(tmp_path / "mamba")
    _refuses(_eval(tmp_path / "mamba", text), "expected a model that continues from past_key_values", capfd)

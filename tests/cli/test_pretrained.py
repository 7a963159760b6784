"""linrope generate and eval on folders in Hugging Face format."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from linrope.backends import native
from linrope.cli import pretrained
from linrope.cli.generation import stream
from linrope.decode.with_cache import WithCache
from linrope.integrations.transformers import replaced
from linrope.models import LanguageModel
from linrope.models.huggingface import LinRopeConfig, LinRopeForCausalLM, LinRopeForMaskedLM
from linrope.models.training import Corpus, bits_by_position
from tests.cli.commands import tiny_model, word_tokenizer
from tests.support import families

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


def llama(vocab_size: int = 256, **options: Any) -> hf.LlamaForCausalLM:
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=vocab_size, **SIZES, **options)).eval()


@pytest.fixture
def linear(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = LinRopeConfig(vocab_size=256, max_position_embeddings=16, full_attention_interval=2, **SIZES)
    LinRopeForCausalLM(config).save_pretrained(tmp_path / "linear")
    return tmp_path / "linear"


def test_generate_continues_with_what_transformers_generates(linear, run) -> None:
    command = "generate --checkpoint {tmp}/linear --prompt 'To be' --max-new-tokens "
    model = LinRopeForCausalLM.from_pretrained(linear)
    expected = model.generate(torch.tensor([list(b"To be")]), max_new_tokens=7, do_sample=False)[0]
    assert run(command + "7 --temperature 0") == bytes(expected.tolist()).decode("utf-8", "replace") + "\n"
    assert run(command + "0") == "To be\n"
    first, again, other = (run(command + f"7 --seed {seed} --temperature 2") for seed in (1, 1, 2))
    assert first == again != other


def test_a_language_model_s_load_names_what_loads_such_a_folder(linear) -> None:
    with pytest.raises(
        ValueError, match="model_type='linrope', a model in Hugging Face format; load it with "
    ):
        LanguageModel.load(linear)


def test_eval_compares_models_of_both_kinds_on_a_text(linear, run, refused, text, tmp_path) -> None:
    llama().save_pretrained(tmp_path / "llama")
    run("train {text} --out {tmp}/own --steps 1 {small}")
    folders = " ".join(f"--checkpoint {{tmp}}/{name}" for name in ("linear", "llama", "own"))
    run(f"eval {{text}} {folders} --length 40 --out {{tmp}}")
    models = json.loads((tmp_path / "evaluation.json").read_text())["models"]
    assert [(model["attention"], model["trained_length"], model["held_out"]) for model in models] == [
        ("linear and softmax", 16, False), ("llama", 2048, False), ("linear", 32, True),
    ]  # fmt: skip
    model = LinRopeForCausalLM.from_pretrained(linear)
    at_once = torch.nn.ModuleList([model])
    at_once.forward = lambda tokens, states: (model(tokens).logits, None)  # type: ignore[method-assign]
    for row, expected in zip(
        models[0]["bins"], bits_by_position(at_once, Corpus.load(text).all(), 40), strict=True
    ):
        assert row == pytest.approx(expected, rel=1e-4)
    message = "linear: does not record the text it was trained on; expected a PATH"
    assert message in refused("eval --checkpoint {tmp}/linear")


# By past_key_values and cache_params before transformers 5.24; Bamba's cache does not count tokens
@pytest.mark.parametrize("kind", ["llama", "mamba2", "bamba"])
def test_a_model_of_transformers_continues_from_its_cache(kind: str) -> None:
    model = llama() if kind == "llama" else families.model(kind)
    with_cache, tokens = WithCache(model), torch.randint(90, (1, 30))
    with torch.no_grad():
        first, states = with_cache(tokens[:, :13])
        second, _ = with_cache(tokens[:, 13:], states)
        torch.testing.assert_close(torch.cat((first, second), 1), model(tokens).logits)
        torch.testing.assert_close(with_cache(tokens, logits_to_keep=2)[0], model(tokens).logits[:, -2:])


def test_a_model_that_forgets_its_cache_is_refused() -> None:
    with pytest.raises(
        ValueError, match="model: got MiniMaxForCausalLM, whose logits of a text in pieces are not"
    ):
        WithCache(families.model("minimax"))


@pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))
def test_a_model_of_transformers_with_linear_layers_runs_on_linrope(run, text, tmp_path, monkeypatch) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_heads": 4, "head_dim": 16, "n_groups": 1}
    net = hf.Mamba2ForCausalLM(hf.Mamba2Config(vocab_size=256, max_position_embeddings=64, **sizes))
    net.save_pretrained(tmp_path / "mamba2")
    computed, forward = [], hf.Mamba2Model.forward

    def watched(self, *arguments, **options):
        computed.append(replaced(self))
        return forward(self, *arguments, **options)

    monkeypatch.setattr(hf.Mamba2Model, "forward", watched)
    run("generate --checkpoint {tmp}/mamba2 --max-new-tokens 3 --device cpu")
    run("eval {text} --checkpoint {tmp}/mamba2 --length 20 --out {tmp} --device cpu")
    assert len(computed) > 3
    assert all("scan" in names for names in computed)
    assert replaced(net) == ()


@pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))
def test_functions_that_linrope_does_not_know_run_as_they_are_and_are_logged(monkeypatch, caplog) -> None:
    def refused(*families: str) -> None:
        raise RuntimeError(f"{families[0]}: the scan has other parameters")

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_heads": 4, "head_dim": 16, "n_groups": 1}
    monkeypatch.setattr(pretrained, "enable", refused)
    with pretrained.on_linrope(hf.Mamba2Model(hf.Mamba2Config(**sizes)), torch.device("cpu")) as enabled:
        assert enabled.families == ()
    assert "Mamba2Model runs transformers' own code: mamba2: the scan has other parameters" in caplog.text


def test_generate_ends_where_the_model_ends_the_text(run, text, tmp_path, capfd, monkeypatch) -> None:
    tokenizer = word_tokenizer(text, eos_token="<eos>")
    tokens = torch.tensor(tokenizer.convert_tokens_to_ids(["or", "not", "<eos>", "be"]))
    monkeypatch.setattr("linrope.cli.generation.generate", lambda *_, **__: iter(tokens.split(1)))
    sampling = {"temperature": 0.0, "top_k": None, "top_p": None, "seed": None}
    stream(tiny_model(len(tokenizer)), tokenizer, "To be", 4, **sampling)
    assert capfd.readouterr().out == "To be or not\n"

    model = llama(len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    with torch.no_grad():  # the end is the likeliest token after any other
        for parameter in model.parameters():
            parameter.zero_()
        model.model.norm.weight.fill_(1)
        model.model.embed_tokens.weight.fill_(1)
        model.lm_head.weight[tokenizer.eos_token_id] = 1
    model.save_pretrained(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    assert run("generate --checkpoint {tmp}/llama --prompt 'To be'").split() == ["To", "be"]


CONVERT = "convert {tmp} --out {tmp}/new --text {text}"
GENERATE = "generate --checkpoint {tmp}"
EVAL = "eval {text} --checkpoint {tmp}"
each_command = pytest.mark.parametrize("command", [CONVERT, GENERATE, EVAL])


@each_command
def test_code_in_a_folder_is_not_run_and_nobody_is_asked(
    command: str, refused, tmp_path, monkeypatch
) -> None:
    llama().save_pretrained(tmp_path)
    code = {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}
    _change(tmp_path, model_type="mine", auto_map=code)
    marker = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    (tmp_path / "mine.py").write_text(
        marker + "from transformers import LlamaConfig as C, LlamaForCausalLM as M\n"
    )
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    assert "brings code of its own, which linrope does not run" in refused(command)
    assert not (tmp_path / "ran").exists()


def _change(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@each_command
def test_a_tokenizer_and_a_config_that_do_not_fit_are_refused(command: str, refused, text, tmp_path) -> None:
    llama(vocab_size=10).save_pretrained(tmp_path)
    assert "has no tokenizer; expected one, or vocab_size=256" in refused(command)
    word_tokenizer(text, eos_token="<eos>").save_pretrained(tmp_path)
    assert "the tokenizer has 13 tokens, the model 10" in refused(command)
    _change(tmp_path, vocab_size=256, tie_word_embeddings=3)
    assert f"{tmp_path}: " in refused(command)


def test_models_that_eval_cannot_read_are_refused(refused, tmp_path) -> None:
    masked = LinRopeConfig(vocab_size=256, forget_gate=False, short_conv=None, **SIZES)
    LinRopeForMaskedLM(masked).save_pretrained(tmp_path)
    for command in (GENERATE, EVAL):
        assert "is_causal" in refused(command)
    bloom = hf.BloomConfig(vocab_size=256, hidden_size=32, n_layer=1, n_head=2)
    hf.BloomForCausalLM(bloom).save_pretrained(tmp_path)
    assert "does not record the trained length; expected --length" in refused(EVAL)
    without_cache = hf.OpenAIGPTConfig(vocab_size=256, n_embd=32, n_layer=1, n_head=2)
    hf.OpenAIGPTLMHeadModel(without_cache).save_pretrained(tmp_path)
    assert "of transformers whose forward takes a cache" in refused(EVAL)

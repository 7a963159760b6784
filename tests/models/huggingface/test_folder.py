"""A saved folder: what lies in it, and how it is loaded by those who know linrope and those who do not."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    ByT5Tokenizer,
    pipeline,
)

from linrope.models.huggingface import (
    LORA_TARGETS,
    LinRopeConfig,
    LinRopeForCausalLM,
    LinRopeForQuestionAnswering,
    LinRopeForTokenClassification,
)
from tests.models.huggingface.tiny import causal_lm, checkpoint_activations, config, tokens


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = ByT5Tokenizer()
    torch.manual_seed(0)
    LinRopeForCausalLM(config(vocab_size=len(tokenizer))).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_the_card_names_the_import_and_stays_where_there_is_one(folder: Path) -> None:
    card = folder / "README.md"
    assert "import linrope.models.huggingface" in card.read_text()
    assert "AutoModelForCausalLM.from_pretrained" in card.read_text()
    card.write_text("mine")
    LinRopeForCausalLM.from_pretrained(folder).save_pretrained(folder)
    assert card.read_text() == "mine"


def test_other_processes_than_the_first_write_no_files_beside(tmp_path: Path) -> None:
    model = LinRopeForCausalLM(config())
    model.save_pretrained(tmp_path / "named", is_main_process=False)
    model.save_pretrained(tmp_path / "by position", False)
    assert not list(tmp_path.glob("*/README.md")) + list(tmp_path.glob("*/linrope_models.py"))


@pytest.mark.long
def test_without_the_import_transformers_loads_the_folder_by_trust_remote_code(folder: Path) -> None:
    code = f"""
from transformers import AutoModelForCausalLM, pipeline
try:
    AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=False)
except ValueError as error:
    assert "trust_remote_code=True" in str(error), error
else:
    raise AssertionError
model = AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True)
import linrope.models.huggingface
assert type(model) is linrope.models.huggingface.LinRopeForCausalLM
model.save_pretrained({str(folder / "again")!r})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    files = {path.name for path in (folder / "again").iterdir()}
    code_file = {"linrope_models.py"}
    assert {name for name in files if name.endswith(".py")} == code_file  # no copies of linrope's own code


def test_a_pipeline_takes_the_folder(folder: Path) -> None:
    generate = pipeline("text-generation", model=str(folder), device="cpu")
    (made,) = generate("To be", max_new_tokens=3, do_sample=False)
    assert made["generated_text"].startswith("To be")


SPAN = {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])}


@pytest.mark.parametrize(
    ("kind", "labels"),
    [
        (LinRopeForTokenClassification, {"labels": torch.ones(2, 9).long()}),
        (LinRopeForQuestionAnswering, SPAN),
    ],
)
def test_heads_learn(kind, labels) -> None:
    model = kind(config(num_labels=3, is_causal=False))
    model(tokens(2, 9), **labels).loss.backward()
    assert all(p.grad is not None for p in model.model.layers.parameters())


def test_lora_finds_its_targets(recwarn: pytest.WarningsRecorder) -> None:
    tuned = get_peft_model(causal_lm(), LoraConfig(r=2))
    assert {name.rpartition(".")[2] for name in tuned.targeted_module_names} == set(LORA_TARGETS)


@pytest.mark.parametrize(
    ("name", "got"),
    [("sdpa", "sdpa"), ("flash_attention_2", "flash attention"), ("flex_attention", "flex_attention")],
)
def test_another_attention_asked_for_by_name_says_what_there_is(name: str, got: str) -> None:
    with pytest.raises(
        ValueError, match=f"^attn_implementation: got {got}, expected None or 'eager': linrope"
    ):
        LinRopeForCausalLM._from_config(config(), attn_implementation=name)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of generate(), in that case
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", [{}, {"full_attention_interval": 2}], ids=["linear", "hybrid"])
def test_checkpointing_keeps_the_cache(kind: dict, reentrant: bool) -> None:
    model = causal_lm(**kind).train()
    ids = tokens(2, 9)
    with torch.no_grad():
        generated = model.generate(ids, max_new_tokens=4, do_sample=False)
    expected = model(ids, use_cache=True)
    expected.logits.sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    checkpoint_activations(model, {"use_reentrant": reentrant})
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), generated)
    out = model(ids, use_cache=True)
    assert torch.equal(out.logits, expected.logits)
    out.logits.sum().backward()
    for p, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=0, atol=1e-9 * float(grad.abs().max()))
    cache, other = out.past_key_values, expected.past_key_values
    assert cache.get_seq_length() == 9
    step = ids[:, :1]
    with torch.no_grad():
        again = model(step, past_key_values=cache).logits
        assert torch.equal(again, model(step, past_key_values=other).logits)


def test_checkpointing_makes_a_cache_only_if_asked_to_and_where_there_can_be_one() -> None:
    model, ids = causal_lm().train(), tokens(1, 8)
    packed = {"position_ids": torch.arange(4).repeat(2)[None]}
    expected = model(ids, **packed).logits
    checkpoint_activations(model, {"use_reentrant": False})
    out = model(ids, use_cache=True, **packed)
    assert out.past_key_values is None
    assert torch.equal(out.logits, expected)
    assert model(ids).past_key_values is None
    for kind in (model, model.model):
        assert kind(ids, use_cache=True, cu_seqlens=None).past_key_values.get_seq_length() == 8


@pytest.mark.parametrize(
    "values",
    [
        {"hidden_size": "x"}, {"hidden_size": 2.5}, {"num_hidden_layers": True}, {"feature_map": 3},
        {"feature_map": {"name": ["relu"]}}, {"decay": [{}]}, {"rope_parameters": [1]}, {"layer_types": 5},
        {"layer_types": [["a"]], "num_hidden_layers": 1}, {"selective_rope": 3}, {"head_dim": "x"},
        {"is_causal": "no"}, {"rms_norm_eps": "x"}, {"full_attention_interval": "2"}, {"rope_order": 3},
    ],
    ids=str,
)  # fmt: skip
def test_a_config_of_wrong_types_is_a_valueerror(values: dict) -> None:
    with pytest.raises(ValueError, match=r"config: got|expected"):
        LinRopeConfig(**values)


def test_without_transformers_the_extra_is_named() -> None:
    code = "import sys; sys.modules['transformers'] = None; import linrope.models.huggingface"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "transformers is missing; install linrope[huggingface]" in done.stderr

"""A saved folder: what lies in it, and how it is loaded by those who know linrope and those who do not."""

import importlib
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ByT5Tokenizer, pipeline

from linrope.models import huggingface
from linrope.models.huggingface import LinRopeForCausalLM
from tests.models.huggingface.tiny import HYBRID, config, tokens


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
    copies = [path.name for path in (folder / "again").glob("*.py")]
    assert copies == ["linrope_models.py"]  # none of linrope's own code


def test_a_pipeline_takes_the_folder(folder: Path) -> None:
    generate = pipeline("text-generation", model=str(folder), device="cpu")
    (made,) = generate("To be", max_new_tokens=3, do_sample=False)
    assert made["generated_text"].startswith("To be")


def test_heads_learn() -> None:
    span = {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])}
    labels = {"labels": torch.ones(2, 9).long()}
    for head, given in (("TokenClassification", labels), ("QuestionAnswering", span)):
        model = getattr(huggingface, f"LinRopeFor{head}")(config(num_labels=3, is_causal=False))
        model(tokens(2, 9), **given).loss.backward()
        assert all(p.grad is not None for p in model.model.layers.parameters())


@pytest.mark.parametrize("name", ["flash_attention_2", "flex_attention"])
def test_another_attention_asked_for_by_name_says_what_there_is(name: str) -> None:
    message = f"^attn_implementation: got {name[:5]}.*, expected 'sdpa' or 'eager'"
    with pytest.raises(ValueError, match=message):
        LinRopeForCausalLM._from_config(config(), attn_implementation=name)


@pytest.mark.parametrize("options", [{}, HYBRID])
def test_the_attention_that_training_scripts_ask_for_changes_nothing(options: dict[str, Any]) -> None:
    found = []
    for name in (None, "sdpa", "eager"):
        torch.manual_seed(0)
        found.append(LinRopeForCausalLM._from_config(config(**options), attn_implementation=name).eval())
    one, *others = [model(tokens(2, 9)).logits for model in found]
    assert all(torch.equal(one, x) for x in others)


@pytest.mark.parametrize("how", ["call", "config", "generate"])
def test_weights_of_the_attention_are_refused(how: str) -> None:
    asked = {"output_attentions": True}
    model = LinRopeForCausalLM._from_config(config(**asked if how == "config" else {}))
    call = partial(model.generate, max_new_tokens=1) if how == "generate" else model
    with pytest.raises(ValueError, match=r"^output_attentions: got True, expected False: no layer forms"):
        call(tokens(1, 3), **asked if how != "config" else {})


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "linrope.models.huggingface")
    with pytest.raises(ModuleNotFoundError, match=r"transformers is missing; install linrope\[huggingface\]"):
        importlib.import_module("linrope.models.huggingface")

"""The recipes of docs/extending.md, carried out in a copy of the library."""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from linrope import LinearRoPEAttention, linear_rope_attention, linear_rope_state
from linrope.cli.layer_flags import FLAGS
from linrope.decode.attention_step import AttentionStep
from linrope.layer.config import OPTIONS, SHARED, LayerConfig
from linrope.layer.keywords import meaning
from linrope.layer.softmax_attention import SoftmaxAttention
from linrope.operation import functional
from linrope.operation.options import Options
from linrope.recurrence.call import INPUTS, Call, Gradients, Resolved
from tests.layer.cases import ALL

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "extending.md").read_text("utf-8")
NAME = re.compile(r"`(\w+)(?:=[^`]*)?`")
RECIPES = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S))

MAP = """
import torch
from linrope import feature_maps, linear_rope_attention
q, k, v = torch.randn(3, 1, 9, 2, 4).unbind(0)
fast = linear_rope_attention(q, k, v, feature_map="softplus")
slow = linear_rope_attention(q, k, v, feature_map="softplus", backend="reference")
torch.testing.assert_close(fast, slow)
q.requires_grad_()
linear_rope_attention(q, k, v, feature_map="softplus").sum().backward()
try:
    linear_rope_attention(q, k, v, feature_map="softplus", backend="native")
except RuntimeError as error:
    print(error)
"""
OPTION = """
import torch
from linrope import linear_rope_attention
q, k, v = torch.randn(3, 1, 9, 2, 4).unbind(0)
plain = linear_rope_attention(q, k, v, backend="reference")
torch.testing.assert_close(linear_rope_attention(q, k, v, gain=2.0, backend="reference"), 2 * plain)
torch.testing.assert_close(linear_rope_attention(q, k, v), plain)
try:
    linear_rope_attention(q, k, v, gain=2.0)
except RuntimeError as error:
    print(error)
"""

LAYER_OPTION = """
import torch
from linrope import LinearRoPEAttention
from linrope.cli.app import run
from linrope.decode import prepare
from linrope.models import LanguageModel, LanguageModelConfig, generate
from linrope.models.huggingface import LinRopeConfig, LinRopeForCausalLM
x = torch.randn(1, 9, 16)
layer = LinearRoPEAttention(16, 2, v_norm=True)
scaled = LinearRoPEAttention(16, 2, v_norm=True)
scaled.load_state_dict(layer.state_dict() | {"v_proj.weight": 2 * layer.v_proj.weight})
torch.testing.assert_close(scaled(x), layer(x), rtol=1e-4, atol=1e-5)
config = LanguageModelConfig(embed_dim=16, num_layers=1, num_heads=2, v_norm=True)
assert LanguageModelConfig.from_dict(config.to_dict()) == config
model = LanguageModel(config).requires_grad_(False)
assert "blocks.0.attention.v_norm.weight" in model.state_dict()
assert len(list(generate(model, torch.zeros(1, 4).long(), 3))) == 3
sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
student = LinRopeForCausalLM(LinRopeConfig.from_dict(LinRopeConfig(**sizes, v_norm=True).to_dict()))
assert "model.layers.0.self_attn.v_norm.weight" in student.state_dict()
run(["train", "--help"])
try:
    prepare(model, model(torch.zeros(1, 4).long())[1])
except ValueError as error:
    print(error)
try:
    LinearRoPEAttention(16, 2, v_norm=1)
except TypeError as error:
    print(error)
"""


BACKEND = """
import torch
from linrope import Rotary, linear_rope_attention
q, k, v = torch.randn(3, 1, 9, 2, 4).unbind(0)
for options in ({}, {"feature_map": "silu", "normalize": False}):
    fast = linear_rope_attention(q, k, v, backend="loop", **options)
    torch.testing.assert_close(fast, linear_rope_attention(q, k, v, backend="reference", **options))
linear_rope_attention(q.requires_grad_(), k, v, backend="loop").sum().backward()
try:
    linear_rope_attention(q, k, v, rotary=Rotary(4), backend="loop")
except RuntimeError as error:
    print(error)
"""
TOKENS = """
import torch
from linrope import linear_rope_attention, linear_rope_state
q, k, v = torch.randn(3, 1, 9, 2, 4).unbind(0)
emphasis, mask = torch.rand(1, 9, 2, requires_grad=True), torch.arange(9)[None] > 2
given = {"key_mask": mask, "backend": "reference"}
out = linear_rope_attention(q, k, v, emphasis=emphasis, **given)
torch.testing.assert_close(out, linear_rope_attention(q, k, v, write=emphasis, **given))
out.sum().backward()
assert emphasis.grad[0, 3:].abs().min() > 0
state = linear_rope_state(k, v, emphasis=emphasis.detach(), **given)
torch.testing.assert_close(state.kv, linear_rope_state(k, v, write=emphasis.detach(), **given).kv)
linear_rope_attention(q.requires_grad_(), k, v).sum().backward()
try:
    linear_rope_attention(q, k, v, emphasis=emphasis)
except RuntimeError as error:
    print(error)
"""
OPERATOR = """
import torch
from linrope.ops import soft_clip
x = torch.randn(5, dtype=torch.float64, requires_grad=True)
assert torch.autograd.gradcheck(soft_clip, x) and torch.autograd.gradgradcheck(soft_clip, x)
compiled = torch.compile(soft_clip, fullgraph=True, backend="aot_eager")
torch.testing.assert_close(compiled(x), soft_clip(x))
torch.testing.assert_close(torch.func.vmap(soft_clip)(x.detach()[:, None])[:, 0], soft_clip(x.detach()))
try:
    soft_clip([1.0])
except TypeError as error:
    print(error)
"""
# By heading: a program that runs with the change, and what it prints
PROGRAMS = {
    "A new feature map": (MAP, "feature_map='softplus': this backend only applies identity, elu+1"),
    "A new option of the operation": (
        OPTION,
        "gain: this backend does not compute it; use backend='reference'",
    ),
    "A new input per token": (TOKENS, "emphasis: this backend does not compute it"),
    "A new option of the layer": (LAYER_OPTION, "v_norm=1: expected True or False"),
    "A new backend": (BACKEND, "backend='loop' cannot run: rotary: this backend does not compute it"),
    "A new operator": (OPERATOR, "x: got list, expected a dense torch.Tensor"),
}
# Each in one copy of the library. An option and an input change the same line of the reference.
COPIES = [[name for name in PROGRAMS if name != "A new input per token"], ["A new input per token"]]
# Reads JSON with the programs of each folder. Runs those of a folder in a process of its own, and prints a line of JSON
# with what they printed, or with their tracebacks.
RUN = """
import contextlib, io, json, os, sys, traceback
import torch  # once for all
for folder, programs in json.load(sys.stdin).items():
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        continue
    os.chdir(folder)
    sys.path.insert(0, folder)
    printed = {}
    for name, program in programs.items():
        with contextlib.redirect_stdout(io.StringIO()) as out:
            try:
                exec(program, {})
            except Exception:
                traceback.print_exc(file=out)
        printed[name] = out.getvalue()
    print(json.dumps(printed), flush=True)
    os._exit(0)
"""


def apply(recipe: str, folder: Path) -> set[str]:
    """Applies the recipe's diff to the copy; returns the files that it touched."""
    diff = re.search(r"```diff\n(.*?)```", recipe, re.S)
    assert diff is not None
    touched = set()
    for name, hunks in re.findall(r"^\+\+\+ (\S+)\n(.*?)(?=^\+\+\+ |\Z)", diff[1], re.M | re.S):
        path = folder / name
        text = path.read_text("utf-8") if path.exists() else "\n"
        for hunk in hunks.split("@@\n")[1:]:
            lines = hunk.splitlines()
            before = "".join(f"{line[1:]}\n" for line in lines if line[0] in " -")
            after = "".join(f"{line[1:]}\n" for line in lines if line[0] in " +")
            assert text.count(f"\n{before}") == 1, f"{name}: expected once: {before}"
            text = text.replace(f"\n{before}", f"\n{after}")
        path.write_text(text, "utf-8")
        touched.add(name)
    return touched


@pytest.fixture(scope="module")
def carried_out(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[set[str], str]]:
    """By heading: the files that a recipe touched, and what its program printed."""
    touched, programs = {}, {}
    for headings in COPIES:
        folder = tmp_path_factory.mktemp("copy")
        shutil.copytree(ROOT / "linrope", folder / "linrope", ignore=shutil.ignore_patterns("__pycache__"))
        touched |= {heading: apply(RECIPES[heading], folder) for heading in headings}
        programs[str(folder)] = {heading: PROGRAMS[heading][0] for heading in headings}
    environment = os.environ | {"PYTHONPATH": str(ROOT / "kernels")}
    how = {
        "cwd": folder,
        "env": environment,
        "input": json.dumps(programs),
        "capture_output": True,
        "text": True,
    }
    run = subprocess.run([sys.executable, "-c", RUN], **how)
    assert run.returncode == 0, run.stderr
    printed = dict(item for line in run.stdout.splitlines() for item in json.loads(line).items())
    return {heading: (files, printed[heading]) for heading, files in touched.items()}


@pytest.mark.xdist_group("recipes")  # one process makes the copy
@pytest.mark.parametrize("heading", PROGRAMS)
def test_a_recipe_works_as_it_stands_and_says_how_many_files_it_touches(heading: str, carried_out) -> None:
    touched, printed = carried_out[heading]
    assert PROGRAMS[heading][1] in printed
    files = "1 file" if len(touched) == 1 else f"{len(touched)} files"
    assert f"The change touches {files} of linrope/" in RECIPES[heading].replace("\n", " ")


def test_the_layers_show_the_fields_of_their_config_as_keywords() -> None:
    own = {"embed_dim", "num_heads", "device", "dtype"}
    defaults = {field.name: field.default for field in fields(LayerConfig)}
    for layer, names in ((LinearRoPEAttention, set(OPTIONS)), (SoftmaxAttention, {*SHARED, "rotary"})):
        parameters = inspect.signature(layer).parameters
        assert set(parameters) == own | names
        assert all(parameters[name].default == defaults[name] for name in names & set(OPTIONS))
    plain = LayerConfig(8, 2)
    assert LayerConfig(**plain.to_dict()) == plain == LinearRoPEAttention(8, 2).config


def test_every_option_has_a_meaning_and_every_flag_a_sentence() -> None:
    for name in OPTIONS:
        assert re.fullmatch(r"\S.*[^:]", meaning(name)), name
    for name in FLAGS:
        assert meaning(name).endswith("."), name


def test_the_pages_name_every_option_and_argument() -> None:
    arguments, options = (
        (ROOT / "docs" / name).read_text("utf-8") for name in ("quickstart.md", "layer_options.md")
    )
    rows = {
        name for line in options.splitlines() if line[:1] == "|" for name in NAME.findall(line.split("|")[1])
    }
    assert set(OPTIONS) <= rows
    in_examples = {"q", "k", "v", "state", "return_state", "shard"}
    assert set(inspect.signature(linear_rope_attention).parameters) - in_examples <= set(
        NAME.findall(arguments)
    )


def test_the_layers_cases_have_every_option() -> None:
    assert set(OPTIONS) - {"context_dim"} == set().union(*ALL.values()) - {"num_heads", "dtype"}


def test_signatures_and_records_agree_about_names_and_defaults() -> None:
    """The public signatures, the record and the options for type checkers list the same parts."""
    made_by_a_plan = {field.name for field in fields(Resolved)}
    record = {field.name: field.default for field in fields(Call) if field.name not in made_by_a_plan}
    signature, state_alone = (
        {name: x.default for name, x in inspect.signature(f).parameters.items() if name != "shard"}
        for f in (linear_rope_attention, linear_rope_state)
    )
    assert signature.keys() == record.keys()
    optional = {name: x for name, x in signature.items() if x is not inspect.Parameter.empty}
    assert optional == {name: record[name] for name in optional}
    assert set(get_type_hints(Options)) == set(optional) - {"return_state"}
    of_outputs = {"q", "key_positions", "causal", "normalize", "eps", "eps_mode", "return_state"}
    assert state_alone == {name: x for name, x in signature.items() if name not in of_outputs}
    assert Gradients._fields == (*INPUTS, "kv", "z")


def test_a_prepared_step_takes_every_input_of_a_token() -> None:
    assert set(INPUTS) == set(inspect.signature(AttentionStep.__call__).parameters) - {"self"}


@pytest.mark.parametrize("function", [linear_rope_attention, linear_rope_state])
def test_every_argument_reaches_the_call(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Call] = []
    monkeypatch.setattr(functional, "attend", lambda call: (calls.append(call), (None, object()))[1])
    given = {name: object() for name in inspect.signature(function).parameters if name != "shard"}
    tensors = [given.pop(name) for name in ("q", "k", "v") if name in given]
    function(*tensors, **given)
    assert [getattr(calls[0], name) for name in given] == [*given.values()]

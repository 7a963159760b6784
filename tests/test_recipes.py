"""The recipes of CONTRIBUTING.md, carried out in a copy of the library."""

import inspect
import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

from linrope import linear_rope_attention, linear_rope_state
from linrope.operation.options import Options
from linrope.recurrence.call import Call, Resolved

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
RECIPES = re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S)

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


def apply(recipe: str, folder: Path) -> set[str]:
    """Applies the recipe's diff to the copy; returns the files that it touched."""
    diff = re.search(r"```diff\n(.*?)```", recipe, re.S)
    assert diff is not None
    touched = set()
    for name, hunks in re.findall(r"^\+\+\+ (\S+)\n(.*?)(?=^\+\+\+ |\Z)", diff[1], re.M | re.S):
        path = folder / name
        text = path.read_text("utf-8")
        for hunk in hunks.split("@@\n")[1:]:
            lines = hunk.splitlines()
            before = "".join(f"{line[1:]}\n" for line in lines if line[0] in " -")
            after = "".join(f"{line[1:]}\n" for line in lines if line[0] in " +")
            assert text.count(f"\n{before}") == 1, f"{name}: expected once: {before}"
            text = text.replace(f"\n{before}", f"\n{after}")
        path.write_text(text, "utf-8")
        touched.add(name)
    return touched


@pytest.mark.parametrize(
    ("title", "script", "reason", "most"),
    [
        ("A new feature map", MAP, "feature_map='softplus': this backend only applies identity, elu+1", 3),
        ("A new option of the operation", OPTION, "gain=2.0: use backend='reference'", 5),
    ],
    ids=["map", "option"],
)
def test_a_recipe_works_as_it_stands(title: str, script: str, reason: str, most: int, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "linrope", tmp_path / "linrope", ignore=shutil.ignore_patterns("__pycache__"))
    touched = apply(dict(RECIPES)[title], tmp_path)
    assert len(touched) <= most
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "kernels")])}
    how = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    run = subprocess.run([sys.executable, "-c", script], **how)
    assert run.returncode == 0, run.stderr
    assert reason in run.stdout


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
    assert state_alone == {name: signature[name] for name in state_alone}

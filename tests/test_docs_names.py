"""docs/layer_options.md, "Names of sizes": each name is one of its column's."""

import inspect
import re
from pathlib import Path

import pytest
import typer

from linrope import LinearRoPEAttention
from linrope.cli.app import app
from linrope.models import LanguageModelConfig

ROOT = Path(__file__).parents[1]


def test_the_names_of_sizes_are_there() -> None:
    configuration = pytest.importorskip("linrope.models.huggingface.configuration")
    _, _, section = (ROOT / "docs/layer_options.md").read_text("utf-8").partition("## Names of sizes\n")
    _, _, *rows = [line for line in section.splitlines() if line.startswith("|")]
    columns = [
        re.findall(r"`([^`]+)`", " ".join(cells)) for cells in zip(*(row.split("|")[2:-1] for row in rows))
    ]
    train = typer.main.get_command(app).commands["train"]
    layer = {*inspect.signature(LinearRoPEAttention).parameters}
    names = (
        layer | {*inspect.signature(LanguageModelConfig).parameters},
        {option for parameter in train.params for option in parameter.opts},
        {*dir(configuration.LinRopeConfig())},
    )
    assert [set(column) - known for column, known in zip(columns, names, strict=True)] == [set()] * 3

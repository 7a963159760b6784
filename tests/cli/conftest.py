"""Fixtures for the tests of the commands: a text, and functions that run a command."""

import shlex
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import typer

from linrope.cli.app import run as run_command
from linrope.models import LanguageModel, LanguageModelConfig
from tests.cli.commands import SMALL

Run = Callable[..., str]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("To be, or not to be, that is the question. " * 100)
    return path


@pytest.fixture
def run(text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs a command and returns what it prints. {text} and {tmp} are paths, {small} the options of a small model."""

    def run(command: str, status: int = 0) -> str:
        capfd.readouterr()
        arguments = shlex.split(command.replace("{small}", SMALL))
        found = run_command([part.format(text=text, tmp=tmp_path) for part in arguments])
        printed, message = capfd.readouterr()
        assert found == status, message
        return message if status else printed

    return run


@pytest.fixture
def refused(run: Run) -> Run:
    """Runs a command whose input is wrong; returns the one line that says why."""

    def refused(command: str) -> str:
        message = run(command, 2)
        assert message.startswith("linrope: ")
        assert message.count("\n") == 1
        return message

    return refused


@pytest.fixture
def only_the_model(monkeypatch, text) -> list[LanguageModelConfig]:
    """Commands end when the model has been made, on the meta device. The list holds the models' configs."""
    made = []

    def meta(config: LanguageModelConfig) -> LanguageModel:
        made.append(config)
        with torch.device("meta"):
            return LanguageModel(config)

    end = Mock(side_effect=typer.Exit(0))
    monkeypatch.setattr("linrope.cli.run.accelerator_on", Mock())
    monkeypatch.setattr("linrope.cli.run.LanguageModel", meta)
    monkeypatch.setattr("linrope.cli.run.Corpus", Mock(load_source=Mock(return_value=Mock(vocab_size=256))))
    monkeypatch.setattr("linrope.cli.run.Trainer", end)
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=256, **sizes))
    monkeypatch.setattr("linrope.cli.pretrained.load_pretrained", lambda folder: llama)
    monkeypatch.setattr("linrope.models.training.Corpus", Mock(load=end))
    return made

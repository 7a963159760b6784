"""Fixtures for the tests of the commands: a text, and functions that run a command."""

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from linrope.cli.app import run as run_command
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

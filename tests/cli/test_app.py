import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from linrope.cli.app import run
from linrope.models.training import checkpoints

SMALL = ["--embed-dim", "32", "--layers", "1", "--heads", "2", "--batch-size", "2", "--sequence-length", "32"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("To be, or not to be, that is the question. " * 100)
    return path


@pytest.mark.parametrize("command", [[], ["train"], ["generate"], ["bench"], ["demo"]])
def test_help_says_what_each_command_does(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*command, "--help"]) == 0
    assert "Usage: " in capsys.readouterr().out


def test_train_resume_generate(text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "run")
    assert run(["train", str(text), "--out", out, "--steps", "4", *SMALL]) == 0
    assert "bits per byte after 4 steps" in capfd.readouterr().out
    assert run(["train", str(text), "--out", out, "--resume"]) == 0
    capfd.readouterr()
    generated = []
    for _ in range(2):
        assert (
            run(
                ["generate", "--checkpoint", out, "--prompt", "To be", "--max-new-tokens", "9", "--seed", "1"]
            )
            == 0
        )
        generated.append(capfd.readouterr().out)
    assert generated[0].startswith("To be")
    assert len(generated[0].rstrip("\n")) >= 5
    assert generated[0] == generated[1]


def test_train_with_other_attention_and_positions(
    text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, choice = tmp_path / "run", ["--attention", "softmax", "--positions", "shaw"]
    assert run(["train", str(text), "--out", str(out), "--steps", "3", *choice, *SMALL]) == 0
    assert "bits per byte after 3 steps" in capfd.readouterr().out
    config = json.loads((checkpoints(out)[-1] / "config.json").read_text())
    assert (config["attention"], config["positions"]) == ("softmax", "shaw")
    assert run(["generate", "--checkpoint", str(out), "--prompt", "To be", "--max-new-tokens", "5"]) == 0
    assert capfd.readouterr().out.startswith("To be")


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["train", "absent.txt"], "absent.txt: no such file or folder"),
        (["train", "--steps", "many"], "--steps"),
        (["train", "--stepz", "1"], "--stepz"),
        (["train", "{text}", "--steps", "0"], "steps=0"),
        (["train", "{text}", "--feature-map", "elu+"], "did you mean 'elu+1'"),
        (["train", "{text}", "--rotary", "both"], "rotary='both'"),
        (["train", "{text}", "--attention", "softmax", "--rotary", "both"], "rotary='both'"),
        (["train", "{text}", "--attention", "square"], "attention='square'"),
        (["train", "{text}", "--positions", "learnt"], "did you mean 'learned'"),
        (["train", "{text}", "--positions", "deberta"], "expected attention='softmax'"),
        (["train", "{text}", "--feature-map", "silu"], "signed"),
        (["train", "{text}", "--out", "{text}/run", "--steps", "1", *SMALL], "text.txt"),
        (["train", "{text}", "--out", "{tmp}/none", "--resume"], "expected a folder with checkpoints"),
        (["generate", "--checkpoint", "{tmp}"], "expected a folder with checkpoints"),
        (["generate"], "--checkpoint"),
        (["bench", "--max-length", "1000"], "--max-length=1000"),
        (["bench", "--positions", "1k"], "--positions='1k'"),
        (["dance"], "dance"),
    ],
)
def test_wrong_input_exits_2_with_one_line(
    arguments: list[str], cause: str, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run([part.format(text=text, tmp=tmp_path) for part in arguments]) == 2
    message = capfd.readouterr().err
    assert message.startswith("linrope: ")
    assert message.count("\n") == 1
    assert cause in message


def test_ctrl_c_saves_and_resume_goes_on(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [
        sys.executable,
        "-c",
        "from linrope.cli import main; main()",
        "train",
        str(text),
        "--out",
        str(out),
    ]
    process = subprocess.Popen(
        [*command, "--steps", "100000", "--save-every", "1", *SMALL], stdout=subprocess.PIPE, env=os.environ
    )
    end = time.monotonic() + 120
    while not checkpoints(out) and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert b"checkpoint: " in output
    metadata = json.loads((checkpoints(out)[-1] / "config.json").read_text())
    assert metadata["embed_dim"] == 32


def test_bench_writes_what_it_prints(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--max-length", "512", "--positions", "64", "--budget", "0.05", "--rounds", "1"]
    assert run(["bench", *arguments, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    assert [row["n"] for row in result["attention"]] == [256, 512]
    assert result["decode"][0]["position"] == 64
    assert path.with_suffix(".png").stat().st_size > 10_000
    assert "softmax tok/s" in capfd.readouterr().out

from pathlib import Path

import pytest

from linrope.cli import demo
from linrope.cli.app import run
from linrope.models import LanguageModel
from linrope.models.training import Corpus, checkpoints


def test_the_demo_shows_two_models_of_one_size_after_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "def main():\n    return 'a rose is a rose'\n"
    corpus = Corpus.from_texts([text * (50 + i) for i in range(20)])
    monkeypatch.setattr(demo.Corpus, "load", lambda: corpus)
    for part in ("measure", "stream"):  # tested by themselves
        monkeypatch.setattr(demo, part, lambda *_, **__: None)
    assert run(["demo", "--seconds", "0.1", "--out", str(tmp_path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "held-out files after 0.1 s each" in shown
    assert "linear" in shown
    sizes = [
        sum(p.numel() for p in LanguageModel(config).parameters()) for config in (demo.LINEAR, demo.SOFTMAX)
    ]
    assert abs(sizes[0] - sizes[1]) <= 0.01 * sizes[0]
    assert LanguageModel.load(tmp_path).config == demo.LINEAR
    assert all(map(demo._of_a_demo, checkpoints(tmp_path)))  # the next demo may remove it


def test_a_demo_leaves_checkpoints_of_other_runs_alone(
    tmp_path: Path, text: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    small = ["--embed-dim", "32", "--layers", "1", "--heads", "2", "--sequence-length", "32"]
    assert run(["train", str(text), "--out", str(tmp_path), "--steps", "1", *small]) == 0
    assert run(["demo", "--seconds", "0.1", "--out", str(tmp_path)]) == 2
    assert "has step-00000001 of another run" in capfd.readouterr().err
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000001"]

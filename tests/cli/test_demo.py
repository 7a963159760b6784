from pathlib import Path

import pytest

from linrope.cli import demo
from linrope.cli.app import run
from linrope.models import LanguageModel
from linrope.models.training import Corpus


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

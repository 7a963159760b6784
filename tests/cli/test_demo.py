import re

from benchmarks.study.tasks import Task
from linrope.cli import demonstration
from linrope.models import LanguageModel
from linrope.models.training import Corpus, checkpoints


def test_the_demo_shows_two_models_of_one_size_after_the_same_time(run, tmp_path, monkeypatch) -> None:
    text = "def main():\n    return 'a rose is a rose'\n"
    corpus = Corpus.from_texts([text * (20 + i) for i in range(20)])
    monkeypatch.setattr(demonstration.Corpus, "load", lambda: corpus)
    monkeypatch.setattr(demonstration, "stream", lambda *_, **__: None)  # tested by itself
    monkeypatch.setattr(demonstration, "_LENGTHS", (20, 40))
    shown = " ".join(run("demo --seconds 0.1 --out {tmp}").split())
    assert re.search(
        r"held-out files after 0\.1 s each: \d\.\d\d linear, \d\.\d\d softmax attention; ", shown
    )
    assert re.search(r"after \d+ steps; with more --seconds, such as 600, the text gets better", shown)
    assert re.search(r"next byte -+ 20( \d+\.\d){4} 40( \d+\.\d){4}$", shown.replace("─", "-")), shown
    assert "with one seed, each at the best of three learning rates" in shown
    assert demonstration.RATES.keys() == {"linear", "softmax"}
    assert set(demonstration.RATES.values()) <= set(Task.learning_rates)  # the rule of the study
    both = (LanguageModel(config).parameters() for config in (demonstration.LINEAR, demonstration.SOFTMAX))
    linear, softmax = (sum(p.numel() for p in parameters) for parameters in both)
    assert abs(linear - softmax) <= 0.01 * linear
    assert LanguageModel.load(tmp_path).config == demonstration.LINEAR
    assert all(map(demonstration._of_a_demo, checkpoints(tmp_path)))  # the next demo may remove it


def test_a_demo_leaves_checkpoints_of_other_runs_alone(run, refused, tmp_path) -> None:
    run("train {text} --out {tmp} --steps 1 {small}")
    assert "has step-00000001 of another run" in refused("demo --seconds 0.1 --out {tmp}")
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000001"]

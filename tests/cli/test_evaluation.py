"""linrope eval: what it measures, labels and legends, the plot."""

import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from linrope.cli.app import run
from linrope.cli.evaluation import labels, legends, write
from linrope.models import LanguageModel, LanguageModelConfig
from linrope.models.training import Corpus, Trainer, TrainingConfig

SMALL = ["--embed-dim", "32", "--layers", "1", "--heads", "2", "--batch-size", "2", "--sequence-length", "32"]


def test_eval_of_two_runs(text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    runs = [str(tmp_path / name) for name in ("linear", "softmax")]
    for out in runs:
        choice = ["--attention", Path(out).name, "--steps", "2"]
        assert run(["train", str(text), "--out", out, *choice, *SMALL]) == 0
    both = [part for out in runs for part in ("--checkpoint", out)]
    capfd.readouterr()
    assert run(["eval", *both, "--out", str(tmp_path)]) == 0
    assert "the held-out part of" in " ".join(capfd.readouterr().out.split())
    result = json.loads((tmp_path / "evaluation.json").read_text())
    assert [model["attention"] for model in result["models"]] == ["linear", "softmax"]
    for model in result["models"]:
        assert (model["held_out"], model["trained_length"], model["step"]) == (True, 32, 2)
        bins = model["bins"]
        assert bins[-1]["end"] == 4 * 32
        mean = sum(row["bits_per_byte"] * (row["end"] - row["start"]) for row in bins) / 128
        assert model["bits_per_byte"] == pytest.approx(mean)
    assert (tmp_path / "evaluation.png").stat().st_size > 10_000

    other = tmp_path / "other.txt"
    other.write_text("Something else, all of which is read. " * 3)
    assert run(["eval", str(other), "--checkpoint", runs[0], "--length", "60"]) == 0
    model = json.loads((tmp_path / "linear" / "evaluation.json").read_text())["models"][0]
    assert (model["held_out"], model["corpus"]) == (False, str(other))


def test_a_run_whose_text_has_changed_requires_a_path(
    text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "run")
    assert run(["train", str(text), "--out", out, "--steps", "1", *SMALL]) == 0
    text.write_text(text.read_text() + "More. ")
    capfd.readouterr()
    assert run(["eval", "--checkpoint", out]) == 2
    assert f"run: was trained on another version of {text}, so" in capfd.readouterr().err
    assert run(["eval", str(text), "--checkpoint", out]) == 0
    # Without any white space: a line may break inside the path, or before it.
    assert "".join(f"all of {text}".split()) in "".join(capfd.readouterr().out.split())


def test_a_run_on_texts_in_memory_requires_a_path(
    text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = LanguageModel(LanguageModelConfig(embed_dim=16, num_layers=1, num_heads=2))
    config = TrainingConfig(steps=1, sequence_length=8)
    Trainer(model, Corpus.from_texts([text.read_text()] * 2), config).save(tmp_path / "run")
    for command in (["eval", "--checkpoint"], ["train", "--resume", "--out"]):
        assert run([*command, str(tmp_path / "run")]) == 2
        assert "does not record the text it was trained on; expected a PATH" in capfd.readouterr().err
    assert run(["eval", str(text), "--checkpoint", str(tmp_path / "run"), "--length", "16"]) == 0


def test_a_model_that_no_run_wrote_is_measured_on_a_path(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    LanguageModel(LanguageModelConfig(embed_dim=16, num_layers=1, num_heads=2)).save(folder)
    assert run(["eval", str(text), "--checkpoint", str(folder), "--length", "16"]) == 0
    (model,) = json.loads((folder / "evaluation.json").read_text())["models"]
    assert (model["held_out"], model["trained_length"], model["step"]) == (False, None, None)


def test_legends_name_what_the_models_differ_in() -> None:
    spread, none = ({"decay": decay, "embed_dim": 8} for decay in ({"name": "spread", "longest": 9}, None))
    same = {"attention": "linear", "positions": "rope"}
    models = [{"label": "a", "config": spread, **same}, {"label": "b", "config": none, **same}]
    assert legends(models) == [
        "a: linear, positions rope, decay spread",
        "b: linear, positions rope, decay none",
    ]
    short, long = ({"forget_gate": {"longest": n}, "qk_norm": q} for n, q in ((8, False), (64, True)))
    models = [{"label": "a", "config": short, **same}, {"label": "b", "config": long, **same}]
    assert legends(models) == [
        "a: linear, positions rope, forget_gate longest 8, qk_norm no",
        "b: linear, positions rope, forget_gate longest 64, qk_norm yes",
    ]
    models[1]["config"] = {"forget_gate": False, "qk_norm": False, "extra": 3}
    assert legends(models) == [
        "a: linear, positions rope, forget_gate yes",
        "b: linear, positions rope, forget_gate no",
    ]


def test_the_legend_of_a_plot_lies_below_curves_that_keep_their_width(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib import pyplot as plt

    figures: list[Figure] = []
    monkeypatch.setattr(plt, "close", figures.append)
    bins = [{"start": 0, "end": 1, "bits_per_byte": 5.0, "error": 0.1}]
    bins += [{"start": 1, "end": 40, "bits_per_byte": 4.0, "error": 0.1}]
    same = {"attention": "linear", "positions": "rope", "bins": bins}
    configs = [{f"option {i}": f"the value {i} of {label}" for i in range(9)} for label in "ab"]
    models = [
        {"label": label, "trained_length": length, "config": config, **same}
        for label, length, config in zip("ab", (16, 17), configs, strict=True)
    ]
    write({"models": models}, tmp_path)
    (figure,) = figures
    monkeypatch.undo()
    (axis,), (legend,) = figure.axes, figure.legends
    frame, below = axis.get_window_extent(), legend.get_window_extent()
    assert frame.width > 0.8 * figure.bbox.width
    assert below.y1 < axis.xaxis.get_tightbbox().y0
    assert below.x1 <= figure.bbox.width
    assert [text.get_text() for text in legend.get_texts()][-1] == "trained length: 16, 17 tokens"
    plt.close(figure)


def test_curves_of_runs_with_one_name_have_labels_that_differ(tmp_path: Path) -> None:
    assert labels([tmp_path / "a" / "run", tmp_path / "b" / "run"]) == ["a/run", "b/run"]
    assert labels([tmp_path / "one", tmp_path / "two"]) == ["one", "two"]
    with pytest.raises(ValueError, match="expected each checkpoint once"):
        labels([tmp_path / "one", tmp_path / "two" / ".." / "one"])

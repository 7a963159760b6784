"""linrope eval: what it measures, labels and legends, the plot."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from linrope.cli.evaluation import legends, write
from linrope.models.training import Corpus, Trainer, TrainingConfig
from tests.cli.commands import tiny_model


def evaluated(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "evaluation.json").read_text())["models"]


def test_eval_of_two_runs(run, tmp_path) -> None:
    for name in ("linear", "softmax"):
        run(f"train {{text}} --out {{tmp}}/{name} --attention {name} --steps 2 {{small}}")
    printed = run("eval --checkpoint {tmp}/linear --checkpoint {tmp}/softmax --out {tmp}")
    assert "the held-out part of" in " ".join(printed.split())
    models = evaluated(tmp_path)
    assert [model["attention"] for model in models] == ["linear", "softmax"]
    for model in models:
        assert (model["held_out"], model["trained_length"], model["step"]) == (True, 32, 2)
        bins = model["bins"]
        assert bins[-1]["end"] == 4 * 32
        mean = sum(row["bits_per_byte"] * (row["end"] - row["start"]) for row in bins) / 128
        assert model["bits_per_byte"] == pytest.approx(mean)
    assert (tmp_path / "evaluation.png").stat().st_size > 10_000

    other = tmp_path / "other.txt"
    other.write_text("Something else, all of which is read. " * 3)
    run("eval {tmp}/other.txt --checkpoint {tmp}/linear --length 60")
    (model,) = evaluated(tmp_path / "linear")
    assert (model["held_out"], model["corpus"]) == (False, str(other))


def test_a_run_whose_text_has_changed_requires_a_path(run, refused, text) -> None:
    run("train {text} --out {tmp}/run --steps 1 {small}")
    text.write_text(text.read_text() + "More. ")
    assert f"run: was trained on another version of {text}, so" in refused("eval --checkpoint {tmp}/run")
    printed = run("eval {text} --checkpoint {tmp}/run")
    assert f"all of {text}, " in printed
    # The table counts positions from 1, as the plot does.
    rows = re.findall(r"^\W*(\d+)(?: \.\. (\d+))? ", printed, re.MULTILINE)
    assert rows[:2] == [("1", ""), ("2", "")]
    assert all(int(start) == int(end or one) + 1 for (one, end), (start, _) in pairwise(rows))


def test_a_run_on_texts_in_memory_requires_a_path(run, refused, text, tmp_path) -> None:
    config = TrainingConfig(steps=1, sequence_length=8)
    Trainer(tiny_model(), Corpus.from_texts([text.read_text()] * 2), config).save(tmp_path / "run")
    for command in ("eval --checkpoint {tmp}/run", "train --resume --out {tmp}/run"):
        assert "does not record the text it was trained on; expected a PATH" in refused(command)
    run("eval {text} --checkpoint {tmp}/run --length 16")


def test_a_model_that_no_run_wrote_is_measured_on_a_path(run, tmp_path) -> None:
    tiny_model().save(tmp_path)
    run("eval {text} --checkpoint {tmp} --length 16")
    (model,) = evaluated(tmp_path)
    assert (model["held_out"], model["trained_length"], model["step"]) == (False, None, None)


def test_a_text_that_is_too_short_to_train_on_is_read_to_its_end(run, refused, tmp_path) -> None:
    tiny_model().save(tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    for size in (2, 9, 100, 1000):
        (tmp_path / "tiny.txt").write_text(("tiny text " * 100)[:size])
        run(f"eval {{tmp}}/tiny.txt --checkpoint {{tmp}} --length {size - 1}")
        assert evaluated(tmp_path)[0]["bins"][-1]["end"] == size - 1
        (folder / "a.txt").write_bytes((tmp_path / "tiny.txt").read_bytes())
        run(f"eval {{tmp}}/folder --checkpoint {{tmp}} --length {size}")  # a newline ends each document
        longest = f"--length={size}: expected at least 1, less than the longest document, {size} tokens\n"
        assert longest in refused(f"eval {{tmp}}/tiny.txt --checkpoint {{tmp}} --length {size}")


def test_a_text_without_a_token_to_predict_is_refused_as_such(refused, tmp_path) -> None:
    tiny_model().save(tmp_path)
    expected = "expected a document of at least 2 bytes: the model reads one and predicts the next\n"
    (tmp_path / "empty").mkdir()
    for text, got in (("", "no text"), ("t", "documents of at most 1 byte")):
        (tmp_path / "tiny.txt").write_text(text)
        message = refused("eval {tmp}/tiny.txt --checkpoint {tmp} --length 1")
        assert message == f"linrope: {tmp_path}/tiny.txt: got {got}, {expected}"
    message = refused("eval {tmp}/empty --checkpoint {tmp} --length 1")
    assert message == f"linrope: {tmp_path}/empty: got no text, {expected}"


def test_legends_name_what_the_models_differ_in() -> None:
    same = {"attention": "linear", "positions": "rope"}
    gates = [{"forget_gate": {"longest": n}, "qk_norm": q} for n, q in ((8, False), (64, True))]
    ungated = {"forget_gate": False, "qk_norm": False, "extra": 3}
    decays = [{"decay": decay, "embed_dim": 8} for decay in ({"name": "spread", "longest": 9}, None)]
    for configs, *differences in (
        (decays, "decay spread", "decay none"),
        (gates, "forget gate longest 8, qk norm no", "forget gate longest 64, qk norm yes"),
        ([gates[0], ungated], "forget gate yes", "forget gate no"),
    ):
        models = [{"label": label, "config": config, **same} for label, config in zip("ab", configs)]
        assert legends(models) == [f"{x}: linear, positions rope, {y}" for x, y in zip("ab", differences)]


def test_the_legend_of_a_plot_lies_below_curves_that_keep_their_width(tmp_path, monkeypatch) -> None:
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

"""linrope plot: the curves of runs, and what it says of a folder without them."""

import json

import pytest
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from tests.cli.commands import metrics


def test_the_losses_of_two_runs(run, tmp_path, monkeypatch) -> None:
    for name in ("a", "b"):
        run(f"train {{text}} --out {{tmp}}/{name} --steps 4 --save-every 2 {{small}}")
    with open(tmp_path / "b" / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "bits')  # as kill leaves it
    figures: list[Figure] = []
    monkeypatch.setattr(plt, "close", figures.append)
    assert run("plot {tmp}/a {tmp}/b") == f"written: {tmp_path}/a/losses.png\n"
    (figure,) = figures
    curves = {line.get_label(): line for line in figure.axes[0].lines}
    assert list(curves) == ["a, training", "a, held out", "b, training", "b, held out"]
    rows = metrics(tmp_path / "a")
    assert list(curves["b, training"].get_xdata()) == [1, 2, 3, 4]
    assert curves["a, training"].get_ydata()[0] == pytest.approx(rows[0]["bits_per_byte"])
    assert list(curves["a, held out"].get_xdata()) == [2, 4]
    assert list(curves["a, held out"].get_ydata()) == [rows[i]["held_out_bits_per_byte"] for i in (1, 3)]
    assert run("plot {tmp}/a --out {tmp}/plots/a.svg") == f"written: {tmp_path}/plots/a.svg\n"
    assert (tmp_path / "plots/a.svg").read_text().startswith("<?xml")
    monkeypatch.undo()
    plt.close("all")


WRONG = {
    "{tmp}": "{tmp}: has no metrics.jsonl; expected the folder of a run of linrope train",
    "{tmp}/empty": "metrics.jsonl: expected the metrics of at least one step, with step and bits_per_byte",
    "{tmp}/other": "metrics.jsonl: expected the metrics of at least one step, with step and bits_per_byte",
    "{tmp} {tmp}": "RUN: got {tmp}, {tmp}, expected each once",
    "{tmp} --out {tmp}/a.pdf": "--out={tmp}/a.pdf: expected a file that ends in .png or .svg",
    "{tmp} --out {text}/a.svg": "text.txt is a file, expected a folder",
    "": "Missing argument 'RUN..'",
}


@pytest.mark.parametrize(("arguments", "cause"), WRONG.items(), ids=WRONG)
def test_what_is_no_run_is_named(arguments: str, cause: str, refused, tmp_path, text) -> None:
    for name, lines in (("empty", ""), ("other", json.dumps({"loss": 1.0}) + "\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(lines)
    assert cause.format(tmp=tmp_path, text=text) in refused(f"plot {arguments}")

"""The style that all charts share."""

import pytest

from linrope.cli.charts import charts, labels, save


def test_curves_of_runs_with_one_name_have_labels_that_differ(tmp_path) -> None:
    assert labels([tmp_path / "a" / "run", tmp_path / "b" / "run"], "RUN") == ["a/run", "b/run"]
    assert labels([tmp_path / "one", tmp_path / "two"], "RUN") == ["one", "two"]
    with pytest.raises(ValueError, match=r"^RUN: got .*, expected each once"):
        labels([tmp_path / "one", tmp_path / "two" / ".." / "one"], "RUN")


@pytest.mark.parametrize("name", ["a.svg", "a.png"])
def test_the_same_chart_is_the_same_file(name: str, tmp_path) -> None:
    found = []
    for _ in range(2):
        figure, axes = charts(3, 2)
        axes.plot([1, 2])
        save(figure, tmp_path / name)
        found.append((tmp_path / name).read_bytes())
    assert found[0] == found[1]
    assert [path.name for path in tmp_path.iterdir()] == [name]

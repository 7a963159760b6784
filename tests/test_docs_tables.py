"""docs/tables.py: README.md and docs/performance.md have the tables that follow from the kept results."""

import pytest

from docs import families, tables
from linrope.cli.bench.families import CONFIGURATIONS


@pytest.mark.parametrize("page", tables.PAGES)
def test_the_tables_are_those_of_the_results(page: str) -> None:
    assert tables.written(page) == (tables.ROOT / page).read_text("utf-8"), (
        "python -m docs.tables writes others"
    )


def test_a_page_without_a_place_for_its_table_is_refused(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "README.md").write_text("<!-- families -->\n| old |\n<!-- /families -->\n\n<!-- study -->\n")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    with pytest.raises(
        ValueError, match=r"README\.md: expected a place between <!-- study --> and <!-- /study -->"
    ):
        tables.written("README.md")


def test_the_newest_result_counts(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    for date in ("2026-11-24", "2026-11-26", "2026-11-26-2", "2026-11-26-10", "2026-11-25"):
        (tmp_path / f"cpu-{date}.json").write_text(f'"{date}"')
    (tmp_path / "cpu-others-2026-12-01.json").write_text('"another kind"')
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.newest("cpu") == "2026-11-26-10"


def test_of_each_kind_the_longest_of_at_most_2048_tokens_is_shown() -> None:
    rows = [
        {"kind": kind, "batch": batch, "length": length}
        for kind, batch in families.CASES
        for length in (512, 2048, 8192)
    ]
    shown = [(row["kind"], row["batch"], row["length"]) for row in families.longest(rows)]
    assert shown == [(*case, 2048) for case in families.CASES]
    assert families.MODELS.keys() <= CONFIGURATIONS.keys()

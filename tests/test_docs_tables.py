"""docs/tables.py: README.md and docs/performance.md have the tables that follow from the kept results."""

import json

import pytest

from benchmarks.configurations import FAMILIES
from docs import families, gpu_tables, tables


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
    for name in ("cpu-others-2026-12-01", "cpu-8192-2026-12-01"):
        (tmp_path / f"{name}.json").write_text('"another kind"')
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
    assert families.MODELS.keys() <= FAMILIES.keys()


# A GPU's tables


def times(**milliseconds: float) -> dict[str, dict[str, float]]:
    return {name.replace("_", " "): {"median_ms": x} for name, x in milliseconds.items()}


@pytest.fixture
def results(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """Writes results of a GPU, in the order of their dates."""
    monkeypatch.setattr(gpu_tables, "RESULTS", tmp_path)

    def write(**steps: list[dict[str, object]]) -> None:
        machine = {"device": "GPU", "torch": "2.11.0+cu130", "triton": "3.6.0", "copy": {"rate": 1e12}}
        found = {"date": "2026-12-01", "machine": [machine], **steps}
        found["steps"] = {name: {"status": "done", "seconds": 120.0} for name in steps}
        path = tmp_path / f"gpu-2026-12-{len(list(tmp_path.iterdir())) + 1:02}.json"
        path.write_text(json.dumps(found))

    return write


def test_the_fewest_bytes() -> None:
    assert gpu_tables.fewest_bytes(64, 64) == {"forward": 512, "backward": 1420, "step": 32768}
    assert gpu_tables.fewest_bytes(128, 128) == {"forward": 1024, "backward": 2828, "step": 131072}


def test_shares_are_the_least_time_over_the_measured_one(results) -> None:
    row = {"shape": [1, 1000, 10, 64], "extra_memory": 0.02, **times(forward_graph=0.02, training_graph=0.06)}
    between, slow = (row | times(forward_graph=x, training_graph=0.1) for x in (0.03, 0.04))
    results(bandwidth=[row, between, slow, {"shape": [1], "failure": "no memory"}], gates=[row])
    _, _, least, plain, gates = gpu_tables.gpu_shares().splitlines()
    assert "| 0.04 ms | 0.06 ms | 13% |" in least
    # 10,000 tokens and heads of 512 and 1,420 bytes at 1e12 byte/s: 0.00512 and 0.0142 ms
    assert plain == "| 64 | 1 x 1,000 tokens, 10 heads | 0.02 ms | 0.04 ms | 26% | 36% | 2% |"
    assert gates == plain.replace("heads", "heads, gates")


def test_a_step_s_share_counts_all_its_layers(results) -> None:
    results(decode=[{"shape": [8, 1, 16, 64], "layers": 10, **times(graph=0.1)}])
    # 128 states of 32,768 bytes: 0.0042 ms, of 0.01 ms
    assert gpu_tables.gpu_decode().endswith("| 64 | 128 | 10 us | 42% |")


def test_a_table_shows_the_newest_run_that_has_its_rows(results) -> None:
    sides = {name: times(forward_graph=1.0, training_graph=2.0) for name in ("linrope", "route", "bare")}
    results(fla=[{"functions": sides}])
    results(fla=[{"functions": {}, "failure": "no GPU"}], tests=[{"passed": 5, "failed": 1}])
    assert "| its linear attention alone | 1x | 1x |" in gpu_tables.gpu_fla()
    text = gpu_tables.gpu_runs()
    assert text.splitlines()[2:4] == ["| GPU | 2.11.0 | 3.6.0 | 5 of 6 | fla |", ""]
    assert "`gates`" in text.splitlines()[4]


def test_softmax_attention_is_the_fastest_of_its_kernels(results) -> None:
    functions = {
        "flash": times(forward_graph=8, training_graph=20), "cudnn": times(forward_graph=6, training_graph=30),
        "cudnn bare": times(forward_graph=4, training_graph=25), "efficient": times(forward_graph=50),
    }  # fmt: skip
    results(
        softmax=[
            {"shape": [8, 256, 16, 64], "functions": functions, **times(forward_graph=2, training_graph=10)}
        ]
    )
    assert gpu_tables.gpu_softmax().endswith("| 256 | 3x | 2x | 2x | 2.5x |")

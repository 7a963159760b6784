"""``linrope bench --transformers``: both sides of small models, the table, the file and the plot."""

import json
from pathlib import Path

import pytest
import torch

from linrope.backends import native
from linrope.cli.bench import families
from linrope.cli.bench.report import times
from linrope.integrations import transformers as linrope_transformers
from tests.support.families import CONFIGURATIONS, VOCABULARY

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "CONFIGURATIONS", CONFIGURATIONS)
    monkeypatch.setitem(families._SIZES, "hidden_size", 48)
    monkeypatch.setitem(families._SIZES, "vocab_size", VOCABULARY)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "family",
    [
        name
        for name in ("nemotron_h", "minimax", "kimi_linear", "glm5_next", "lfm2")
        if name in CONFIGURATIONS
    ],
)
def test_a_family_of_models(family: str, run, tmp_path) -> None:
    options = "--lengths 5,40 --rounds 1 --budget 0.01 --out {tmp}"
    assert family in run(f"bench --transformers {family} {options}")
    (file,) = tmp_path.glob("*.json")
    result = json.loads(file.read_text())
    cases = [(row["kind"], row["batch"], row["length"]) for row in result["rows"]]
    assert cases == [(kind, 1, n) for kind in families.KINDS for n in (5, 40)] + [("decoding", 8, 5)]
    assert all(set(row["seconds"]) == set(families.SIDES) for row in result["rows"])
    assert all(0 <= row["difference"] <= families.TOLERANCE for row in result["rows"])
    assert file.with_suffix(".png").stat().st_size > 10_000
    assert linrope_transformers.enable(family).families == (family,)  # nothing was left enabled
    linrope_transformers.disable()


@pytest.mark.usefixtures("small")
def test_outputs_that_differ_are_an_error(monkeypatch) -> None:
    benchmark = families.FamilyBenchmark("mamba2")
    results = iter([torch.ones(1)] * 3 + [torch.full((1,), 1.001)])
    monkeypatch.setattr(benchmark, "call", lambda *_: lambda: next(results))
    with pytest.raises(RuntimeError, match=r"mamba2, prefill, 20 tokens: outputs differ by 0\.001 of the"):
        families.measure(benchmark, "prefill", 1, 20, 1, 0.01)


def test_configurations_build_layers_of_the_family() -> None:
    assert set(families.CONFIGURATIONS) == set(linrope_transformers.FAMILIES)


NAMES = {
    "mamba2": "Mamba-2",
    "granitemoehybrid": "Granite 4.0-H",
    "nemotron_h": "Nemotron-H",
    "qwen3_5": "Qwen3.5",
    "kimi_linear": "Kimi Linear",
}


def lines_of(file: Path) -> list[str]:
    """The lines of a result in the table of docs/performance.md."""
    result = json.loads(file.read_text())
    lines = []
    for row in result["rows"]:
        longest = max(other["length"] for other in result["rows"] if other["kind"] == row["kind"])
        if row["length"] == 512 < longest and row["batch"] == 1:
            continue
        seconds, peaks = row["seconds"], row["bytes"]
        kind = row["kind"] if row["batch"] == 1 else f"{row['kind']}, {row['batch']} sequences"
        cells = [NAMES[result["family"]], kind, f"{row['length']:,}"]
        cells += [f"{seconds[side] * 1e3:,.0f}" for side in families.SIDES]
        cells += [times(seconds["transformers"] / seconds["linrope"])]
        cells += [f"{peaks[side] / 1e6:,.0f}" for side in families.SIDES]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def test_the_table_of_the_docs_has_the_kept_results() -> None:
    page = (ROOT / "docs" / "performance.md").read_text("utf-8")
    table = page.partition("<!-- families -->\n")[2].partition("<!-- /families -->")[0].splitlines()[2:]
    files = [
        next((ROOT / "benchmarks" / "results").glob(f"transformers-{family}-*.json")) for family in NAMES
    ]
    assert table == [line for file in files for line in lines_of(file)]


def row_of_the_readme(file: Path) -> str:
    """A result in the small table of README.md: how many times as fast linrope is, and its share of the memory."""
    result = json.loads(file.read_text())
    rows = {(row["kind"], row["batch"], row["length"]): row for row in result["rows"]}
    longest = 2048 if ("training", 1, 2048) in rows else 512
    cases = [("prefill", 1, 2048), ("training", 1, longest), ("decoding", 1, 2048), ("decoding", 8, 512)]
    shares = [rows[case]["seconds"]["transformers"] / rows[case]["seconds"]["linrope"] for case in cases]
    peaks = rows[cases[1]]["bytes"]
    cells = [f"{NAMES[result['family']]}, {result['parameters'] / 1e6:.0f} M"]
    cells += [f"{float(f'{share:.2g}'):g}x" for share in shares] + [
        f"{peaks['linrope'] / peaks['transformers']:.2f}x"
    ]
    return f"| {' | '.join(cells)} |"


def test_the_small_table_of_the_readme_has_the_kept_results() -> None:
    page = (ROOT / "README.md").read_text("utf-8")
    table = page.partition("<!-- families -->\n")[2].partition("<!-- /families -->")[0].splitlines()[2:]
    files = [
        next((ROOT / "benchmarks" / "results").glob(f"transformers-{family}-*.json")) for family in NAMES
    ]
    assert table == [row_of_the_readme(file) for file in files]

"""``linrope bench --transformers``: both sides of small models, the table, the file and the plot."""

import json

import pytest
import torch

from benchmarks.bench import families
from benchmarks.configurations import FAMILIES, SMALL
from linrope.backends import native
from linrope.integrations import transformers as linrope_transformers
from tests.support.families import CONFIGURATIONS

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "SIZE", SMALL)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=pytest.mark.long if name == "glm5_next" else ())
        for name in ("kimi_linear", "glm5_next")  # one with a vision tower
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
    assert all(0 <= row["difference"] <= families.TOLERANCE["float32"] for row in result["rows"])
    assert file.with_suffix(".png").stat().st_size > 10_000
    assert linrope_transformers.enable(family).families == (family,)  # nothing was left enabled
    linrope_transformers.disable()


@pytest.mark.usefixtures("small")
def test_a_family_in_half_precision(run, tmp_path) -> None:
    run("bench --transformers mamba2 --dtype bfloat16 --lengths 40 --rounds 1 --budget 0.01 --out {tmp}")
    (file,) = tmp_path.glob("transformers-mamba2-bfloat16-*.json")
    result = json.loads(file.read_text())
    assert result["dtype"] == "bfloat16"
    assert all(0 < row["difference"] <= families.TOLERANCE["bfloat16"] for row in result["rows"])


@pytest.mark.usefixtures("small")
def test_outputs_that_differ_are_an_error(monkeypatch) -> None:
    benchmark = families.FamilyBenchmark("mamba2")
    results = iter([torch.ones(1)] * 3 + [torch.full((1,), 1.001)])
    monkeypatch.setattr(benchmark, "call", lambda *_: lambda: next(results))
    with pytest.raises(RuntimeError, match=r"mamba2, prefill, 20 tokens: outputs differ by 0\.001 of the"):
        families.measure(benchmark, "prefill", 1, 20, 1, 0.01)


def test_configurations_build_layers_of_the_family() -> None:
    assert set(FAMILIES) == set(linrope_transformers.FAMILIES)

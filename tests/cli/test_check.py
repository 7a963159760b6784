"""linrope check: what it prints of all backends, and its exit status."""

import json
from collections.abc import Iterator

import pytest
import torch

from linrope import backends
from linrope.backends import eager
from linrope.cli.app import run as command
from linrope.conformance import comparison
from linrope.conformance.cases import cases_of
from linrope.operation.plan import forget_plans


def test_this_machine_s_backends_are_within_the_bounds(run) -> None:
    found = json.loads(run("check --json --seconds 300"))
    assert found["passed"]
    available = {name for name, places in backends.BACKENDS.items() if places} - found["not_available"].keys()
    assert {row["backend"] for row in found["results"]} == available
    for row in found["results"]:
        assert row["cases"] == row["all_cases"] or torch.cuda.is_available()
        assert row["all_cases"] == len(cases_of(row["backend"]))
        assert set(row["errors"]) == {"forward", "gradients", "state"}
        assert all(0 < error <= 1 for error in row["errors"].values())


@pytest.fixture
def own_plans() -> Iterator[None]:
    """Plans keep the backend that they chose: those of a test that changes the table of backends serve no other."""
    forget_plans()
    yield
    forget_plans()


@pytest.mark.usefixtures("own_plans")
def test_a_table_has_a_line_for_each_backend_and_dtype(run, monkeypatch) -> None:
    monkeypatch.setattr(
        backends, "load", lambda name: "it is missing" if name in ("native", "triton") else eager
    )
    printed = run("check --seconds 0")
    lines = [line.split() for line in printed.splitlines() if line.split()[:2] == ["eager", "cpu"]]
    assert [line[2] for line in lines] == ["float32", "bfloat16", "float16"]
    assert "native: not available: it is missing\n" in printed
    assert "larger number of --seconds" in printed


def test_failures_are_named_and_the_exit_status_is_1(monkeypatch, capfd) -> None:
    wrong = comparison.Row(
        "eager", "cpu", "float32", 1, 9, {"forward": float("inf")}, ["eager: forward has inf"]
    )
    rows = [wrong, comparison.Row("native", "cpu", "float32", 1, 9, {"forward": 0.5})]
    monkeypatch.setattr(comparison, "compared", lambda *_: (rows, {}))
    assert command(["check"]) == 1
    printed = capfd.readouterr().out
    assert "eager: forward has inf\n" in printed
    assert "all errors are within" not in printed
    assert command(["check", "--json"]) == 1
    found = json.loads(capfd.readouterr().out)
    assert not found["passed"]
    assert [(row["errors"], bool(row["failures"])) for row in found["results"]] == [
        ({"forward": "inf"}, True),
        ({"forward": 0.5}, False),
    ]

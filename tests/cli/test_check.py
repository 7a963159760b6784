"""linrope check: its bounds are those of the equation, and a backend that is wrong does not pass."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from linrope import backends, feature_maps
from linrope.backends import eager
from linrope.cli import conformance
from linrope.cli.conformance import CASES, Case, Exact, cases_of
from linrope.operation.plan import forget_plans
from tests.support.equation import Equation

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@every_case
def test_the_sizes_of_terms_are_those_of_the_equation(case: Case) -> None:
    inputs, how = case.inputs(torch.float64), case.how()
    how |= {name: inputs[name].double() for name in ("log_decay", "erase") if name in inputs}
    if how["feature_map"] == "exp":  # the equation takes maps with a scale
        q, k = inputs["q"].exp(), inputs["k"].exp()
        inputs, how = inputs | {"q": q, "k": k}, how | {"feature_map": "identity"}
    elif how["feature_map"] == "unit":  # and elementwise ones by name
        how["feature_map"] = feature_maps.make("unit", inputs["k"].shape[3])
    equation = Equation()
    equation(inputs["q"], inputs["k"], inputs["v"], **how)
    found = conformance.sizes_of_terms(case.inputs(torch.float64), case.how())
    for name, x in found.items():
        torch.testing.assert_close(x, getattr(equation.sizes, name), rtol=1e-6, atol=0, msg=name)


def test_this_machine_s_backends_are_within_the_bounds(run) -> None:
    found = json.loads(run("check --json"))
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


def _wrong_output(out: Tensor, sums: Any) -> tuple[Tensor, Any]:
    return out * 1.001, sums


def _wrong_gradient(out: Tensor, sums: Any) -> tuple[Tensor, Any]:
    return out + 1e-3 * (out - out.detach()), sums


def _wrong_state(out: Tensor, sums: Any) -> tuple[Tensor, Any]:
    return out, sums._replace(kv=sums.kv * 1.001)


def _none(out: Tensor, sums: Any) -> tuple[Tensor, Any]:
    return out * float("nan"), sums._replace(kv=sums.kv * float("nan"))


def _raises(out: Tensor, sums: Any) -> tuple[Tensor, Any]:
    raise RuntimeError("no such kernel")


WRONG = {
    _wrong_output: ["forward has"],
    _wrong_gradient: ["gradients has"],
    _wrong_state: ["state has"],
    _none: ["forward has inf", "gradients has inf", "state has inf"],
    _raises: ["RuntimeError: no such kernel, in: rotation"],
}


@pytest.mark.parametrize(("change", "messages"), WRONG.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_a_wrong_backend_exits_1_and_its_line_is_named(
    change: Callable[..., Any], messages: list[str], run, monkeypatch, capfd
) -> None:
    right = eager.attend
    monkeypatch.setattr(eager, "attend", lambda call, state: change(*right(call, state)))
    monkeypatch.setattr(conformance, "CASES", CASES[:1])
    from linrope.cli.app import run as command

    assert command(["check"]) == 1
    printed = capfd.readouterr().out
    assert all(f"eager cpu float32: {message}" in printed for message in messages)
    assert "native cpu" not in printed  # the other backend has no failures
    assert "all errors are within" not in printed
    if change is not _wrong_output:  # the report is the same, whatever is wrong
        return
    assert command(["check", "--json"]) == 1
    found = json.loads(capfd.readouterr().out)
    assert not found["passed"]
    assert {row["backend"] for row in found["results"] if row["failures"]} == {"eager"}


@pytest.mark.usefixtures("quick_interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_triton_kernels_pass_in_the_interpreter(dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    for case in (Case("causal", (20,), gates=True), Case("steps", (20, 1, 1), gates=True)):
        found = conformance.errors("triton", str(torch.get_default_device()), Exact(case, dtype))
        assert set(found) == {"forward", "state"} | ({"gradients"} if len(case.pieces) == 1 else set())
        assert all(error <= 1 for error in found.values()), found

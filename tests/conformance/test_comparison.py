"""linrope.conformance: its bounds are those of the equation, and a backend that is wrong does not pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from linrope import feature_maps
from linrope.backends import eager
from linrope.conformance import cases
from linrope.conformance.cases import CASES, Case, Exact
from linrope.conformance.comparison import Row
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
    found = cases.sizes_of_terms(case.inputs(torch.float64), case.how())
    for name, x in found.items():
        torch.testing.assert_close(x, getattr(equation.sizes, name), rtol=1e-6, atol=0, msg=name)


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


@pytest.fixture(scope="module")
def exact() -> Exact:
    """One case, whose oracle all wrong backends are compared with."""
    return Exact(CASES[0], torch.float32)


@pytest.mark.parametrize(("change", "messages"), WRONG.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_a_wrong_backend_fails_by_name(
    change: Callable[..., Any], messages: list[str], exact: Exact, monkeypatch
) -> None:
    right = eager.attend
    monkeypatch.setattr(eager, "attend", lambda call, state: change(*right(call, state)))
    row = Row("eager", "cpu", "float32")
    row.add(exact)
    assert all(any(x.startswith(f"eager cpu float32: {m}") for x in row.failures) for m in messages)
    assert row.cases == 1


@pytest.mark.usefixtures("quick_interpreter")
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (Case("causal", (20,), gates=True), torch.float32),
        (Case("steps", (20, 1, 1), gates=True), torch.float16),
    ],
    ids=lambda x: getattr(x, "name", None),
)
def test_the_triton_kernels_pass_in_the_interpreter(case: Case, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    found = cases.errors("triton", str(torch.get_default_device()), Exact(case, dtype))
    assert set(found) == {"forward", "state"} | ({"gradients"} if len(case.pieces) == 1 else set())
    assert all(error <= 1 for error in found.values()), found

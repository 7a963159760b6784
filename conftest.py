"""Names that every doctest finds, as after ``from linrope import *``, and a fixed seed."""

import pytest
import torch

import linrope


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", default="cpu", help="where tests/kernels runs: cpu, in an interpreter, or cuda"
    )
    parser.addoption("--instruction-set", help="which kernels backend 'native' runs: baseline, v3, v4 or amx")


@pytest.fixture(autouse=True)
def _examples(doctest_namespace: dict[str, object]) -> None:
    torch.manual_seed(0)
    doctest_namespace["torch"] = torch
    doctest_namespace.update({name: getattr(linrope, name) for name in linrope.__all__})

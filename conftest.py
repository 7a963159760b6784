"""Names that every doctest finds, as after ``from linrope import *``, and a fixed seed."""

import pytest
import torch

import linrope


@pytest.fixture(autouse=True)
def _examples(doctest_namespace: dict[str, object]) -> None:
    torch.manual_seed(0)
    doctest_namespace["torch"] = torch
    doctest_namespace.update({name: getattr(linrope, name) for name in linrope.__all__})

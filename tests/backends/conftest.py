"""Tests of the backend triton also run on a GPU. Fresh memory holds NaN."""

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    parameters = getattr(item, "callspec", None)
    names = () if parameters is None else (getattr(x, "backend", x) for x in parameters.params.values())
    if any(name == "triton" for name in names if isinstance(name, str)):
        item.add_marker("gpu")


@pytest.fixture(autouse=True)
def _poisoned(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu"):
        request.getfixturevalue("poison")

"""Compiling the kernels takes minutes: it goes on beside the other tests, and is looked at last."""

import pytest

from tests.kernels.compiled import start_launches, start_report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.parts[-2:] == ("kernels", "test_compile.py"))  # stable


def pytest_collection_finish(session: pytest.Session) -> None:
    chosen = any(item.path.parts[-2:] == ("kernels", "test_compile.py") for item in session.items)
    if chosen and not session.config.option.collectonly:
        start_report()
        start_launches()

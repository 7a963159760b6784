"""The marks that transformers' own tests carry: see test_mixins.py."""

import pytest

MARKS = (
    "accelerate_tests", "flash_attn_test", "flash_attn_3_test", "flash_attn_4_test", "generate", "slow",
    "torch_compile_test", "torch_export_test",
)  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    for mark in MARKS:
        config.addinivalue_line("markers", f"{mark}: transformers' own")

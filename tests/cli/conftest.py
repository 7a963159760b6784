"""What the commands are given."""

from pathlib import Path

import pytest


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("To be, or not to be, that is the question. " * 100)
    return path

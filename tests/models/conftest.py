"""What models are trained on."""

from pathlib import Path

import pytest


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(60):
        (folder / f"{i}.txt").write_text(f"file {i}: the quick brown fox jumps over the lazy dog. " * 4)
    return folder

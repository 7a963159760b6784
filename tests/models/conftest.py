"""A model, and what models are trained on."""

from pathlib import Path

import pytest
import torch

from linrope.models import LanguageModel, LanguageModelConfig


@pytest.fixture
def model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(LanguageModelConfig(embed_dim=32, num_layers=2, num_heads=2))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(60):
        (folder / f"{i}.txt").write_text(f"file {i}: the quick brown fox jumps over the lazy dog. " * 4)
    return folder

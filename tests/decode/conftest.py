"""A small model."""

import pytest
import torch

from linrope.models import LanguageModel, LanguageModelConfig


@pytest.fixture
def model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(LanguageModelConfig(embed_dim=32, num_layers=2, num_heads=2))

"""Models for long sequences."""

from linrope.decode import generate
from linrope.models.language_model import LanguageModel
from linrope.models.language_model_config import LanguageModelConfig

__all__ = ["LanguageModel", "LanguageModelConfig", "generate"]

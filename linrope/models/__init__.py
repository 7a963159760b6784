"""Models for long sequences."""

from linrope.models.generation import generate
from linrope.models.language_model import LanguageModel
from linrope.models.language_model_config import LanguageModelConfig
from linrope.models.step import DecodingStep

__all__ = ["DecodingStep", "LanguageModel", "LanguageModelConfig", "generate"]

"""Long-sequence models, each readable as one file."""

from linrope.models.language_model import LanguageModel, LanguageModelConfig, generate

__all__ = ["LanguageModel", "LanguageModelConfig", "generate"]

"""Models for long sequences."""

from linrope.decode import generate
from linrope.layer.states import load_states, save_states
from linrope.models.language_model import LanguageModel
from linrope.models.language_model_config import LanguageModelConfig

__all__ = ["LanguageModel", "LanguageModelConfig", "generate", "load_states", "save_states"]

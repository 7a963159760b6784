"""Models for transformers, registered with its Auto classes as this module is imported."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from linrope.models.huggingface.cache import LinRopeCache
from linrope.models.huggingface.configuration import LinRopeConfig
from linrope.models.huggingface.modeling import (
    LinRopeForCausalLM,
    LinRopeForMaskedLM,
    LinRopeForSequenceClassification,
    LinRopeModel,
    LinRopePreTrainedModel,
)

__all__ = [
    "LinRopeCache",
    "LinRopeConfig",
    "LinRopeForCausalLM",
    "LinRopeForMaskedLM",
    "LinRopeForSequenceClassification",
    "LinRopeModel",
    "LinRopePreTrainedModel",
]

AutoConfig.register(LinRopeConfig.model_type, LinRopeConfig)
AutoModel.register(LinRopeConfig, LinRopeModel)
AutoModelForCausalLM.register(LinRopeConfig, LinRopeForCausalLM)
AutoModelForMaskedLM.register(LinRopeConfig, LinRopeForMaskedLM)
AutoModelForSequenceClassification.register(LinRopeConfig, LinRopeForSequenceClassification)

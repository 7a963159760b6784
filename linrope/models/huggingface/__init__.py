"""Models for transformers, registered with its Auto classes as this module is imported."""

from linrope.models.training.optional import need

need("transformers", "linrope[huggingface]")

from transformers import (  # noqa: E402
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from linrope.models.huggingface.cache import LinRopeCache  # noqa: E402
from linrope.models.huggingface.configuration import LinRopeConfig  # noqa: E402
from linrope.models.huggingface.modeling import (  # noqa: E402
    LinRopeForCausalLM,
    LinRopeForMaskedLM,
    LinRopeForQuestionAnswering,
    LinRopeForSequenceClassification,
    LinRopeForTokenClassification,
    LinRopeModel,
    LinRopePreTrainedModel,
)

__all__ = [
    "LORA_TARGETS",
    "LinRopeCache",
    "LinRopeConfig",
    "LinRopeForCausalLM",
    "LinRopeForMaskedLM",
    "LinRopeForQuestionAnswering",
    "LinRopeForSequenceClassification",
    "LinRopeForTokenClassification",
    "LinRopeModel",
    "LinRopePreTrainedModel",
]

AutoConfig.register(LinRopeConfig.model_type, LinRopeConfig)
AutoModel.register(LinRopeConfig, LinRopeModel)
AutoModelForCausalLM.register(LinRopeConfig, LinRopeForCausalLM)
AutoModelForMaskedLM.register(LinRopeConfig, LinRopeForMaskedLM)
AutoModelForQuestionAnswering.register(LinRopeConfig, LinRopeForQuestionAnswering)
AutoModelForSequenceClassification.register(LinRopeConfig, LinRopeForSequenceClassification)
AutoModelForTokenClassification.register(LinRopeConfig, LinRopeForTokenClassification)

LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]  # of a LoraConfig that names none
try:
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as _LORA
except ModuleNotFoundError:  # peft is an extra of its own to whoever does not tune
    pass
else:
    _LORA.setdefault(LinRopeConfig.model_type, LORA_TARGETS)

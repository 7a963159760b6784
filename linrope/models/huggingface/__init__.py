"""Models for transformers. Importing this module registers them with the Auto classes."""

from linrope.common.optional import need

need("transformers", "linrope[huggingface]")

import transformers  # noqa: E402

from linrope.models.huggingface.cache import LinRopeCache  # noqa: E402
from linrope.models.huggingface.configuration import LinRopeConfig  # noqa: E402
from linrope.models.huggingface.heads import (  # noqa: E402
    LinRopeForMaskedLM,
    LinRopeForQuestionAnswering,
    LinRopeForSequenceClassification,
    LinRopeForTokenClassification,
)
from linrope.models.huggingface.modeling import (  # noqa: E402
    LinRopeForCausalLM,
    LinRopeModel,
    LinRopePreTrainedModel,
)
from linrope.models.huggingface.saving import AUTO_MAP  # noqa: E402

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

for _auto, _name in AUTO_MAP.items():
    _key = LinRopeConfig.model_type if _auto == "AutoConfig" else LinRopeConfig
    getattr(transformers, _auto).register(_key, globals()[_name])

LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]  # the default of a LoraConfig that names no modules
try:
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as _LORA
except ModuleNotFoundError:  # peft is needed for finetuning only
    pass
else:
    _LORA.setdefault(LinRopeConfig.model_type, LORA_TARGETS)

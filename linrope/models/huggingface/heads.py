"""Models that predict hidden tokens, classes or answers: LinRopeModel with a matrix behind it."""

import copy
from typing import Any

from torch import Tensor, nn
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.modeling_outputs import MaskedLMOutput
from transformers.utils.generic import can_return_tuple

from linrope.models.huggingface.configuration import LinRopeConfig
from linrope.models.huggingface.modeling import LinRopeModel, LinRopePreTrainedModel
from linrope.models.huggingface.parallel import TP_HEAD


class LinRopeForMaskedLM(LinRopePreTrainedModel):
    """Takes tokens and returns the logits of the same tokens; each token sees all others (is_causal=False).

    >>> from linrope.models.huggingface import LinRopeConfig, LinRopeForMaskedLM
    >>> model = LinRopeForMaskedLM(LinRopeConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2))
    >>> model(torch.randint(50, (2, 10))).logits.shape
    torch.Size([2, 10, 50])
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = TP_HEAD

    def __init__(self, config: LinRopeConfig) -> None:
        config = copy.deepcopy(config)
        config.is_causal = False  # saved with the config, so that AutoModel makes the same layers
        super().__init__(config)
        self.model = LinRopeModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self, input_ids: Tensor | None = None, *, labels: Tensor | None = None, **kwargs: Any
    ) -> MaskedLMOutput:
        """Takes the arguments of ``LinRopeModel``, and labels (b, n): -100 where there is no loss."""
        outputs = self.model(input_ids, **kwargs)
        logits = self.lm_head(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


class LinRopeForSequenceClassification(GenericForSequenceClassification, LinRopePreTrainedModel):
    """Takes tokens and returns logits of config.num_labels classes, from the last token that is not padding.

    >>> from linrope.models.huggingface import LinRopeConfig, LinRopeForSequenceClassification
    >>> config = LinRopeConfig(vocab_size=50, hidden_size=32, num_labels=3, pad_token_id=0)
    >>> LinRopeForSequenceClassification(config)(torch.randint(1, 50, (2, 10))).logits.shape
    torch.Size([2, 3])
    """


class LinRopeForTokenClassification(GenericForTokenClassification, LinRopePreTrainedModel):
    """Takes tokens and returns logits of config.num_labels classes for each; is_causal=False sees both sides.

    >>> from linrope.models.huggingface import LinRopeConfig, LinRopeForTokenClassification
    >>> config = LinRopeConfig(vocab_size=50, hidden_size=32, num_labels=3, is_causal=False)
    >>> LinRopeForTokenClassification(config)(torch.randint(50, (2, 10))).logits.shape
    torch.Size([2, 10, 3])
    """


class LinRopeForQuestionAnswering(GenericForQuestionAnswering, LinRopePreTrainedModel):
    """Takes tokens and returns logits for an answer's start and end; is_causal=False sees both sides.

    >>> from linrope.models.huggingface import LinRopeConfig, LinRopeForQuestionAnswering
    >>> config = LinRopeConfig(vocab_size=50, hidden_size=32, is_causal=False)
    >>> LinRopeForQuestionAnswering(config)(torch.randint(50, (2, 10))).start_logits.shape
    torch.Size([2, 10])
    """

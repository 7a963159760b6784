"""Models of transformers with the call of linrope's language models."""

from inspect import signature
from typing import Any

from torch import Tensor, nn

CACHES = ("cache", "past_key_values", "cache_params")  # transformers 5.24 renamed the latter two to the first


class WithCache(nn.Module):
    """Calls a model of transformers as a LanguageModel is called: its cache takes the place of the states.

    Raises:
        ValueError: the model's call takes no cache.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        parameters = signature(model.forward).parameters
        taken = [name for name in CACHES if name in parameters]
        if not taken:
            raise ValueError(
                f"model: got {type(model).__name__}, expected a LanguageModel, a LinRopeForCausalLM, or a causal "
                "language model of transformers whose forward takes a cache"
            )
        self.name, self.keeps = taken[0], "logits_to_keep" in parameters

    def forward(self, tokens: Tensor, states: Any = None, *, logits_to_keep: int = 0) -> tuple[Tensor, Any]:
        kept = {"logits_to_keep": logits_to_keep} if self.keeps else {}
        out = self.model(tokens, **{self.name: states}, use_cache=True, **kept)
        return out.logits[:, -logits_to_keep:], out[self.name]

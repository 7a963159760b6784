"""Models of transformers with the call of linrope's language models."""

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

CACHES = ("cache", "past_key_values", "cache_params")  # transformers 5.24 renamed the latter two to the first


class WithCache(nn.Module):
    """Calls a model of transformers as a LanguageModel is called.

    The states are its cache and the number of tokens in it, which some hybrid models do not count themselves.

    Raises:
        ValueError: the model's call takes no cache, or a text in pieces gives other logits than as a whole.
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
        self.name = taken[0]
        config: Any = model.config
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        # Beyond it a model with a table of positions fails, and any other was not trained.
        self.longest: int | None = getattr(config, "max_position_embeddings", None)
        self.counts, self.keeps = "position_ids" in parameters, "logits_to_keep" in parameters
        self._check_pieces()

    def forward(self, tokens: Tensor, states: Any = None, *, logits_to_keep: int = 0) -> tuple[Tensor, Any]:
        cache, seen = (None, 0) if states is None else states
        end = seen + tokens.shape[1]
        positions = torch.arange(seen, end, device=tokens.device)[None]
        logits, cache = self.read(tokens, cache, positions, logits_to_keep)
        return logits, (cache, end)

    def read(
        self, tokens: Tensor, cache: Any, positions: Tensor, logits_to_keep: int, mask: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """tokens (b, n) at positions (b, n) -> their last logits, and the cache after them.

        mask (b, m): 0 hides a column of the cache from its row.
        """
        options: dict[str, Any] = {"logits_to_keep": logits_to_keep} if self.keeps else {}
        if self.counts:
            options["position_ids"] = positions
        if mask is not None:
            options["attention_mask"] = mask
        out = self.model(tokens, **{self.name: cache}, use_cache=True, **options)
        return out.logits[:, -logits_to_keep:], out[self.name]

    @torch.no_grad()
    def _check_pieces(self) -> None:
        """Raises ValueError for a model such as MiniMax's, which forgets its cache if it reads more than one token."""
        tokens = torch.arange(8, device=next(self.parameters()).device)[None]
        whole, (_, states) = self(tokens)[0], self(tokens[:, :5])
        if not same_logits(self, self(tokens[:, 5:], states)[0], whole[:, 5:]):
            raise ValueError(
                f"model: got {type(self.model).__name__}, whose logits of a text in pieces are not those of the whole "
                "text; expected a model that continues from its cache with any number of tokens"
            )


def longest_text(model: Any) -> int | None:
    """The number of tokens beyond which a model fails, or was not trained. None: it reads any number."""
    return model.longest if isinstance(model, WithCache) else None


def same_logits(model: nn.Module, found: Tensor, expected: Tensor) -> bool:
    """Whether rounding alone explains the difference."""
    wide = all(x.dtype.itemsize >= 4 for x in model.parameters() if x.is_floating_point())
    # In half precision rounding may lead a mixture of experts to other experts.
    allowed = 1e-3 if wide else 0.1
    return bool((found - expected).abs().max() <= allowed * expected.abs().max())

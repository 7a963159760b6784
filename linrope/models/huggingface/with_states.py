"""A LinRopeForCausalLM with the call of a LanguageModel, for continuous batching, ``generate`` and export."""

from typing import Any

from torch import Tensor, nn

from linrope.decode.parts import ModelParts
from linrope.layer.states import State
from linrope.models.logits import kept_rows


class WithStates(nn.Module):
    """Calls a LinRopeForCausalLM, whose weights it shares, with a list of states in place of a cache."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def forward(
        self,
        tokens: Tensor,
        states: list[State] | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        return_states: bool = True,
        logits_to_keep: int | Tensor = 0,
    ) -> tuple[Tensor, list[State]]:
        """tokens (b, n) integers -> logits (b, n, vocab_size), and the states after the last token.

        The arguments are those of ``LanguageModel``.
        """
        base = self.model.model
        if states is not None and len(states) != len(base.layers):
            raise ValueError(f"states: got {len(states)}, expected one per layer, {len(base.layers)}")
        x, new_states = base.embed_tokens(tokens), []
        for i, layer in enumerate(base.layers):
            state = None if states is None else states[i]
            x, state = layer(x, state=state, return_state=return_states, cu_seqlens=cu_seqlens)
            if state is not None:
                new_states.append(state)
        logits: Tensor = self.model.lm_head(base.norm(kept_rows(x, logits_to_keep)))
        return logits, new_states

    def decoding_parts(self) -> ModelParts:
        """The modules for ``linrope.decode.prepare``."""
        parts: ModelParts = self.model.model.parts()
        kinds: tuple[type, ...] = (WithStates, type(self.model), *parts.kinds)
        embedding, head = self.model.model.embed_tokens, self.model.lm_head
        return parts._replace(model=self, kinds=kinds, embedding=embedding, head=head)

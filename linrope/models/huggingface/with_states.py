"""A LinRopeForCausalLM with the call of a LanguageModel, for continuous batching, ``generate`` and export."""

from typing import Any

from torch import Tensor, nn

from linrope.decode.parts import ModelParts
from linrope.layer.states import State
from linrope.models.huggingface.prepared import parts_of
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
        parts = parts_of(self.model.model)
        kinds = (WithStates, *self.model.kinds(), *parts.kinds)
        embedding, head = self.model.model.embed_tokens, self.model.lm_head
        return parts._replace(model=self, kinds=kinds, embedding=embedding, head=head)


def with_states(model: Any) -> WithStates:
    """This model with the call of a LanguageModel: tokens and states -> logits and the next states.

    Raises:
        TypeError: the model's class has a forward of its own, which that call would leave out.

    >>> from linrope.models import generate
    >>> from linrope.models.huggingface import LinRopeConfig, LinRopeForCausalLM
    >>> model = LinRopeForCausalLM(LinRopeConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2))
    >>> tokens, states = generate(model.with_states(), torch.tensor([[1, 2]]), 5, return_states=True)
    >>> tokens.shape, states[0].position
    (torch.Size([1, 5]), tensor([6]))
    """
    for part in (model, model.model):
        if type(part).forward not in (kind.forward for kind in part.kinds()):
            raise TypeError(
                f"with_states: got a {type(part).__name__} with a forward of its own, expected linrope's"
            )
    return WithStates(model)

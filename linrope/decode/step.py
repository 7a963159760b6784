"""Prepares a decoding step once for all tokens of a loop."""

from collections.abc import Sequence
from typing import overload

from linrope.decode.layer_step import PreparedLayer
from linrope.decode.model_step import ModelStep
from linrope.decode.parts import DecodableModel, ModelParts
from linrope.decode.reasons import why_not
from linrope.layer.attention import LinearRoPEAttention
from linrope.layer.state import LayerState


@overload
def prepare(module: LinearRoPEAttention, states: LayerState) -> PreparedLayer: ...
@overload
def prepare(module: DecodableModel | ModelParts, states: Sequence[LayerState]) -> ModelStep: ...
def prepare(
    module: LinearRoPEAttention | DecodableModel | ModelParts, states: LayerState | Sequence[LayerState]
) -> PreparedLayer | ModelStep:
    """Prepares the decoding steps of a layer or a model: a function that takes the next token of each sequence.

        y = layer(x, state=state)                 x (b, 1, embed_dim) -> the same shape
        logits = model(tokens, states)[0]         tokens (b, 1) -> (b, 1, vocab_size)

    The step computes what the module computes, without gradients, with far fewer calls of PyTorch. Module and states
    are checked here, once, and a call checks only its own tokens and slots. It is for float32 on a CPU. Every call
    overwrites the states given here with the next ones, from which the module too can continue. step(tokens, slots)
    with slots (b,) int64 takes the rows of the states at the slots, and leaves the other rows alone. It reads the
    weights in place: prepare a new step after a weight has been replaced by another tensor.

    Args:
        module: a layer; a model such as ``linrope.models.LanguageModel``; or the parts of a model.
        states: the state after the last token: of a layer, or a list with one per block of a model. Do not donate
            these objects to other calls while the step is in use.

    Raises:
        ValueError: ``why_not(module, states)`` has a reason why only the module's own call can take the step.

    >>> from linrope.decode import prepare, why_not
    >>> from linrope.models import LanguageModel, LanguageModelConfig
    >>> model = LanguageModel(LanguageModelConfig(embed_dim=32, num_layers=2, num_heads=2)).requires_grad_(False)
    >>> tokens = torch.randint(256, (1, 10))
    >>> states = model(tokens[:, :9])[1]
    >>> if why_not(model, states) is None:
    ...     step = prepare(model, states)
    ...     torch.testing.assert_close(step(tokens[:, 9:]), model(tokens)[0][:, 9:], rtol=1e-4, atol=1e-5)
    """
    if (reason := why_not(module, states)) is not None:
        raise ValueError(f"a prepared decoding step is impossible here: {reason}")
    if isinstance(module, LinearRoPEAttention):
        assert isinstance(states, LayerState)
        return PreparedLayer(module, states)
    assert not isinstance(states, LayerState)
    return ModelStep(module if isinstance(module, ModelParts) else module.decoding_parts(), states)

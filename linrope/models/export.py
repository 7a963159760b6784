"""A language model for exporters and other runtimes: tensors in, tensors out."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from linrope.models.language_model import LanguageModel


class TensorStates(nn.Module):
    """A LanguageModel whose states are plain tensors in its arguments and results.

        logits, [kv_0', z_0', position_0', kv_1', ..] = module(tokens, [kv_0, z_0, position_0, kv_1, ..])

    The tensors of block i are those of its LinearAttentionState: kv_i (b, g, f, e), z_i (b, g, f), position_i
    (b,), and angle_i, log_scale_i and conv_i if the model has them. Sequences begin with ``empty``. A
    prompt, a piece of a prompt and a decoding step are all the same call. The weights are shared with the
    model.

    Args:
        model: a LanguageModel with linear attention.

    Raises:
        ValueError: the model has softmax attention, whose cache grows.

    >>> from linrope.models import LanguageModel, LanguageModelConfig
    >>> from linrope.models.export import TensorStates
    >>> model = LanguageModel(LanguageModelConfig(embed_dim=32, num_layers=2, num_heads=2))
    >>> module = TensorStates(model)
    >>> logits, tensors = module(torch.tensor([[76, 105]]), module.empty(1))
    >>> dict(zip(module.names, [tuple(tensor.shape) for tensor in tensors]))
    {'kv_0': (1, 2, 16, 32), 'z_0': (1, 2, 16), 'position_0': (1,), 'conv_0': (1, 3, 128),
     'kv_1': (1, 2, 16, 32), 'z_1': (1, 2, 16), 'position_1': (1,), 'conv_1': (1, 3, 128)}
    """

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        if model.config.attention != "linear":
            raise ValueError(f"model: got attention={model.config.attention!r}, expected 'linear'")
        self.model = model
        with torch.no_grad():
            _, states = model(torch.zeros(1, 0, dtype=torch.int64, device=model.embed.weight.device))
        self._empty, self._structure = pytree.tree_flatten(states)
        paths: list[Any] = [path for path, _ in pytree.tree_flatten_with_path(states)[0]]
        self.names = [f"{leaf.name}_{block.idx}" for block, leaf in paths]

    def empty(self, batch: int) -> list[Tensor]:
        """The states of ``batch`` sequences before their first token."""
        return [tensor.repeat(batch, *[1] * (tensor.ndim - 1)) for tensor in self._empty]

    def forward(self, tokens: Tensor, tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """tokens (b, n) -> logits (b, n, vocab_size), and the tensors after the last token."""
        logits, states = self.model(tokens, pytree.tree_unflatten(tensors, self._structure))
        return logits, pytree.tree_leaves(states)

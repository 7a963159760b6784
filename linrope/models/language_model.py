"""A causal language model on linear attention with RoPE, of bytes by default.

    x = embed(bytes)
    x = x + attention(norm(x));  x = x + swiglu(norm(x))      in each block; swiglu is an option
    logits = norm(x) embed^T                                  the embedding is tied

The state of a sequence is one LayerState per block: generating the millionth byte takes the same
time and memory as generating the first. Softmax attention is included for comparison.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linrope.common.argument_checks import check_integer_tensors
from linrope.common.files import digest, load_tensors, parse_json, replace_file, save_tensors
from linrope.common.tracing import values_readable
from linrope.decode.parts import BlockParts, ModelParts
from linrope.distributed.shard import Shard
from linrope.layer.norm import RMSNorm, silu_product
from linrope.layer.softmax_attention import SoftmaxAttention
from linrope.layer.states import State as State
from linrope.models.checkpoint_folders import latest_checkpoint
from linrope.models.initialization import initialize
from linrope.models.language_model_config import LanguageModelConfig, make_attention
from linrope.models.logits import kept_rows
from linrope.operation.checks import check_packing

_FORMAT, _VERSION = "linrope.LanguageModel", 2

States = list[State]


class SwiGLU(nn.Module):
    """W_2 (silu(W_1 x) * W_3 x). Shazeer 2020, arXiv 2002.05202."""

    def __init__(self, dim: int, hidden_dim: int, **factory: Any) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False, **factory)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False, **factory)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False, **factory)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.w2(silu_product(self.w1(x), self.w3(x)))
        return y


class TiedEmbedding(nn.Embedding):
    """An embedding whose weight is also the model's last matrix: vectors of integers, and logits of vectors."""

    def forward(self, x: Tensor) -> Tensor:
        """Integers (b, n) -> (b, n, dim); vectors (b, n, dim) -> x W^T, (b, n, integers)."""
        return F.linear(x, self.weight) if x.is_floating_point() else super().forward(x)


class Block(nn.Module):
    """Attention and, as an option, a feed-forward network, each behind a norm and in a residual connection."""

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        dim = config.embed_dim
        self.attention_norm = RMSNorm(dim, eps=1e-6)
        self.attention = make_attention(config)
        self.feed_forward_norm = RMSNorm(dim, eps=1e-6) if config.feed_forward else None
        self.feed_forward = SwiGLU(dim, config.feed_forward_dim()) if config.feed_forward else None

    def forward(
        self,
        x: Tensor,
        state: State | None,
        positions: Tensor | None,
        cu_seqlens: Tensor | None,
        return_state: bool,
        shard: Shard | None = None,
    ) -> tuple[Tensor, State | None]:
        attend = _AttentionCall(self.attention, state, positions, cu_seqlens, return_state, shard)
        x = x + attend(self.attention_norm(x))
        if self.feed_forward is not None and self.feed_forward_norm is not None:
            x = x + self.feed_forward(self.feed_forward_norm(x))
        return x, attend.state

    def decoding_parts(self) -> BlockParts:
        network = self.feed_forward
        products = (None, None, None) if network is None else (network.w1, network.w2, network.w3)
        return BlockParts(self.attention_norm, self.attention, self.feed_forward_norm, *products)


class _AttentionCall:
    """A block's attention as a function of x alone, which keeps the new state in ``state``."""

    def __init__(
        self,
        attention: nn.Module,
        state: State | None,
        positions: Tensor | None,
        cu_seqlens: Tensor | None,
        return_state: bool,
        shard: Shard | None,
    ) -> None:
        self.attention, self.state, self.return_state = attention, state, return_state
        self.options: dict[str, Any] = {"positions": positions, "cu_seqlens": cu_seqlens}
        if shard is not None:  # softmax attention has no such argument
            self.options["shard"] = shard

    def __call__(self, x: Tensor) -> Tensor:
        state, self.state = self.state, None
        if isinstance(self.attention, SoftmaxAttention) and self.options["cu_seqlens"] is not None:
            return _attend_to_each_sequence(self.attention, x, **self.options)
        result: Any = self.attention(x, state=state, return_state=self.return_state, **self.options)
        y: Tensor
        y, self.state = result if self.return_state else (result, None)
        return y


def _attend_to_each_sequence(
    attention: SoftmaxAttention, x: Tensor, positions: Tensor | None, cu_seqlens: Tensor
) -> Tensor:
    """Splits packed sequences: the cost of a block mask would be the square of their total length."""
    cuts = cu_seqlens[1:-1].cpu().long()
    parts = x.tensor_split(cuts, 1)
    part_positions = [None] * len(parts) if positions is None else positions.tensor_split(cuts, -1)
    return torch.cat([attention(part, positions=p) for part, p in zip(parts, part_positions, strict=True)], 1)


class LanguageModel(nn.Module):
    """Maps token ids, bytes by default, to the logits of the next token.

    Raises:
        ValueError: a size does not fit, or a name is unknown.

    >>> from linrope.models import LanguageModel, LanguageModelConfig
    >>> model = LanguageModel(LanguageModelConfig(embed_dim=32, num_layers=2, num_heads=2))
    >>> logits, states = model(torch.randint(256, (1, 10)))
    >>> logits.shape, model(torch.tensor([[65]]), states)[0].shape
    (torch.Size([1, 10, 256]), torch.Size([1, 1, 256]))
    """

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = TiedEmbedding(config.vocab_size, config.embed_dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.embed_dim, eps=1e-6)
        branches = (1 + config.feed_forward) * config.num_layers
        initialize(self.named_parameters(), config.init, branches)

    def forward(
        self,
        tokens: Tensor,
        states: States | None = None,
        *,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        return_states: bool = True,
        logits_to_keep: int | Tensor = 0,
        shard: Shard | None = None,
    ) -> tuple[Tensor, States]:
        """tokens (b, n) integers -> logits (b, n, vocab_size), and the states after the last token.

        positions, cu_seqlens and shard are as in linear_rope_attention. With return_states=False the list of
        states is empty, which saves the time to compute them. Packed softmax attention has no states.

        logits_to_keep: return the logits of the last so many tokens only; 0: of all; a tensor (k,): of the tokens at
        these indices.
        """
        check_integer_tensors(tokens=tokens)
        if tokens.element_size() < 4:  # uint8, as in a Corpus, with which an embedding would fail
            tokens = tokens.int()
        if tokens.ndim != 2:
            raise ValueError(f"tokens: got shape {tuple(tokens.shape)}, expected (b, n)")
        if values_readable(tokens) and tokens.numel():
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high >= self.config.vocab_size:
                raise ValueError(
                    f"tokens: got ids {low} .. {high}, expected 0 .. {self.config.vocab_size - 1}"
                )
        continues = bool(states) and cu_seqlens is not None
        softmax = (continues or shard is not None) and any(
            isinstance(x, SoftmaxAttention)
            for x in self.modules()  # the config tells nothing of a block whose attention was replaced
        )
        if shard is not None and softmax:
            raise ValueError(
                "shard: got a shard, expected None with attention='softmax', which reads all keys"
            )
        if continues and softmax:
            raise ValueError("states: got a list with cu_seqlens, expected None with attention='softmax'")
        if not isinstance(states, list | tuple | None):
            raise TypeError(
                f"states: got {type(states).__name__}, expected a list with one per block, as load_states reads it"
            )
        if states is not None and len(states) != len(self.blocks):
            raise ValueError(f"states: got {len(states)}, expected one per block, {len(self.blocks)}")
        b, n = tokens.shape
        check_packing(cu_seqlens, b, n, n, tokens.device)
        x = self.embed(tokens)
        new_states: States = []
        for index, block in enumerate(self.blocks):
            state = None if states is None else states[index]
            x, state = block(x, state, positions, cu_seqlens, return_states, shard)
            if state is not None:
                new_states.append(state)
        x = self.norm(kept_rows(x, logits_to_keep))
        if not isinstance(self.embed, TiedEmbedding):  # PEFT's embedding takes integers only
            return F.linear(x, self.embed.weight), new_states
        return self.embed(x), new_states

    def decoding_parts(self) -> ModelParts:
        """The modules for ``linrope.decode.prepare``."""
        kinds = (LanguageModel, Block, SwiGLU, TiedEmbedding, nn.ModuleList, RMSNorm, nn.Linear)
        blocks: Any = self.blocks
        return ModelParts(self, kinds, [x.decoding_parts() for x in blocks], self.norm, self.embed)

    def save(self, folder: str | os.PathLike[str], weights: dict[str, Any] | None = None) -> None:
        """Writes model.safetensors and config.json.

        weights: the whole state_dict, if this process holds only a part of it; default: self.state_dict().

        Raises:
            ValueError: the weights are split over processes. Nothing is written.
        """
        weights = self.state_dict() if weights is None else weights
        if split := next((name for name, x in weights.items() if hasattr(x, "full_tensor")), None):
            raise ValueError(
                f"weights: got a DTensor for {split}, expected whole tensors, as torch.distributed."
                "checkpoint.state_dict.get_model_state_dict gathers them with StateDictOptions(full_state_dict=True)"
            )
        text = json.dumps(self.config.to_dict(), indent=2) + "\n"
        metadata = {"format": _FORMAT, "version": str(_VERSION), "config": config_digest(json.loads(text))}
        save_tensors(Path(folder) / "model.safetensors", weights, metadata)
        replace_file(Path(folder) / "config.json", lambda path: path.write_text(text))

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> "LanguageModel":
        """Reads a folder that ``save`` wrote, or the last checkpoint in the folder of a run.

        The weights have the dtype that they were saved with.

        Raises:
            FileNotFoundError, ValueError: a file is missing, damaged, newer, or does not fit the other.
        """
        folder = latest_checkpoint(folder)
        path, weights = folder / "config.json", folder / "model.safetensors"
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file")
        try:
            values = parse_json(path.read_bytes(), path.name)
            config = LanguageModelConfig.from_dict(values)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        tensors, metadata = load_tensors(weights, _FORMAT, _VERSION)
        if metadata.get("config") != config_digest(values):
            raise ValueError(f"{path}: differs from the one that {weights.name} was saved with")
        if config.num_layers > len(tensors):
            raise ValueError(
                f"{path}: num_layers={config.num_layers}: expected at most {len(tensors)}, the number of tensors in "
                f"{weights.name}"
            )
        try:
            with torch.device("meta"):  # compares the sizes before any memory is allocated
                shapes = {name: x.shape for name, x in cls(config).state_dict().items()}
            if wrong := [name for name, x in tensors.items() if shapes.get(name, x.shape) != x.shape]:
                raise ValueError(f"sizes of {wrong[:3]} differ")
            # Loading draws no random numbers from the caller's stream.
            with torch.random.fork_rng(devices=[]):
                model = cls(config)
            for name, x in model.state_dict(keep_vars=True).items():
                if name in tensors and tensors[name].is_floating_point():
                    x.data = x.data.to(tensors[name].dtype)
            model.load_state_dict(tensors)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"{folder}: weights do not fit config.json: {error}") from error
        return model


def config_digest(values: dict[str, Any]) -> str:
    """A digest of config.json.

    model.safetensors stores it, so that ``load`` can tell whether the two files belong together.
    """
    return digest({}, {"config": json.dumps(values, sort_keys=True)})

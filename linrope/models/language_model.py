"""A byte-level causal language model on linear attention with RoPE, in one file.

    x = embed(bytes)                                          + p, with absolute positions
    x = x + attention(norm(x));  x = x + swiglu(norm(x))      in each block
    logits = norm(x) embed^T                                  the embedding is tied

The state of a sequence is one LinearAttentionState per block: generating the millionth byte takes the same
time and memory as generating the first. Softmax attention and other position encodings are included for
comparison.
"""

import json
import math
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linrope.common.files import digest, load_tensors, parse_json, replace_file, save_tensors
from linrope.common.names import check_name
from linrope.common.values import values_readable
from linrope.distributed.shard import Shard
from linrope.layer.attention import LinearRoPEAttention
from linrope.layer.choices import ROTATIONS
from linrope.models.decay import resolve_decay
from linrope.models.folders import latest_checkpoint
from linrope.operation.checks import check_packing
from linrope.operation.positions import resolve_positions
from linrope.position_encodings import ABSOLUTE, RELATIVE, KeyValueState, SoftmaxAttention
from linrope.rotation.rotary import LAYOUTS, Rotary
from linrope.sequence.state import LinearAttentionState

_FORMAT, _VERSION = "linrope.LanguageModel", 1

ATTENTION = ("linear", "softmax")
POSITIONS = ("rope", "none", *ABSOLUTE, *RELATIVE)

State = LinearAttentionState | KeyValueState
States = list[State]

_SIZES = (
    "vocab_size",
    "embed_dim",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "hidden_dim",
    "max_length",
    "short_conv",
)
_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class LanguageModelConfig:
    """The sizes and choices of a LanguageModel, saved beside the weights as JSON."""

    vocab_size: int = 256
    embed_dim: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int | None = None
    hidden_dim: int | None = None  # of the SwiGLU; default: 8/3 embed_dim, rounded up to a multiple of 32
    feature_map: str | dict = "elu+1"  # type: ignore[type-arg]  # or {"name": .., options}
    # With positions "rope": a layout, "selective", or {"name": "selective", options}; None: no rotation.
    rotary: str | dict | None = "interleaved"  # type: ignore[type-arg]
    normalize: bool = True
    out_norm: bool = True
    gate: bool = True
    attention: str = "linear"  # or "softmax", which uses only the heads and rotary of the fields above
    positions: str = "rope"  # one of POSITIONS; those in RELATIVE require softmax attention
    max_length: int = 4096  # the size of the table if positions is "learned"
    # Options of linear attention, as in LinearRoPEAttention. decay="auto": see models/decay.py.
    decay: str | dict | None = "auto"  # type: ignore[type-arg]
    forget_gate: bool | dict = False  # type: ignore[type-arg]
    short_conv: int | None = None
    qk_norm: bool = False

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if value is not None and value > _LARGEST:
                raise ValueError(f"{name}={value}: expected at most {_LARGEST}")

    @classmethod
    def from_dict(cls, values: object) -> "LanguageModelConfig":
        """Raises ValueError on unknown keys or values of the wrong type."""
        known = {field.name: field.type for field in fields(cls)}
        if not isinstance(values, dict):
            raise ValueError(f"config: got {type(values).__name__}, expected an object")
        if unknown := sorted(set(values) - set(known)):
            raise ValueError(f"config: got unknown keys {unknown}, expected some of {sorted(known)}")
        for name, value in values.items():
            kinds = get_args(known[name]) or (known[name],)
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                raise ValueError(f"config: got {name}={value!r}, expected {known[name]}")
        return cls(**values)


class SwiGLU(nn.Module):
    """W_2 (silu(W_1 x) * W_3 x). Shazeer 2020, arXiv 2002.05202."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return y


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm and inside a residual connection."""

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        dim = config.embed_dim
        self.attention_norm = nn.RMSNorm(dim, eps=1e-6)
        self.attention = _softmax(config) if config.attention == "softmax" else _linear(config)
        self.feed_forward_norm = nn.RMSNorm(dim, eps=1e-6)
        self.feed_forward = SwiGLU(dim, config.hidden_dim or 32 * math.ceil(8 / 3 * dim / 32))

    def forward(
        self,
        x: Tensor,
        state: State | None,
        positions: Tensor | None,
        cu_seqlens: Tensor | None,
        return_state: bool,
        shard: Shard | None = None,
    ) -> tuple[Tensor, State | None]:
        mixer = _Mixer(self.attention, state, positions, cu_seqlens, return_state, shard)
        x = x + mixer(self.attention_norm(x))
        x = x + self.feed_forward(self.feed_forward_norm(x))
        return x, mixer.state


class _Mixer:
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
        before, self.state = self.state, None
        if isinstance(self.attention, SoftmaxAttention) and self.options["cu_seqlens"] is not None:
            return _attend_to_each_sequence(self.attention, x, **self.options)
        result: Any = self.attention(x, state=before, return_state=self.return_state, **self.options)
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


def _linear(config: LanguageModelConfig) -> LinearRoPEAttention:
    rotary = config.rotary if config.positions == "rope" else None
    return LinearRoPEAttention(
        config.embed_dim,
        config.num_heads,
        num_kv_heads=config.num_kv_heads,
        feature_map=config.feature_map,
        rotary=rotary,
        normalize=config.normalize,
        out_norm=config.out_norm,
        gate=config.gate,
        decay=resolve_decay(config.decay, rotated=rotary is not None, forget_gate=config.forget_gate),
        forget_gate=config.forget_gate,
        short_conv=config.short_conv,
        qk_norm=config.qk_norm,
    )


def _softmax(config: LanguageModelConfig) -> SoftmaxAttention:
    positions: str | Rotary = config.positions if config.positions in RELATIVE else "none"
    if config.positions == "rope" and isinstance(config.rotary, str):
        positions = Rotary(config.embed_dim // config.num_heads, layout=config.rotary)
    return SoftmaxAttention(
        config.embed_dim, config.num_heads, num_kv_heads=config.num_kv_heads, positions=positions
    )


def _check_softmax(config: LanguageModelConfig) -> None:
    """Raises ValueError for options that only linear attention has."""
    for name in ("decay", "forget_gate", "short_conv", "qk_norm"):
        if (value := getattr(config, name)) not in (None, False, "auto"):
            expected = False if name in ("forget_gate", "qk_norm") else None
            raise ValueError(f"{name}={value!r}: expected {expected} with attention='softmax'")
    if config.rotary not in (*LAYOUTS, None):
        raise ValueError(
            f"rotary={config.rotary!r}: expected {' or '.join(LAYOUTS)} with attention='softmax'"
        )


def _absolute(config: LanguageModelConfig) -> nn.Module | None:
    end = {"max_length": config.max_length} if config.positions == "learned" else {}
    return ABSOLUTE[config.positions](config.embed_dim, **end) if config.positions in ABSOLUTE else None


class LanguageModel(nn.Module):
    """Takes bytes and returns the logits of the next byte.

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
        for name in ("vocab_size", "embed_dim", "num_layers", "num_heads"):
            if getattr(config, name) < 1:
                raise ValueError(f"{name}={getattr(config, name)}: expected at least 1")
        check_name("attention", config.attention, ATTENTION)
        check_name("positions", config.positions, POSITIONS)
        if isinstance(config.rotary, str):  # the layer checks a dict
            check_name("rotary", config.rotary, ROTATIONS, also="a dict or None")
        if config.attention == "linear" and config.positions in RELATIVE:
            raise ValueError(
                f"positions={config.positions!r}: adds a term to the n x m scores, which linear attention "
                "never forms; expected attention='softmax'"
            )
        if config.attention == "softmax":
            _check_softmax(config)
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.embed_dim)
        self.encoding = _absolute(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.embed_dim, eps=1e-6)
        for name, weight in self.named_parameters():
            if weight.ndim == 2 and ".angle_steps." not in name:
                # GPT-2's scaling: x sums two branches per block, so the last weights of each start smaller.
                ends_branch = name.endswith(("o_proj.weight", "w2.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * config.num_layers) ** 0.5 if ends_branch else 0.02)

    def forward(
        self,
        tokens: Tensor,
        states: States | None = None,
        *,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        return_states: bool = True,
        shard: Shard | None = None,
    ) -> tuple[Tensor, States]:
        """tokens (b, n) integers -> logits (b, n, vocab_size), and the states after the last token.

        positions, cu_seqlens and shard are as in linear_rope_attention. With return_states=False the list of
        states is empty, which saves the time to compute them. Packed softmax attention has no states.
        """
        if tokens.ndim != 2 or tokens.is_floating_point():
            raise ValueError(f"tokens: got {tokens.dtype} {tuple(tokens.shape)}, expected integers (b, n)")
        if values_readable(tokens) and tokens.numel():
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high >= self.config.vocab_size:
                raise ValueError(
                    f"tokens: got ids {low} .. {high}, expected 0 .. {self.config.vocab_size - 1}"
                )
        if shard is not None and self.config.attention == "softmax":
            raise ValueError("shard: got one, expected None with attention='softmax', which reads all keys")
        if states and cu_seqlens is not None and self.config.attention == "softmax":
            raise ValueError("states: got states and cu_seqlens, expected None with attention='softmax'")
        if states is not None and len(states) != len(self.blocks):
            raise ValueError(f"states: got {len(states)}, expected one per block, {len(self.blocks)}")
        x = self.embed(tokens)
        if (
            self.config.positions == "sinusoidal"
        ):  # Vaswani 2017, section 3.4: p is about 1, and x starts small
            x = x * math.sqrt(self.config.embed_dim)
        if self.encoding is not None:
            x = self.encoding(x, _absolute_positions(tokens, states, positions, cu_seqlens, shard))
        new_states: States = []
        for index, block in enumerate(self.blocks):
            state = None if states is None else states[index]
            x, state = block(x, state, positions, cu_seqlens, return_states, shard)
            if state is not None:
                new_states.append(state)
        return F.linear(self.norm(x), self.embed.weight), new_states

    def save(self, folder: str | os.PathLike[str], weights: dict[str, Any] | None = None) -> None:
        """Writes config.json and model.safetensors.

        weights: the whole state_dict, if this process holds only a part of it; default: self.state_dict().
        """
        text = json.dumps(asdict(self.config), indent=2) + "\n"
        replace_file(Path(folder) / "config.json", lambda path: path.write_text(text))
        metadata = {"format": _FORMAT, "version": str(_VERSION), "config": config_digest(json.loads(text))}
        save_tensors(Path(folder) / "model.safetensors", weights or self.state_dict(), metadata)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> "LanguageModel":
        """Reads a folder that ``save`` wrote, or the last checkpoint in the folder of a run.

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
            raise ValueError(f"{path}: got {config.num_layers} layers, expected those of {weights.name}")
        try:
            with torch.device("meta"):  # compares the sizes before any memory is allocated
                shapes = {name: x.shape for name, x in cls(config).state_dict().items()}
            if wrong := [name for name, x in tensors.items() if shapes.get(name, x.shape) != x.shape]:
                raise ValueError(f"sizes of {wrong[:3]} differ")
            with torch.random.fork_rng(
                devices=[]
            ):  # loading draws no random numbers from the caller's stream
                model = cls(config)
            model.load_state_dict(tensors)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"{folder}: weights do not fit config.json: {error}") from error
        return model


def config_digest(values: dict[str, Any]) -> str:
    """A digest of the contents of config.json, which the weights carry to vouch for it."""
    return digest({}, {"config": json.dumps(values, sort_keys=True)})


def _absolute_positions(
    tokens: Tensor,
    states: States | None,
    positions: Tensor | None,
    cu_seqlens: Tensor | None,
    shard: Shard | None,
) -> Tensor:
    """(n,) or (b or 1, n): the caller's positions, or positions that continue the states."""
    if positions is not None:
        return positions
    if shard is not None:
        if states is not None and shard.cu_seqlens is not None:
            return shard.positions(tokens.device, states[0].position)
        positions = shard.positions(tokens.device)
        return positions if states is None else states[0].position[:, None] + positions
    b, n = tokens.shape
    if cu_seqlens is None:
        positions = torch.arange(n, device=tokens.device)
        return positions if states is None else states[0].position[:, None] + positions
    start = torch.zeros(len(cu_seqlens) - 1, dtype=torch.int64, device=tokens.device)
    start = start if states is None else states[0].position
    check_packing(cu_seqlens, b, n, n, tokens.device)
    return resolve_positions(positions=None, start=start, b=b, n=n, m=n, bounds=cu_seqlens)[0]

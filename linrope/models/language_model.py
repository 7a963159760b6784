"""A byte-level causal language model on linear attention with RoPE, in one file.

    x = embed(bytes)                                          + p, with absolute positions
    x = x + attention(norm(x));  x = x + swiglu(norm(x))      for each block
    logits = norm(x) embed^T                                  the embedding is tied

The state of a sequence is one LinearAttentionState per block: generating the millionth byte costs what
the first one costs, in time and in memory. Softmax attention and other position encodings are there to
compare with.
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
from linrope.models.folders import latest_checkpoint
from linrope.operation.checks import check_packing
from linrope.operation.positions import resolve_positions
from linrope.position_encodings import ABSOLUTE, RELATIVE, KeyValueState, SoftmaxAttention
from linrope.rotation.rotary import LAYOUTS, Rotary
from linrope.sequence.state import LinearAttentionState

_FORMAT, _VERSION = "linrope.LanguageModel", 1

ATTENTION = ("linear", "softmax")
POSITIONS = ("rope", "none", *ABSOLUTE, *RELATIVE)
_BEFORE: dict[str, Any] = {"decay": None}  # defaults that were other ones when models were saved first

State = LinearAttentionState | KeyValueState
States = list[State]


_SIZES = (
    "vocab_size", "embed_dim", "num_layers", "num_heads", "num_kv_heads", "hidden_dim", "max_length",
    "short_conv",
)  # fmt: skip
_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class LanguageModelConfig:
    """Sizes and choices of a LanguageModel; saved beside the weights as JSON."""

    vocab_size: int = 256
    embed_dim: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int | None = None
    hidden_dim: int | None = None  # of the SwiGLU; default 8/3 embed_dim, rounded up to 32
    feature_map: str | dict = "elu+1"  # type: ignore[type-arg]  # or {"name": .., options}
    # Of positions "rope": a layout, "selective", or {"name": "selective", options}; None: no positions.
    rotary: str | dict | None = "interleaved"  # type: ignore[type-arg]
    normalize: bool = True
    out_norm: bool = True
    gate: bool = True
    attention: str = "linear"  # or "softmax", which has nothing of what is above but heads and rotary
    positions: str = "rope"  # one of POSITIONS; those in RELATIVE with softmax only
    max_length: int = 4096  # of positions "learned"
    # Of linear attention, as in LinearRoPEAttention. decay "auto": "spread" beside a rotation, None without
    # one or with a forget gate.
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
        return cls(**(_BEFORE | values))


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
    """Pre-norm attention and feed-forward, each around a residual connection."""

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        dim = config.embed_dim
        self.attention_norm = nn.RMSNorm(dim, eps=1e-6)
        self.attention = _softmax(config) if config.attention == "softmax" else _linear(config)
        self.feed_forward_norm = nn.RMSNorm(dim, eps=1e-6)
        self.feed_forward = SwiGLU(dim, config.hidden_dim or 32 * math.ceil(8 / 3 * dim / 32))

    def forward(
        self, x: Tensor, state: State | None, positions: Tensor | None, cu_seqlens: Tensor | None,
        return_state: bool, shard: Shard | None = None,
    ) -> tuple[Tensor, State | None]:  # fmt: skip
        y, after = self.attention_norm(x), None
        where: dict[str, Any] = {"state": state, "positions": positions, "cu_seqlens": cu_seqlens}
        if shard is not None:  # softmax attention knows of none
            where["shard"] = shard
        if cu_seqlens is not None and isinstance(self.attention, SoftmaxAttention):
            y = _each_alone(self.attention, y, positions, cu_seqlens)
        elif return_state:
            y, after = self.attention(y, return_state=True, **where)
        else:
            y = self.attention(y, **where)
        x = x + y
        return x + self.feed_forward(self.feed_forward_norm(x)), after


def _each_alone(
    attention: SoftmaxAttention, x: Tensor, positions: Tensor | None, cu_seqlens: Tensor
) -> Tensor:
    """Packed sequences one by one: a block mask would cost the square of all their lengths."""
    cuts = cu_seqlens[1:-1].cpu().long()
    parts = x.tensor_split(cuts, 1)
    where = [None] * len(parts) if positions is None else positions.tensor_split(cuts, -1)
    return torch.cat([attention(part, positions=at) for part, at in zip(parts, where, strict=True)], 1)


def _linear(config: LanguageModelConfig) -> LinearRoPEAttention:
    decay = config.decay
    if decay == "auto":
        rope = config.positions == "rope" and config.rotary is not None
        decay = "spread" if rope and config.forget_gate is False else None
    return LinearRoPEAttention(
        config.embed_dim,
        config.num_heads,
        num_kv_heads=config.num_kv_heads,
        feature_map=config.feature_map,
        rotary=config.rotary if config.positions == "rope" else None,
        normalize=config.normalize,
        out_norm=config.out_norm,
        gate=config.gate,
        decay=decay,
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
    """Refuses choices that only linear attention has."""
    for name in ("decay", "forget_gate", "short_conv", "qk_norm"):
        if (value := getattr(config, name)) not in (None, False, "auto"):
            off = False if name in ("forget_gate", "qk_norm") else None
            raise ValueError(f"{name}={value!r}: expected {off} with attention='softmax'")
    if config.rotary not in (*LAYOUTS, None):
        raise ValueError(
            f"rotary={config.rotary!r}: expected {' or '.join(LAYOUTS)} with attention='softmax'"
        )


def _absolute(config: LanguageModelConfig) -> nn.Module | None:
    end = {"max_length": config.max_length} if config.positions == "learned" else {}
    return ABSOLUTE[config.positions](config.embed_dim, **end) if config.positions in ABSOLUTE else None


class LanguageModel(nn.Module):
    """Bytes in, logits of the next byte out.

    Raises:
        ValueError: sizes that do not fit, unknown names.

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
        if isinstance(config.rotary, str):  # or None, or a dict, which the layer checks
            check_name("rotary", config.rotary, ROTATIONS, also="a dict or None")
        if config.attention == "linear" and config.positions in RELATIVE:
            raise ValueError(
                f"positions={config.positions!r}: a term of the n x m scores, which linear attention never "
                "forms; expected attention='softmax'"
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
                # Residual branches add up over 2 layers per block: GPT-2's scaling keeps the sum tame.
                last = name.endswith(("o_proj.weight", "w2.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * config.num_layers) ** 0.5 if last else 0.02)

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
        """tokens (b, n) integers -> logits (b, n, vocab_size) and the states after the last token.

        positions, cu_seqlens and shard as in linear_rope_attention. Packed softmax attention has no states:
        none are returned, as with return_states=False, which saves the time they take.
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
            raise ValueError("shard: got one, expected None with attention='softmax', which needs all keys")
        if states and cu_seqlens is not None and self.config.attention == "softmax":
            raise ValueError("states: got them beside cu_seqlens, expected None with attention='softmax'")
        if states is not None and len(states) != len(self.blocks):
            raise ValueError(f"states: got {len(states)}, expected one per block, {len(self.blocks)}")
        x = self.embed(tokens)
        if self.config.positions == "sinusoidal":  # Vaswani 2017, section 3.4: p is about 1, x was small
            x = x * math.sqrt(self.config.embed_dim)
        if self.encoding is not None:
            x = self.encoding(x, _absolute_positions(tokens, states, positions, cu_seqlens, shard))
        after: States = []
        for index, block in enumerate(self.blocks):
            before = None if states is None else states[index]
            x, state = block(x, before, positions, cu_seqlens, return_states, shard)
            if state is not None:
                after.append(state)
        return F.linear(self.norm(x), self.embed.weight), after

    def save(self, folder: str | os.PathLike[str], weights: dict[str, Any] | None = None) -> None:
        """Writes config.json and model.safetensors; weights: the state_dict, where processes share it."""
        text = json.dumps(asdict(self.config), indent=2) + "\n"
        replace_file(Path(folder) / "config.json", lambda path: path.write_text(text))
        metadata = {"format": _FORMAT, "version": str(_VERSION), "config": _digest(self.config)}
        save_tensors(Path(folder) / "model.safetensors", weights or self.state_dict(), metadata)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> "LanguageModel":
        """Reads what ``save`` wrote: that folder, or a run's, of which it takes the last checkpoint.

        Raises:
            FileNotFoundError, ValueError: a file is missing, damaged, newer, or does not fit the other.
        """
        folder = latest_checkpoint(folder)
        path, weights = folder / "config.json", folder / "model.safetensors"
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file")
        try:
            config = LanguageModelConfig.from_dict(parse_json(path.read_bytes(), path.name))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        tensors, metadata = load_tensors(weights, _FORMAT, _VERSION)
        if metadata.get("config", _digest(config)) != _digest(config):
            raise ValueError(f"{path}: differs from the one that {weights.name} was saved with")
        if config.num_layers > len(tensors):
            raise ValueError(f"{path}: got {config.num_layers} layers, expected those of {weights.name}")
        try:
            with torch.device("meta"):  # sizes that no machine has room for are seen here
                shapes = {name: x.shape for name, x in cls(config).state_dict().items()}
            if wrong := [name for name, x in tensors.items() if shapes.get(name, x.shape) != x.shape]:
                raise ValueError(f"sizes of {wrong[:3]} differ")
            with torch.random.fork_rng(devices=[]):  # the weights drawn here are not the ones kept
                model = cls(config)
            model.load_state_dict(tensors)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"{folder}: weights do not fit config.json: {error}") from error
        return model


def _digest(config: LanguageModelConfig) -> str:
    """Of what differs from the first defaults: a field that a later version adds leaves it as it was."""
    values, first = asdict(config), {field.name: field.default for field in fields(config)} | _BEFORE
    chosen = {name: value for name, value in values.items() if value != first[name]}
    return digest({}, {"config": json.dumps(chosen, sort_keys=True)})


def _absolute_positions(
    tokens: Tensor, states: States | None, positions: Tensor | None, cu_seqlens: Tensor | None,
    shard: Shard | None,
) -> Tensor:  # fmt: skip
    """(n,) or (b or 1, n): those given, or on from the states."""
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

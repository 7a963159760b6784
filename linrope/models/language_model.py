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
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linrope.attention import LinearRoPEAttention
from linrope.files import load_tensors, replace_file, save_tensors
from linrope.position_encodings import ABSOLUTE, RELATIVE, KeyValueState, SoftmaxAttention
from linrope.rotary import LAYOUTS, Rotary
from linrope.state import LinearAttentionState

_FORMAT, _VERSION = "linrope.LanguageModel", 1

ATTENTION = ("linear", "softmax")
POSITIONS = ("rope", "none", *ABSOLUTE, *RELATIVE)

State = LinearAttentionState | KeyValueState
States = list[State]


@dataclass(frozen=True)
class LanguageModelConfig:
    """Sizes and choices of a LanguageModel; saved beside the weights as JSON."""

    vocab_size: int = 256
    embed_dim: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int | None = None
    hidden_dim: int | None = None  # of the SwiGLU; default 8/3 embed_dim, rounded up to 32
    feature_map: str = "elu+1"
    rotary: str | None = "interleaved"  # layout of positions "rope"; None: no positions
    normalize: bool = True
    out_norm: bool = True
    gate: bool = True
    attention: str = "linear"  # or "softmax": without feature_map, normalize, out_norm and gate
    positions: str = "rope"  # one of POSITIONS; those in RELATIVE with softmax only
    max_length: int = 4096  # of positions "learned"

    @classmethod
    def from_dict(cls, values: object) -> "LanguageModelConfig":
        """Raises ValueError on unknown keys or values of the wrong type."""
        known = {field.name: field.type for field in fields(cls)}
        if not isinstance(values, dict):
            raise ValueError(f"config: got {type(values).__name__}, expected an object")
        if unknown := sorted(set(values) - set(known)):
            raise ValueError(f"config: got unknown keys {unknown}, expected some of {sorted(known)}")
        for name, value in values.items():
            kind = known[name]
            if not (isinstance(value, kind) and isinstance(value, bool) == (kind is bool)):  # type: ignore[arg-type]
                raise ValueError(f"config: got {name}={value!r}, expected {kind}")
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
    """Pre-norm attention and feed-forward, each around a residual connection."""

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        dim = config.embed_dim
        self.attention_norm = nn.RMSNorm(dim, eps=1e-6)
        self.attention = _softmax(config) if config.attention == "softmax" else _linear(config)
        self.feed_forward_norm = nn.RMSNorm(dim, eps=1e-6)
        self.feed_forward = SwiGLU(dim, config.hidden_dim or 32 * math.ceil(8 / 3 * dim / 32))

    def forward(self, x: Tensor, state: State | None) -> tuple[Tensor, State]:
        y, state = self.attention(self.attention_norm(x), state=state, return_state=True)
        x = x + y
        return x + self.feed_forward(self.feed_forward_norm(x)), state


def _linear(config: LanguageModelConfig) -> LinearRoPEAttention:
    return LinearRoPEAttention(
        config.embed_dim,
        config.num_heads,
        num_kv_heads=config.num_kv_heads,
        feature_map=config.feature_map,
        rotary=config.rotary if config.positions == "rope" else None,
        normalize=config.normalize,
        out_norm=config.out_norm,
        gate=config.gate,
    )


def _softmax(config: LanguageModelConfig) -> SoftmaxAttention:
    positions: str | Rotary = config.positions if config.positions in RELATIVE else "none"
    if config.positions == "rope" and config.rotary is not None:
        positions = Rotary(config.embed_dim // config.num_heads, layout=config.rotary)
    return SoftmaxAttention(
        config.embed_dim, config.num_heads, num_kv_heads=config.num_kv_heads, positions=positions
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
        for name, known in (("attention", ATTENTION), ("positions", POSITIONS), ("rotary", (*LAYOUTS, None))):
            if (value := getattr(config, name)) not in known:
                names = [str(choice) for choice in known]
                near = get_close_matches(str(value), names, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"{name}={value!r}: expected one of {', '.join(names)}{hint}")
        if config.attention == "linear" and config.positions in RELATIVE:
            raise ValueError(
                f"positions={config.positions!r}: a term of the n x m scores, which linear attention never "
                "forms; expected attention='softmax'"
            )
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.embed_dim)
        self.encoding = _absolute(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.embed_dim, eps=1e-6)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                # Residual branches add up over 2 layers per block: GPT-2's scaling keeps the sum tame.
                last = name.endswith(("o_proj.weight", "w2.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * config.num_layers) ** 0.5 if last else 0.02)

    def forward(self, tokens: Tensor, states: States | None = None) -> tuple[Tensor, States]:
        """tokens (b, n) integers -> logits (b, n, vocab_size) and the states after the last token."""
        if tokens.ndim != 2 or tokens.is_floating_point():
            raise ValueError(f"tokens: got {tokens.dtype} {tuple(tokens.shape)}, expected integers (b, n)")
        if not torch.compiler.is_compiling() and tokens.device.type == "cpu" and tokens.numel():
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high >= self.config.vocab_size:
                raise ValueError(
                    f"tokens: got ids {low} .. {high}, expected 0 .. {self.config.vocab_size - 1}"
                )
        if states is not None and len(states) != len(self.blocks):
            raise ValueError(f"states: got {len(states)}, expected one per block, {len(self.blocks)}")
        x = self.embed(tokens)
        if self.config.positions == "sinusoidal":  # Vaswani 2017, section 3.4: p is about 1, x was small
            x = x * math.sqrt(self.config.embed_dim)
        if self.encoding is not None:
            positions = torch.arange(tokens.shape[1], device=x.device)
            x = self.encoding(x, positions if states is None else states[0].position[:, None] + positions)
        after: States = []
        for index, block in enumerate(self.blocks):
            x, state = block(x, None if states is None else states[index])
            after.append(state)
        return F.linear(self.norm(x), self.embed.weight), after

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes config.json and model.safetensors."""
        text = json.dumps(asdict(self.config), indent=2) + "\n"
        replace_file(Path(folder) / "config.json", lambda path: path.write_text(text))
        metadata = {"format": _FORMAT, "version": str(_VERSION)}
        save_tensors(Path(folder) / "model.safetensors", self.state_dict(), metadata)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> "LanguageModel":
        """Reads what ``save`` wrote.

        Raises:
            FileNotFoundError, ValueError: a file is missing, damaged, newer, or does not fit the other.
        """
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file")
        try:
            config = LanguageModelConfig.from_dict(json.loads(path.read_text()))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        tensors, _ = load_tensors(Path(folder) / "model.safetensors", _FORMAT, _VERSION)
        with torch.random.fork_rng(devices=[]):  # the weights drawn here are not the ones kept
            model = cls(config)
        try:
            model.load_state_dict(tensors)
        except RuntimeError as error:
            raise ValueError(f"{folder}: weights do not fit config.json: {error}") from error
        return model


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
) -> Iterator[Tensor]:
    """Samples tokens one by one, with linear attention at constant time and memory per token.

    Args:
        prompt: (b, n) integers, n >= 1.
        max_new_tokens: how many to yield.
        temperature: divides the logits; 0: the likeliest token.
        top_k: sample among the k likeliest only.
        top_p: sample among the fewest likeliest whose probabilities reach p.
        seed: of the sampling; default: drawn from torch's generator.

    Yields:
        (b,) tokens.

    Raises:
        ValueError: an argument out of range.

    >>> from linrope.models import LanguageModel, LanguageModelConfig, generate
    >>> model = LanguageModel(LanguageModelConfig(embed_dim=32, num_layers=2, num_heads=2))
    >>> len(list(generate(model, torch.tensor([[76, 105]]), 5, temperature=0.8, top_k=20, seed=1)))
    5
    """
    if prompt.ndim != 2 or prompt.shape[1] < 1:
        raise ValueError(f"prompt: got shape {tuple(prompt.shape)}, expected (b, n) with n >= 1")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens}: expected at least 0")
    if not temperature >= 0:
        raise ValueError(f"temperature={temperature}: expected at least 0")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k}: expected at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p}: expected more than 0, at most 1")
    generator = torch.Generator(prompt.device)
    generator.manual_seed(int(torch.randint(2**62, ())) if seed is None else seed)
    return _generate(model, prompt, max_new_tokens, temperature, top_k, top_p, generator)


@torch.no_grad()
def _generate(
    model: LanguageModel,
    tokens: Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator,
) -> Iterator[Tensor]:
    states = None
    for _ in range(max_new_tokens):
        logits, states = model(tokens, states)
        token = _sample(logits[:, -1].float(), temperature, top_k, top_p, generator)
        yield token
        tokens, states = token[:, None], [state.donate() for state in states]


def _sample(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator
) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    order = (logits / temperature).sort(-1, descending=True)
    probabilities = order.values.softmax(-1)
    if top_k is not None:
        probabilities[:, top_k:] = 0
    if top_p is not None:  # a token stays if those before it do not reach p yet
        probabilities[probabilities.cumsum(-1) - probabilities >= top_p] = 0
    chosen = torch.multinomial(probabilities, 1, generator=generator)
    return order.indices.gather(-1, chosen)[:, 0]

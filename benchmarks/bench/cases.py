"""The cases of the benchmark: linear and softmax attention, both with RoPE, on the same inputs.

Each case compares both sides with float64 (checks.py) before they are timed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.bench import checks
from linrope import LinearAttentionState, LinearRoPEAttention, Rotary, feature_maps, linear_rope_attention
from linrope.common.private_names import softmax_kernel
from linrope.decode import prepare_attention
from linrope.decode.attention_step import AttentionStep
from linrope.layer.choices import make_decay, make_map
from linrope.layer.config import LayerConfig
from linrope.layer.state import LayerState


@dataclass
class Case:
    """The sizes, the dtype and the options of attention that all cases of a run share."""

    batch: int = 1
    heads: int = 8
    dim: int = 64
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    kv_heads: int | None = None  # default: heads
    feature_map: str | dict[str, Any] = "elu+1"
    decay: str | None = None  # a name, as in LinearRoPEAttention
    gates: bool = False  # random forget gates per key/value head
    backend: str = "auto"

    def arguments(self) -> dict[str, Any]:
        """The arguments of ``linear_rope_attention``, without the gates.

        Raises:
            ValueError: the sizes, the map or the decay do not fit.
        """
        for name in ("batch", "heads", "dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name}={getattr(self, name)}: expected at least 1")
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            raise ValueError(f"--kv-heads={self.kv_heads}: expected a divisor of --heads={self.heads}")
        groups = self.kv_heads or self.heads
        layer = LayerConfig(
            self.heads * self.dim,
            self.heads,
            num_kv_heads=groups,
            feature_map=self.feature_map,
            decay=self.decay,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            fmap = (
                make_map(layer.feature_map, self.dim, self.heads, groups)
                .to(self.device)
                .requires_grad_(False)
            )
        decay = None if layer.decay is None else make_decay(layer.decay, groups)[0].to(self.device)
        return {
            "feature_map": fmap,
            "rotary": Rotary(fmap.feature_dim),
            "normalize": fmap.positive,
            "decay": decay,
            "backend": self.backend,
        }


def shape_of(case: Case) -> dict[str, Any]:
    """The fields of a case as JSON types."""
    return {name: getattr(case, name) for name in Case.__dataclass_fields__} | {
        "dtype": str(case.dtype).removeprefix("torch."),
        "kv_heads": case.kv_heads or case.heads,
    }


def rotated(x: Tensor, cis: Tensor) -> Tensor:
    """x rotated by plain PyTorch operations, as users of softmax attention do."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * cis).flatten(-2).to(x.dtype)


class AttentionCase(Case):
    """Causal self-attention on (b, n, h, d). The other arguments are those of ``Case``."""

    def __init__(self, n: int, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.n, self.options = n, self.arguments()
        self.rotary: Rotary = self.options["rotary"]
        generator = torch.Generator(self.device).manual_seed(self.n)
        groups = self.kv_heads or self.heads
        q, k, v, self.g_out = (
            torch.randn(
                (self.batch, self.n, heads, self.dim),
                generator=generator,
                device=self.device,
                dtype=self.dtype,
            )
            for heads in (self.heads, groups, groups, self.heads)
        )
        self.inputs: tuple[Tensor, Tensor, Tensor] = (
            q.requires_grad_(),
            k.requires_grad_(),
            v.requires_grad_(),
        )
        self.log_decay: Tensor | None = None
        if self.gates:
            gates = torch.rand(self.batch, self.n, groups, generator=generator, device=self.device)
            self.log_decay = gates.clamp(min=1e-3).log().div(8).requires_grad_()
            self.options["log_decay"] = self.log_decay
        cos, sin = Rotary(self.dim).cos_sin(torch.arange(self.n, device=self.device))
        self.cis = torch.complex(cos, sin)  # the softmax side's table, not timed

    @property
    def tokens(self) -> int:
        return self.batch * self.n

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The tensors with gradients: q, k, v, and the gates if the case has them."""
        return self.inputs if self.log_decay is None else (*self.inputs, self.log_decay)

    def linrope(self, **options: Any) -> Tensor:
        out: Tensor = linear_rope_attention(*self.inputs, **(self.options | options))
        return out

    def eager(self) -> Tensor:
        return self.linrope(backend="eager")

    def variants(self) -> dict[str, dict[str, Any]]:
        """Options of ``linrope`` that take extra time, by name."""
        generator = torch.Generator().manual_seed(1)
        gates = torch.rand(1, self.n, self.heads, generator=generator).log().div(8)
        steps = torch.randn(1, self.n, self.heads, self.dim // 2, generator=generator)
        erase = torch.rand(1, self.n, self.heads, generator=generator)
        unit = {
            "feature_map": feature_maps.make("unit", self.dim, activation="elu+1"),
            "rotary": Rotary(self.dim),
        }
        return {
            "decay": {"decay": torch.linspace(0.9, 1, self.heads)},
            "log_decay": {"log_decay": gates.requires_grad_()},
            "angle_steps": {"angle_steps": steps.requires_grad_()},
            # What is erased is written, too, as in Gated DeltaNet
            "erase": {"erase": erase.requires_grad_(), "write": erase, "normalize": False, **unit},
            "packed": {"cu_seqlens": torch.arange(0, self.n + 1, 128)},
        }

    def softmax(self) -> Tensor:
        q, k, v = self.inputs
        q, k = (rotated(x, self.cis) for x in (q, k))
        grouped = self.kv_heads not in (None, self.heads)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=grouped
        )
        return out.transpose(1, 2)

    def forward(self, attend: Callable[[], Tensor]) -> Tensor:
        with torch.no_grad():
            return attend()

    def training(self, attend: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        out = attend()
        return torch.autograd.grad(out, self.leaves, self.g_out.to(out.dtype), allow_unused=True)

    def softmax_backend(self) -> str:
        """The kernel that scaled_dot_product_attention chooses for these inputs."""
        q, k, v = (x.detach().transpose(1, 2) for x in self.inputs)
        grouped = self.kv_heads not in (None, self.heads)
        choice = softmax_kernel(q, k, v, is_causal=True, enable_gqa=grouped)
        return {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}.get(choice, str(choice))

    def check(self, attend: Callable[[], Tensor] | None = None) -> None:
        """Compares the outputs and gradients of attend (default: linrope) with the equation in float64.

        Raises:
            AssertionError: an error is too large.
        """
        checks.check_attention(self, self.linrope if attend is None else attend, "linrope", self.options)

    def check_softmax(self) -> None:
        """Compares sampled rows of the softmax side's output with softmax in float64.

        Raises:
            AssertionError: an error is too large.
        """
        checks.check_softmax(self)


class DecodeCase(Case):
    """One new token for each sequence, after ``position`` tokens: a state against a key/value cache."""

    def __init__(self, position: int, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.position, self.options = position, self.arguments()
        self.groups = self.kv_heads or self.heads
        self.rotary: Rotary = self.options["rotary"]
        generator = torch.Generator(self.device).manual_seed(self.position)
        new: dict[str, Any] = {"generator": generator, "device": self.device, "dtype": self.dtype}
        heads_of = self.heads, self.groups, self.groups  # q, k, v
        self.token = [torch.randn(self.batch, 1, heads, self.dim, **new) for heads in heads_of]
        # The state holds a few keys and is moved to the position: the cost of a step does not depend on them.
        prompt = [torch.randn(self.batch, 64, heads, self.dim, **new) for heads in heads_of]
        gates = {"log_decay": prompt[1][..., 0].float().abs().div(-8)} if self.gates else {}
        if self.gates:
            self.options["log_decay"] = self.token[1][..., 0].float().abs().div(-8)
        _, state = linear_rope_attention(*prompt, **(self.options | gates), return_state=True)
        self.positions = torch.full((self.batch,), self.position, device=self.device)
        self.state = LinearAttentionState(
            state.kv, state.z, self.positions.clone(), state.identity, log_scale=state.log_scale
        )
        self.donated_state = self.state.clone()
        self.step = self._prepared()
        self.layer = LinearRoPEAttention(
            self.heads * self.dim,
            self.heads,
            num_kv_heads=self.groups,
            head_dim=self.dim,
            **{name: self.options[name] for name in ("feature_map", "rotary", "normalize", "backend")},
            decay=self.decay,
            forget_gate=self.gates,
            device=self.device,
            dtype=self.dtype,
        ).eval()
        self.x = torch.randn(self.batch, 1, self.heads * self.dim, **new)
        self.layer_state: LayerState | None = None
        self.cache: tuple[Tensor, Tensor] | None = None
        cos, sin = Rotary(self.dim).cos_sin(self.positions[:1])
        self.cis = torch.complex(cos, sin)

    def fill_cache(self) -> None:
        shape = self.batch, self.groups, self.position + 1, self.dim
        new: dict[str, Any] = {"device": self.device, "dtype": self.dtype}
        self.cache = torch.empty(shape, **new).normal_(), torch.empty(shape, **new).normal_()

    def linrope(self) -> Tensor:
        with torch.no_grad():
            result = linear_rope_attention(*self.token, **self.options, state=self.state, return_state=True)
        out: Tensor = result[0]
        return out

    def linrope_donated(self) -> None:
        """A step that writes the next state into the old one's memory; each step moves the position."""
        if self.step is not None:
            self.step(*self.token, log_decay=self.options.get("log_decay"))
            return
        with torch.no_grad():
            _, self.donated_state = linear_rope_attention(
                *self.token, **self.options, state=self.donated_state.donate(), return_state=True
            )

    def _prepared(self) -> AttentionStep | None:
        """The operation's step, prepared where the native kernels can take it."""
        if self.device != "cpu" or self.options["backend"] not in ("auto", "native"):
            return None
        fixed = {name: x for name, x in self.options.items() if name not in ("backend", "log_decay")}
        try:
            return prepare_attention(self.donated_state, **fixed)
        except (RuntimeError, ValueError):  # another map, another dtype, no compiled kernels
            return None

    def linrope_layer(self) -> None:
        with torch.no_grad():
            if self.layer_state is None:
                _, self.layer_state = self.layer(self.x, positions=self.positions[:, None], return_state=True)
            _, self.layer_state = self.layer(self.x, state=self.layer_state.donate(), return_state=True)

    def softmax_layer(self) -> Tensor:
        """The step with a cache, with the projections of the same layer around it."""
        layer, b = self.layer, self.batch
        with torch.no_grad():
            q, k, v = (
                project(self.x).view(b, 1, -1, self.dim)
                for project in (layer.q_proj, layer.k_proj, layer.v_proj)
            )
            out: Tensor = layer.o_proj(self._softmax(q, k, v).transpose(1, 2).reshape(b, 1, -1))
        return out

    def softmax(self) -> Tensor:
        return self._softmax(*self.token)

    def _softmax(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert self.cache is not None
        keys, values = self.cache
        grouped = self.groups != self.heads
        with torch.no_grad():
            q, k = (rotated(x, self.cis) for x in (q, k))
            keys[:, :, -1:], values[:, :, -1:] = k.transpose(1, 2), v.transpose(1, 2)
            return F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, enable_gqa=grouped)

    def check(self) -> None:
        """Compares one step with the equation in float64.

        Raises:
            AssertionError: the error is too large.
        """
        checks.check_step(self)

    def check_softmax(self) -> None:
        """Compares the softmax side's step with softmax in float64, head by head.

        Raises:
            AssertionError: the error is too large.
        """
        checks.check_softmax_step(self)

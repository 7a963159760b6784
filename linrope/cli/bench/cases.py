"""What is compared: linear attention with RoPE and softmax attention with RoPE, on the same inputs.

Each case checks both sides against float64 (checks.py) before anyone times them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from linrope import LinearAttentionState, LinearRoPEAttention, Rotary, linear_rope_attention
from linrope.cli.bench import checks
from linrope.layer.choices import make_decay, make_map


@dataclass
class Case:
    """What all cases of a run share: sizes, dtype, and how attention is computed."""

    batch: int = 1
    heads: int = 8
    dim: int = 64
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    kv_heads: int | None = None  # default: heads
    feature_map: str | dict[str, Any] = "elu+1"
    decay: str | None = None  # by name, as LinearRoPEAttention takes it
    gates: bool = False  # a forget gate per key/value head, made from random numbers
    backend: str = "auto"

    def options(self) -> dict[str, Any]:
        """Of ``linear_rope_attention``, without the gates.

        Raises:
            ValueError: sizes, or a map or decay, that do not fit.
        """
        for name in ("batch", "heads", "dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name}={getattr(self, name)}: expected at least 1")
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            raise ValueError(f"--kv-heads={self.kv_heads}: expected a divisor of --heads={self.heads}")
        groups = self.kv_heads or self.heads
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            fmap = (
                make_map(self.feature_map, self.dim, self.heads, groups).to(self.device).requires_grad_(False)
            )
        decay = None if self.decay is None else make_decay(self.decay, groups)[0].to(self.device)
        return {
            "feature_map": fmap,
            "rotary": Rotary(fmap.feature_dim),
            "normalize": fmap.positive,
            "decay": decay,
            "backend": self.backend,
        }


def shape_of(case: Case) -> dict[str, Any]:
    """The fields of a case, as JSON has them."""
    return {name: getattr(case, name) for name in Case.__dataclass_fields__} | {
        "dtype": str(case.dtype).removeprefix("torch."),
        "kv_heads": case.kv_heads or case.heads,
    }


@dataclass
class AttentionCase:
    """Causal self-attention on (b, n, h, d)."""

    n: int
    batch: int = 1
    heads: int = 8
    dim: int = 64
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    kv_heads: int | None = None
    feature_map: str | dict[str, Any] = "elu+1"
    decay: str | None = None
    gates: bool = False
    backend: str = "auto"
    inputs: tuple[Tensor, Tensor, Tensor] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        case = Case(**{name: getattr(self, name) for name in Case.__dataclass_fields__})
        self.how = case.options()
        self.rotary: Rotary = self.how["rotary"]
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
        self.inputs = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
        self.log_decay: Tensor | None = None
        if self.gates:
            some = torch.rand(self.batch, self.n, groups, generator=generator, device=self.device)
            self.log_decay = some.clamp(min=1e-3).log().div(8).requires_grad_()
            self.how["log_decay"] = self.log_decay
        cos, sin = Rotary(self.dim).cos_sin(torch.arange(self.n, device=self.device))
        self.cis = torch.complex(cos, sin)  # the softmax side gets its table for free

    @property
    def tokens(self) -> int:
        return self.batch * self.n

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """What gradients are taken of: q, k, v, and the gates where there are some."""
        return self.inputs if self.log_decay is None else (*self.inputs, self.log_decay)

    def linrope(self, **options: Any) -> Tensor:
        out: Tensor = linear_rope_attention(*self.inputs, **(self.how | options))
        return out

    def eager(self) -> Tensor:
        return self.linrope(backend="eager")

    def variants(self) -> dict[str, dict[str, Any]]:
        """Options of ``linrope`` that cost extra, by name."""
        generator = torch.Generator().manual_seed(1)
        gates = torch.rand(1, self.n, self.heads, generator=generator).log().div(8)
        steps = torch.randn(1, self.n, self.heads, self.dim // 2, generator=generator)
        return {
            "decay": {"decay": torch.linspace(0.9, 1, self.heads)},
            "log_decay": {"log_decay": gates.requires_grad_()},
            "angle_steps": {"angle_steps": steps.requires_grad_()},
            "packed": {"cu_seqlens": torch.arange(0, self.n + 1, 128)},
        }

    def softmax(self) -> Tensor:
        q, k, v = self.inputs
        q, k = self._rotate(q), self._rotate(k)
        grouped = self.kv_heads not in (None, self.heads)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=grouped
        )
        return out.transpose(1, 2)

    def _rotate(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.cis).flatten(-2).to(x.dtype)

    def forward(self, attend: Callable[[], Tensor]) -> Tensor:
        with torch.no_grad():
            return attend()

    def training(self, attend: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        out = attend()
        return torch.autograd.grad(out, self.leaves, self.g_out.to(out.dtype), allow_unused=True)

    def softmax_backend(self) -> str:
        """The kernel that scaled_dot_product_attention takes for these inputs."""
        q, k, v = (x.detach().transpose(1, 2) for x in self.inputs)
        grouped = self.kv_heads not in (None, self.heads)
        choice = torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=grouped)
        return {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}.get(int(choice), str(choice))

    def check(self, attend: Callable[[], Tensor] | None = None) -> None:
        """Compares the outputs and gradients of attend (default: linrope) with the equation in float64.

        Raises:
            AssertionError: one of them is off.
        """
        checks.check_attention(self, self.linrope if attend is None else attend, "linrope", self.how)

    def check_softmax(self) -> None:
        """Compares sampled rows of the softmax side's output with softmax in float64.

        Raises:
            AssertionError: one of them is off.
        """
        checks.check_softmax(self)


@dataclass
class DecodeCase:
    """One new token of each sequence after ``position`` earlier ones: a state against a key/value cache."""

    position: int
    case: Case = field(default_factory=Case)

    def __post_init__(self) -> None:
        case = self.case
        self.heads, self.dim, self.groups = case.heads, case.dim, case.kv_heads or case.heads
        self.how = case.options()
        self.rotary: Rotary = self.how["rotary"]
        generator = torch.Generator(case.device).manual_seed(self.position)
        new: dict[str, Any] = {"generator": generator, "device": case.device, "dtype": case.dtype}
        sizes = (self.heads, self.groups, self.groups)
        self.token = [torch.randn(case.batch, 1, heads, self.dim, **new) for heads in sizes]
        # The state is made of a few keys and moved to the position: its cost does not depend on them.
        few = [torch.randn(case.batch, 64, heads, self.dim, **new) for heads in sizes]
        gates = {"log_decay": few[1][..., 0].float().abs().div(-8)} if case.gates else {}
        if case.gates:
            self.how["log_decay"] = self.token[1][..., 0].float().abs().div(-8)
        _, state = linear_rope_attention(*few, **(self.how | gates), return_state=True)
        self.where = torch.full((case.batch,), self.position, device=case.device)
        self.state = LinearAttentionState(
            state.kv, state.z, self.where.clone(), state.identity, log_scale=state.log_scale
        )
        self.moving = self.state.clone()
        self.layer = LinearRoPEAttention(
            self.heads * self.dim,
            self.heads,
            num_kv_heads=self.groups,
            head_dim=self.dim,
            **{name: self.how[name] for name in ("feature_map", "rotary", "normalize", "backend")},
            decay=case.decay,
            forget_gate=case.gates,
            device=case.device,
            dtype=case.dtype,
        ).eval()
        self.x = torch.randn(case.batch, 1, self.heads * self.dim, **new)
        self.moving_in_layer: LinearAttentionState | None = None
        self.cache: tuple[Tensor, Tensor] | None = None
        cos, sin = Rotary(self.dim).cos_sin(self.where[:1])
        self.cis = torch.complex(cos, sin)

    def fill_cache(self) -> None:
        shape = self.case.batch, self.groups, self.position + 1, self.dim
        new: dict[str, Any] = {"device": self.case.device, "dtype": self.case.dtype}
        self.cache = torch.empty(shape, **new).normal_(), torch.empty(shape, **new).normal_()

    def linrope(self) -> Tensor:
        with torch.no_grad():
            made = linear_rope_attention(*self.token, **self.how, state=self.state, return_state=True)
        out: Tensor = made[0]
        return out

    def linrope_donated(self) -> None:
        """The next state in this one's memory: the position goes on with every step."""
        with torch.no_grad():
            _, self.moving = linear_rope_attention(
                *self.token, **self.how, state=self.moving.donate(), return_state=True
            )

    def linrope_layer(self) -> None:
        with torch.no_grad():
            if self.moving_in_layer is None:
                _, self.moving_in_layer = self.layer(self.x, positions=self.where[:, None], return_state=True)
            _, self.moving_in_layer = self.layer(
                self.x, state=self.moving_in_layer.donate(), return_state=True
            )

    def softmax_layer(self) -> Tensor:
        """The same projections around the step with a cache."""
        layer, b = self.layer, self.case.batch
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
            q, k = (
                torch.view_as_real(torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * self.cis)
                .flatten(-2)
                .to(x.dtype)
                for x in (q, k)
            )
            keys[:, :, -1:], values[:, :, -1:] = k.transpose(1, 2), v.transpose(1, 2)
            return F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, enable_gqa=grouped)

    def check(self) -> None:
        """Compares one step with the equation on the state, in float64.

        Raises:
            AssertionError: it is off.
        """
        checks.check_step(self)

    def check_softmax(self) -> None:
        """Compares the softmax side's step with softmax in float64, head by head.

        Raises:
            AssertionError: it is off.
        """
        checks.check_softmax_step(self)

"""What is compared: linear attention with RoPE and softmax attention with RoPE, on the same inputs.

Each case checks both sides against float64 before anyone times them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from linrope import LinearAttentionState, LinearRoPEAttention, Rotary, linear_rope_attention

U32 = 2.0**-24
_SAMPLED = 32  # rows that are checked where checking all would take too long


@dataclass
class AttentionCase:
    """Causal self-attention, (1, n, 8, 64) float32 unless told otherwise."""

    n: int
    batch: int = 1
    heads: int = 8
    dim: int = 64
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    inputs: tuple[Tensor, Tensor, Tensor] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        generator = torch.Generator(self.device).manual_seed(self.n)
        shape = self.batch, self.n, self.heads, self.dim
        q, k, v, self.g_out = (
            torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype) for _ in range(4)
        )
        self.inputs = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
        self.rotary = Rotary(self.dim)
        positions = torch.arange(self.n, device=self.device)
        cos, sin = self.rotary.cos_sin(positions)
        self.cis = torch.complex(cos, sin)  # the softmax side gets its table for free

    @property
    def tokens(self) -> int:
        return self.batch * self.n

    def linrope(self, **options: Any) -> Tensor:
        out: Tensor = linear_rope_attention(*self.inputs, rotary=self.rotary, **options)
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
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        return out.transpose(1, 2)

    def _rotate(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.cis).flatten(-2).to(x.dtype)

    def forward(self, attend: Callable[[], Tensor]) -> Tensor:
        with torch.no_grad():
            return attend()

    def training(self, attend: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(), self.inputs, self.g_out)

    def softmax_backend(self) -> str:
        """The kernel that scaled_dot_product_attention takes for these inputs."""
        q, k, v = (x.detach().transpose(1, 2) for x in self.inputs)
        choice = torch._fused_sdp_choice(q, k, v, is_causal=True)
        return {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}.get(int(choice), str(choice))

    def check(self, attend: Callable[[], Tensor] | None = None) -> None:
        """Compares the outputs and gradients of attend (default: linrope) with eq. 19 in float64.

        Sampled rows of out and dq, and the last rows of dk and dv, whose sums lie among them.

        Raises:
            AssertionError: one of them is off.
        """
        attend = self.linrope if attend is None else attend
        n, count = self.n, min(_SAMPLED, self.n)
        generator = torch.Generator().manual_seed(0)
        last = torch.arange(n - count, n)
        rows = torch.cat((torch.randint(n, (count,), generator=generator), last))
        seen = torch.arange(n) <= rows[:, None]
        q, k, v = (x.detach()[0].double().cpu() for x in self.inputs)
        g = self.g_out[0, rows].double().cpu()
        phi, psi = (torch.where(x > 0, x + 1, x.exp()) for x in (q, k))
        positions = torch.arange(n)
        phi_hat, psi_hat = (self.rotary(x[None], positions)[0] for x in (phi, psi))

        # eq. 19 and its gradient, written out for the rows
        scores = torch.einsum("rhf,mhf->hrm", phi_hat[rows], psi_hat) * seen
        den = (torch.einsum("rhf,mhf->hrm", phi[rows], psi) * seen).sum(-1)
        num = torch.einsum("hrm,mhe->hre", scores, v)
        out = num / den[..., None]
        magnitude = torch.einsum("rhf,mhf->hrm", phi_hat[rows].abs(), psi_hat.abs()) * seen
        bound = torch.einsum("hrm,mhe->hre", magnitude, v.abs()) / den[..., None]
        error = (self.forward(attend)[0, rows].double().cpu().transpose(0, 1) - out).abs()
        assert bool((error <= 16 * U32 * bound).all()), f"linrope's output is off at N = {n}"

        gb = g.transpose(0, 1) / den[..., None]
        d_scores = torch.einsum("hre,mhe->hrm", gb, v) * seen
        delta = -(gb * out).sum(-1)
        d_weights = delta[..., None] * seen
        back = torch.einsum("hrm,mhf->rhf", d_scores, psi_hat)
        dphi = self._unrotate(back, rows) + torch.einsum("hrm,mhf->rhf", d_weights, psi)
        dq = dphi * torch.where(q[rows] > 0, 1.0, phi[rows])
        late = slice(count, None)  # the last rows among rows: all that the last keys are seen by
        back = torch.einsum("hrm,rhf->mhf", d_scores[:, late, last], phi_hat[last])
        dpsi = self._unrotate(back, last) + torch.einsum("hrm,rhf->mhf", d_weights[:, late, last], phi[last])
        dk = dpsi * torch.where(k[last] > 0, 1.0, psi[last])
        dv = torch.einsum("hrm,hre->mhe", scores[:, late, last], gb[:, late])
        grads = self.training(attend)
        for name, got, expected in zip(
            "qkv", (grads[0][0, rows], grads[1][0, last], grads[2][0, last]), (dq, dk, dv)
        ):
            error = (got.double().cpu() - expected).abs()
            assert bool(error.max() <= 1e-4 * expected.abs().max()), f"linrope's d{name} is off at N = {n}"

    def check_softmax(self) -> None:
        """Compares sampled rows of the softmax side's output with softmax in float64."""
        rows = torch.randint(self.n, (_SAMPLED,), generator=torch.Generator().manual_seed(1))
        q, k, v = (x.detach()[0].double().cpu() for x in self.inputs)
        q, k = (self.rotary(x[None], torch.arange(self.n))[0] for x in (q, k))
        logits = torch.einsum("rhd,mhd->hrm", q[rows], k) / self.dim**0.5
        logits = logits.masked_fill(torch.arange(self.n) > rows[:, None], -torch.inf)
        out = torch.einsum("hrm,mhe->rhe", logits.softmax(-1), v)
        error = (self.forward(self.softmax)[0, rows].double().cpu() - out).abs().max()
        assert error <= 1e-5, f"softmax attention's output is off at N = {self.n}"

    def _unrotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """R(p)^T x: rotation with the sines negated."""
        opposite = Rotary(self.dim, theta=-self.rotary.theta)
        return opposite(x[None], positions)[0]


@dataclass
class DecodeCase:
    """One new token after ``position`` earlier ones: a state against a key/value cache."""

    position: int
    heads: int = 8
    dim: int = 64

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.position)
        self.rotary = Rotary(self.dim)
        self.token = torch.randn(3, 1, 1, self.heads, self.dim, generator=generator).unbind(0)
        # The state is made of a few keys and moved to the position: its cost does not depend on them.
        q, k, v = torch.randn(3, 1, 64, self.heads, self.dim, generator=generator)
        _, state = linear_rope_attention(q, k, v, rotary=self.rotary, return_state=True)
        self.state = LinearAttentionState(state.kv, state.z, torch.tensor([self.position]), state.identity)
        self.moving = self.state.clone()
        self.layer = LinearRoPEAttention(self.heads * self.dim, self.heads, rotary=self.rotary).eval()
        self.x = torch.randn(1, 1, self.heads * self.dim, generator=generator)
        self.cache: tuple[Tensor, Tensor] | None = None
        cos, sin = self.rotary.cos_sin(torch.tensor([self.position]))
        self.cis = torch.complex(cos, sin)

    def fill_cache(self) -> None:
        shape = 1, self.heads, self.position + 1, self.dim
        self.cache = torch.empty(shape).normal_(), torch.empty(shape).normal_()

    def linrope(self) -> Tensor:
        with torch.no_grad():
            out, _ = linear_rope_attention(
                *self.token, rotary=self.rotary, state=self.state, return_state=True
            )
        return out

    def linrope_donated(self) -> None:
        """The next state in this one's memory: the position goes on with every step."""
        with torch.no_grad():
            _, self.moving = linear_rope_attention(
                *self.token, rotary=self.rotary, state=self.moving.donate(), return_state=True
            )

    def linrope_layer(self) -> None:
        with torch.no_grad():
            _, self.moving = self.layer(self.x, state=self.moving.donate(), return_state=True)

    def softmax_layer(self) -> Tensor:
        """The same projections around the step with a cache."""
        layer, shape = self.layer, (1, 1, self.heads, self.dim)
        with torch.no_grad():
            q, k, v = (project(self.x).view(shape) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
            out: Tensor = layer.o_proj(self._softmax(q, k, v).transpose(1, 2).reshape(1, 1, -1))
        return out

    def softmax(self) -> Tensor:
        return self._softmax(*self.token)

    def _softmax(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert self.cache is not None
        keys, values = self.cache
        with torch.no_grad():
            q, k = (
                torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * self.cis).flatten(-2)
                for x in (q, k)
            )
            keys[:, :, -1:], values[:, :, -1:] = k.transpose(1, 2), v.transpose(1, 2)
            return F.scaled_dot_product_attention(q.transpose(1, 2), keys, values)

    def check(self) -> None:
        """Compares one step with eq. 19 on the state, in float64.

        Raises:
            AssertionError: it is off.
        """
        q, k, v = (x[0, 0].double() for x in self.token)
        phi, psi = (torch.where(x > 0, x + 1, x.exp()) for x in (q, k))
        at = torch.tensor([self.position])
        phi_hat, psi_hat = (self.rotary(x[None, None], at)[0, 0] for x in (phi, psi))
        kv = self.state.kv[0].double() + psi_hat[..., None] * v[:, None]
        den = (phi * (self.state.z[0] + psi)).sum(-1, keepdim=True)
        bound = torch.einsum("hf,hfe->he", phi_hat.abs(), kv.abs()) / den
        out = torch.einsum("hf,hfe->he", phi_hat, kv) / den
        error = (self.linrope()[0, 0].double() - out).abs()
        assert bool((error <= 16 * U32 * bound).all()), f"the step is off at position {self.position}"

    def check_softmax(self) -> None:
        """Compares the softmax side's step with softmax in float64, head by head.

        Raises:
            AssertionError: it is off.
        """
        assert self.cache is not None
        out, q = self.softmax()[0, :, 0].double(), self.token[0]
        at = torch.tensor([self.position])
        q = self.rotary(q.double(), at)[0, 0]
        for head, (keys, values) in enumerate(zip(*(x[0] for x in self.cache), strict=True)):
            weights = (keys.double() @ q[head] / self.dim**0.5).softmax(0)
            error = (out[head] - weights @ values.double()).abs().max()
            assert error <= 1e-5, f"softmax attention's step is off at position {self.position}"

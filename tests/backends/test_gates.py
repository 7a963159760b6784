"""Decay and rotation made from the data: other models' recurrences, strong gates, long gaps, masks, cuts."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from linrope import Rotary, linear_rope_attention, linear_rope_state
from tests.support.contract import of_backends
from tests.support.oracle import NATIVE, assert_same, every_backend, every_kernel, everything, randoms


def data(n: int, g: int = 2, b: int = 2, d: int = 4, seed: int = 1) -> tuple[Tensor, Tensor]:
    """log_decay and angle_steps, float64."""
    generator = torch.Generator().manual_seed(seed)
    gates = -2 * torch.rand(b, n, g, generator=generator, dtype=torch.float64)
    return gates, 2 * torch.randn(b, n, g, d // 2, generator=generator, dtype=torch.float64)


# What others call by another name, each as its paper writes its recurrence: S_t from S_(t-1), one token at
# a time.


def retnet(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """RetNet (arXiv 2307.08621), eq. 5: S_n = gamma S_(n-1) + k_n^T v_n with (q_n e^(i n theta)), (k_n e^(i
    n theta)) complex."""
    n, d = q.shape
    theta = 10000.0 ** (-torch.arange(0, d, 2).double() / d)
    state, out = torch.zeros(d // 2, v.shape[1], dtype=torch.complex128), []
    for i in range(n):
        turn = torch.polar(torch.ones(d // 2).double(), i * theta)
        query, key = torch.complex(q[i, ::2], q[i, 1::2]) * turn, torch.complex(k[i, ::2], k[i, 1::2]) * turn
        state = (1 - 2.0**-5) * state + key.conj()[:, None] * v[i].to(state.dtype)
        out.append((query @ state).real)
    return torch.stack(out)


def gated_linear_attention(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor) -> Tensor:
    """GLA (arXiv 2312.06635), eq. 3: S_t = Diag(alpha_t) S_(t-1) + k_t^T v_t, o_t = q_t S_t; or one alpha per
    head."""
    state, out = torch.zeros(q.shape[1], v.shape[1], dtype=q.dtype), []
    for t in range(len(q)):
        state = alpha[t].view(-1, 1) * state + torch.outer(k[t], v[t])
        out.append(q[t] @ state)
    return torch.stack(out)


def mamba2(x: Tensor, dt: Tensor, a: float, b: Tensor, c: Tensor) -> Tensor:
    """SSD (arXiv 2405.21060), eq. 1 and 2: h_t = exp(A dt_t) h_(t-1) + dt_t B_t x_t^T, y_t = C_t h_t."""
    return gated_linear_attention(c, b, dt[:, None] * x, (a * dt).exp())


def selective_rope(q: Tensor, k: Tensor, v: Tensor, omega: Tensor, alpha: Tensor) -> Tensor:
    """Selective RoPE (arXiv 2511.17388): q, k turned by the sums of omega up to their token, then a gated
    recurrence."""

    def turned(x: Tensor) -> Tensor:
        turn = torch.polar(torch.ones_like(omega), omega.cumsum(0))
        return torch.view_as_real(torch.complex(x[:, ::2], x[:, 1::2]) * turn).flatten(1)

    return gated_linear_attention(turned(q), turned(k), v, alpha)


def mamba3(x: Tensor, dt: Tensor, a: Tensor, theta: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Mamba-3 (arXiv 2603.15569) without its trapezoid: complex h_t = e^(dt_t (A_t + i theta_t)) h_(t-1) +
    dt_t B_t x_t^T.

    y_t = Re(conj(C_t) h_t), B and C complex numbers from pairs of real ones.
    """
    pairs = [torch.complex(y[:, ::2], y[:, 1::2]) for y in (b, c)]
    state, out = torch.zeros(b.shape[1] // 2, x.shape[1], dtype=torch.complex128), []
    for t in range(len(x)):
        state = torch.exp(dt[t] * torch.complex(a[t].expand_as(theta[t]), -theta[t]))[:, None] * state
        state = state + dt[t] * pairs[0][t][:, None] * x[t].to(state.dtype)
        out.append((pairs[1][t].conj() @ state).real)
    return torch.stack(out)


def gated_delta_net(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """Gated DeltaNet (arXiv 2412.06464), eq. 10: S_t = S_(t-1) alpha_t (I - beta_t k_t k_t^T) + beta_t v_t k_t^T."""
    state, out = torch.zeros(v.shape[1], q.shape[1], dtype=q.dtype), []
    for t in range(len(q)):
        keeps = torch.eye(q.shape[1], dtype=q.dtype) - beta[t] * torch.outer(k[t], k[t])
        state = alpha[t] * state @ keeps + beta[t] * torch.outer(v[t], k[t])
        out.append(state @ q[t])
    return torch.stack(out)


def kimi_delta_attention(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """KDA (arXiv 2510.26692), eq. 1: S_t = (I - beta_t k_t k_t^T) Diag(alpha_t) S_(t-1) + beta_t k_t v_t^T."""
    state, out = torch.zeros(q.shape[1], v.shape[1], dtype=q.dtype), []
    for t in range(len(q)):
        keeps = torch.eye(q.shape[1], dtype=q.dtype) - beta[t] * torch.outer(k[t], k[t])
        state = keeps @ (alpha[t][:, None] * state) + beta[t] * torch.outer(k[t], v[t])
        out.append(q[t] @ state)
    return torch.stack(out)


MODELS = (
    *("RetNet", "GLA", "GLA per head", "Mamba-2", "Selective RoPE", "Mamba-3"),
    *("DeltaNet", "Gated DeltaNet", "Kimi Delta Attention"),
)


@every_backend
@pytest.mark.parametrize("model", MODELS)
def test_it_holds_the_recurrences_of_other_models(model: str, backend: str) -> None:
    n, d = 90, 6
    (q, k, v), (gates, steps) = randoms(1, n, 1, d, e=3), data(n, 1, 1, d)
    if "Delta" in model:
        k = k / k.norm(dim=-1, keepdim=True)
    one, a, omega = [x[0, :, 0] for x in (q, k, v)], gates[0, :, 0], steps[0, :, 0]
    query, key, value = one
    dt, beta = F.softplus(value[:, 0]), 2 * query[:, 0].sigmoid()
    units = -F.softplus(randoms(1, n, 1, d, seed=5)[0])
    alpha = units[0, :, 0].exp()
    after, fading = v * dt[None, :, None, None], torch.tensor([1 - 2.0**-5], dtype=torch.float64)
    rate = beta[None, :, None]
    forget, turn = (a * dt)[None, :, None], (omega * dt[:, None])[None, :, None]
    expected, v, how = {
        "RetNet": (retnet(*one), v, {"rotary": Rotary(d), "decay": fading}),
        "GLA": (gated_linear_attention(*one, alpha), v, {"log_decay": units}),
        "GLA per head": (gated_linear_attention(*one, a.exp()), v, {"log_decay": gates}),
        "Mamba-2": (mamba2(value, dt, -0.7, key, query), after, {"log_decay": (-0.7 * dt)[None, :, None]}),
        "Selective RoPE": (selective_rope(*one, omega, a.exp()), v, {"log_decay": gates, "angle_steps": steps}),
        "Mamba-3": (mamba3(value, dt, a, omega, key, query), after, {"log_decay": forget, "angle_steps": turn}),
        "DeltaNet": (gated_delta_net(*one, torch.ones(n), beta), v, {"write": rate, "erase": rate}),
        "Gated DeltaNet": (
            gated_delta_net(*one, a.exp(), beta), v, {"log_decay": gates, "write": rate, "erase": rate}
        ),
        "Kimi Delta Attention": (
            kimi_delta_attention(*one, alpha, beta), v, {"log_decay": units, "write": rate, "erase": rate}
        ),
    }[model]  # fmt: skip
    out = linear_rope_attention(q, k, v, feature_map=None, normalize=False, backend=backend, **how)
    torch.testing.assert_close(out[0, :, 0], expected, rtol=0, atol=1e-12 * float(expected.abs().max()))


# Gates as they come


@every_backend
@pytest.mark.parametrize("strength", [-20.0, -1e4, -1e30])
def test_a_strong_gate_leaves_exactly_nothing_of_what_came_before(strength: float, backend: str) -> None:
    q, k, v = randoms(2, 150, 4, 6, g=2)
    gates, steps = data(150, d=6)
    gates[:, 70] = strength
    how: dict[str, Any] = {"rotary": Rotary(6), "backend": backend}
    found = everything(q, k, v, log_decay=gates, angle_steps=steps, **how)
    assert all(bool(x.isfinite().all()) for x in found.values())
    if strength < -1000:
        late = [x[:, 70:] for x in (q, k, v)]
        alone, _ = linear_rope_attention(
            *late, log_decay=gates[:, 70:], angle_steps=steps[:, 70:], return_state=True,
            positions=torch.arange(70, 150), **how,
        )  # fmt: skip
        torch.testing.assert_close(found["out"][:, 70:], alone, rtol=0, atol=1e-12)
        state = linear_rope_state(k[:, :70], v[:, :70], log_decay=gates[:, :70], **how)
        token = [x[:, 70:71] for x in (q, k, v)]
        how["normalize"] = False
        pulled = linear_rope_attention(*token, log_decay=gates[:, 70:71], state=state, **how)
        assert torch.equal(pulled, linear_rope_attention(*token, positions=torch.tensor([70]), **how))


@every_backend
def test_gates_of_zero_are_no_gates(backend: str) -> None:
    q, k, v = randoms(2, 100, 4, 6, g=2)
    how: dict[str, Any] = {"rotary": Rotary(6), "backend": backend}
    gated = everything(q, k, v, log_decay=torch.zeros(2, 100, 1, dtype=torch.float64), **how)
    del gated["dlog_decay"]
    assert_same(gated, everything(q, k, v, **how), 1e-13)


@every_backend
def test_a_decay_can_be_learned(backend: str) -> None:
    q, k, v = randoms(1, 70, 2, 4)
    decay = torch.tensor([0.6, 0.97], dtype=torch.float64, requires_grad=True)

    def loss(decay: Tensor) -> Tensor:
        return linear_rope_attention(q, k, v, decay=decay, backend=backend).square().sum()

    (slope,) = torch.autograd.grad(loss(decay), decay)
    for i, step in enumerate(1e-6 * torch.eye(2, dtype=torch.float64)):
        numeric = float(loss(decay.detach() + step) - loss(decay.detach() - step)) / 2e-6
        assert abs(numeric - float(slope[i])) < 1e-6 * float(slope.abs().max())


# Long gaps: a state is multiplied by what is left of it, without cancellation


@pytest.mark.parametrize("backend", ["eager", NATIVE, "triton"])
@pytest.mark.parametrize("gap", [60, 200])
@pytest.mark.parametrize("way", ["one step", "masked tokens", "gradient"])
def test_a_state_of_long_ago_stays_within_the_bound(way: str, gap: int, backend: str) -> None:
    u, n = 2.0**-24, 64
    heads = 1 if backend == "triton" else 2
    q, k, v = randoms(1, n, heads, 8, dtype=torch.float32)
    decay = torch.tensor([0.8, 0.9], dtype=torch.float64)[:heads]
    token = [x[:, :1] for x in (q, k, v)]
    how: dict[str, Any] = {"decay": decay, "normalize": False, "rotary": Rotary(8)}

    def run(backend: str, dtype: torch.dtype) -> Tensor:
        def attend(tokens: list[Tensor], **more: Any) -> Any:
            return linear_rope_attention(*(x.to(dtype) for x in tokens), backend=backend, **how, **more)

        _, state = attend([q, k, v], return_state=True)
        if way == "one step":
            hidden = torch.tensor([[False]])
            return attend(token, state=state, positions=torch.tensor([n + gap]), key_mask=hidden)
        kv = state.kv.detach().requires_grad_(way == "gradient")
        mask = torch.zeros(1, 1 + gap, dtype=torch.bool)
        padded = [x.repeat(1, 1 + gap, 1, 1) for x in token]
        out = attend(padded, state=replace(state, kv=kv), key_mask=mask)[:, -1:]
        return torch.autograd.grad(out.sum(), kv)[0] if way == "gradient" else out

    expected = run("reference", torch.float64)
    # M, the contract's sum of absolute terms, is at least the largest gradient.
    bound = 16 * u * expected.abs().max()
    assert float((run(backend, torch.float32) - expected).abs().max()) <= float(bound) + 1e-38


@every_kernel
def test_a_gate_that_is_not_a_number_shows_from_its_token_on(backend: str) -> None:
    q, k, v = randoms(1, 130, 2, 16, dtype=torch.float32)
    log_decay = data(130, g=1, b=1)[0].float()
    log_decay[0, 40] = math.nan
    out = linear_rope_attention(q, k, v, log_decay=log_decay, backend=backend)
    assert out[:, :40].isfinite().all()
    assert out[:, 40:].isnan().all()


@every_kernel
def test_a_step_that_is_not_a_number_does_not_reach_other_sequences_in_the_next_call(backend: str) -> None:
    q, k, v = randoms(1, 8, 1, 4, dtype=torch.float32)
    how: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 3, 8]), "backend": backend}
    outs, ones = [], torch.ones(1, 8, 1, 2)
    for first in (0.5, math.nan):
        steps = ones.index_fill(1, torch.tensor([0]), first).requires_grad_()
        state = linear_rope_state(k, v, angle_steps=steps, **how)
        outs.append(linear_rope_attention(q, k, v, angle_steps=ones, state=state, **how)[:, 3:])
    assert torch.equal(*outs)


@of_backends("wrong", reference=[7.0], eager=[7.0], triton=[7.0], native=[7.0, math.nan, math.inf])
def test_with_gates_and_steps_later_tokens_change_no_earlier_bit(wrong: float, backend: str) -> None:
    n, cut = 100, 43  # inside a chunk, and a block of rows
    q, k, v = randoms(1, n, 2, 8, g=1, dtype=torch.float32)
    gates, steps = (x.float() for x in data(n, g=1, b=1, d=8))
    how: dict[str, Any] = {"rotary": Rotary(8), "backend": backend}
    before = linear_rope_attention(q, k, v, log_decay=gates, angle_steps=steps, **how)
    later = [torch.cat((x[:, :cut], x[:, cut:] * wrong), 1) for x in (q, k, v, gates)]
    steps = torch.cat((steps[:, :cut], steps[:, cut:] + 1), 1)
    after = linear_rope_attention(*later[:3], log_decay=later[3], angle_steps=steps, **how)
    assert torch.equal(after[:, :cut], before[:, :cut])
    assert not torch.equal(after[:, cut:], before[:, cut:])


# Cut anywhere, in one's own pieces


@every_backend
def test_gradients_of_packed_pieces_are_those_of_one_call(backend: str) -> None:
    n, cut = 60, 27
    q, k, v = randoms(1, n, 4, 6, g=2)
    gates, steps = data(n, b=1, d=6)
    leaves = [x.requires_grad_() for x in (q, k, v, gates, steps)]
    weight = torch.randn(1, n, 4, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    how: dict[str, Any] = {"rotary": Rotary(6), "backend": backend}
    # Two sequences, whose pieces lie behind each other.
    order = torch.tensor([*range(10), *range(23, 40), *range(10, 23), *range(40, 60)])

    def run(inputs: list[Tensor], bounds: list[int], state: Any = None) -> Any:
        q, k, v, a, w = inputs
        more = {"cu_seqlens": torch.tensor(bounds), "state": state, "return_state": True, **how}
        return linear_rope_attention(q, k, v, log_decay=a, angle_steps=w, **more)

    whole, last = run(leaves, [0, 23, 60])
    expected = torch.autograd.grad((whole * weight).sum() + last.kv.sum(), leaves)
    mixed = [x[:, order] for x in leaves]
    first, state = run([x[:, :cut] for x in mixed], [0, 10, 27])
    second, last = run([x[:, cut:] for x in mixed], [0, 13, 33], state)
    pieces = torch.cat((first, second), 1)[:, order.argsort()]
    torch.testing.assert_close(pieces, whole)
    found = torch.autograd.grad((pieces * weight).sum() + last.kv.sum(), leaves)
    for name, a, b in zip("qkvaw", found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11 * float(b.abs().max()), msg=name)


@pytest.mark.parametrize("backend", ["eager", NATIVE])
def test_without_tokens_the_gradient_of_the_last_state_goes_to_the_one_before(backend: str) -> None:
    q, k, v = (x.float() for x in randoms(1, 5, 2, 4))
    state = linear_rope_state(k, v)
    state = replace(state, kv=state.kv.requires_grad_())
    gates, angle_steps = torch.zeros(1, 0, 2, requires_grad=True), torch.zeros(1, 0, 2, 2, requires_grad=True)
    _, last = linear_rope_attention(
        q[:, :0], k[:, :0], v[:, :0], log_decay=gates, angle_steps=angle_steps, state=state,
        return_state=True, backend=backend,
    )  # fmt: skip
    found = torch.autograd.grad(last.kv.sum(), [state.kv, gates, angle_steps])
    assert torch.equal(found[0], torch.ones_like(state.kv))
    assert [x.shape for x in found[1:]] == [(1, 0, 2), (1, 0, 2, 2)]

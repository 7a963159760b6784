"""Decay and rotation made from the data: other models' recurrences, strong gates, long gaps, masks, cuts."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from linrope import Rotary, linear_rope_attention, linear_rope_state
from tests.oracle import (
    NATIVE,
    assert_same,
    every_backend,
    every_kernel,
    everything,
    randoms,
)


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
    """GLA (arXiv 2312.06635), eq. 3, with one gate per head: S_t = alpha_t S_(t-1) + k_t^T v_t, o_t = q_t
    S_t."""
    state, out = torch.zeros(q.shape[1], v.shape[1], dtype=q.dtype), []
    for t in range(len(q)):
        state = alpha[t] * state + torch.outer(k[t], v[t])
        out.append(q[t] @ state)
    return torch.stack(out)


def mamba2(x: Tensor, dt: Tensor, a: float, b: Tensor, c: Tensor) -> Tensor:
    """SSD (arXiv 2405.21060), eq. 1 and 2: h_t = exp(A dt_t) h_(t-1) + dt_t B_t x_t^T, y_t = C_t h_t."""
    state, out = torch.zeros(b.shape[1], x.shape[1], dtype=x.dtype), []
    for t in range(len(x)):
        state = math.exp(a * dt[t]) * state + dt[t] * torch.outer(b[t], x[t])
        out.append(c[t] @ state)
    return torch.stack(out)


def selective_rope(q: Tensor, k: Tensor, v: Tensor, omega: Tensor, alpha: Tensor) -> Tensor:
    """Selective RoPE (arXiv 2511.17388): q, k turned by the sums of omega up to their token, then a gated
    recurrence."""

    def turned(x: Tensor) -> Tensor:
        angle = omega.cumsum(0)
        x1, x2 = x[:, ::2], x[:, 1::2]
        return torch.stack(
            (x1 * angle.cos() - x2 * angle.sin(), x1 * angle.sin() + x2 * angle.cos()), -1
        ).flatten(1)

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


@every_backend
@pytest.mark.parametrize("model", ["RetNet", "GLA", "Mamba-2", "Selective RoPE", "Mamba-3"])
def test_it_holds_the_recurrences_of_other_models(model: str, backend: str) -> None:
    n, d = 90, 6
    (q, k, v), (gates, steps) = randoms(1, n, 1, d, e=3), data(n, 1, 1, d)
    one, a, omega = [x[0, :, 0] for x in (q, k, v)], gates[0, :, 0], steps[0, :, 0]
    dt = F.softplus(one[2][:, 0])
    how: dict[str, Any] = {"feature_map": None, "normalize": False, "backend": backend}
    if model == "RetNet":
        expected = retnet(*one)
        how |= {"rotary": Rotary(d), "decay": torch.tensor([1 - 2.0**-5], dtype=torch.float64)}
    elif model == "GLA":
        expected = gated_linear_attention(*one, a.exp())
        how |= {"log_decay": gates}
    elif model == "Mamba-2":
        expected = mamba2(one[2], dt, -0.7, one[1], one[0])
        how |= {"log_decay": (-0.7 * dt)[None, :, None]}
        v = v * dt[None, :, None, None]
    elif model == "Selective RoPE":
        expected = selective_rope(*one, omega, a.exp())
        how |= {"log_decay": gates, "angle_steps": steps}
    else:
        expected = mamba3(one[2], dt, a, omega, one[1], one[0])
        how |= {"log_decay": (a * dt)[None, :, None], "angle_steps": (omega * dt[:, None])[None, :, None]}
        v = v * dt[None, :, None, None]
    out = linear_rope_attention(q, k, v, **how)
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
        kv = linear_rope_state(k[:, :70], v[:, :70], log_decay=gates[:, :70], **how)
        pulled = linear_rope_attention(
            *[x[:, 70:71] for x in (q, k, v)], log_decay=gates[:, 70:71], state=kv, normalize=False, **how
        )
        bare = linear_rope_attention(
            *[x[:, 70:71] for x in (q, k, v)], normalize=False, positions=torch.tensor([70]), **how
        )
        assert torch.equal(pulled, bare)


@every_backend
def test_gates_of_zero_are_no_gates(backend: str) -> None:
    q, k, v = randoms(2, 100, 4, 6, g=2)
    how: dict[str, Any] = {"rotary": Rotary(6), "backend": backend}
    plain = everything(q, k, v, **how)
    gated = everything(q, k, v, log_decay=torch.zeros(2, 100, 1, dtype=torch.float64), **how)
    gated.pop("dlog_decay")
    assert_same(gated, plain, 1e-13)


@every_backend
def test_gates_and_a_fixed_decay_multiply(backend: str) -> None:
    q, k, v = randoms(2, 100, 4, 6, g=2)
    gates, _ = data(100)
    decay = torch.tensor([0.5, 0.99], dtype=torch.float64)
    how: dict[str, Any] = {"rotary": Rotary(6), "backend": backend}
    both = everything(q, k, v, log_decay=gates, decay=decay, **how)
    assert_same(both, everything(q, k, v, log_decay=gates + decay.log(), **how), 1e-12)


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


@every_backend
@pytest.mark.parametrize("causal", [True, False])
def test_a_hidden_token_neither_fades_nor_turns_what_follows(causal: bool, backend: str) -> None:
    n = 80
    q, k, v = randoms(1, n, 4, 6, g=2)
    gates, steps = data(n, b=1, d=6)
    shown = torch.rand(n, generator=torch.Generator().manual_seed(2)) > 0.4
    how: dict[str, Any] = {"backend": backend, "causal": causal}
    if causal:
        how["log_decay"] = gates
    found, state = linear_rope_attention(
        q, k, v, key_mask=shown[None], angle_steps=steps, return_state=True, **how
    )
    short = {name: x[:, shown] for name, x in how.items() if isinstance(x, Tensor)}
    alone, expected = linear_rope_attention(
        *[x[:, shown] for x in (q, k, v)], angle_steps=steps[:, shown], return_state=True, **(how | short)
    )
    torch.testing.assert_close(found[:, shown], alone, rtol=0, atol=1e-12)
    torch.testing.assert_close(state.kv, expected.kv, rtol=0, atol=1e-11)
    assert torch.equal(state.angle, expected.angle)


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
        _, state = linear_rope_attention(
            *[x.to(dtype) for x in (q, k, v)], return_state=True, backend=backend, **how
        )
        late = torch.tensor([n + gap])
        if way == "one step":
            return linear_rope_attention(
                *[x.to(dtype) for x in token], state=state, positions=late, backend=backend,
                key_mask=torch.tensor([[False]]), **how,
            )  # fmt: skip
        padded = [x.to(dtype).repeat(1, 1 + gap, 1, 1) for x in token]
        mask = torch.zeros(1, 1 + gap, dtype=torch.bool)
        if way == "masked tokens":
            return linear_rope_attention(*padded, state=state, key_mask=mask, backend=backend, **how)[:, -1:]
        kv = state.kv.detach().requires_grad_()
        out = linear_rope_attention(
            *padded, state=replace(state, kv=kv), key_mask=mask, backend=backend, **how
        )
        return torch.autograd.grad(out[:, -1].sum(), kv)[0]

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
    outs = []
    for first in (0.5, math.nan):
        steps = torch.ones(1, 8, 1, 2)
        steps[0, 0] = first
        state = linear_rope_state(k, v, angle_steps=steps.requires_grad_(), **how)
        outs.append(linear_rope_attention(q, k, v, angle_steps=torch.ones(1, 8, 1, 2), state=state, **how))
    assert torch.equal(outs[0][:, 3:], outs[1][:, 3:])


@pytest.mark.parametrize(
    ("backend", "wrong"),
    [*((name, 7.0) for name in ("reference", "eager", "triton")),
     *(pytest.param("native", wrong, marks=NATIVE.marks) for wrong in (7.0, math.nan, math.inf))],
)  # fmt: skip
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
def test_the_state_alone_has_gradients(backend: str) -> None:
    _, k, v = randoms(1, 70, 2, 4)
    gates, steps = (x.requires_grad_() for x in data(70, b=1))
    k.requires_grad_()

    def run(backend: str) -> tuple[Tensor, ...]:
        state = linear_rope_state(k, v, log_decay=gates, angle_steps=steps, backend=backend)
        return torch.autograd.grad((state.kv.square().sum() + state.z.sum()), (k, gates, steps))

    for found, expected in zip(run(backend), run("reference")):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@every_backend
def test_gradients_of_packed_pieces_are_those_of_one_call(backend: str) -> None:
    n, cut = 60, 27
    q, k, v = randoms(1, n, 4, 6, g=2)
    gates, steps = data(n, b=1, d=6)
    leaves = [x.detach().requires_grad_() for x in (q, k, v, gates, steps)]
    weight = torch.randn(1, n, 4, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    how: dict[str, Any] = {"rotary": Rotary(6), "backend": backend}
    # Two sequences, whose pieces lie behind each other.
    order = torch.tensor([*range(10), *range(23, 40), *range(10, 23), *range(40, 60)])
    bounds = [torch.tensor([0, 23, 60]), torch.tensor([0, 10, 27]), torch.tensor([0, 13, 33])]

    def run(inputs: list[Tensor], state: Any = None, which: int = 0) -> Any:
        q, k, v, a, w = inputs
        more = {"cu_seqlens": bounds[which], "state": state, "return_state": True, **how}
        return linear_rope_attention(q, k, v, log_decay=a, angle_steps=w, **more)

    whole, last = run(leaves)
    expected = torch.autograd.grad((whole * weight).sum() + last.kv.sum(), leaves)
    mixed = [x[:, order] for x in leaves]
    first, state = run([x[:, :cut] for x in mixed], which=1)
    second, last = run([x[:, cut:] for x in mixed], state, which=2)
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
    assert [x.shape for x in found[1:]] == [gates.shape, angle_steps.shape]


@every_kernel
def test_steps_beside_other_positions_of_the_keys(backend: str) -> None:
    q, k, v = randoms(2, 9, 2, 4, dtype=torch.float32)
    places = {"positions": torch.arange(9), "key_positions": 2 * torch.arange(9) + 3}
    how: dict[str, Any] = {"rotary": Rotary(4), **places}
    steps = data(9)[1].float()
    out = linear_rope_attention(q, k, v, angle_steps=steps, backend=backend, **how)
    exact = [x.double() for x in (q, k, v)]
    expected = linear_rope_attention(*exact, angle_steps=steps.double(), backend="reference", **how)
    torch.testing.assert_close(out.cpu(), expected.float(), rtol=1e-5, atol=1e-5)

"""docs/coming_from.md: its calls give what the equations of the other libraries give, written out in float64.

Their recurrences are in tests/backends/test_gates.py.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from linrope import Rotary, feature_maps, linear_rope_attention, state_from_sums
from linrope.rotation.rotary import grid_positions
from tests.support.equation import Equation

same = torch.testing.assert_close
FLA: dict[str, Any] = {"feature_map": None, "normalize": False}


@pytest.fixture
def qkv() -> Tensor:
    """q, k, v (b, n, h, d)"""
    return torch.randn(3, 2, 12, 4, 8, dtype=torch.float64)


def test_mamba_ssm_s_options_are_applied_around_the_call() -> None:
    """selective_state_update's equation: steps dt, states (batch, heads, headdim, d_state), two groups, D and z."""
    torch.manual_seed(0)
    x, z = torch.randn(2, 2, 12, 4, 6, dtype=torch.float64)
    B, C = torch.randn(2, 2, 12, 2, 8, dtype=torch.float64)
    raw, dt_bias = torch.randn(2, 12, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    A, D = -torch.rand(4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    start = torch.randn(2, 4, 6, 8, dtype=torch.float64)
    dt = F.softplus(raw + dt_bias).clamp(0.3, 1.5)

    s, theirs = start, []
    per_head = [y.repeat_interleave(2, 2) for y in (B, C)]
    for t in range(12):
        key, query = (y[:, t, :, None] for y in per_head)
        step = dt[:, t, :, None, None]
        s = s * (step * A[:, None, None]).exp() + step * x[:, t, ..., None] * key
        theirs.append(((s * query).sum(-1) + D[:, None] * x[:, t]) * F.silu(z[:, t]))

    state = state_from_sums(start.mT, feature_map=None)
    options: dict[str, Any] = {"log_decay": dt * A, "write": dt, **FLA}
    y, last = linear_rope_attention(C, B, x, state=state, return_state=True, **options)
    same((y + D[:, None] * x) * F.silu(z), torch.stack(theirs, 1))
    same(last.kv.mT, s)
    single = {"log_decay": (dt * A)[:, :1], "write": dt[:, :1], **FLA}
    state = state_from_sums(start.mT, feature_map=None)
    one, _ = linear_rope_attention(C[:, :1], B[:, :1], x[:, :1], state=state, return_state=True, **single)
    same(one, y[:, :1])


def test_a_state_of_fla_is_continued_with_its_scale(qkv: Tensor) -> None:
    q, k, v = qkv
    g = F.logsigmoid(torch.randn(2, 12, 4, dtype=torch.float64))
    initial_state = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    state = state_from_sums(initial_state, feature_map=None)
    out, last = linear_rope_attention(
        q * 8**-0.5, k, v, log_decay=g, state=state, return_state=True, **FLA
    )  # fmt: skip
    same(out, Equation()(q * 8**-0.5, k, v, log_decay=g, state=state, **FLA)[0])
    assert last.kv.shape == initial_state.shape


def test_the_unit_map_with_fla_s_scale_is_gated_deltanet(qkv: Tensor) -> None:
    q, k, v = qkv
    g, beta = F.logsigmoid(torch.randn(2, 12, 4).double()), torch.rand(2, 12, 4, dtype=torch.float64)
    unit_q, unit_k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    unit = feature_maps.make("unit", 8, query_factor=8**-0.5)
    same(
        linear_rope_attention(
            q, k, v, feature_map=unit, normalize=False, log_decay=g, write=beta, erase=beta
        ),
        Equation()(unit_q * 8**-0.5, unit_k, v, log_decay=g, write=beta, erase=beta, **FLA)[0],
    )


def test_eps_is_added_as_in_fast_transformers(qkv: Tensor) -> None:
    q, k, v = qkv
    scores = torch.einsum("bnhd,bmhd->bhnm", F.elu(q) + 1, F.elu(k) + 1).tril()
    theirs = torch.einsum("bhnm,bmhe->bnhe", scores / (scores.sum(-1, keepdim=True) + 1e-6), v)
    same(linear_rope_attention(q, k, v, eps_mode="add"), theirs)


def test_performer_pytorch_s_projection_gives_its_features(qkv: Tensor) -> None:
    q, k, v = qkv
    projection_matrix = torch.randn(64, 8, dtype=torch.float64)  # (nb_features, dim_heads)

    def softmax_kernel(x: Tensor) -> Tensor:  # without kernel_epsilon
        logits = x * 8**-0.25 @ projection_matrix.T
        return (logits - x.square().sum(-1, keepdim=True) / 2 * 8**-0.5).exp() / 64**0.5

    favor: Any = feature_maps.make("favor+", 8, num_features=64).double()
    favor.load_projection(projection_matrix)
    weights = torch.einsum("bnhf,bmhf->bhnm", softmax_kernel(q), softmax_kernel(k))
    theirs = torch.einsum("bhnm,bmhe->bnhe", weights / weights.sum(-1, keepdim=True), v)
    same(linear_rope_attention(q, k, v, feature_map=favor, causal=False), theirs)


def test_mlla_is_equation_19_with_n_times_its_eps(qkv: Tensor) -> None:
    q, k, v = qkv
    places, (_, n, heads, _) = grid_positions(3, 4), q.shape
    rotary = Rotary.axial(8 * heads, axes=2)

    def turned(x: Tensor) -> Tensor:  # before the split into heads
        return rotary(x.flatten(2)[:, :, None], places).view_as(x)

    phi, psi = F.elu(q) + 1, F.elu(k) + 1
    den = torch.einsum("bnhd,bhd->bnh", phi, psi.mean(1)) + 1e-6
    kv = torch.einsum("bnhd,bnhe->bhde", turned(psi) / n**0.5, v / n**0.5)
    theirs = torch.einsum("bnhd,bhde->bnhe", turned(phi), kv) / den[..., None]
    same(
        linear_rope_attention(
            q,
            k,
            v,
            rotary=Rotary.whole_model(heads, 8, axes=2),
            positions=places,
            causal=False,
            eps=n * 1e-6,
            eps_mode="add",
        ),
        theirs,
    )


def test_sana_is_relu_without_a_rotation(qkv: Tensor) -> None:
    q, k, v = qkv
    sums = torch.einsum("bmhd,bmhe->bhde", k.relu(), F.pad(v, (0, 1), value=1.0))
    theirs = torch.einsum("bnhd,bhde->bnhe", q.relu(), sums)
    same(
        linear_rope_attention(q, k, v, feature_map="relu", causal=False, eps=1e-15, eps_mode="add"),
        theirs[..., :-1] / (theirs[..., -1:] + 1e-15),
    )

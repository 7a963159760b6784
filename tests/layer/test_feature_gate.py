"""A forget gate per feature: its equation, where it starts, what it refuses, and models that learn with it."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from linrope import LinearRoPEAttention
from linrope.layer.config import LayerConfig
from linrope.layer.feature_gate import FeatureForgetGate
from linrope.layer.selective import spread
from linrope.models import LanguageModel, LanguageModelConfig
from tests.layer.cases import make, numbers

PER_FEATURE = {"forget_gate": {"per": "feature"}}
KDA: dict[str, Any] = {"erase_gate": "tied", "feature_map": "unit", "normalize": False}


@pytest.mark.parametrize("bound", [None, 5])
def test_with_a_tied_erase_gate_it_is_kimi_delta_attention(bound: float | None) -> None:
    """S <- (I - b k k^T) Diag(e^a) S + b k v^T with keys of length 1, without a rotation."""
    layer = make(forget_gate={"per": "feature", "bound": bound}, rotary=None, **KDA)
    x = numbers(2, 9, 16)
    q, k, v = (p(x).unflatten(-1, (4, 4)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    gate = layer.forget_gate
    y = (x @ gate.down.T @ gate.up.flatten(0, 1).T).unflatten(-1, (4, 4)) + gate.bias
    keep = y.sigmoid() if bound is None else (-bound / (1 + y.exp())).exp()
    beta = (x @ layer.erase_gate.weight.T + layer.erase_gate.bias).sigmoid()[..., None]
    S, outs = torch.zeros(2, 4, 4, 4, dtype=torch.float64), []
    for t in range(9):
        S = keep[:, t, ..., None] * S
        written = beta[:, t] * (v[:, t] - torch.einsum("bhd,bhde->bhe", k[:, t], S))
        S = S + torch.einsum("bhd,bhe->bhde", k[:, t], written)
        outs.append(torch.einsum("bhd,bhde->bhe", q[:, t], S))
    assert_close(layer(x), layer.o_proj(torch.stack(outs, 1).flatten(-2)))


@pytest.mark.parametrize("rotary", ["interleaved", {"rotary_dim": 4, "layout": "half"}, "selective"], ids=str)
def test_outputs_depend_on_relative_positions_only(rotary: Any) -> None:
    layer, x = make(**PER_FEATURE, rotary=rotary, head_dim=8), numbers(2, 9, 16)
    assert layer.forget_gate.up.shape == (4, 6 if "rotary_dim" in rotary else 4, 8)
    assert_close(layer(x, positions=torch.arange(9) + 1234), layer(x))


@pytest.mark.parametrize("bound", [None, 1, 5.5])
def test_it_starts_with_half_lives_spread_over_each_head(bound: float | None) -> None:
    gate = FeatureForgetGate(16, 2, units=5, longest=100, rank=4, bound=bound)
    expected = spread(5, 100).log().float().expand(1, 1, 2, 5)
    assert_close(gate(torch.randn(1, 1, 16)), expected, rtol=1e-5, atol=0)
    nn.init.normal_(gate.up)
    assert not torch.allclose(gate(torch.ones(1, 1, 16)), expected, rtol=0.1)
    gate.reset_parameters()
    assert_close(gate(torch.randn(1, 1, 16)), expected, rtol=1e-5, atol=0)


@torch.no_grad()
def test_a_bound_keeps_every_gate_open() -> None:
    x = 1e4 * torch.randn(1, 50, 16)
    for bound in (None, 5):
        gate = FeatureForgetGate(16, 2, units=3, bound=bound)
        nn.init.normal_(gate.up)
        lowest = float(gate(x).min())
        assert lowest < -1000 if bound is None else lowest == -5
        assert gate(x.bfloat16()).dtype == torch.float32
        assert float(gate(x).max()) <= 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"write_gate": "tied"}, "^write_gate='tied': got a forget_gate per feature, expected 'independent', None or"),
        ({"rope_order": "before"}, "^rope_order='before': got a forget_gate per feature, expected 'after'"),
        ({"causal": False}, "^forget_gate: got causal=False, expected causal=True"),
        ({"rotary": nn.Bilinear(1, 1, 1)}, "^rotary: got a Bilinear without an attribute rotary, .*pairs is not known"),
        ({"forget_gate": {"per": "unit"}}, "^forget_gate='unit': expected one of head, feature"),
        ({"forget_gate": {"rank": 4}}, "^forget_gate: got rank with per='head', expected per='feature' with it"),
        *(({"forget_gate": {"per": "feature", "rank": x}}, f"^forget_gate: got rank={x!r}, expected an integer, 1 ")
          for x in (0, True, 1.5, 10**20)),
        *(({"forget_gate": {"per": "feature", "bound": x}}, f"^forget_gate: got bound={x!r}, expected a finite number")
          for x in (0.5, True, "x", math.inf)),
    ],
)  # fmt: skip
def test_what_does_not_go_with_it_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LinearRoPEAttention(16, 4, **PER_FEATURE | options)


def test_the_block_with_it_has_no_write_gate() -> None:
    for erase_gate in (None, "tied", "independent"):
        config = LayerConfig.block(16, 4, **PER_FEATURE, erase_gate=erase_gate)
        assert (config.write_gate, config.decay) == (None, None)
        assert LayerConfig(**config.to_dict()) == config
        layer = LinearRoPEAttention(config)
        assert layer.forget_gate.up.shape == (4, 3, 4)  # of 4 features, one pair turns
        assert config.with_longest(9).forget_gate.longest == 9
    assert "units=3, longest=4096.0, rank=4)" in repr(layer)


def test_training_lowers_the_loss_and_reaches_the_gate() -> None:
    torch.manual_seed(0)
    forget_gate = {"per": "feature", "bound": 5}
    config = LanguageModelConfig(
        embed_dim=32, num_layers=2, num_heads=2, forget_gate=forget_gate, erase_gate="tied"
    )
    model, tokens = (
        LanguageModel(config),
        torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(1)),
    )
    gates = [block.attention.forget_gate for block in model.blocks]
    starts = spread(14, 4096).log().float().expand(2, 14)  # of 16 features, two pairs turn
    for gate in gates:
        assert_close(gate(torch.zeros(1, 1, 32))[0, 0], starts, rtol=1e-5, atol=0)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(15):
        loss = F.cross_entropy(model(tokens[:, :-1])[0].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 1
    assert all(parameter.grad.any() for gate in gates for parameter in gate.parameters())

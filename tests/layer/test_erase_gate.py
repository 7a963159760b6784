"""The layer's delta rule: its equation, what it refuses, the block, and models that learn, save and decode with it."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from linrope import LinearRoPEAttention
from linrope.decode import generate
from linrope.decode.engine import Engine, Generation
from linrope.layer.config import LayerConfig
from linrope.models import LanguageModel, LanguageModelConfig
from linrope.recurrence.identities import WITHOUT_Z
from tests.layer.cases import GATED, make, numbers

DELTA: dict[str, Any] = {"feature_map": "unit", "normalize": False}
TINY: dict[str, Any] = {"embed_dim": 32, "num_layers": 2, "num_heads": 2, "erase_gate": "tied"}


@pytest.mark.parametrize("largest", [1, 2])
def test_tied_it_is_gated_deltanet(largest: int) -> None:
    """S <- f S - b k (f S^T k)^T + b k v^T with keys of length 1, queries of length d^-1/2, and no rotation."""
    options = {"forget_gate": True, "erase_gate": {"name": "tied", "largest": largest}, "rotary": None}
    layer = make(**options, feature_map={"name": "unit", "query_factor": 0.5}, normalize=False)
    x = numbers(2, 9, 16)
    q, k, v = (p(x).unflatten(-1, (4, 4)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    keep = (x @ layer.forget_gate.weight.T + layer.forget_gate.bias).sigmoid()[..., None, None]
    beta = largest * (x @ layer.erase_gate.weight.T + layer.erase_gate.bias).sigmoid()[..., None]
    S, outs = torch.zeros(2, 4, 4, 4, dtype=torch.float64), []
    for t in range(9):
        S = keep[:, t] * S
        written = beta[:, t] * (v[:, t] - torch.einsum("bhd,bhde->bhe", k[:, t], S))
        S = S + torch.einsum("bhd,bhe->bhde", k[:, t], written)
        outs.append(torch.einsum("bhd,bhde->bhe", q[:, t] / 2, S))
    assert_close(layer(x), layer.o_proj(torch.stack(outs, 1).flatten(-2)))
    _, state = layer(x, return_state=True)
    assert_close(state.sums.kv, S)


def test_above_1_a_layer_tracks_a_parity() -> None:
    """A token of ones reflects the state, b = 2, and one of zeros leaves it, b = 0. The first token has written it."""
    layer = make(
        num_heads=1, head_dim=1, erase_gate={"name": "independent", "largest": 2}, rotary=None, **DELTA
    )
    bits = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1])
    x = torch.zeros(1, len(bits) + 1, 16, dtype=torch.float64)
    x[..., 0], x[0, 1:, 1], x[0, 0, 2] = 1, bits.double(), 1
    with torch.no_grad():
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj, layer.erase_gate):
            projection.weight.zero_()
        layer.q_proj.weight[0, 0] = layer.k_proj.weight[0, 0] = layer.v_proj.weight[0, 2] = 1
        layer.erase_gate.weight[0, 1], layer.erase_gate.bias[0] = 100, -50
    y = layer(x)[0, 1:] @ layer.o_proj.weight[:, 0] / layer.o_proj.weight.square().sum()
    assert_close(y, 1 - 2 * (bits.cumsum(0) % 2).double(), rtol=0, atol=1e-4)


def test_the_state_has_no_z() -> None:
    x, layer = numbers(2, 5, 16), make(erase_gate="tied", **DELTA)
    _, state = layer(x, return_state=True)
    assert state.identity.endswith(WITHOUT_Z)
    assert not state.sums.z.any()
    plain = LinearRoPEAttention(16, 4, feature_map={"name": "unit", "activation": "relu"}).double()
    with pytest.raises(ValueError, match=r"^state: made without z; expected normalize=False"):
        plain(x, state=state)
    other = make(erase_gate="tied", feature_map={"name": "unit", "activation": "silu"}, normalize=False)
    with pytest.raises(
        ValueError, match=r"^state: made with UnitMap\(4, .*; without z; expected UnitMap\(4, .*silu"
    ):
        other(x, state=state)


NORMALIZER = "^erase_gate: got normalize=True, expected normalize=False, and keys .*'unit'"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"feature_map": "unit", "normalize": True}, NORMALIZER),
        ({"feature_map": "relu", "normalize": True, "out_norm": True}, NORMALIZER),
        ({"causal": False}, "^erase_gate: got causal=False, expected causal=True"),
        ({"feature_map": "exp"}, "^feature_map='exp': its features have scales, .* erase_gate; expected 'unit'"),
        *(({"feature_map": name}, "^feature_map=.*: with an erase_gate keys must have length 1, .*expected 'unit'")
          for name in ("elu+1", "silu", "identity", "t2r")),
        ({"rotary": {"xpos": 512}}, r"^rotary: got xpos=512.*erase_gate, expected xpos=None"),
        ({"forget_gate": True, "write_gate": "tied"}, "^write_gate='tied': expected None with erase_gate='tied'"),
        ({"erase_gate": "tie"}, "^erase_gate='tie': expected one of tied, independent, a dict, or None; did you mean"),
        ({"erase_gate": True}, "^erase_gate=True: expected one of tied, independent"),
        ({"erase_gate": {"largest": 2}}, r"^erase_gate: got the keys \['largest'\], expected the key 'name'"),
        ({"erase_gate": {"name": "tied", "most": 2}}, "^erase_gate: got the key 'most', expected one of name, largest"),
        *(({"erase_gate": {"name": "tied", "largest": x}}, f"^erase_gate: got largest={x!r}, expected 1 or 2")
          for x in (3, 0, True, "x")),
    ],
)  # fmt: skip
def test_what_does_not_go_with_it_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LinearRoPEAttention(16, 4, **{"erase_gate": "tied", **DELTA} | options)


def test_a_context_is_refused() -> None:
    layer = make(erase_gate="tied", **DELTA)
    with pytest.raises(
        ValueError,
        match="context: got a tensor, expected a layer without erase_gate, for which key t and query t",
    ):
        layer(numbers(1, 5, 16), numbers(1, 5, 16, seed=2))


@pytest.mark.parametrize(
    ("changes", "write_gate", "feature_map"),
    [
        ({"erase_gate": "tied"}, None, {"name": "unit"}),
        ({"erase_gate": "independent"}, "tied", {"name": "unit", "activation": "elu+1"}),
        (
            {"erase_gate": "tied", "decay": None, "feature_map": {"name": "unit", "activation": "relu"}},
            None,
            {"name": "unit", "activation": "relu"},
        ),
        ({}, "tied", {"name": "elu+1"}),
    ],
    ids=str,
)
def test_the_block_with_it_has_keys_of_length_1(
    changes: Any, write_gate: str | None, feature_map: dict[str, str]
) -> None:
    config = LayerConfig.block(16, 4, **changes)
    assert (config.write_gate, config.feature_map) == (write_gate, feature_map)
    assert config.normalize is ("erase_gate" not in changes)
    assert LayerConfig(**config.to_dict()) == config
    assert ("erase_gate" in repr(LinearRoPEAttention(config))) is ("erase_gate" in changes)


def test_it_starts_near_0_and_in_the_middle_of_its_range_if_it_writes_too() -> None:
    for largest, (name, share) in product((1, 2), (("tied", 0.5), ("independent", 1 / (1 + math.exp(4))))):
        layer = LinearRoPEAttention(16, 4, erase_gate={"name": name, "largest": largest}, **DELTA)
        assert_close(layer.erase_gate(torch.zeros(1, 1, 16)), torch.full((1, 1, 4), largest * share))
        assert repr(layer.erase_gate) == f"EraseGate(16, num_heads=4, largest={largest})"


def test_float16_needs_no_normalizer() -> None:
    layer = make(torch.float16, **GATED["gated delta rule"])
    assert layer(numbers(1, 50, 16).half()).isfinite().all()


# Models


def model(**options: Any) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(LanguageModelConfig(**TINY | options))


@pytest.mark.parametrize("gate", ["tied", {"name": "independent", "largest": 2}], ids=str)
def test_training_lowers_the_loss(gate: Any) -> None:
    tokens, trained = (
        torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(1)),
        model(erase_gate=gate),
    )
    optimizer, losses = torch.optim.AdamW(trained.parameters(), lr=3e-3), []
    for _ in range(15):
        loss = F.cross_entropy(trained(tokens[:, :-1])[0].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 1
    gates = [block.attention.erase_gate for block in trained.blocks]
    assert all(isinstance(gate, nn.Module) and gate.weight.grad.any() for gate in gates)


@torch.no_grad()
def test_a_model_generates_what_its_own_calls_give() -> None:
    """With and without an engine. A prepared step refuses such a layer, and says why."""
    made, prompt = model(), torch.randint(256, (1, 7), generator=torch.Generator().manual_seed(1))
    tokens = prompt
    for _ in range(5):
        tokens = torch.cat((tokens, made(tokens)[0][:, -1:].argmax(-1)), 1)
    expected = tokens[0, 7:].tolist()
    assert [int(token) for token in generate(made, prompt, 5, temperature=0)] == expected
    engine, generation = Engine(made, 2, queue=0), Generation(prompt[0].tolist(), max_tokens=5, temperature=0)
    engine.submit(generation)
    pieces: list[str] = []
    while generation.finish_reason is None:
        pieces += [text for _, text in engine.step() if text]
    assert "".join(pieces) == bytes(expected).decode(errors="replace")

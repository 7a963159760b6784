"""The layer's delta rule: a state that it tracks, what it refuses, and the block with it."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from linrope import LinearRoPEAttention
from linrope.layer.config import LayerConfig
from linrope.recurrence.identities import WITHOUT_Z
from tests.layer.cases import make, numbers

DELTA: dict[str, Any] = {"feature_map": "unit", "normalize": False}
TINY: dict[str, Any] = {"embed_dim": 32, "num_layers": 2, "num_heads": 2, "erase_gate": "tied"}


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

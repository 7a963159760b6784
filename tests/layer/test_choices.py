"""Options of LinearRoPEAttention, and inputs beside them, that do not fit are refused by name."""

import json

import numpy as np
import pytest
import torch

from linrope import LinearRoPEAttention, Rotary, feature_maps
from linrope.layer.config import LayerConfig


def make(**options) -> LinearRoPEAttention:
    return LinearRoPEAttention(16, 4, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forget_gate": True, "causal": False}, "forget_gate: got causal=False, expected causal=True"),
        ({"short_conv": 4, "causal": False}, "short_conv: got causal=False, expected causal=True"),
        ({"rotary": "selective", "rope_order": "before"}, "rope_order='before': got selective steps"),
        ({"rotary": {"name": "selective", "axes": 2}}, "rotary: got .*expected one without axes"),
        ({"rotary": {"name": "selected"}}, "rotary='selected': expected one of selective"),
        ({"rotary": "selectiv"}, "rotary='selectiv': expected one of .*did you mean 'selective'"),
        *(({"rotary": {"partial_rotary_factor": x}}, f"partial_rotary_factor={x!r}: expected a number above 0")
          for x in (1.5, "x")),
        ({"rotary": {"partial_rotary_factor": 0.5, "rotary_dim": 2}}, "rotary: got rotary_dim and partial_rot"),
        ({"forget_gate": {"shortest": 1}}, "forget_gate: got the key 'shortest', expected one of longest, per"),
        ({"forget_gate": 3}, "forget_gate=3: expected True, False, or a dict with longest, per, rank, bound"),
        ({"short_conv": 1}, "short_conv=1: expected the number of taps"),
        ({"short_conv": {"activation": "relu"}}, "activation='relu': expected one of silu, None"),
        ({"short_conv": {"start": "zero"}}, "start='zero': expected one of identity, uniform"),
        ({"short_conv": {"kernel": 4}}, "short_conv: got the key 'kernel', expected one of taps, activation"),
        ({"feature_map": {"name": "paired", "inner": "silu"}},
         "feature_map={'name': 'paired', 'inner': 'silu'}: its features are signed"),
        ({"feature_map": {"name": "paired"}, "rotary": "half"},
         "feature_map: got a paired map with layout='interleaved', expected the rotation's, 'half'"),
        ({"feature_map": {"name": "paired", "layout": "half"}, "rotary": {"layout": "half", "rotary_dim": 4}},
         "rotary: got rotary_dim=4, expected all 8 features of a paired map with layout='half'"),
        ({"write_gate": "tied"}, "write_gate='tied': expected a forget_gate with it, or None"),
        ({"write_gate": "tie", "forget_gate": True}, "write_gate='tie': expected one of tied, independent, None"),
        ({"skip": "inside"}, "skip='inside': expected one of before, after, None"),
        ({"gate": "inside"}, "gate='inside': expected one of before, after, True or False"),
        ({"out_norm": "heads"}, "out_norm='heads': expected one of head, all"),
        *(({"out_norm": {"eps": x}}, f"out_norm: got eps={x!r}, expected a positive finite number")
          for x in (-1.0, "x")),
        ({"num_value_heads": 6}, "num_value_heads=6: expected a multiple of num_heads=4"),
        ({"num_value_heads": 8, "num_kv_heads": 2}, "num_value_heads=8: expected None, as num_kv_heads=2 differs"),
        ({"decay": {"name": "spread", "shortest": 1}}, "decay: got the key 'shortest', expected one of name, longest"),
        ({"decay": {"longest": 1}}, r"decay: got the keys \['longest'\], expected the key 'name'"),
        ({"decay": {"name": "retnet", "longest": 9}}, r"decay: got \['longest'\] with name='retnet'"),
        ({"decay": {"name": "learned", "longest": 0}}, "longest=0: expected a finite number of tokens"),
    ],
)  # fmt: skip
def test_choices_that_do_not_fit_are_refused(options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_a_layer_takes_a_config_or_its_fields() -> None:
    config = LayerConfig(16, 4, short_conv=4, gate=True, out_norm="all", decay={"name": "spread"})
    assert LinearRoPEAttention(config).config == make(short_conv={"taps": 4}, gate="after", out_norm={"over": "all"},
                                                      decay="spread").config  # fmt: skip
    with pytest.raises(TypeError, match="got num_heads or options with a LayerConfig"):
        LinearRoPEAttention(config, gate=False)
    with pytest.raises(TypeError, match=r"got the keyword 'forgetgate', .*did you mean 'forget_gate'"):
        make(forgetgate=True)
    with pytest.raises(TypeError, match="num_heads: got None"):
        LinearRoPEAttention(16)


@pytest.mark.parametrize("options", [{"rotary": Rotary(4)}, {"feature_map": feature_maps.make("elu+1", 4)}])
def test_configs_with_objects_are_not_json(options) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))}: got a .*which JSON cannot hold"):
        make(**options).config.to_dict()


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({}, "forget_gate write_gate short_conv out_norm skip gate"),
        ({"forget_gate": False}, "decay short_conv out_norm skip gate"),
        ({"forget_gate": False, "rotary": None}, "short_conv out_norm skip gate"),
        ({"decay": "retnet"}, "decay short_conv out_norm skip gate"),
        ({"decay": None}, "short_conv out_norm skip gate"),
        ({"causal": False, "skip": None}, "out_norm gate"),
    ],
    ids=str,
)
def test_the_block_of_the_models_follows_from_what_is_changed(changes, parts: str) -> None:
    config = LinearRoPEAttention.block(16, 4, **changes).config
    assert config.value_dim == 8
    names = ("decay", "forget_gate", "write_gate", "short_conv", "out_norm", "skip", "gate")
    assert [name for name in names if getattr(config, name) is not None] == parts.split()
    assert config == LayerConfig(**json.loads(json.dumps(config.to_dict())))


def test_numbers_of_numpy_count_as_python_s_own() -> None:
    whole, half = np.int64, np.float32
    options = {
        "forget_gate": {"longest": half(16), "per": "feature", "rank": whole(2), "bound": half(4)},
        "erase_gate": {"name": "independent", "largest": whole(2)},
        "short_conv": whole(4),
        "out_norm": {"eps": half(0.25)},
        "feature_map": {"name": "unit", "activation": "relu"},
        "rotary": {"partial_rotary_factor": half(0.5), "base": half(100)},
    }
    layer = LinearRoPEAttention(whole(32), whole(2), normalize=False, **options)
    layer(torch.randn(1, 3, 32))
    assert LayerConfig(**json.loads(json.dumps(layer.config.to_dict()))) == layer.config
    scaled = {"rope_type": "linear", "rope_theta": half(100), "factor": half(2)}
    learned = LinearRoPEAttention(32, 2, decay={"name": "learned", "longest": half(64)}, rotary=scaled)
    assert learned.rotary == Rotary.from_config({**scaled, "rope_theta": 100, "factor": 2}, head_dim=16)
    expected = LinearRoPEAttention(32, 2, decay={"name": "learned", "longest": 64})
    assert torch.equal(learned.decay, expected.decay)
    for option in (
        {"short_conv": half(4)},
        {"short_conv": np.bool_(True)},
        {"decay": {"longest": half("nan")}},
    ):
        with pytest.raises(ValueError, match="expected"):
            make(**option)


def test_a_bias_of_the_convolution_that_is_no_bool_is_refused() -> None:
    with pytest.raises(TypeError, match="bias=1: expected True or False"):
        make(short_conv={"bias": 1})


@pytest.mark.parametrize(
    "options",
    [
        {"forget_gate": True},
        {"rotary": "selective"},
        {"short_conv": 4},
        {"erase_gate": "tied", "feature_map": "unit", "normalize": False},
    ],
    ids=str,
)
def test_a_context_is_refused_by_what_steps_through_one_sequence(options) -> None:
    with pytest.raises(
        ValueError, match=r"^context: got a tensor, expected a layer without .*, for which key t"
    ):
        make(**options)(torch.randn(1, 5, 16), torch.randn(1, 5, 16))


@pytest.mark.parametrize(
    ("taps", "own_taps", "message"),
    [
        (None, 4, r"state: got conv .*None, expected \(3, 48\)"),
        (4, 2, r"state: got conv .*\(3, 48\), expected \(1, 48\)"),
        (4, None, r"state: got conv .*\(3, 48\), expected None"),
    ],
)
def test_states_without_the_convolution_s_inputs_are_refused(taps, own_taps, message: str) -> None:
    x = torch.randn(2, 5, 16)
    _, state = make(short_conv=taps)(x, return_state=True)
    with pytest.raises(ValueError, match=message):
        make(short_conv=own_taps)(x, state=state)


def test_with_a_convolution_other_states_are_refused() -> None:
    layer, x = make(short_conv=4), torch.randn(2, 5, 16)
    with pytest.raises(ValueError, match=r"state: got 2 sequences, expected 1"):
        layer(x[:1], state=layer(x, return_state=True)[1])
    with pytest.raises(TypeError, match="state: got tuple"):
        layer(x, state=(1, 2))


@pytest.mark.parametrize(
    ("dim", "share", "turned"), [(64, 0.25, 16), (12, 0.25, 2), (4, 0.25, 2), (30, 0.5, 14), (8, 1, 8)]
)
def test_a_share_of_the_features_turns_rounded_down_to_an_even_number(dim, share, turned) -> None:
    rotary = make(head_dim=dim, rotary={"partial_rotary_factor": share, "layout": "half"}).rotary
    assert (rotary.dim, rotary.rotary_dim, rotary.layout) == (dim, turned, "half")

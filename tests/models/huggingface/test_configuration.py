from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from linrope.models.huggingface import LinRopeConfig, LinRopeForMaskedLM
from linrope.models.huggingface.configuration import CHOICES, ConfigOptions, make_attention
from tests.models.huggingface.tiny import KINDS, causal_lm, config

MROPE = {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [2, 1, 1]}


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_config_is_the_same(kind: str, tmp_path: Path) -> None:
    rope = {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, "attention_factor": 1.0}
    made = config(**KINDS[kind], rope_parameters=rope, max_position_embeddings=64)
    made.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(loaded, LinRopeConfig)
    assert loaded.to_diff_dict() == made.to_diff_dict()
    assert loaded.head_dim == 8


def test_the_seed_of_a_random_map_is_saved() -> None:
    paired = {"name": "paired", "inner": "favor+", "layout": "half", "num_features": 16}
    all_features = {"rope_theta": 1e4}
    made = config(feature_map=paired, rope_parameters=all_features)
    assert isinstance(made.feature_map, dict)
    assert set(made.feature_map) == {"name", "inner", "layout", "num_features", "seed"}
    again = LinRopeConfig.from_dict(made.to_dict())
    assert again.feature_map == made.feature_map
    one, other = (causal_lm(feature_map=c.feature_map, rope_parameters=all_features) for c in (made, again))
    projections = [m.model.layers[1].self_attn.feature_map.inner.projection for m in (one, other)]
    assert torch.equal(*projections)


def test_rope_parameters_reach_both_kinds_of_layers() -> None:
    rope = {"rope_theta": 1e6, "rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 0.5}
    linear, full = causal_lm(full_attention_interval=2, rope_parameters=rope).model.layers
    theta = torch.tensor([1, 1e6**-0.5], dtype=torch.float64, device="cpu") / 4
    for rotary in (linear.self_attn.rotary, full.self_attn.rotary):
        torch.testing.assert_close(rotary.theta, theta)
        assert (rotary.layout, rotary.rotary_dim) == ("half", 4)


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({}, 1 / 4),
        ({"head_dim": 12}, 2 / 12),
        ({"feature_map": "hedgehog", "full_attention_interval": 2}, 1 / 4),
        ({"feature_map": {"name": "favor+", "num_features": 30}}, 6 / 30),
        ({"feature_map": {"name": "favor+", "num_features": 30}, "full_attention_interval": 2}, None),
        ({"rope_parameters": {"rope_theta": 1e6}}, None),
        ({"selective_rope": True}, None),
        ({"is_causal": False}, None),
    ],
    ids=str,
)
def test_a_quarter_of_the_features_turns_unless_the_rotation_is_chosen(options, share, tmp_path) -> None:
    made = config(**options)
    assert made.rope_parameters.get("partial_rotary_factor") == share
    made.save_pretrained(tmp_path)
    assert LinRopeConfig.from_pretrained(tmp_path).rope_parameters == made.rope_parameters
    rotary = make_attention(made, "linear_attention").rotary
    assert rotary.rotary_dim == round(rotary.dim * (share or 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 0}, r"hidden_size=0: expected at least 1"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers=0: expected at least 1"),
        ({"num_key_value_heads": 3}, r"^num_key_value_heads=3: expected a divisor of num_attention_heads=4$"),
        ({"hidden_size": 33}, r"^hidden_size=33: expected a multiple of num_attention_heads=4$"),
        ({"head_dim": 7}, r"got 7 of head_dim=7 features, expected a positive even"),
        ({"feature_map": "elu1"}, r"feature_map='elu1': expected one of .*did you mean 'elu\+1'\?"),
        ({"feature_map": "silu"}, r"its features are signed; expected normalize=False"),
        ({"decay": [0.5, 2.0]}, r"decay: got \[0.5, 2.0\], expected 2 numbers in \(0, 1\]"),
        ({"is_causal": False, "forget_gate": True}, r"^forget_gate: got is_causal=False, expected is_causal=True"),
        ({"decay": "retnet", "is_causal": False}, r"decay: got is_causal=False, expected is_causal=True"),
        ({"rope_order": "never"}, r"rope_order='never': expected one of after, before"),
        ({"rope_parameters": {"rope_type": "yarm"}}, r"rope_type='yarm': expected one of .*did you mean"),
        ({"rope_parameters": {"rope_theta": -1.0}}, r"rope_theta=-1.0: expected a positive"),
        ({"rope_parameters": MROPE, "full_attention_interval": 2},
         r"^rope_parameters: got mrope_section, expected none with full_attention layers$"),
        ({"layer_types": ["linear_attention"]}, r"layer_types=.*expected num_hidden_layers=2 of"),
        ({"layer_types": ["linear_attention", "mamba2"]}, r"layer_types=.*mamba2"),
        ({"full_attention_interval": 0}, r"full_attention_interval=0: expected at least 1"),
        ({"full_attention_interval": 2, "layer_types": []}, r"expected None with layer_types"),
        ({"forgetgate": True}, r"got the unknown option 'forgetgate'; did you mean 'forget_gate'\?"),
        ({"backend": "eager"}, r"got 'backend', an option of LinearRoPEAttention that LinRopeConfig lacks"),
        ({"num_heads": 8}, r"got the unknown option 'num_heads'; did you mean 'num_attention_heads'\?"),
        *((options, "config: got|expected") for options in [  # wrong types, as a file may have them
            {"hidden_size": "x"}, {"hidden_size": 2.5}, {"num_hidden_layers": True}, {"feature_map": 3},
            {"feature_map": {"name": ["relu"]}}, {"decay": [{}]}, {"rope_parameters": [1]}, {"layer_types": 5},
            {"layer_types": [["a"]], "num_hidden_layers": 1}, {"selective_rope": 3}, {"head_dim": "x"},
            {"is_causal": "no"}, {"rms_norm_eps": "x"}, {"full_attention_interval": "2"}, {"rope_order": 3},
        ]),
    ],
)  # fmt: skip
def test_bad_values_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**options)


@pytest.mark.parametrize("load", [LinRopeConfig, AutoConfig], ids=lambda kind: kind.__name__)
def test_options_beside_a_folder_take_the_place_of_its_own_and_are_checked(load, tmp_path) -> None:
    config().save_pretrained(tmp_path)
    given = {"decay": "retnet", "vocab_size": 9, "num_labels": 3}
    loaded = load.from_pretrained(tmp_path, **given)
    assert {name: getattr(loaded, name) for name in given} == given
    for options, message in (
        ({"n_layers": 5}, "unknown option 'n_layers'; did you mean 'num_hidden_layers'"),
        ({"num_hidden_layers": 5}, "layer_types=.*expected num_hidden_layers=5"),
        ({"decay": "retnett"}, "decay='retnett': expected one of"),
    ):
        with pytest.raises(ValueError, match=message):
            load.from_pretrained(tmp_path, **options)


def test_only_the_types_of_layers_in_use_are_checked() -> None:
    assert make_attention(config(rope_parameters=MROPE), "linear_attention").rotary.axes == 3
    assert config(feature_map="silu", layer_types=["full_attention"] * 2).head_dim == 8


def test_completion_sees_the_keywords_that_there_are() -> None:
    known = {*LinRopeConfig.__annotations__, *CHOICES, "full_attention_interval"}
    assert {*ConfigOptions.__annotations__} == known


def test_options_of_other_tools_are_kept() -> None:
    made = LinRopeConfig.from_dict(config(made_by="a tool", num_labels=3, architectures=["X"]).to_dict())
    assert (made.made_by, made.num_labels, made.architectures) == ("a tool", 3, ["X"])


def test_causality_and_head_must_fit() -> None:
    with pytest.raises(ValueError, match=r"is_causal=False: expected True in a causal language model"):
        causal_lm(is_causal=False)
    with pytest.raises(ValueError, match=r"decay: got causal=False, expected causal=True"):
        LinRopeForMaskedLM(config(decay="retnet"))
    given = config()
    assert not LinRopeForMaskedLM(given).config.is_causal
    assert given.is_causal


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({}, "forget_gate write_gate short_conv skip"),
        ({"forget_gate": False}, "decay short_conv skip"),
        ({"decay": "retnet"}, "decay short_conv skip"),
        ({"decay": None}, "short_conv skip"),
        ({"write_gate": None, "skip": None, "short_conv": None}, "forget_gate"),
        ({"erase_gate": "tied"}, "forget_gate erase_gate short_conv skip"),
        ({"is_causal": False}, "skip"),
    ],
    ids=str,
)
def test_the_default_block_has_a_forget_gate_unless_a_decay_is_chosen(options: Any, parts: str) -> None:
    for choices in (config(**options), LinRopeConfig.from_dict(config(**options).to_dict())):
        layer = make_attention(choices, "linear_attention")
        names = ("decay", "forget_gate", "write_gate", "erase_gate", "short_conv", "skip")
        there = {name: getattr(layer, name) for name in names} | {"write_gate": layer.config.write_gate}
        assert " ".join(name for name in names if there[name] is not None) == parts

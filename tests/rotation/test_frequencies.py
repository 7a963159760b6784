"""Frequencies of RoPE's extensions: against transformers' own code, against the papers' figures."""

import copy
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import PhiConfig, modeling_rope_utils
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding
from transformers.models.qwen2_vl import modeling_qwen2_vl
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen3_vl import modeling_qwen3_vl
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig

from linrope import Rotary
from linrope.rotation.frequencies import METHODS, base_for_length, critical_dimension

HEAD_DIM, TRAINED = 64, 4096
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
DYNAMIC = {"rope_type": "dynamic", "factor": 3.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1 + 0.01 * t for t in range(32)],
    "long_factor": [1 + 0.5 * t for t in range(32)],
    "original_max_position_embeddings": 1024,
}
HALF_LISTS = {key: LONGROPE[key][:16] for key in ("short_factor", "long_factor")}

# A config's rope_parameters, and the length for which theta is asked.
CONFIGS: list[tuple[dict[str, Any], int | None]] = [
    ({}, None),
    ({"rope_type": "default", "rope_theta": 5e5}, None),
    ({"partial_rotary_factor": 0.375, "rope_theta": 1e4}, None),
    ({"rope_type": "linear", "factor": 2.5}, None),
    ({"type": "linear", "factor": 2, "partial_rotary_factor": 0.5}, None),
    (DYNAMIC, None),
    *((DYNAMIC, length) for length in (1, 100, TRAINED, TRAINED + 1, 20000)),
    ({**DYNAMIC, "partial_rotary_factor": 0.25}, 20000),
    (YARN, None),
    ({**YARN, "rope_theta": 1e6, "partial_rotary_factor": 0.5}, None),
    ({**YARN, "factor": None}, None),  # then the ratio of the lengths
    ({"rope_type": "yarn", "factor": 8}, None),
    ({**YARN, "truncate": False}, None),
    ({**YARN, "mscale": 0.707, "mscale_all_dim": 1.3}, None),
    ({**YARN, "mscale": 0.707}, None),
    ({**YARN, "mscale": 1.0, "mscale_all_dim": 0}, None),
    ({**YARN, "attention_factor": 0.8, "mscale": 0.707, "mscale_all_dim": 1.3}, None),
    ({**YARN, "beta_fast": 16, "beta_slow": 2}, None),
    ({**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False}, None),  # a step
    ({**YARN, "rope_theta": 10.0}, None),  # the ramp's end lies beyond the last pair
    # No pair turns 32 times: the ramp starts at pair 0.
    ({**YARN, "original_max_position_embeddings": 128}, None),
    ({**YARN, "factor": 1.0}, None),
    *((LONGROPE, length) for length in (None, 1024, 1025)),
    ({**LONGROPE, "factor": 32.0}, 5000),
    ({**LONGROPE, "attention_factor": 1.19}, 5000),
    ({**LONGROPE, **HALF_LISTS, "partial_rotary_factor": 0.5}, 5000),
    ({**LLAMA3, "original_max_position_embeddings": 1024, "rope_theta": 5e5}, None),
    ({**LLAMA3, "original_max_position_embeddings": 512, "low_freq_factor": 0.5}, None),
    ({**LLAMA3, "partial_rotary_factor": 0.5}, None),
    ({"rope_type": "proportional"}, None),
    ({"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}, None),
    ({"rope_type": "proportional", "partial_rotary_factor": 0.3, "factor": 8.0}, None),
    ({"rope_type": "proportional", "partial_rotary_factor": 0.0}, None),
]


def theirs(rope_parameters: dict[str, Any], seq_len: int | None) -> tuple[Tensor, float]:
    """theta and attention factor as transformers computes them."""
    config = PhiConfig(
        hidden_size=2 * HEAD_DIM, num_attention_heads=2, max_position_embeddings=TRAINED,
        rope_parameters={"partial_rotary_factor": 1.0} | rope_parameters,  # a Phi's own default is 0.5
    )  # fmt: skip
    config.head_dim = HEAD_DIM
    compute = modeling_rope_utils.ROPE_INIT_FUNCTIONS.get(
        config.rope_parameters["rope_type"], PhiRotaryEmbedding.compute_default_rope_parameters
    )
    theta, attention_factor = compute(config, torch.device("cpu"), seq_len=seq_len)
    return theta.cpu(), attention_factor


def ours(rope_parameters: dict[str, Any], seq_len: int | None = None) -> Rotary:
    sizes = {"head_dim": HEAD_DIM, "max_position_embeddings": TRAINED}
    return Rotary.from_config(rope_parameters, **sizes, seq_len=seq_len)


@pytest.mark.parametrize(("rope_parameters", "seq_len"), CONFIGS, ids=str)
def test_theta_and_attention_factor_are_those_of_transformers(
    rope_parameters: dict[str, Any], seq_len: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, rotary = copy.deepcopy(rope_parameters), ours(rope_parameters, seq_len)
    assert rope_parameters == given
    assert rotary.layout == "half"
    assert rotary.theta.dtype == torch.float64
    assert rotary.rotary_dim == 2 * len(rotary.theta)

    theta, attention_factor = theirs(rope_parameters, seq_len)
    assert rotary.attention_factor == pytest.approx(attention_factor, rel=1e-14)
    # Their exponents are off by up to 2^-25, which ln(base) <= 14 makes 14 * 2^-25 of theta.
    assert_close(rotary.theta, theta.double(), rtol=1e-6, atol=0)
    if rope_parameters.get("rope_type") == "longrope":
        return  # calls .float()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch, "float32", torch.float64)
        theta, _ = theirs(rope_parameters, seq_len)
    assert_close(rotary.theta, theta, rtol=1e-14, atol=0)


def test_every_method_of_transformers_is_known_and_compared() -> None:
    compared = {config.get("rope_type", config.get("type", "default")) for config, _ in CONFIGS}
    assert compared == {"default", *modeling_rope_utils.ROPE_INIT_FUNCTIONS} == set(METHODS) - {"ntk"}


def theta(rope_type: str | None, dim: int = HEAD_DIM, base: float = 1e4, **keys: Any) -> Tensor:
    scaling = None if rope_type is None else {"rope_type": rope_type, **keys}
    return Rotary(dim, base=base, scaling=scaling).theta


def test_ntk_keeps_the_first_frequency_and_divides_the_last_by_the_factor() -> None:
    plain, scaled = theta(None), theta("ntk", factor=8.0)
    assert_close(scaled[0], plain[0])
    assert_close(scaled[-1], plain[-1] / 8)
    assert_close(scaled, theta(None, base=1e4 * 8 ** (64 / 62)))


def test_longrope_divides_each_frequency_by_its_entry() -> None:
    for seq_len, key in ((None, "short_factor"), (1024, "short_factor"), (1025, "long_factor")):
        expected = [1e4 ** (-2 * t / 64) / LONGROPE[key][t] for t in range(32)]
        assert_close(ours(LONGROPE, seq_len).theta, torch.tensor(expected, dtype=torch.float64, device="cpu"))


def test_configs_that_mean_the_same_make_the_same_rotation() -> None:
    plain, linear = Rotary(HEAD_DIM, base=5e5, layout="half"), ours({"rope_type": "linear", "factor": 2.0})
    for one, other in (
        (ours({"rope_theta": 500000}), plain),
        (ours({"rope_theta": 5e5, "rope_type": "default", "type": None}), plain),
        (ours({"partial_rotary_factor": 0.5}), Rotary(HEAD_DIM, layout="half", rotary_dim=32)),
        (ours({"type": "linear", "factor": 2}), linear),  # an older dict, and both
        (ours({"type": "mrope", "rope_type": "linear", "factor": 2.0}), linear),
        (ours(YARN, 100_000), ours(YARN)),  # its theta does not depend on the length
    ):
        assert one.identity == other.identity


def theirs_on_a_grid(
    rope_parameters: dict[str, Any], q: Tensor, k: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """q and k (1, n, h, f) turned to positions (n, 3) by transformers' own vision language models."""
    sizes: dict[str, Any] = {
        "hidden_size": 2 * HEAD_DIM, "num_attention_heads": 2, "num_key_value_heads": 2,
        "max_position_embeddings": TRAINED, "rope_parameters": dict(rope_parameters),
    }  # fmt: skip
    if rope_parameters.get("mrope_interleaved"):
        config = Qwen3VLTextConfig(head_dim=HEAD_DIM, **sizes)
        embed: Any = modeling_qwen3_vl.Qwen3VLTextRotaryEmbedding(config)
        apply = modeling_qwen3_vl.apply_rotary_pos_emb
    else:
        embed = modeling_qwen2_vl.Qwen2VLRotaryEmbedding(Qwen2VLTextConfig(**sizes))
        apply = modeling_qwen2_vl.apply_rotary_pos_emb
    cos, sin = embed(q, positions.T[:, None])
    turned = apply(q.transpose(1, 2), k.transpose(1, 2), cos / embed.attention_scaling, sin)
    return tuple(x.transpose(1, 2) for x in turned)


@pytest.mark.parametrize(
    "rope_parameters",
    [
        {"rope_theta": 1e6, "mrope_section": [8, 12, 12]},
        {"rope_theta": 1e4, "mrope_section": [20, 4, 8], "type": "mrope"},
        {"rope_theta": 5e6, "mrope_section": [12, 10, 10], "mrope_interleaved": True},
        {"rope_theta": 5e6, "mrope_section": [20, 5, 7], "mrope_interleaved": True},
        {**LLAMA3, "rope_theta": 1e4, "mrope_section": [8, 12, 12], "original_max_position_embeddings": 1024},
    ],
    ids=str,
)
def test_multimodal_sections_turn_q_and_k_as_transformers_does(rope_parameters: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 20, 2, HEAD_DIM, generator=generator)
    positions = torch.randint(0, 100, (20, 3), generator=generator)
    rotary = ours(rope_parameters)
    assert rotary.axes == 3
    expected = theirs_on_a_grid(rope_parameters, q, k, positions)
    for x, theirs_turned in zip((q, k), expected):
        # theirs: float32 angles, off by 100 * 2^-24 rad and by 1e-6 of theta, times features up to 4
        assert_close(rotary(x, positions), theirs_turned, atol=1e-4, rtol=0)


def test_multimodal_sections_keep_scaling_and_its_attention_factor() -> None:
    plain, grid = ours(YARN), ours({**YARN, "mrope_section": [8, 12, 12]})
    assert grid.attention_factor == plain.attention_factor != 1.0
    assert torch.equal(grid.theta.sum(0), plain.theta)
    assert grid.theta.count_nonzero(dim=1).tolist() == [8, 12, 12]
    assert f"attention_factor={plain.attention_factor}" in grid.identity


@pytest.mark.parametrize("interleaved", [False, True])
def test_text_turns_as_without_sections(interleaved: bool) -> None:
    """Its tokens have the same number on every axis."""
    rope_parameters = {"rope_theta": 1e6, "partial_rotary_factor": 0.5}
    sections = {"mrope_section": [6, 5, 5], "mrope_interleaved": interleaved}
    x = torch.randn(1, 9, 2, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(9)
    text = ours({**rope_parameters, **sections})(x, positions[:, None].expand(9, 3))
    assert torch.equal(text, ours(rope_parameters)(x, positions))


def test_critical_dimension_has_the_published_figure() -> None:
    assert critical_dimension(128, 10000.0, 4096) == 92
    turned = 4096 * Rotary(128).theta >= 2 * math.pi  # pairs t with t <= (dim/2) log_base(length / 2 pi)
    assert critical_dimension(128, 10000.0, 4096) == 2 * int(turned.sum())
    assert critical_dimension(128, 10000.0, 10**9) == 128


@pytest.mark.parametrize(("length", "base"), [(8192, 26784), (16384, 71738), (32768, 192144), (4096, 10000)])
def test_base_for_length_has_the_published_figures(length: int, base: int) -> None:
    assert round(base_for_length(length)) == base
    # the same pairs turn once in the longer length
    assert critical_dimension(128, base_for_length(length), length) == 92


SECTIONS = "expected three positive integers, 32 in all"
NUMBER, LONG = "a positive finite number", "a length of more than 1"
IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"rope_type": "yarm"}, r"rope_type='yarm': expected one of default, .*; did you mean 'yarn'\?"),
    ({"rope_type": None}, r"rope_type=None: expected one of default"),
    ({"rope_type": ["yarn"]}, r"rope_type=\['yarn'\]: expected one of"),
    ({"rope_type": "linear"}, r"factor: missing key of rope_type='linear', got rope_type"),
    ({"rope_type": "linear", "factor": None}, r"factor: missing key of rope_type='linear'"),
    ({"rope_type": "default", "factor": 2.0}, r"factor=2.0: unknown key of rope_type='default', expected none"),
    ({**YARN, "beta_fats": 3}, r"beta_fats=3: unknown key of rope_type='yarn', .*did you mean 'beta_fast'"),
    ({**YARN, "seq_len": 3}, r"seq_len=3: unknown key of rope_type='yarn'"),
    *(({"rope_type": "linear", "factor": x}, rf"factor={x!r}: expected a finite number of at least 1")
      for x in (0.5, 0, -2.0, math.nan, math.inf, "2", True)),
    ({**DYNAMIC, "max_position_embeddings": 0}, rf"max_position_embeddings=0: expected {LONG}"),
    ({**DYNAMIC, "max_position_embeddings": 9, "seq_len": 0}, r"seq_len=0: expected a finite number of at least 1"),
    ({**YARN, "original_max_position_embeddings": 1}, rf"original_max_position_embeddings=1: expected {LONG}"),
    ({**YARN, "original_max_position_embeddings": 4}, r"original_max_position_embeddings=4.0: .*some pair turns"),
    ({**YARN, "beta_fast": 0}, rf"beta_fast=0: expected {NUMBER}"),
    ({**YARN, "beta_fast": 1, "beta_slow": 2}, r"beta_fast=1.0: expected at least beta_slow=2.0"),
    ({**YARN, "mscale": -1}, r"mscale=-1: expected a finite number of at least 0"),
    ({**YARN, "attention_factor": 0.0}, rf"attention_factor=0.0: expected {NUMBER}"),
    ({**YARN, "truncate": "no"}, r"truncate='no': expected True or False"),
    ({**LONGROPE, "factor": 4, "long_factor": [1.0] * 31}, r"long_factor.*: got 31 numbers, expected .*, 32"),
    ({**LONGROPE, "factor": 4, "short_factor": 2.0}, r"short_factor=2.0: expected a list of positive numbers"),
    ({**LONGROPE, "factor": 4, "short_factor": [0.0] * 32}, r"short_factor=.*expected a list of positive"),
    (LONGROPE, r"factor: missing key of rope_type='longrope', expected factor or attention_factor"),
    ({**LLAMA3, "original_max_position_embeddings": 512, "low_freq_factor": 4},
     r"low_freq_factor=4.0: expected less than high_freq_factor=4.0"),
    ({"rope_type": "proportional", "partial_rotary_factor": 1.5}, r"partial_rotary_factor=1.5: .*from 0 to 1"),
    ({"factor": 2.0}, r"scaling={'factor': 2.0}: expected None or a dict with the key 'rope_type'"),
]  # fmt: skip


@pytest.mark.parametrize(("scaling", "message"), IMPOSSIBLE, ids=str)
def test_impossible_scaling_is_refused(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rotary(HEAD_DIM, scaling=scaling)


def test_a_size_or_base_that_the_method_cannot_have_is_refused() -> None:
    lengths = "expected base > 1, lengths > 2 pi"
    for call, message in (
        (lambda: Rotary(2, scaling={"rope_type": "ntk", "factor": 2.0}), "rotary_dim=2: expected at least 4"),
        (lambda: Rotary(64, base=1.0, scaling=YARN), "base=1.0: expected more than 1"),
        (lambda: critical_dimension(64, 1.0, 4096), lengths),
        (lambda: critical_dimension(64, 1e4, 6), lengths),
        (lambda: base_for_length(8192, trained=6), lengths),
        (lambda: base_for_length(8192, trained=math.nan), lengths),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize(
    ("rope_parameters", "message"),
    [
        (None, r"rope_parameters=None: expected a dict"),
        ({"full_attention": LLAMA3, "sliding": {}}, r"one dict per layer type, .*rope_parameters\['full_attention'\]"),
        ({"factor": 2.0}, r"factor=2.0: unknown key of rope_type='default'"),
        *(({"mrope_section": x}, rf"mrope_section={re.escape(str(x))}: {SECTIONS}")
          for x in ([8, 12, 13], [16, 16], [8, 12.0, 12], [0, 16, 16], 32)),
        ({"mrope_section": [8, 12, 12], "mrope_interleaved": True},
         r"mrope_section=\[8, 12, 12\]: got 12 pairs in section 1, expected at most 11, since .* third of 32 pairs"),
        ({"mrope_section": [8, 12, 12], "mrope_interleaved": 1}, r"mrope_interleaved=1: expected True or False"),
        ({"mrope_interleaved": True}, r"mrope_section: missing key, got mrope_interleaved"),
        ({"type": "mrope", "rope_theta": 1e6}, r"mrope_section: missing key, got type, rope_theta"),
        ({"rope_theta": 0}, rf"rope_theta=0: expected {NUMBER}"),
        ({"partial_rotary_factor": 2}, r"partial_rotary_factor=2: expected a number from 0 to 1"),
        ({"partial_rotary_factor": 0.4}, r"partial_rotary_factor=0.4: got 25 of head_dim=64 features, .*even"),
        ({"partial_rotary_factor": 0.0}, r"partial_rotary_factor=0.0: got 0 of head_dim=64 features"),
        (DYNAMIC, r"max_position_embeddings: missing key of rope_type='dynamic'"),
        ({"rope_type": "yarn", "factor": 2.0}, r"original_max_position_embeddings: missing key"),
    ],
    ids=str,
)  # fmt: skip
def test_impossible_configs_are_refused(rope_parameters: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rotary.from_config(rope_parameters, head_dim=HEAD_DIM)

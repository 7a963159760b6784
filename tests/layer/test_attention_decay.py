"""The layer's decay, exact whatever happens to the model; its norm in the normalizer's place; its repr."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.testing import assert_close

from linrope import LinearRoPEAttention, linear_rope_attention

ALL = {
    "decay": "learned", "forget_gate": {"longest": 64}, "rotary": "selective", "short_conv": 4,
    "qk_norm": True, "out_norm": True, "gate": True, "bias": True, "num_kv_heads": 2, "value_head_dim": 6,
    "feature_map": "hedgehog",
}  # fmt: skip


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make(dtype: torch.dtype = torch.float64, **options) -> LinearRoPEAttention:
    torch.manual_seed(0)
    layer = LinearRoPEAttention(16, 4, **options).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def test_a_fixed_decay_survives_casting_averaging_and_the_meta_device() -> None:
    numbers_given = [0.1, 0.2, 0.3, 1 - 2.0**-40]
    layer = LinearRoPEAttention(16, 4, decay=numbers_given)
    assert not [name for name in layer.state_dict() if "decay" in name]
    averaged = AveragedModel(layer, use_buffers=True)
    for _ in range(3):
        averaged.update_parameters(layer)
    halves = {name: tensor.half() for name, tensor in layer.state_dict().items()}
    cast = LinearRoPEAttention(16, 4, decay=numbers_given, dtype=torch.bfloat16)
    cast.load_state_dict(halves)
    empty = LinearRoPEAttention(16, 4, decay=numbers_given, device="meta").to_empty(device="cpu")
    for other in (layer.half(), averaged.module, cast, empty, copy.deepcopy(layer)):
        assert other.decay.tolist() == numbers_given
        assert other.decay.dtype == torch.float64


def test_a_learned_decay_starts_spread_and_stays_below_1() -> None:
    layer, x = LinearRoPEAttention(16, 4, decay="learned"), torch.randn(2, 30, 16)
    spread = LinearRoPEAttention(16, 4, decay="spread").decay
    assert_close(layer.decay, spread, rtol=1e-6, atol=0)  # a float32 logit
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e4)
    for _ in range(3):
        optimizer.zero_grad()
        layer(x).square().sum().backward()
        assert bool(layer.decay_logit.grad.isfinite().all())
        nn.utils.clip_grad_value_(layer.parameters(), 1e-4)
        optimizer.step()
    assert not torch.allclose(layer.decay, spread, rtol=1e-3)
    assert bool(((layer.decay > 0) & (layer.decay < 1)).all())


@pytest.mark.parametrize("options", [ALL, {"feature_map": "favor+", "decay": "learned"}])
def test_reset_parameters_makes_a_new_layer_of_an_empty_one(options) -> None:
    layer = LinearRoPEAttention(16, 4, **options, device="meta").to_empty(device="cpu")
    for parameter in layer.parameters():
        nn.init.constant_(parameter, torch.nan)
    layer.reset_parameters()
    fresh = LinearRoPEAttention(16, 4, **options)
    for name in ("decay_logit", "forget_gate.bias", "angle_steps.up", "short_conv.weight", "q_norm.weight"):
        if name in dict(fresh.named_parameters()):
            assert torch.equal(layer.get_parameter(name), fresh.get_parameter(name))
    assert bool(layer(torch.randn(1, 5, 16)).isfinite().all())


# ---- The norm in the normalizer's place.


@pytest.mark.parametrize("feature_map", ["elu+1", "hedgehog", "relu", "softmax"])
@torch.no_grad()
def test_a_norm_gives_what_it_gave_behind_the_normalizer_up_to_its_eps(feature_map: str) -> None:
    layer, x = make(feature_map=feature_map, out_norm=True, decay="spread"), numbers(2, 50, 16)
    q, k, v = (p(x).unflatten(-1, (4, 4)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    how = {"feature_map": layer.feature_map, "rotary": layer.rotary, "decay": layer.decay}
    out = linear_rope_attention(q, k, v, **how)
    expected = layer.o_proj(F.rms_norm(out, (4,), layer.out_norm.weight, eps=1e-6).flatten(-2))
    # eps was added to squares of averages of values, most of which are above 1e-2.
    error = (layer(x) - expected).norm() / expected.norm()
    assert float(error) < 1e-3


def test_the_norm_takes_the_normalizer_s_place_where_the_numerator_stays_in_range(monkeypatch) -> None:
    seen = []

    def spy(*args, normalize: bool, **how):
        seen.append(normalize)
        return linear_rope_attention(*args, normalize=normalize, **how)

    monkeypatch.setattr("linrope.layer.attention.linear_rope_attention", spy)
    x = numbers(1, 5, 16)
    for options in ({}, {"out_norm": True}, {"out_norm": True, "feature_map": "exp"}):
        make(**options)(x)
    make(torch.float16, out_norm=True)(x.half())
    assert seen == [True, False, True, True]


def test_repr_says_what_the_layer_is_in_a_line() -> None:
    line = repr(LinearRoPEAttention(16, 4, **ALL)).split("\n")[1].strip()
    assert line == (
        "heads=4, kv_heads=2, head_dim=4, value_head_dim=6, feature_map=Hedgehog, rotary=selective "
        "interleaved, decay=learned [0.5, 0.9998], forget_gate, short_conv, qk_norm, out_norm, gate"
    )
    assert "heads=4, kv_heads=4, head_dim=4, value_heads=8" in repr(
        LinearRoPEAttention(16, 4, num_value_heads=8)
    )
    assert "decay=[0.9688, 0.9844, 0.9922, 0.9961]" in repr(LinearRoPEAttention(16, 4, decay="retnet"))
    assert "decay" in repr(LinearRoPEAttention(16, 4, decay="learned", device="meta"))

"""The layer's decay, exact whatever happens to the model, and its new values from reset_parameters."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.testing import assert_close

from linrope import LinearRoPEAttention
from tests.layer.cases import GATED


def test_retnet_decay_is_the_paper_s() -> None:
    decay = LinearRoPEAttention(16, 4, decay="retnet").decay
    assert decay.tolist() == [1 - 1 / 32, 1 - 1 / 64, 1 - 1 / 128, 1 - 1 / 256]


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
    for other in (averaged.module, cast, empty, copy.deepcopy(layer), layer.half(), layer.bfloat16().float()):
        assert other.decay.tolist() == numbers_given
        assert other.decay.dtype == torch.float64


SPREAD = [1.0, 16.0, 256.0, 4096.0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"decay": [0.5, 0.25, 1.0, 0.5**0.01]}, [1, 0.5, torch.inf, 100]),
        ({"decay": "learned"}, SPREAD),
        ({"forget_gate": True}, SPREAD),
        ({"forget_gate": {"longest": 64}, "decay": [0.5, 1, 1, 1]}, [0.5, 4, 16, 64]),
        ({"forget_gate": {"per": "feature", "longest": 4}, "rotary": None}, [[4 ** (i / 3) for i in range(4)]] * 4),
    ],
    ids=str,
)  # fmt: skip
def test_half_lives_are_those_of_the_decay_and_the_gate_together(options, expected) -> None:
    layer = LinearRoPEAttention(16, 4, **options)
    assert_close(layer.half_lives(), torch.tensor(expected).double(), rtol=1e-5, atol=0)
    for parameter in layer.parameters():
        parameter.data.zero_()  # each learned factor is then 1/2
    after = layer.half_lives()
    assert after is not None
    assert_close(
        after[0].max().item(), 0.5 if options.keys() == {"forget_gate", "decay"} else 1.0, rtol=1e-6, atol=0
    )


def test_a_layer_without_decay_has_no_half_lives() -> None:
    assert LinearRoPEAttention(16, 4, causal=False).half_lives() is None


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


@pytest.mark.parametrize("options", [GATED["all"], {"feature_map": "favor+", "decay": "learned"}])
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

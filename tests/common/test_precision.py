"""Autocast is off inside ``full_precision``, which devices without autocast take too."""

from typing import Any

import pytest
import torch

from linrope import LinearRoPEAttention
from linrope.common.precision import full_precision


def test_products_are_not_rounded() -> None:
    x = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        with full_precision(x.device):
            assert (x @ x).dtype == torch.float32


ALL: dict[str, Any] = {
    "rotary": "selective",
    "forget_gate": True,
    "write_gate": "independent",
    "short_conv": 4,
    "qk_norm": True,
    "out_norm": True,
    "skip": "after",
    "gate": True,
}


@pytest.mark.parametrize(
    "options",
    [
        {},
        ALL,
        {"forget_gate": True, "trapezoid": True, "out_norm": True},
        {"feature_map": "favor+"},
        {"feature_map": "hedgehog"},
    ],
    ids=["plain", "all", "trapezoid", "favor+", "hedgehog"],
)
def test_a_layer_on_the_meta_device_has_gradients(options: dict[str, Any]) -> None:
    layer = LinearRoPEAttention(16, 2, device="meta", **options)
    x = torch.empty(2, 5, 16, device="meta", requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert all(parameter.grad is not None for parameter in layer.parameters())

"""Devices without autocast take ``full_precision`` too; its example shows that it turns autocast off."""

from typing import Any

import pytest
import torch

from linrope import LinearRoPEAttention

LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {
        "rotary": "selective", "forget_gate": True, "write_gate": "independent", "short_conv": 4,
        "qk_norm": True, "out_norm": True, "skip": "after", "gate": True,
    },
    "favor+": {"feature_map": "favor+"},
    "hedgehog": {"feature_map": "hedgehog"},
}  # fmt: skip


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_a_layer_on_the_meta_device_has_gradients(options: dict[str, Any]) -> None:
    layer = LinearRoPEAttention(16, 2, device="meta", **options)
    x = torch.empty(2, 5, 16, device="meta", requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert all(parameter.grad is not None for parameter in layer.parameters())

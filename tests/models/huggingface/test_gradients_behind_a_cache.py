"""Training behind a filled cache, which later decoding steps overwrite before the backward pass."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.huggingface import tiny


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-5)], ids=["eager", "native"]
)
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_gradients_equal_those_of_one_call(kind: str, dtype: torch.dtype, bound: float) -> None:
    net: Any = tiny.causal_lm(**tiny.KINDS[kind]).to(dtype)
    ids = tiny.tokens(2, 24)
    weights = torch.randn(2, 12, 50, dtype=dtype, generator=torch.Generator().manual_seed(0)).to(ids.device)

    def gradients(logits: Tensor) -> dict[str, Tensor]:
        net.zero_grad()
        (logits * weights).sum().backward()
        return {name: x.grad.clone() for name, x in net.named_parameters() if x.grad is not None}

    expected = gradients(net(ids, use_cache=False).logits[:, 12:])
    cache = net(ids[:, :12], use_cache=True).past_key_values
    logits = net(ids[:, 12:], use_cache=True, past_key_values=cache).logits
    with torch.no_grad():
        for i in range(3):
            net(ids[:, i : i + 1], use_cache=True, past_key_values=cache)
    got = gradients(logits)
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        assert float((got[name] - x).abs().max()) <= bound * float(x.abs().max()), name

"""The Triton backend behind the shared operator: autocast, inference, what is saved for the backward pass."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from linrope import LinearRoPEAttention, Rotary, linear_rope_attention
from linrope.backends import triton
from tests.oracle import randoms


def test_inference_mode_and_no_grad_give_what_training_gives() -> None:
    q, k, v = randoms(1, 70, 2, 16, dtype=torch.float32)
    how: dict[str, Any] = {"rotary": Rotary(16), "backend": "triton"}
    expected = linear_rope_attention(q.requires_grad_(), k, v, **how)
    with torch.no_grad():
        assert torch.equal(linear_rope_attention(q, k, v, **how), expected)
    with torch.inference_mode():
        assert torch.equal(linear_rope_attention(q, k, v, **how), expected)


def test_autocast_does_not_narrow_the_sums() -> None:
    layer = LinearRoPEAttention(16, 2, backend="triton")
    x = torch.randn(1, 40, 16)
    expected = layer(x)
    with torch.autocast("cpu", dtype=torch.float16):
        y, state = layer(x, return_state=True)
    assert (y.dtype, state.kv.dtype, state.z.dtype) == (torch.float16, torch.float32, torch.float64)
    assert_close(y.float(), expected, atol=2e-2, rtol=0)


def test_nothing_is_saved_without_gradients_and_little_with_them() -> None:
    q, k, v = randoms(1, 100, 8, 16, dtype=torch.float32)  # the table of angles is shared by all heads
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        linear_rope_attention(q, k, v, rotary=Rotary(16), backend="triton")
        assert not saved
        out = linear_rope_attention(q.requires_grad_(), k, v, rotary=Rotary(16), backend="triton")
    assert out.data_ptr() not in {x.data_ptr() for x in saved if x.numel()}  # only large heads read it
    own = {x.data_ptr() for x in (q, k, v)}
    extra = sum(x.numel() for x in saved if x.numel() and x.data_ptr() not in own)
    assert extra <= 0.1 * 4 * q.numel()


def test_double_backward_is_refused() -> None:
    q, k, v = randoms(1, 5, 1, 16, dtype=torch.float32)
    out = linear_rope_attention(q.requires_grad_(), k, v, backend="triton")
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"linrope\.attend_backward"):
        grad.sum().backward()


def test_the_backend_module_is_the_only_importer_of_the_kernels() -> None:
    assert triton.launch.__name__ == "linrope_kernels.launch"

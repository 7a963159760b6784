"""The backend "onnx" outside of a graph, and the calls that it refuses."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from linrope import linear_rope_attention
from linrope.versions import versions


def test_it_refuses_to_compute_in_pytorch() -> None:
    """Its nodes would return zeros there."""
    q = k = v = torch.ones(1, 3, 2, 4)
    expected = r"backend='onnx' cannot run: it makes nodes .* use it under torch\.onnx\.export"
    with pytest.raises(RuntimeError, match=expected):
        linear_rope_attention(q, k, v, backend="onnx")
    with pytest.raises(Exception, match=expected):
        torch.compile(linear_rope_attention, backend="eager", fullgraph=True)(q, k, v, backend="onnx")
    assert "torch.onnx.export" in versions()["backends"]["onnx"]["reason"]


@pytest.mark.parametrize(
    ("dtype", "options", "expected"),
    [*((x, {}, rf"{x}: ONNX's operator is for torch\.float32") for x in (torch.float64, torch.bfloat16)),
     (torch.float32, {"causal": False}, r"causal=False: .* use backend='reference'"),
     (torch.float32, {"cu_seqlens": torch.tensor([0, 1, 3])}, r"cu_seqlens: .* no packed sequences"),
     (torch.float32, {"erase": torch.ones(1, 3, 2), "log_decay": torch.zeros(1, 3, 2, 4), "feature_map": None,
                     "normalize": False},
      r"log_decay with a last axis of units: with erase it must be per head; use backend='reference'")],
)  # fmt: skip
def test_calls_that_the_operator_cannot_express_raise_the_reason(dtype, options, expected) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = k = v = torch.ones(1, 3, 2, 4, dtype=dtype)
        with pytest.raises(RuntimeError, match=f"backend='onnx' cannot run: {expected}"):
            linear_rope_attention(q, k, v, backend="onnx", **options)

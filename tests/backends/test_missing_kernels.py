"""What says that the kernels cannot run: one warning per process, a layer's repr, and the repr of ``enable()``."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from linrope import LinearRoPEAttention, backends, linear_rope_attention
from linrope.backends import library, native
from linrope.integrations import transformers as linrope_transformers
from linrope.layer.norm import RMSNorm
from linrope.operation.plan import forget_plans
from linrope.ops import convolve, gated_norm, gates

MESSAGE = (
    "linrope's kernels (backend 'native') cannot run, so plain PyTorch computes, which is slower: not built"
)


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(native, "why_not", lambda: "not built")
    monkeypatch.setattr(backends, "_warned", set())
    forget_plans()
    yield
    linrope_transformers.disable()
    forget_plans()


def attend(features: int = 8, dtype: torch.dtype = torch.float32, backend: str = "auto") -> Tensor:
    q, k, v = torch.randn(3, 1, 5, 2, features, dtype=dtype)
    return linear_rope_attention(q, k, v, backend=backend)


def layer_call(**options: Any) -> Tensor:
    y: Tensor = LinearRoPEAttention.block(16, 2, **options)(torch.randn(1, 5, 16))
    return y


def convolution(dtype: torch.dtype = torch.float32, taps: int = 4, **how: Any) -> Tensor:
    return convolve(torch.ones(1, 5, 3, dtype=dtype), torch.ones(3, taps), **how)


def norm() -> Tensor:
    y: Tensor = RMSNorm(8)(torch.ones(1, 5, 8))
    return y


def eager_block() -> Tensor:
    return layer_call(backend="eager")  # but its convolution and its norm have kernels


@pytest.mark.parametrize(
    "call", [attend, layer_call, eager_block, convolution, norm, linrope_transformers.enable]
)
def test_missing_kernels_are_announced_once_with_the_reason(call: Callable[[], object]) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
        assert len(seen) == 1
        for again in (call, attend, layer_call):
            again()
    assert [(str(x.message), x.filename) for x in seen] == [(MESSAGE, __file__)]


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_compiled_call_announces_them_too(fullgraph: bool) -> None:
    torch.compiler.reset()
    with pytest.warns(RuntimeWarning, match="not built"):
        torch.compile(attend, backend="eager", fullgraph=fullgraph)()


def bare_layer(backend: str) -> Tensor:
    y: Tensor = LinearRoPEAttention(16, 2, backend=backend)(torch.randn(1, 5, 16))
    return y


def on_meta() -> Tensor:
    x = torch.empty(1, 5, 2, 8, device="meta")
    return gated_norm(linear_rope_attention(x, x, x))


def gate() -> Tensor:
    return gates(torch.ones(1, 5, 8), torch.ones(2, 8), torch.ones(2))


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda: attend(backend="eager"), id="a named backend"),
        pytest.param(lambda: bare_layer("eager"), id="a layer with a named backend"),
        pytest.param(lambda: attend(dtype=torch.float64), id="float64, which no kernel takes"),
        pytest.param(
            lambda: attend(300),
            id="300 features, which no kernel takes",
            marks=pytest.mark.skipif(library.WHY_NOT is not None, reason="a missing library has no limits"),
        ),
        pytest.param(on_meta, id="a device without kernels"),
        pytest.param(lambda: convolution(backend="eager"), id="an operator with a named backend"),
        pytest.param(lambda: convolution(torch.float64), id="an operator in float64"),
        pytest.param(
            lambda: convolution(taps=9),
            id="9 taps, which no kernel takes",
            marks=pytest.mark.skipif(library.WHY_NOT is not None, reason="a missing library has no limits"),
        ),
        pytest.param(gate, id="an operator without a kernel for CPUs"),
    ],
)
def test_calls_without_kernels_in_any_case_announce_nothing(call: Callable[[], object]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        call()


def test_a_backend_without_xpos_names_one_with_it() -> None:
    layer = LinearRoPEAttention(16, 2, rotary={"xpos": 512}, backend="native")
    with pytest.raises(
        RuntimeError, match=r"^backend='native' cannot run: rotary with xpos: .* use backend='eager'"
    ):
        layer(torch.ones(1, 2, 16))


def test_the_reprs_say_what_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LinearRoPEAttention(16, 2)
    backends._warned.add("native")
    enabled = linrope_transformers.enable("mamba2")
    assert "backend=auto (eager)" in repr(layer)
    assert repr(enabled) == "Enabled(mamba2; backend: none, transformers computes)"
    monkeypatch.setattr(native, "why_not", lambda: None)
    assert "backend=auto (native, else eager)" in repr(layer)
    assert repr(enabled) == "Enabled(mamba2; backend: native)"
    assert "backend=auto (eager)" in repr(layer.double())
    assert LinearRoPEAttention(16, 2, backend="reference").extra_repr().endswith("backend=reference")
    assert LinearRoPEAttention(16, 2, device="meta").extra_repr().endswith("backend=auto")

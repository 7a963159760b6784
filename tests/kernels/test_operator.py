"""The Triton backend behind the shared operator: torch.library's checks, compilation, autocast, inference."""

from typing import Any

import pytest
import torch
from linrope_kernels import INTERPRETED, tiles
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

from linrope import LinearAttentionState, LinearRoPEAttention, Rotary, linear_rope_attention
from linrope.backends import triton
from linrope.backends.call import Call, Sums
from linrope.backends.operators import flatten
from tests.oracle import randoms

long_here = [pytest.mark.long] if INTERPRETED else []  # a second or two each in the interpreter


class Model(nn.Module):
    """One layer without weights around it, so that a compiler has something to fuse with."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.attention = LinearRoPEAttention(16, 4, num_kv_heads=2, causal=causal, backend="triton")

    def forward(self, x: Tensor, state: LinearAttentionState | None = None) -> Any:
        if not self.attention.causal:
            return self.attention(2 * x) + x
        y, state = self.attention(2 * x, state=state, return_state=True)
        return y + x, state


def gradients(model: Model, run: Any, x: Tensor) -> list[Tensor]:
    """Of all weights and of x."""
    x = x.clone().requires_grad_()
    y = run(x)
    y = y[0] if isinstance(y, tuple) else y
    return list(torch.autograd.grad(y.square().sum(), [*model.parameters(), x]))


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def operator_arguments(
    n: int = 9, m: int | None = None, *, mask: bool = False, rotary: bool = True, save: bool = True,
    decay: bool = False, state: bool = True, packed: bool = False, **how: Any,
) -> tuple[Any, ...]:  # fmt: skip
    m = n if m is None else m
    b, bounds = (1, torch.tensor([0, 5, 5, n])) if packed else (2, None)
    q, k, v = randoms(b, n, 4, 4, g=2, m=m, e=6, dtype=torch.float32)
    s = 3 if packed else b
    sums = (numbers(s, 2, 4, 6), numbers(s, 2, 4, dtype=torch.float64).abs()) if state else (None, None)
    for x in (q, k, v, *sums):
        if x is not None:
            x.requires_grad_(save)
    options = {"layout": "half", "feature_map": "elu+1", "want_state": True} | how
    call = Call(
        q=q,
        k=k,
        v=v,
        log_decay=-torch.rand(1, n, 2).double() if decay else None,
        theta=Rotary(4).turns(q.device) if rotary else None,
        positions=torch.tensor([[3]]),
        key_positions=None if m == n else torch.tensor([[0]]),
        key_mask=numbers(b, m) > 0 if mask else None,
        cu_seqlens=bounds,
        **options,
    )
    return *flatten("triton", call, Sums(*sums, None) if state else None), save


CONFIGURATIONS: dict[str, dict[str, Any]] = {"packed": {"packed": True, "decay": True}}
LONG: dict[str, dict[str, Any]] = {
    "causal, inference, mask": {"save": False, "mask": True},
    "no rotary, no state": {"rotary": False, "state": False, "want_state": False},
    "cross": {"causal": False, "m": 9},
    "causal": {},
    "decay": {"decay": True},
    "bidirectional": {"causal": False},
    "bidirectional, no state": {"causal": False, "state": False, "want_state": False},
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # PyTorch 2.15 reads it itself
@pytest.mark.parametrize(
    "configuration",
    [
        *(pytest.param(x, id=name) for name, x in CONFIGURATIONS.items()),
        *(pytest.param(x, id=name, marks=long_here) for name, x in LONG.items()),
    ],
)
def test_operator_passes_torch_library_s_checks(configuration: dict[str, Any]) -> None:
    torch.library.opcheck(torch.ops.linrope.attend.default, operator_arguments(**configuration))


@pytest.mark.parametrize("segments", [pytest.param(3, marks=long_here)])
def test_operator_passes_them_with_segments(segments: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them in use: states saved for segments that a short sequence lacks hold anything."""
    monkeypatch.setattr(tiles, "most_segments", lambda *_: segments)
    monkeypatch.setattr(tiles, "SHORTEST_SEGMENT", 32)
    monkeypatch.setattr(tiles, "SEGMENT_MULTIPLE", 32)
    torch.library.opcheck(torch.ops.linrope.attend.default, operator_arguments(n=90, decay=True))


@pytest.fixture
def _no_compiled_code_from_before():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_no_compiled_code_from_before")
@pytest.mark.parametrize(
    "causal", [True, pytest.param(False, marks=long_here)], ids=["causal", "bidirectional"]
)
def test_compiled_in_one_graph_a_module_computes_the_same(causal: bool) -> None:
    model, counter = Model(causal), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for n in (5, 9, 70):
        x = numbers(1, n, 16)
        for a, b in zip(gradients(model, compiled, x), gradients(model, model, x), strict=True):
            assert_close(a, b)
    assert counter.frame_count <= 2


@pytest.mark.usefixtures("_no_compiled_code_from_before")
def test_compiled_decoding_goes_on_from_a_state_and_compiles_once() -> None:
    model, counter = Model(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    x = numbers(1, 6, 16)
    with torch.no_grad():
        expected, _ = model(x)
        _, state = model(x[:, :4])
        for i in range(4, 6):
            y, state = compiled(x[:, i : i + 1], state)
            assert_close(y, expected[:, i : i + 1])
    assert counter.frame_count == 1


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

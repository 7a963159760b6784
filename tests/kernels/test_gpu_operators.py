"""What only a GPU can show of the layer's operators: large tensors, repeated bits, no waiting for the device."""

from typing import Any

import pytest
import torch
from torch import Tensor

from linrope.ops import convolve, convolve_step, gated_norm
from linrope.ops.backends import choose

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]
LARGE, ROWS = 2**31, 300  # elements; tokens to compare
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def close(actual: Tensor, exact: Tensor) -> None:
    """Numbers that were rounded once, or sums of many."""
    half = 1e-5 if actual.dtype == torch.float32 else 1.02 * torch.finfo(actual.dtype).eps / 2
    least = 4e-6 * float(exact.abs().max())
    torch.testing.assert_close(actual.double(), exact.double(), rtol=half, atol=least)


def results(inputs: dict[str, Tensor | None], call: Any, g: Tensor | None = None) -> list[Tensor]:
    leaves = {name: None if x is None else x.detach().requires_grad_() for name, x in inputs.items()}
    y = call(**leaves)
    g = torch.ones((), dtype=y.dtype).expand_as(y) if g is None else g.to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [x for x in leaves.values() if x is not None], g)]


def test_auto_takes_the_kernels() -> None:
    x = torch.zeros(1, 2, 3, dtype=torch.bfloat16)
    assert choose("auto", (x, None)) == "triton"
    assert choose("auto", (x.double(),)) == choose("auto", (x,), taps=9) == "eager"


def convolution(n: int, c: int, dtype: torch.dtype, s: int) -> dict[str, Tensor | None]:
    x, before = torch.randn(1, n, c, dtype=dtype), torch.randn(s, 3, c, dtype=dtype)
    return {"x": x, "weight": torch.randn(c, 4), "bias": torch.randn(c), "before": before}


def test_a_convolution_of_more_than_two_to_the_31_elements() -> None:
    c = 1024
    inputs = convolution(LARGE // c + ROWS, c, torch.bfloat16, 1)
    y, dx, *_ = results(inputs, lambda **x: convolve(**x, silu=True, backend="triton"))
    last = inputs | {"x": inputs["x"][:, -ROWS:].float(), "before": inputs["x"][:, -ROWS - 3 : -ROWS].float()}
    exact_y, exact_dx, *_ = results(last, lambda **x: convolve(**x, silu=True, backend="eager"))
    close(y[:, -ROWS:], exact_y)
    close(dx[:, -ROWS:], exact_dx)


def norm(n: int, h: int, e: int, dtype: torch.dtype, over: str) -> dict[str, Tensor | None]:
    out, gate, v = (torch.randn(1, n, *size, dtype=dtype) for size in ((h, e), (h * e,), (h, e)))
    weight = torch.randn(h * e if over == "all" else e)
    return {"out": out, "weight": weight, "gate": gate, "v": v, "skip": torch.randn(h)}


@pytest.mark.parametrize("over", ["head", "all"])
def test_a_norm_of_more_than_two_to_the_31_elements(over: str) -> None:
    h, e = 32, 128
    inputs = norm(LARGE // (h * e) + ROWS, h, e, torch.bfloat16, over)
    y, d_out, _, d_gate, d_v, _ = results(inputs, lambda **x: gated_norm(**x, over=over, backend="triton"))
    last = inputs | {name: inputs[name][:, -ROWS:].float() for name in ("out", "gate", "v")}
    exact = results(last, lambda **x: gated_norm(**x, over=over, backend="eager"))
    for actual, expected in zip((y, d_out, d_gate, d_v), (exact[0], exact[1], exact[3], exact[4])):
        close(actual[:, -ROWS:], expected)


@every_dtype
def test_sizes_of_models_and_a_hundred_repetitions_with_the_same_bits(dtype: torch.dtype) -> None:
    lengths = torch.tensor([1, 700, 0, 3000, 64, 5000, 2], device="cpu")
    cuts = torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).int().cuda()
    n = int(lengths.sum())
    cases = [(convolution(n, 1024, dtype, 7), lambda **x: convolve(**x, cu_seqlens=cuts, silu=True))]
    for h, e, over in ((16, 64, "head"), (16, 128, "all"), (64, 256, "all")):
        cases.append((norm(3000, h, e, dtype, over), lambda over=over, **x: gated_norm(**x, over=over)))
    for inputs, call in cases:
        wide = {name: None if x is None else x.double() for name, x in inputs.items()}
        exact = results(wide, call)
        g = torch.ones((), dtype=dtype).expand_as(exact[0])
        torch.cuda.set_sync_debug_mode("error")
        try:
            first = results(inputs, call, g)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for actual, expected in zip(first, exact, strict=True):
            close(actual, expected)
        for _ in range(99):
            assert all(torch.equal(x, y) for x, y in zip(results(inputs, call, g), first, strict=True))


@every_dtype
def test_steps_in_a_cuda_graph_have_the_bits_of_the_whole_call(dtype: torch.dtype) -> None:
    c, b, n = 3072, 64, 20
    x, weight, bias = torch.randn(b, n, c, dtype=dtype), torch.randn(c, 4), torch.randn(c)
    whole = convolve(x, weight, bias, silu=True)
    pool, slots = torch.zeros(2 * b, 3, c, dtype=dtype), torch.randperm(2 * b)[:b]
    token = x[:, :1].clone()
    with torch.cuda.stream(torch.cuda.Stream()):
        convolve_step(token, weight, bias, pool.clone(), silu=True, slots=slots)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        y = convolve_step(token, weight, bias, pool, silu=True, slots=slots)
    pool.zero_()
    for i in range(n):
        token.copy_(x[:, i : i + 1])
        graph.replay()
        assert torch.equal(y, whole[:, i : i + 1])
    assert torch.equal(pool[slots], x[:, -3:])

"""The operators in a graph: torch.library's checks, torch.compile, exporters, and which backend "auto" takes."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.testing import assert_close

from linrope.backends import library
from linrope.ops import convolve, gated_norm
from linrope.ops.arguments import choose
from tests.ops.cases import needs_native, numbers

BF16, F16 = torch.bfloat16, torch.float16
CUTS = torch.tensor([0, 0, 3, 9], dtype=torch.int32)


def leaf(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return numbers(*shape, seed=seed).to(dtype).requires_grad_()


# The operators' arguments in order; each table has every kind of argument, present and absent.
CALLS = {
    "convolve": {
        "all": (leaf(2, 9, 5), leaf(2, 9, 1), leaf(2, 9, 2), leaf(8, 4), leaf(8), leaf(2, 3, 8), None, True, "native"),
        "weight alone": (leaf(2, 9, 5), None, None, leaf(5, 4), None, None, None, False, "native"),
        "packed": (leaf(1, 9, 5), leaf(1, 9, 2), None, leaf(7, 3), None, leaf(3, 2, 7), CUTS, True, "native"),
        "half precision": (
            leaf(2, 9, 5, dtype=BF16), None, None, leaf(5, 4), leaf(5), None, None, True, "native"
        ),
    },
    "gated_norm": {
        "all": (
            leaf(2, 9, 4, 5), leaf(4, 5), leaf(2, 9, 20), leaf(2, 9, 2, 5), leaf(4), 1e-6, False, False, True,
            "silu", "native"
        ),
        "weight alone": (leaf(2, 9, 4, 5), leaf(5), None, None, None, 1e-6, False, False, False, "silu", "native"),
        "gate alone": (leaf(2, 9, 4, 5), None, leaf(2, 9, 20), None, None, 1e-6, True, True, False, "sigmoid",
                       "native"),
        "half precision": (
            leaf(2, 9, 4, 5, dtype=F16), leaf(4, 5), leaf(2, 9, 20, dtype=F16), None, None, 1e-6, True, False, False,
            "silu", "native"
        ),
    },
}  # fmt: skip
MORE = ("gate alone", "half precision")  # the schema and the shapes are those of the others
NATIVE = pytest.param("native", marks=needs_native)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # PyTorch 2.15 reads it itself
@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        pytest.param(name, x, id=f"{name}-{label}", marks=pytest.mark.long if label in MORE else ())
        for name, calls in CALLS.items()
        for label, x in calls.items()
    ],
)  # fmt: skip
@needs_native
def test_the_operators_pass_torch_library_s_checks(operator: str, arguments: tuple) -> None:
    torch.library.opcheck(getattr(torch.ops.linrope, operator).default, (*arguments, True))


class Block(nn.Module):
    """The operators as a layer uses them: the first half of the convolution's result is the gate."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.backend = backend
        self.taps, self.bias = nn.Parameter(numbers(32, 4)), nn.Parameter(numbers(32, seed=2))
        self.weight, self.skip = nn.Parameter(numbers(8, seed=3)), nn.Parameter(numbers(2, seed=4))

    def forward(self, x: Tensor) -> Tensor:
        z, out = convolve(x, self.taps, self.bias, silu=True, backend=self.backend).chunk(2, -1)
        out = out.unflatten(-1, (2, 8))
        how = {"v": out.flip(-1), "skip": self.skip, "skip_order": "before", "backend": self.backend}
        return gated_norm(out, self.weight, gate=z, **how)


def results(block: Block, run, x: Tensor) -> list[Tensor]:
    block.zero_grad()
    x = x.clone().requires_grad_()
    y = run(x)
    y.square().sum().backward()
    return [y, x.grad, *(parameter.grad for parameter in block.parameters())]


@pytest.mark.parametrize("backend", ["eager", NATIVE])
def test_compiled_in_one_graph_they_compute_the_same_for_any_length(backend: str) -> None:
    torch._dynamo.reset()
    block = Block(backend)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (7, 30):
        x = numbers(2, n, 32)
        assert_close(results(block, compiled, x), results(block, block, x))


@needs_native
def test_a_compiled_graph_holds_one_node_per_operator_and_direction() -> None:
    torch._dynamo.reset()
    seen: list[str] = []

    def keep(graph: torch.fx.GraphModule, _: list[Tensor]):
        seen.extend(str(node.target) for node in graph.graph.nodes if "linrope" in str(node.target))
        return make_boxed_func(graph)

    block = Block("auto")
    compiled = torch.compile(block, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    results(block, compiled, numbers(2, 9, 32))
    names = ("convolve", "gated_norm", "gated_norm_backward", "convolve_backward")
    assert seen == [f"linrope.{name}.default" for name in names]


def test_exported_programs_hold_no_fused_operator_and_take_any_length() -> None:
    block, lengths = Block("auto"), {"x": {1: torch.export.Dim("n", min=2)}}
    program = torch.export.export(block, (numbers(2, 9, 32),), dynamic_shapes=lengths, strict=False)
    assert not [node for node in program.graph.nodes if "linrope" in str(node.target)]
    assert_close(program.module()(numbers(2, 5, 32)), block(numbers(2, 5, 32)))


def test_transformations_of_torch_func_and_forward_mode_take_the_definition() -> None:
    x, weight = numbers(3, 2, 6, 4), numbers(4, 4)
    stacked = torch.func.vmap(lambda x: convolve(x, weight, silu=True))(x)
    assert_close(stacked, torch.stack([convolve(one, weight, silu=True) for one in x]))
    gradient = torch.func.grad(lambda w: convolve(x[0], w, silu=True).sum())(weight)
    leaf = weight.clone().requires_grad_()
    assert_close(gradient, torch.autograd.grad(convolve(x[0], leaf, silu=True).sum(), leaf)[0])
    _, tangent = torch.func.jvp(lambda x: convolve(x, weight), (x[0],), (x[1],))
    assert_close(tangent, convolve(x[1], weight))


@needs_native
def test_second_derivatives_in_torch_func_take_the_definition_or_name_it() -> None:
    blocks = {name: Block(name) for name in ("auto", "eager", "native")}

    def loss(x: Tensor, backend: str) -> Tensor:
        return blocks[backend](x).square().sum()

    x = numbers(1, 3, 32)
    expected = torch.autograd.functional.hessian(lambda x: loss(x, "eager"), x)
    assert_close(torch.func.hessian(loss)(x, "auto"), expected)
    with pytest.raises(RuntimeError, match=r"backend='native' cannot run: .* use backend='eager'"):
        torch.func.hessian(loss)(x, "native")


@needs_native
def test_auto_takes_the_kernels_where_they_can_run_and_names_the_reason_where_not() -> None:
    x, most = torch.zeros(1, 2, 3), {"native": 8}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert choose("auto", (x.to(dtype), None), 8, "taps", most) == "native"
    for other, taps in ((x.double(), 8), (x, 9), (x.to("meta"), 8)):
        assert choose("auto", (other,), taps, "taps", most) == "eager"
    with pytest.raises(RuntimeError, match="cannot run: inside a transformation"):
        torch.func.vmap(lambda x: convolve(x, torch.ones(3, 2), backend="native"))(x[None])


def test_without_the_library_auto_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    block, x = Block("auto"), numbers(2, 9, 32)
    expected = results(block, block, x)
    monkeypatch.setattr(library, "WHY_NOT", "not built")
    assert_close(results(block, block, x), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError, match="backend='native' cannot run: not built"):
        convolve(x, torch.ones(32, 2), backend="native")

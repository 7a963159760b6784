"""The gated norm: against its three lines written out per head; the kernels against float64; orders, strides, bits."""

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from linrope.backends import native
from linrope.layer.operators import gated_norm
from tests.layer.operators.cases import (
    FAST,
    HALF_PRECISION,
    Tensors,
    combinations,
    differentiate,
    every_set,
    numbers,
    relative_error,
    skip_bfloat16,
    threads,
)

ORDERS = [
    {"gate_order": gate, "skip_order": skip, "over": over}
    for gate, skip, over in product(("after", "before"), ("after", "before"), ("head", "all"))
]


def written_out(inputs: Tensors, gate_order: str, skip_order: str, over: str, eps: float) -> Tensor:
    """Each token and head in turn."""
    out, weight, gate, v, skip = inputs.values()
    b, n, h, e = out.shape
    factor = torch.ones_like(out) if gate is None else F.silu(gate).view(b, n, h, e)
    skipped = torch.zeros_like(out)
    if v is not None:
        group = h // v.shape[2]
        skipped = torch.stack([skip[i] * v[:, :, i // group] for i in range(h)], 2)
    u = out + skipped if skip_order == "before" else out
    u = u * factor if gate_order == "before" else u
    if weight is not None:
        squares = u.square().sum(-1)
        mean = squares.sum(-1, keepdim=True).expand(b, n, h) / (h * e) if over == "all" else squares / e
        u = weight.view(-1, e) * u / (mean + eps).sqrt()[..., None]
    u = u + skipped if skip_order == "after" else u
    return (u * factor if gate_order == "after" else u).flatten(2)


def make(
    b: int = 2, n: int = 9, h: int = 4, g: int = 2, e: int = 20, *, weight: str = "heads", dtype=torch.float32
) -> Tensors:
    shape = {"one": (e,), "heads": (h, e), "flat": (h * e,)}[weight]
    return {
        "out": numbers(b, n, h, e).to(dtype),
        "weight": numbers(*shape, seed=2),
        "gate": numbers(b, n, h * e, seed=3).to(dtype),
        "v": numbers(b, n, g, e, seed=4).to(dtype),
        "skip": numbers(h, seed=5),
    }


def run(inputs: Tensors, backend: str, **options: object) -> Tensor:
    return gated_norm(**inputs, backend=backend, **options)


def weight_of(over: str) -> str:
    return "flat" if over == "all" else "heads"


@pytest.mark.parametrize(
    ("backend", "gate", "skip", "over", "absent"),
    combinations(
        *(("after", "before"), ("after", "before"), ("head", "all")),
        ("none", "weight", "gate", "v skip", "gate v skip"),
        usual=lambda gate, skip, over, absent: absent == "none" or gate == skip == "before",
    ),
)
def test_it_is_the_three_lines_with_their_gradients(
    backend: str, gate: str, skip: str, over: str, absent: str
) -> None:
    order = {"gate_order": gate, "skip_order": skip, "over": over}
    inputs = make(weight=weight_of(over))
    inputs |= {name: None for name in inputs if name in absent.split()}
    exact = differentiate(inputs, lambda x: written_out(x, **order, eps=1e-6), torch.float64)
    for _ in every_set(backend):
        for actual, expected in zip(
            differentiate(inputs, lambda x: run(x, backend, **order)), exact, strict=True
        ):
            assert relative_error(actual, expected) < 2e-6


SHAPES = {
    "whole vectors": {"e": 64, "h": 2, "g": 2},
    "few values": {"e": 3, "h": 2, "g": 1},
    "one head": {"h": 1, "g": 1, "e": 17},
    "one token": {"b": 5, "n": 1},
    "one weight for all heads": {"weight": "one", "g": 4},
    "several tasks": {"b": 1, "n": 300, "e": 16},
}


@pytest.mark.parametrize("order", ORDERS[::5], ids=lambda x: "-".join(x.values()))
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("backend", FAST)
def test_of_other_shapes(backend: str, shape: dict, order: dict) -> None:
    order = order | ({"over": "head"} if "weight" in shape else {})
    inputs = make(**({"weight": weight_of(order["over"])} | shape))
    exact = differentiate(inputs, lambda x: written_out(x, **order, eps=0.1), torch.float64)
    for _ in every_set(backend):
        found = differentiate(inputs, lambda x: run(x, backend, **order, eps=0.1))
        for actual, expected in zip(found, exact, strict=True):
            assert relative_error(actual, expected) < 2e-6


@pytest.mark.parametrize("order", ORDERS, ids=lambda x: "-".join(x.values()))
def test_the_definition_has_first_and_second_derivatives(order: dict) -> None:
    inputs = make(1, 2, 2, 1, 3, weight=weight_of(order["over"]))
    leaves = [x.double().requires_grad_() for x in inputs.values()]

    def call(*leaves: Tensor) -> Tensor:
        return run(dict(zip(inputs, leaves)), "eager", **order, eps=0.1)

    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


@pytest.mark.parametrize("dtype", HALF_PRECISION)
@pytest.mark.parametrize("order", ORDERS[::3], ids=lambda x: "-".join(x.values()))
@pytest.mark.parametrize("backend", FAST)
def test_half_precision_rounds_the_results_alone(backend: str, order: dict, dtype: torch.dtype) -> None:
    skip_bfloat16(backend, dtype)
    inputs = make(weight=weight_of(order["over"]), dtype=dtype)
    exact = differentiate(inputs, lambda x: written_out(x, **order, eps=1e-6), torch.float64)
    for _ in every_set(backend):
        found = differentiate(inputs, lambda x: run(x, backend, **order))
        for actual, expected in zip(found, exact, strict=True):
            half_a_bit = 0 if actual.dtype == torch.float32 else torch.finfo(dtype).eps / 2
            atol = 4e-6 * float(expected.abs().max())
            assert_close(actual.double(), expected, rtol=1.01 * half_a_bit, atol=atol)
        assert [x.dtype for x in found] == [dtype, dtype, torch.float32, dtype, dtype, torch.float32]


@pytest.mark.parametrize("backend", FAST)
def test_a_gate_of_another_dtype_is_not_rounded(backend: str) -> None:
    inputs, dtype = make(), torch.float16 if backend == "triton" else torch.bfloat16
    inputs["out"] = inputs["out"].to(dtype)
    exact = differentiate(inputs, lambda x: written_out(x, **ORDERS[0], eps=1e-6), torch.float64)
    found = differentiate(inputs, lambda x: run(x, backend))
    assert found[0].dtype == found[1].dtype == dtype
    assert found[3].dtype == torch.float32
    assert relative_error(found[3], exact[3]) < 2e-6


@pytest.mark.parametrize("backend", FAST)
def test_slices_and_transposed_tensors_change_no_bit(backend: str) -> None:
    inputs = make(e=32)
    expected = differentiate(inputs, lambda x: run(x, backend))
    strided = dict(inputs)
    strided["out"] = inputs["out"].transpose(1, 2).contiguous().transpose(1, 2)
    strided["gate"] = torch.cat((inputs["gate"],) * 3, 2)[..., 128:256]
    strided["v"] = torch.cat((inputs["v"], inputs["v"]), 3)[..., 32:]
    strided["weight"] = inputs["weight"].mT.contiguous().mT
    for actual, other in zip(differentiate(strided, lambda x: run(x, backend)), expected, strict=True):
        assert torch.equal(actual, other)
    transposed = inputs | {"gate": inputs["gate"].mT.contiguous().mT}
    assert torch.equal(run(transposed, backend), expected[0])


@pytest.mark.parametrize("backend", FAST)
def test_a_token_has_the_same_bits_whatever_else_is_in_the_call(backend: str) -> None:
    inputs = make(3, 150)
    for _ in every_set(backend):
        whole = run(inputs, backend)
        for row, token in ((0, 0), (1, 77), (2, 149)):
            part = {
                name: x[row : row + 1, token : token + 1] if x.ndim > 2 else x for name, x in inputs.items()
            }
            assert torch.equal(run(part, backend)[0, 0], whole[row, token])


# Triton's interpreter computes with NumPy, which warns.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize(("name", "over"), [*product(("out", "gate", "v"), ("head", "all"))])
@pytest.mark.parametrize("backend", FAST)
def test_what_is_not_finite_stays_in_its_token_and_with_a_norm_per_head_in_its_heads(
    backend: str, name: str, over: str, value: float
) -> None:
    inputs = make(weight=weight_of(over))
    hostile = inputs | {name: inputs[name].clone()}
    hostile[name][1, 3, ..., 0] = value  # in the first head, if the tensor has them
    for _ in every_set(backend):
        clean, y = (run(x, backend, over=over).view(2, 9, 4, 20) for x in (inputs, hostile))
        assert torch.equal(y[0], clean[0])
        others = torch.arange(9) != 3
        assert torch.equal(y[1, others], clean[1, others])
        if name == "gate":
            assert torch.equal(y[1, 3, 1:], clean[1, 3, 1:])


@pytest.mark.parametrize("backend", FAST)
def test_gradients_of_gradients_and_a_tensor_passed_twice(backend: str) -> None:
    inputs, penalties = make(1, 3), []
    for dtype, name in ((torch.float32, backend), (torch.float64, "eager")):
        leaves = {key: x.to(dtype).requires_grad_() for key, x in inputs.items()}
        y = run(leaves, name, eps=0.1)
        first = torch.autograd.grad(y.square().sum(), list(leaves.values()), create_graph=True)
        penalties.append(torch.autograd.grad(sum(g.square().sum() for g in first), list(leaves.values())))
    for a, b in zip(*penalties, strict=True):
        assert relative_error(a, b) < 2e-5
    out = numbers(1, 3, 2, 4).requires_grad_()
    weight, skip = torch.ones(4), torch.ones(2)
    (both,) = torch.autograd.grad(
        gated_norm(out, weight, v=out, skip=skip, backend=backend).square().sum(), out
    )
    p, q = (out.detach().clone().requires_grad_() for _ in range(2))
    y = gated_norm(p, weight, v=q, skip=skip, backend="eager")
    assert_close(both, sum(torch.autograd.grad(y.square().sum(), (p, q))))


@pytest.mark.parametrize("backend", FAST)
def test_no_tokens_and_tokens_of_zeros(backend: str) -> None:
    for shape in ({"n": 0}, {"b": 0}):
        inputs = make(**shape)
        y, *gradients = differentiate(inputs, lambda x: run(x, backend))
        assert y.shape == inputs["gate"].shape
        assert not any(bool(x.any()) for x in gradients)
    zeros = {name: torch.zeros_like(x) for name, x in make().items()}
    assert all(bool(x.isfinite().all()) for x in differentiate(zeros, lambda x: run(x, backend)))


def test_bits_depend_neither_on_the_run_nor_on_the_number_of_threads() -> None:
    if native.why_not() is not None:
        pytest.skip(native.why_not())
    inputs, results = make(3, 400), []
    for count in (1, 2, 3, 2):
        with threads(count):
            results.append(differentiate(inputs, lambda x: run(x, "native")))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


OUT = torch.zeros(2, 3, 4, 5)
REFUSED = {
    "out of three axes": ({"out": torch.zeros(2, 3, 4)}, ValueError, r"out: got shape \(2, 3, 4\)"),
    "out of integers": ({"out": OUT.long()}, TypeError, "out: got torch.int64"),
    "weight": (
        {"weight": torch.zeros(4)},
        ValueError,
        r"weight: got shape \(4,\), expected \(5,\) or \(4, 5\)",
    ),
    "weight of a head": (
        {"weight": torch.zeros(5), "over": "all"},
        ValueError,
        r"weight: got shape \(5,\), expected \(20,\)",
    ),
    "eps": ({"weight": torch.zeros(5), "eps": 0.0}, ValueError, "eps=0.0"),
    "eps not a number": ({"weight": torch.zeros(5), "eps": torch.nan}, ValueError, "eps=nan"),
    "gate": ({"gate": OUT}, ValueError, r"gate: got shape \(2, 3, 4, 5\), expected \(2, 3, 20\)"),
    "v alone": ({"v": OUT}, ValueError, "v, skip: got v alone"),
    "skip alone": ({"skip": torch.zeros(4)}, ValueError, "v, skip: got skip alone"),
    "three heads of v": ({"v": OUT[:, :, :3], "skip": torch.zeros(4)}, ValueError, "v: got 3 heads"),
    "skip": ({"v": OUT, "skip": torch.zeros(3)}, ValueError, r"skip: got shape \(3,\)"),
    "over": ({"over": "heads"}, ValueError, "over='heads'.*did you mean 'head'"),
    "gate_order": ({"gate_order": "inside"}, ValueError, "gate_order='inside'"),
    "skip_order": ({"skip_order": None}, ValueError, "skip_order=None"),
    "backend": ({"backend": "cuda"}, ValueError, "backend='cuda'"),
    "float64": ({"out": OUT.double(), "backend": "native"}, RuntimeError, "native.*cannot run"),
    "device": ({"gate": torch.zeros(2, 3, 20, device="meta")}, ValueError, "gate: got device meta"),
}


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_arguments_are_refused(arguments: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        gated_norm(**({"out": OUT} | arguments))

"""The gated norm: against its three lines written out per head; the kernels against float64; orders, strides, bits."""

from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from linrope.ops import gated_norm
from tests.conftest import HAS_TRITON
from tests.ops import cases
from tests.ops.cases import BACKENDS, Tensors, differentiate, every_set, numbers

TRITON = pytest.param(
    "triton", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")]
)
every_backend = pytest.mark.parametrize("backend", [*BACKENDS, TRITON])
ORDERS = [
    {"gate_order": gate, "skip_order": skip, "over": over, "gate_activation": activation}
    for activation, gate, skip, over in product(
        ("silu", "sigmoid"), ("after", "before"), ("after", "before"), ("head", "all")
    )
]


def written_out(
    inputs: Tensors, gate_order: str, skip_order: str, over: str, gate_activation: str, eps: float = 1e-6
) -> Tensor:
    """Each token and head in turn."""
    out, weight, gate, v, skip = inputs.values()
    b, n, h, e = out.shape
    function = {"silu": F.silu, "sigmoid": F.sigmoid}[gate_activation]
    factor = torch.ones_like(out) if gate is None else function(gate).view(b, n, h, e)
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
    b: int = 2, n: int = 9, h: int = 4, g: int = 2, e: int = 20, *, over: str = "head", dtype=torch.float32
) -> Tensors:
    shape = {"head": (h, e), "one for all heads": (e,), "all": (h * e,)}[over]
    return {
        "out": numbers(b, n, h, e).to(dtype),
        "weight": numbers(*shape, seed=2),
        "gate": numbers(b, n, h * e, seed=3).to(dtype),
        "v": numbers(b, n, g, e, seed=4).to(dtype),
        "skip": numbers(h, seed=5),
    }


def run(inputs: Tensors, backend: str, **options: object) -> Tensor:
    return gated_norm(**inputs, backend=backend, **options)


ABSENT = ("none", "weight", "gate", "v skip", "gate v skip")


@pytest.mark.parametrize("order", ORDERS, ids=lambda x: "-".join(x.values()))
@every_backend
def test_it_is_the_three_lines_with_their_gradients(backend: str, order: dict) -> None:
    """The native kernels with every input that may be absent, the others with one of them after the other."""
    for absent in ABSENT if backend == "native" else ABSENT[ORDERS.index(order) % 5 :][:1]:
        inputs = make(over=order["over"])
        inputs |= {name: None for name in inputs if name in absent.split()}
        cases.assert_exact(inputs, partial(run, **order), partial(written_out, **order), backend)


SHAPES = {
    "whole vectors": {"e": 64, "h": 2, "g": 2},
    "few values": {"e": 3, "h": 2, "g": 1},
    "one head": {"h": 1, "g": 1, "e": 17},
    "one token": {"b": 5, "n": 1},
    "one weight for all heads": {"over": "one for all heads", "g": 4},
    "several tasks": {"b": 1, "n": 300, "e": 16},
}


@pytest.mark.parametrize("name", SHAPES)
@every_backend
def test_of_other_shapes(backend: str, name: str) -> None:
    shape, orders = SHAPES[name], ORDERS[::5]
    for order in orders if backend == "native" else orders[[*SHAPES].index(name) % 4 :][:1]:
        how = {**order, "eps": 0.1} | ({"over": "head"} if "over" in shape else {})
        inputs = make(**({"over": order["over"]} | shape))
        cases.assert_exact(inputs, partial(run, **how), partial(written_out, **how), backend)


@pytest.mark.parametrize("order", ORDERS[::3], ids=lambda x: "-".join(x.values()))
def test_the_definition_has_first_and_second_derivatives(order: dict) -> None:
    inputs = make(1, 2, 2, 1, 3, over=order["over"])
    cases.assert_twice_differentiable(inputs, partial(run, backend="eager", **order, eps=0.1))


@pytest.mark.parametrize("dtype", cases.HALF_PRECISION)
@pytest.mark.parametrize("order", ORDERS[::3], ids=lambda x: "-".join(x.values()))
@every_backend
def test_half_precision_rounds_the_results_alone(backend: str, order: dict, dtype: torch.dtype) -> None:
    cases.skip_bfloat16(backend, dtype)
    inputs = make(over=order["over"], dtype=dtype)
    exact = differentiate(inputs, partial(written_out, **order), torch.float64)
    for _ in every_set(backend):
        found = differentiate(inputs, partial(run, backend=backend, **order))
        for actual, expected in zip(found, exact, strict=True):
            half_a_bit = 0 if actual.dtype == torch.float32 else torch.finfo(dtype).eps / 2
            atol = 4e-6 * float(expected.abs().max())
            assert_close(actual.double(), expected, rtol=1.01 * half_a_bit, atol=atol)
        assert [x.dtype for x in found] == [dtype, dtype, torch.float32, dtype, dtype, torch.float32]


@every_backend
def test_a_gate_of_another_dtype_is_not_rounded(backend: str) -> None:
    inputs, dtype = make(), torch.bfloat16
    inputs["out"] = inputs["out"].to(dtype)
    exact = differentiate(inputs, partial(written_out, **ORDERS[0]), torch.float64)
    found = differentiate(inputs, partial(run, backend=backend))
    assert found[0].dtype == found[1].dtype == dtype
    assert found[3].dtype == torch.float32
    assert cases.relative_error(found[3], exact[3]) < 2e-6


@every_backend
def test_slices_and_transposed_tensors_change_no_bit(backend: str) -> None:
    inputs = make(e=32)
    out, weight, gate, v, _ = inputs.values()
    strided = {
        "out": out.transpose(1, 2).contiguous().transpose(1, 2),
        "weight": weight.mT.contiguous().mT,
        "gate": torch.cat((gate, gate, gate), 2)[..., 128:256],
        "v": torch.cat((v, v), 3)[..., 32:],
    }
    expected = differentiate(inputs, partial(run, backend=backend))
    actual = differentiate(inputs | strided, partial(run, backend=backend))
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))
    assert torch.equal(run(inputs | {"gate": gate.mT.contiguous().mT}, backend), expected[0])


@every_backend
def test_a_token_has_the_same_bits_whatever_else_is_in_the_call(backend: str) -> None:
    inputs = make(3, 150)
    for _ in every_set(backend):
        whole = run(inputs, backend)
        for row, token in ((0, 0), (1, 77), (2, 149)):
            at = slice(row, row + 1), slice(token, token + 1)
            part = {name: x[at] if x.ndim > 2 else x for name, x in inputs.items()}
            assert torch.equal(run(part, backend)[0, 0], whole[row, token])


# Triton's interpreter computes with NumPy, which warns.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(("name", "over"), [*product(("out", "gate", "v"), ("head", "all"))])
@every_backend
def test_what_is_not_finite_stays_in_its_token_and_with_a_norm_per_head_in_its_heads(
    backend: str, name: str, over: str
) -> None:
    inputs, hostile = make(over=over), []
    for value in (torch.inf, -torch.inf, torch.nan):
        hostile.append(inputs | {name: inputs[name].clone()})
        hostile[-1][name][1, 3].view(-1)[0] = value  # in the first head
    others, reached = torch.arange(9) != 3, 2 if name == "v" else 1  # two heads share a head of v
    for _ in every_set(backend):
        for activation in ("silu", "sigmoid"):
            call = partial(run, backend=backend, over=over, gate_activation=activation)
            clean, *found = (call(x).view(2, 9, 4, 20) for x in (inputs, *hostile))
            for y in found:
                assert torch.equal(y[0], clean[0])
                assert torch.equal(y[1, others], clean[1, others])
                if over == "head" or name == "gate":
                    assert torch.equal(y[1, 3, reached:], clean[1, 3, reached:])


@every_backend
def test_gradients_of_gradients_and_a_tensor_passed_twice(backend: str) -> None:
    cases.assert_gradients_of_gradients(make(1, 3), partial(run, eps=0.1), backend, 2e-5)
    weight, skip = torch.ones(4), torch.ones(2)
    cases.assert_sums_gradients_of_a_tensor_passed_twice(
        numbers(1, 3, 2, 4), lambda x, v, **how: gated_norm(x, weight, v=v, skip=skip, **how), backend
    )


@every_backend
def test_no_tokens_and_tokens_of_zeros(backend: str) -> None:
    empty = [make(**shape) for shape in ({"n": 0}, {"b": 0})]
    for inputs in (*empty, *map(cases.with_strides_of_0, empty)):
        y, *gradients = differentiate(inputs, partial(run, backend=backend))
        assert y.shape == inputs["gate"].shape
        assert not any(bool(x.any()) for x in gradients)
    zeros = {name: torch.zeros_like(x) for name, x in make().items()}
    assert all(bool(x.isfinite().all()) for x in differentiate(zeros, partial(run, backend=backend)))


@cases.needs_native
def test_bits_depend_neither_on_the_run_nor_on_the_number_of_threads() -> None:
    cases.assert_same_bits_on_any_number_of_threads(make(3, 400), partial(run, backend="native"))


OUT, GATE, WEIGHT = torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 20), torch.zeros(5)
REFUSED = {
    "out of three axes": ({"out": OUT[0]}, ValueError, r"out: got shape \(3, 4, 5\)"),
    "out of integers": ({"out": OUT.long()}, TypeError, "out: got torch.int64"),
    "weight": ({"weight": WEIGHT[:4]}, ValueError, r"weight: got shape \(4,\), expected \(5,\) or \(4, 5\)"),
    "weight of a head": (
        {"weight": WEIGHT, "over": "all"}, ValueError, r"weight: got shape \(5,\), expected \(20,\)"
    ),
    "eps": ({"weight": WEIGHT, "eps": 0.0}, ValueError, "eps=0.0"),
    "eps not a number": ({"weight": WEIGHT, "eps": torch.nan}, ValueError, "eps=nan"),
    "gate": ({"gate": OUT}, ValueError, r"gate: got shape \(2, 3, 4, 5\), expected \(2, 3, 20\)"),
    "v alone": ({"v": OUT}, ValueError, "v, skip: got v alone"),
    "skip alone": ({"skip": torch.zeros(4)}, ValueError, "v, skip: got skip alone"),
    "three heads of v": ({"v": OUT[:, :, :3], "skip": torch.zeros(4)}, ValueError, "v: got 3 heads"),
    "skip": ({"v": OUT, "skip": torch.zeros(3)}, ValueError, r"skip: got shape \(3,\)"),
    "over": ({"over": "heads"}, ValueError, "over='heads'.*did you mean 'head'"),
    "gate_order": ({"gate_order": "inside"}, ValueError, "gate_order='inside'"),
    "skip_order": ({"skip_order": None}, ValueError, "skip_order=None"),
    "gate_activation": ({"gate_activation": "relu"}, ValueError, "gate_activation='relu': expected one of"),
    "backend": ({"backend": "cuda"}, ValueError, "backend='cuda'"),
    "float64": ({"out": OUT.double(), "backend": "native"}, RuntimeError, "native.*cannot run"),
    "device": ({"gate": GATE.to("meta")}, ValueError, "gate: got device meta"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_arguments_are_refused(arguments: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        gated_norm(**({"out": OUT} | arguments))

"""The convolution of each channel: against its sum written out, cut, packed and stepped; the kernels against both."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from linrope.backends import native
from linrope.layer.operators import convolve, convolve_parts, convolve_step
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

CUTS = [0, 0, 3, 4, 12, 37, 37]  # empty sequences, and shorter ones than there are taps


def written_out(inputs: Tensors, cuts: list[int] | None, silu: bool) -> Tensor:
    """The sum of each token of each sequence, in float64."""
    x, weight, bias, before = (
        None if inputs[name] is None else inputs[name].double() for name in ("x", "weight", "bias", "before")
    )
    taps, rows = weight.shape[-1], []
    sequences = list(x) if cuts is None else [x[0, a:b] for a, b in pairwise(cuts)]
    for s, tokens in enumerate(sequences):
        first = tokens.new_zeros(taps - 1, x.shape[2]) if before is None else before[s]
        padded = torch.cat((first, tokens))
        for i in range(len(tokens)):
            y = (weight.T * padded[i : i + taps]).sum(0) + (0 if bias is None else bias)
            rows.append(F.silu(y) if silu else y)
    return torch.stack(rows).view(x.shape)


def make(
    b: int = 2,
    n: int = 37,
    c: int = 21,
    taps: int = 4,
    *,
    dtype: torch.dtype = torch.float32,
    s: int | None = None,
) -> Tensors:
    return {
        "x": numbers(b, n, c).to(dtype),
        "weight": numbers(c, taps, seed=2),
        "bias": numbers(c, seed=3),
        "before": numbers(b if s is None else s, taps - 1, c, seed=4).to(dtype),
    }


def with_gaps(x: Tensor) -> Tensor:
    """The same numbers, with others between them in memory."""
    return torch.stack((x, torch.zeros_like(x)), -1)[..., 0]


def run(inputs: Tensors, backend: str, cuts: list[int] | None = None, silu: bool = True) -> Tensor:
    bounds = None if cuts is None else with_gaps(torch.tensor(cuts, dtype=torch.int32))
    return convolve(**inputs, cu_seqlens=bounds, silu=silu, backend=backend)


SHAPES = {
    "usual": {"c": 64},
    "few channels": {"c": 3},
    "two taps": {"taps": 2},
    "three taps": {"taps": 3, "c": 16},
    "eight taps": {"taps": 8},
    "one tap": {"taps": 1},
    "one token": {"b": 5, "n": 1},
    "several tasks": {"n": 300, "b": 1, "c": 33},
}


def usual(shape: str, absent: str, silu: bool) -> bool:
    """Each shape once; each absent argument and the sum without silu twice."""
    return (silu and absent == "none") or (
        shape in ("few channels", "two taps") and silu == (absent == "bias")
    )


@pytest.mark.parametrize(
    ("backend", "shape", "absent", "silu"),
    combinations(SHAPES, ("none", "bias", "before"), (False, True), usual=usual),
)
def test_it_is_the_sum_with_its_gradients(backend: str, shape: str, absent: str, silu: bool) -> None:
    inputs = make(**SHAPES[shape]) | ({} if absent == "none" else {absent: None})
    expected = differentiate(inputs, lambda x: written_out(x, None, silu), torch.float64)
    for _ in every_set(backend):
        for actual, exact in zip(
            differentiate(inputs, lambda x: run(x, backend, None, silu)), expected, strict=True
        ):
            assert relative_error(actual, exact) < 2e-6


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("taps", [2, 4, 7])
@pytest.mark.parametrize("backend", FAST)
def test_packed_sequences_do_not_see_each_other(backend: str, taps: int, silu: bool) -> None:
    inputs = make(1, taps=taps, s=len(CUTS) - 1)
    expected = differentiate(inputs, lambda x: written_out(x, CUTS, silu), torch.float64)
    for _ in every_set(backend):
        for actual, exact in zip(
            differentiate(inputs, lambda x: run(x, backend, CUTS, silu)), expected, strict=True
        ):
            assert relative_error(actual, exact) < 2e-6


def test_the_definition_has_first_and_second_derivatives() -> None:
    inputs = {name: x.double().requires_grad_() for name, x in make(1, 5, 3, s=2).items()}
    for cuts, before in ((None, inputs["before"][:1]), ([0, 2, 5], inputs["before"])):
        tensors = (*(inputs[name] for name in ("x", "weight", "bias")), before)

        def call(x: Tensor, weight: Tensor, bias: Tensor, before: Tensor, cuts=cuts) -> Tensor:
            return run({"x": x, "weight": weight, "bias": bias, "before": before}, "eager", cuts)

        assert torch.autograd.gradcheck(call, tensors)
        assert torch.autograd.gradgradcheck(call, tensors)


@pytest.mark.parametrize("dtype", HALF_PRECISION)
@pytest.mark.parametrize("backend", FAST)
def test_half_precision_rounds_the_result_alone(backend: str, dtype: torch.dtype) -> None:
    skip_bfloat16(backend, dtype)
    inputs = make(c=24, dtype=dtype)
    for _ in every_set(backend):
        y, dx, dw, dbias, d_before = differentiate(inputs, lambda x: run(x, backend))
        exact = differentiate(inputs, lambda x: written_out(x, None, True), torch.float64)
        assert y.dtype == dx.dtype == d_before.dtype == dtype
        assert dw.dtype == dbias.dtype == torch.float32
        half_a_bit = torch.finfo(dtype).eps / 2
        assert_close(y.double(), exact[0], rtol=1.01 * half_a_bit, atol=1e-6)
        assert_close(dx.double(), exact[1], rtol=1.01 * half_a_bit, atol=1e-6)
        assert max(relative_error(dw, exact[2]), relative_error(dbias, exact[3])) < 2e-6


@pytest.mark.parametrize("backend", FAST)
def test_parameters_of_half_precision_get_gradients_of_their_dtype(backend: str) -> None:
    dtype = torch.float16 if backend == "triton" else torch.bfloat16
    inputs = make()
    inputs |= {name: inputs[name].to(dtype) for name in ("weight", "bias")}
    exact = differentiate(inputs, lambda x: written_out(x, None, True), torch.float64)
    _, _, dw, dbias, _ = differentiate(inputs, lambda x: run(x, backend))
    assert dw.dtype == dbias.dtype == dtype
    assert_close(dw.double(), exact[2], rtol=2**-8, atol=1e-5)
    assert_close(dbias.double(), exact[3], rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("backend", FAST)
def test_slices_transposed_tensors_and_a_third_axis_of_the_weight_change_no_bit(backend: str) -> None:
    inputs = make(c=32)
    x, before, weight = inputs["x"], inputs["before"], inputs["weight"]
    strided = dict(inputs)
    strided["x"] = torch.cat((x, x, x), 2)[..., 32:64]
    strided["before"] = before.mT.contiguous().mT
    strided["weight"] = weight[:, None]
    expected = differentiate(inputs, lambda x: run(x, backend))
    actual = differentiate(strided, lambda x: run(x, backend))
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a.view(b.shape), b)
    transposed = differentiate(inputs | {"x": x.mT.contiguous().mT}, lambda x: run(x, backend))
    assert torch.equal(transposed[1], expected[1])


@pytest.mark.parametrize("cut", [0, 1, 2, 9, 36, 37])
@pytest.mark.parametrize("backend", FAST)
def test_cut_anywhere_or_alone_a_sequence_has_the_same_bits(backend: str, cut: int) -> None:
    inputs, silu = make(), backend != "eager"  # PyTorch's silu rounds otherwise at the end of a tensor
    for _ in every_set(backend):
        whole = run(inputs, backend, None, silu)
        seen = torch.cat((inputs["before"], inputs["x"][:, :cut]), 1)[:, -3:]
        head = run(inputs | {"x": inputs["x"][:, :cut]}, backend, None, silu)
        tail = run(inputs | {"x": inputs["x"][:, cut:], "before": seen}, backend, None, silu)
        assert torch.equal(torch.cat((head, tail), 1), whole)
        packed = run(inputs | {"x": inputs["x"].view(1, 74, -1)}, backend, [0, 37, 74], silu)
        assert torch.equal(packed.view(whole.shape), whole)
        for row in range(2):
            alone = {name: inputs[name][row : row + 1] for name in ("x", "before")}
            assert torch.equal(run(inputs | alone, backend, None, silu), whole[row : row + 1])


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize(
    ("taps", "dtype"), [(4, torch.float32), (4, torch.bfloat16), (2, torch.float32), (1, torch.float32)]
)
@pytest.mark.parametrize("backend", FAST)
def test_steps_in_place_have_the_bits_of_the_whole_call(
    backend: str, taps: int, dtype: torch.dtype, pool: bool
) -> None:
    skip_bfloat16(backend, dtype)
    inputs, silu = make(n=6, taps=taps, dtype=dtype), backend != "eager"
    whole = run(inputs, backend, None, silu)
    slots = with_gaps(torch.tensor([3, 0])) if pool else None
    memory = inputs["before"].clone()
    if pool:
        memory = torch.full((5, taps - 1, 21), 7.0, dtype=dtype)
        memory[slots] = inputs["before"]
    for i in range(6):
        token = inputs["x"][:, i : i + 1]
        y = convolve_step(
            token, inputs["weight"], inputs["bias"], memory, silu=silu, slots=slots, backend=backend
        )
        assert torch.equal(y, whole[:, i : i + 1])
    last = torch.cat((inputs["before"], inputs["x"]), 1)[:, 7 - taps + taps - 1 :]
    assert torch.equal(memory if slots is None else memory[slots], last)
    if pool:
        assert bool((memory[[1, 2, 4]] == 7).all())


@pytest.mark.parametrize("backend", FAST[1:])  # "eager" copies the inputs
def test_a_backward_pass_whose_inputs_a_step_has_overwritten_raises(backend: str) -> None:
    x, weight, inputs = numbers(2, 1, 3), numbers(3, 4).requires_grad_(), numbers(2, 3, 3)
    y = convolve(x, weight, before=inputs, backend=backend)
    convolve_step(x, weight, None, inputs, backend=backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# Triton's interpreter computes with NumPy, which warns.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("backend", FAST)
def test_what_is_not_finite_stays_in_its_channel_and_sequence_and_reaches_no_earlier_token(
    backend: str, value: float
) -> None:
    inputs = make(1, c=20, s=len(CUTS) - 1)
    hostile = inputs | {"x": inputs["x"].clone()}
    hostile["x"][0, 10, 5] = value
    for _ in every_set(backend):
        clean, y = run(inputs, backend, CUTS), run(hostile, backend, CUTS)
        reached = torch.zeros_like(clean, dtype=torch.bool)
        reached[0, 10:12, 5] = True  # the sequence ends before token 12
        assert torch.equal(y[~reached], clean[~reached])
        (dx,) = torch.autograd.grad(
            run(hostile | {"x": hostile["x"].requires_grad_()}, backend, CUTS)[~reached].sum(), hostile["x"]
        )
        hostile["x"] = hostile["x"].detach()
        others = torch.ones(20, dtype=torch.bool)
        others[5] = False
        assert bool(dx[..., others].isfinite().all())
        assert bool(dx[0, 12:].isfinite().all())


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("backend", FAST)
def test_silu_of_large_numbers(backend: str) -> None:
    x = torch.tensor([-1e30, -200.0, -88.0, -50.0, 0.0, 50.0, 104.0, 200.0, 1e30]).view(1, -1, 1)
    one = torch.ones(1, 1)
    for _ in every_set(backend):
        y = convolve(x, one, silu=True, backend=backend)
        # On a GPU e^x is 2^(x / log 2), whose exponent is rounded: at -50 by 2e-6
        assert_close(y.double(), F.silu(x.double()), rtol=4e-6 if backend == "triton" else 1e-6, atol=1e-35)


@pytest.mark.parametrize("backend", FAST)
def test_gradients_of_gradients_and_a_tensor_passed_twice(backend: str) -> None:
    inputs = {name: x.requires_grad_() for name, x in make(1, 5, 3).items()}
    penalties = []
    for dtype, name in ((torch.float32, backend), (torch.float64, "eager")):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs.values()]
        y = run(dict(zip(inputs, leaves)), name)
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        penalties.append(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))
    for a, b in zip(*penalties, strict=True):
        assert relative_error(a, b) < 1e-5
    x = numbers(1, 3, 4).requires_grad_()
    y = convolve(x, numbers(4, 4, seed=2), before=x, silu=True, backend=backend)
    (both,) = torch.autograd.grad(y.sum(), x)
    p, q = (x.detach().clone().requires_grad_() for _ in range(2))
    apart = torch.autograd.grad(
        convolve(p, numbers(4, 4, seed=2), before=q, silu=True, backend="eager").sum(), (p, q)
    )
    assert_close(both, sum(apart))


@pytest.mark.parametrize("backend", FAST)
def test_no_tokens_no_sequences_and_no_channels(backend: str) -> None:
    for shape in ({"n": 0}, {"b": 0}, {"c": 0}):
        inputs = make(**shape)
        y, dx, dw, dbias, d_before = differentiate(inputs, lambda x: run(x, backend))
        assert y.shape == dx.shape == inputs["x"].shape
        assert not any(bool(x.any()) for x in (dw, dbias, d_before))
    inputs = make(1, 0, s=2)
    assert run(inputs, backend, [0, 0, 0]).shape == (1, 0, 21)


def test_bits_depend_neither_on_the_run_nor_on_the_number_of_threads() -> None:
    if native.why_not() is not None:
        pytest.skip(native.why_not())
    inputs = make(3, 400, 70)
    results = []
    for count in (1, 2, 3, 2):
        with threads(count):
            results.append(differentiate(inputs, lambda x: run(x, "native")))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


REFUSED = {
    "x of three axes": ({"x": torch.zeros(2, 3)}, ValueError, r"x: got shape \(2, 3\)"),
    "x of integers": ({"x": torch.zeros(2, 3, 4, dtype=torch.int64)}, TypeError, "x: got torch.int64"),
    "x a list": ({"x": [1.0]}, TypeError, "x: got list"),
    "other channels": ({"weight": torch.zeros(5, 4)}, ValueError, r"weight: got shape \(5, 4\)"),
    "no taps": ({"weight": torch.zeros(4, 0)}, ValueError, "weight: got 0 taps"),
    "a number as weight": ({"weight": torch.zeros(())}, ValueError, r"weight: got shape \(\)"),
    "bias": ({"bias": torch.zeros(3)}, ValueError, r"bias: got shape \(3,\), expected \(4,\)"),
    "before": ({"before": torch.zeros(2, 2, 4)}, ValueError, r"before: got shape \(2, 2, 4\)"),
    "sparse": ({"bias": torch.zeros(4).to_sparse()}, TypeError, "bias: got torch.sparse_coo"),
    "meta": ({"weight": torch.zeros(4, 4, device="meta")}, ValueError, "weight: got device meta"),
    "packed rows": ({"cu_seqlens": torch.tensor([0, 3])}, ValueError, "cu_seqlens: got batch 2"),
    "backend": ({"backend": "triton!"}, ValueError, "backend='triton!'"),
    "float64": (
        {"x": torch.zeros(2, 3, 4).double(), "backend": "native"},
        RuntimeError,
        "native.*cannot run",
    ),
    "nine taps": ({"weight": torch.zeros(4, 9), "backend": "native"}, RuntimeError, "native.*cannot run"),
}


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_arguments_are_refused(arguments: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        convolve(**({"x": torch.zeros(2, 3, 4), "weight": torch.zeros(4, 4)} | arguments))


def test_no_parts_and_parts_on_two_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="parts: got none, expected at least one tensor"):
        convolve_parts((), torch.zeros(4, 4))
    parts = torch.zeros(2, 3, 2), torch.zeros(2, 3, 2, device="meta")
    with pytest.raises(ValueError, match="x: got device meta, expected cpu"):
        convolve_parts(parts, torch.zeros(4, 4))


@pytest.mark.parametrize("bounds", [[0, 4, 2, 9], [1, 9], [0, 8], [0, 10], [-1, 9]])
def test_bounds_that_do_not_rise_to_the_length_are_refused(bounds: list[int]) -> None:
    with pytest.raises(ValueError, match="cu_seqlens"):
        convolve(torch.zeros(1, 9, 4), torch.zeros(4, 4), cu_seqlens=torch.tensor(bounds))


STEPS = {
    "two tokens": ({"x": torch.zeros(2, 2, 4)}, ValueError, r"x: got shape \(2, 2, 4\)"),
    "dtype": ({"inputs": torch.zeros(2, 3, 4).bfloat16()}, TypeError, "inputs: got torch.bfloat16"),
    "rows": ({"inputs": torch.zeros(3, 3, 4)}, ValueError, r"inputs: got shape \(3, 3, 4\)"),
    "slot beyond": ({"slots": torch.tensor([0, 2])}, ValueError, r"slots: got \[0, 2\]"),
    "negative slot": ({"slots": torch.tensor([0, -1])}, ValueError, r"slots: got \[0, -1\]"),
    "same slot": ({"slots": torch.tensor([1, 1])}, ValueError, r"slots: got \[1, 1\]"),
    "int32": ({"slots": torch.tensor([0, 1]).int()}, TypeError, "slots: got torch.int32"),
    "one slot": ({"slots": torch.tensor([0])}, ValueError, r"slots: got shape \(1,\)"),
}


@pytest.mark.parametrize(("arguments", "error", "message"), STEPS.values(), ids=STEPS)
def test_bad_arguments_of_a_step_are_refused_and_nothing_is_written(
    arguments: dict, error: type, message: str
) -> None:
    memory = torch.ones(2, 3, 4)
    given = {"x": torch.zeros(2, 1, 4), "weight": torch.zeros(4, 4), "bias": None, "inputs": memory}
    with pytest.raises(error, match=message):
        convolve_step(**(given | arguments))
    assert bool((memory == 1).all())


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("absent", [(), ("before",), ("before", "bias")])
@pytest.mark.parametrize("twice", [False, True])
def test_parts_are_convolved_as_if_they_were_one_tensor(
    backend: str, absent: tuple[str, ...], twice: bool
) -> None:
    if backend == "native" and native.why_not() is not None:
        pytest.skip(str(native.why_not()))
    inputs: Tensors = {name: None if name in absent else x for name, x in make().items()}

    def in_parts(leaves: Tensors) -> Tensor:
        x, weight, bias, before = leaves.values()
        parts = x.split([8, 1, 12], -1)
        return torch.cat(convolve_parts(parts, weight, bias, before=before, silu=True, backend=backend), -1)

    def gradients(call: Callable[[Tensors], Tensor]) -> list[Tensor]:
        leaves = {name: None if x is None else x.clone().requires_grad_() for name, x in inputs.items()}
        present = [x for x in leaves.values() if x is not None]
        first = torch.autograd.grad(call(leaves).square().sum(), present, create_graph=twice)
        if not twice:
            return list(first)
        return list(torch.autograd.grad(sum(x.square().sum() for x in first), present))

    for x, y in zip(gradients(in_parts), gradients(lambda x: run(x, backend)), strict=True):
        assert relative_error(x, y) < 1e-5  # float32: the parts' sums are added in another order

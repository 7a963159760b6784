"""The convolution of each channel: against its sum written out, cut and packed; the kernels against both."""

from functools import partial
from importlib.util import find_spec
from itertools import pairwise, product

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F
from torch.testing import assert_close

from linrope.ops import convolve, convolve_parts
from tests.ops import cases
from tests.ops.cases import Tensors, differentiate, every_set, numbers, with_gaps

without_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")
TRITON = pytest.param("triton", marks=[pytest.mark.gpu, without_triton])
every_backend = pytest.mark.parametrize("backend", [*cases.BACKENDS, TRITON])
CUTS = [0, 0, 3, 4, 12, 37, 37]  # empty sequences, and shorter ones than there are taps


@pytest.fixture(autouse=True)
def _interpreted(request: pytest.FixtureRequest) -> None:
    """On a CPU triton gets a quick interpreter. Fresh memory holds NaN."""
    if request.node.get_closest_marker("gpu"):
        request.getfixturevalue("quick_interpreter")
        request.getfixturevalue("poison")


def written_out(inputs: Tensors, cuts: list[int] | None = None, silu: bool = True) -> Tensor:
    """The sum of each token of each sequence, in float64."""
    x, weight, bias, before = (None if x is None else x.double() for x in inputs.values())
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
    b: int = 2, n: int = 37, c: int = 21, taps: int = 4, *, dtype: torch.dtype = torch.float32, s: int | None = None
) -> Tensors:  # fmt: skip
    return {
        "x": numbers(b, n, c).to(dtype),
        "weight": numbers(c, taps, seed=2),
        "bias": numbers(c, seed=3),
        "before": numbers(b if s is None else s, taps - 1, c, seed=4).to(dtype),
    }


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


FORMS = [*product(("none", "bias", "before"), (False, True))]  # what is absent, silu


@pytest.mark.parametrize("shape", SHAPES)
@every_backend
def test_it_is_the_sum_with_its_gradients(backend: str, shape: str) -> None:
    """The native kernels in each form, the others in one after the other."""
    for absent, silu in FORMS if backend == "native" else FORMS[[*SHAPES].index(shape) % 6 :][:1]:
        inputs = make(**SHAPES[shape]) | ({} if absent == "none" else {absent: None})
        cases.assert_exact(inputs, partial(run, silu=silu), partial(written_out, silu=silu), backend)


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("taps", [2, 4, 7])
@every_backend
def test_packed_sequences_do_not_see_each_other(backend: str, taps: int, silu: bool) -> None:
    inputs, how = make(1, taps=taps, s=len(CUTS) - 1), {"cuts": CUTS, "silu": silu}
    cases.assert_exact(inputs, partial(run, **how), partial(written_out, **how), backend)


def test_the_definition_has_first_and_second_derivatives() -> None:
    for cuts, s in ((None, 1), ([0, 2, 5], 2)):
        cases.assert_twice_differentiable(make(1, 5, 3, s=s), lambda x, cuts=cuts: run(x, "eager", cuts))


@pytest.mark.parametrize("dtype", cases.HALF_PRECISION)
@every_backend
def test_half_precision_rounds_the_result_alone(backend: str, dtype: torch.dtype) -> None:
    if backend == "triton" and dtype == torch.bfloat16 and torch.get_default_device().type == "cpu":
        pytest.skip(
            "Triton's interpreter does not round bfloat16 to nearest; tests/kernels emulates compiled code"
        )
    inputs = make(c=24, dtype=dtype)
    exact = differentiate(inputs, written_out, torch.float64)
    for _ in every_set(backend):
        y, dx, dw, dbias, d_before = differentiate(inputs, partial(run, backend=backend))
        assert y.dtype == dx.dtype == d_before.dtype == dtype
        assert dw.dtype == dbias.dtype == torch.float32
        half_a_bit = torch.finfo(dtype).eps / 2
        assert_close([y.double(), dx.double()], exact[:2], rtol=1.01 * half_a_bit, atol=1e-6)
        assert max(cases.relative_error(dw, exact[2]), cases.relative_error(dbias, exact[3])) < 2e-6


@every_backend
def test_parameters_of_half_precision_get_gradients_of_their_dtype(backend: str) -> None:
    inputs, dtype = make(), torch.float16 if backend == "triton" else torch.bfloat16  # as above
    inputs |= {name: inputs[name].to(dtype) for name in ("weight", "bias")}
    exact = differentiate(inputs, written_out, torch.float64)
    _, _, dw, dbias, _ = differentiate(inputs, partial(run, backend=backend))
    assert dw.dtype == dbias.dtype == dtype
    assert_close([dw.double(), dbias.double()], exact[2:4], rtol=2**-8, atol=1e-5)


@every_backend
def test_slices_transposed_tensors_and_a_third_axis_of_the_weight_change_no_bit(backend: str) -> None:
    inputs = make(c=32)
    x, weight, _, before = inputs.values()
    sliced = {"x": torch.cat((x, x, x), 2)[..., 32:64], "weight": weight[:, None]}
    transposed = {"x": x.mT.contiguous().mT, "before": before.mT.contiguous().mT}
    expected = differentiate(inputs, partial(run, backend=backend))
    for strided in (sliced, transposed):
        actual = differentiate(inputs | strided, partial(run, backend=backend))
        for a, b in zip(actual, expected, strict=True):
            assert torch.equal(a.view(b.shape), b)


@pytest.mark.parametrize("cut", [0, 1, 2, 9, 36, 37])
@every_backend
def test_cut_anywhere_or_alone_a_sequence_has_the_same_bits(backend: str, cut: int) -> None:
    inputs, silu = make(), backend != "eager"  # PyTorch's silu rounds otherwise at the end of a tensor
    x, before, call = inputs["x"], inputs["before"], partial(run, backend=backend, silu=silu)
    seen = torch.cat((before, x[:, :cut]), 1)[:, -3:]
    for _ in every_set(backend):
        whole = call(inputs)
        pieces = call(inputs | {"x": x[:, :cut]}), call(inputs | {"x": x[:, cut:], "before": seen})
        assert torch.equal(torch.cat(pieces, 1), whole)
        packed = call(inputs | {"x": x.view(1, 74, -1)}, cuts=[0, 37, 74])
        assert torch.equal(packed.view(whole.shape), whole)
        alone = [call(inputs | {"x": x[i : i + 1], "before": before[i : i + 1]}) for i in range(2)]
        assert torch.equal(torch.cat(alone), whole)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@every_backend
def test_what_is_not_finite_stays_in_its_channel_and_sequence_and_reaches_no_earlier_token(
    backend: str, value: float
) -> None:
    inputs = make(1, c=20, s=len(CUTS) - 1)
    hostile = inputs | {"x": inputs["x"].clone()}
    hostile["x"][0, 10, 5] = value
    hostile["x"].requires_grad_()
    not_reached, others = torch.ones(1, 37, 20, dtype=torch.bool), torch.arange(20) != 5
    not_reached[0, 10:12, 5] = False  # the sequence ends before token 12
    for _ in every_set(backend):
        clean, y = (run(x, backend, CUTS)[not_reached] for x in (inputs, hostile))
        assert torch.equal(y, clean)
        (dx,) = torch.autograd.grad(y.sum(), hostile["x"])
        assert bool(dx[..., others].isfinite().all())
        assert bool(dx[0, 12:].isfinite().all())


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's, in the interpreter
@every_backend
def test_silu_of_large_numbers(backend: str) -> None:
    x = torch.tensor([-1e30, -200.0, -88.0, -50.0, 0.0, 50.0, 104.0, 200.0, 1e30]).view(1, -1, 1)
    one = torch.ones(1, 1)
    for _ in every_set(backend):
        y = convolve(x, one, silu=True, backend=backend)
        assert_close(y.double(), F.silu(x.double()), rtol=4e-6 if backend == "triton" else 1e-6, atol=1e-35)


@every_backend
def test_gradients_of_gradients_and_a_tensor_passed_twice(backend: str) -> None:
    cases.assert_gradients_of_gradients(make(1, 5, 3), run, backend, 1e-5)
    weight = numbers(4, 4, seed=2)
    cases.assert_sums_gradients_of_a_tensor_passed_twice(
        numbers(1, 3, 4), lambda x, y, **how: convolve(x, weight, before=y, silu=True, **how), backend
    )


@every_backend
def test_no_tokens_no_sequences_and_no_channels(backend: str) -> None:
    empty = [make(**shape) for shape in ({"n": 0}, {"b": 0}, {"c": 0})]
    for inputs in (*empty, *map(cases.with_strides_of_0, empty)):
        y, dx, dw, dbias, d_before = differentiate(inputs, partial(run, backend=backend))
        assert y.shape == dx.shape == inputs["x"].shape
        assert not any(bool(x.any()) for x in (dw, dbias, d_before))
    inputs = make(1, 0, s=2)
    assert run(inputs, backend, [0, 0, 0]).shape == (1, 0, 21)


@cases.needs_native
def test_bits_depend_neither_on_the_run_nor_on_the_number_of_threads() -> None:
    cases.assert_same_bits_on_any_number_of_threads(make(3, 400, 70), lambda x: run(x, "native"))


X, WEIGHT = torch.zeros(2, 3, 4), torch.zeros(4, 4)
NO_KERNEL = r"native.*cannot run"
REFUSED = {
    "x of two axes": ({"x": X[0]}, ValueError, r"x: got shape \(3, 4\)"),
    "x of integers": ({"x": X.long()}, TypeError, "x: got torch.int64"),
    "x a list": ({"x": [1.0]}, TypeError, "x: got list"),
    "other channels": ({"weight": torch.zeros(5, 4)}, ValueError, r"weight: got shape \(5, 4\)"),
    "no taps": ({"weight": torch.zeros(4, 0)}, ValueError, "weight: got 0 taps"),
    "a number as weight": ({"weight": torch.zeros(())}, ValueError, r"weight: got shape \(\)"),
    "bias": ({"bias": torch.zeros(3)}, ValueError, r"bias: got shape \(3,\), expected \(4,\)"),
    "before": ({"before": torch.zeros(2, 2, 4)}, ValueError, r"before: got shape \(2, 2, 4\)"),
    "sparse": ({"bias": torch.zeros(4).to_sparse()}, TypeError, "bias: got torch.sparse_coo"),
    "meta": ({"weight": WEIGHT.to("meta")}, ValueError, "weight: got device meta"),
    "packed rows": ({"cu_seqlens": torch.tensor([0, 3])}, ValueError, "cu_seqlens: got batch 2"),
    **{
        f"bounds {x}": ({"x": torch.zeros(1, 9, 4), "cu_seqlens": torch.tensor(x)}, ValueError, "cu_seqlens")
        for x in ([0, 4, 2, 9], [1, 9], [0, 8], [0, 10], [-1, 9])
    },
    "backend": ({"backend": "triton!"}, ValueError, "backend='triton!'"),
    "float64": ({"x": X.double(), "backend": "native"}, RuntimeError, NO_KERNEL),
    "nine taps": ({"weight": torch.zeros(4, 9), "backend": "native"}, RuntimeError, NO_KERNEL),
}


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_arguments_are_refused(arguments: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        convolve(**({"x": X, "weight": WEIGHT} | arguments))


def test_too_few_or_many_parts_and_parts_on_two_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="parts: got none, expected 1 to 3 tensors"):
        convolve_parts((), WEIGHT)
    with pytest.raises(ValueError, match="parts: got 4, expected 1 to 3 tensors"):
        convolve_parts((X,) * 4, WEIGHT)
    with pytest.raises(ValueError, match="x: got device meta, expected cpu"):
        convolve_parts((X, X.to("meta")), torch.zeros(8, 4))


# ---- Several parts

SIZES = [8, 1, 12]


def in_parts(inputs: Tensors, backend: str, sizes: list[int] = SIZES, **how) -> list[Tensor]:
    x, *others, before = inputs.values()
    parts = x.split(sizes, -1)
    return list(convolve_parts(parts, *others, before=before, silu=True, backend=backend, **how))


@every_backend
@pytest.mark.parametrize("absent", [(), ("before",), ("before", "bias")])
@pytest.mark.parametrize("gradients", [differentiate, cases.differentiate_twice])
def test_parts_are_convolved_as_if_they_were_one_tensor(backend: str, absent, gradients) -> None:
    inputs: Tensors = {name: None if name in absent else x for name, x in make().items()}
    expected = gradients(inputs, partial(run, backend=backend))
    for sizes in (SIZES,) if backend == "triton" else (SIZES, [9, 12], [0, 21]):
        found = gradients(inputs, lambda x, sizes=sizes: torch.cat(in_parts(x, backend, sizes), -1))
        for x, y in zip(found, expected, strict=True):
            assert cases.relative_error(x, y) < 1e-5  # float32: the parts' sums are added in another order


@every_backend
def test_packed_parts_have_the_bits_of_one_tensor(backend: str) -> None:
    inputs, cuts = make(1, s=len(CUTS) - 1), torch.tensor(CUTS)
    if backend == "eager":  # PyTorch's silu rounds otherwise at the end of a tensor
        inputs = {name: x.double() for name, x in inputs.items()}
    expected = run(inputs, backend, CUTS)
    assert_close(torch.cat(in_parts(inputs, backend, cu_seqlens=cuts), -1), expected, rtol=0, atol=1e-15)


def sizes_of_gradients(inputs: Tensors, wanted: list[int], twice: bool, call) -> list[float]:
    """The sums of the gradients of leaves, of which the first part is constant, if only those results are used."""
    x, *others = (x.clone() for x in inputs.values())
    parts = [x.requires_grad_(i > 0) for i, x in enumerate(x.split(SIZES, -1))]
    leaves = [*parts[1:], *(x.requires_grad_() for x in others)]
    weight, bias, before = others
    ys = call(parts, weight, bias, before=before, silu=True)
    how = {"create_graph": twice, "allow_unused": True, "materialize_grads": True}
    found = torch.autograd.grad(sum(ys[i].square().sum() for i in wanted), leaves, **how)
    if twice:
        found = torch.autograd.grad(
            sum(x.square().sum() for x in found), leaves, **how | {"create_graph": False}
        )
    return [float(x.abs().sum()) for x in found]


@every_backend
@pytest.mark.parametrize("twice", [False, True])
def test_parts_without_a_gradient(backend: str, twice: bool) -> None:
    for wanted in ([0], [1], [0, 2]):
        found, exact = (
            sizes_of_gradients(make(), wanted, twice, partial(convolve_parts, backend=name))
            for name in (backend, "eager")
        )
        assert found == pytest.approx(exact, rel=1e-4, abs=1e-6)


@every_backend
def test_parts_of_two_dtypes_keep_theirs(backend: str) -> None:
    a, b = numbers(2, 5, 3), numbers(2, 5, 4, seed=2).half()
    ys = convolve_parts((a, b), numbers(7, 4), silu=True, backend=backend)
    assert [y.dtype for y in ys] == [torch.float32, torch.float16]
    alone = convolve(b, numbers(7, 4)[3:], silu=True, backend=backend)
    assert_close(ys[1], alone, rtol=0, atol=0)


@pytest.mark.parametrize("backend", cases.BACKENDS)
def test_compiled_parts_are_one_node_of_the_graph(backend: str) -> None:
    torch._dynamo.reset()
    seen: list[str] = []

    def keep(graph: torch.fx.GraphModule, _: list[Tensor]):
        seen.extend(str(node.target) for node in graph.graph.nodes if "linrope" in str(node.target))
        return make_boxed_func(graph)

    call = partial(convolve_parts, backend=backend)
    how = {"fullgraph": True, "backend": aot_autograd(fw_compiler=keep, bw_compiler=keep)}
    for wanted in ([1], [0, 1, 2]):
        found = sizes_of_gradients(make(), wanted, False, torch.compile(call, **how))
        assert found == pytest.approx(sizes_of_gradients(make(), wanted, False, call), rel=1e-4)
    one = [] if backend == "eager" else ["linrope.convolve.default", "linrope.convolve_backward.default"]
    assert seen == one

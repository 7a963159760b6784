"""Gates against their formulas in float64, at the ends of their range, and their gradients."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from linrope.ops import forget_and_write_gates, gates
from tests.ops import cases
from tests.ops.cases import Tensors, differentiate, numbers

pytestmark = pytest.mark.gpu
BACKENDS = ("eager", pytest.param("triton", marks=cases.needs_triton))
every_backend = pytest.mark.parametrize("backend", BACKENDS)
KINDS = ("log_sigmoid", "sigmoid", "forget and write")


def written_out(inputs: Tensors, kind: str) -> Tensor:
    """In float64; a forget gate and its write gate are one tensor here."""
    x, weight, bias = (x.double() for x in inputs.values())
    y = x @ weight.T + bias
    if kind == "sigmoid":
        return torch.sigmoid(y)
    log_decay = torch.nn.functional.logsigmoid(y)
    return log_decay if kind == "log_sigmoid" else torch.cat((log_decay, torch.sigmoid(-y)), -1)


def run(inputs: Tensors, backend: str, kind: str) -> Tensor:
    if kind == "forget and write":
        return torch.cat(forget_and_write_gates(**inputs, backend=backend), -1)
    return gates(**inputs, activation=kind, backend=backend)


def make(
    b: int = 2, n: int = 37, dim: int = 70, heads: int = 5, dtype: torch.dtype = torch.float32
) -> Tensors:
    weight = numbers(heads, dim, seed=2) / dim**0.5
    return {
        "x": numbers(b, n, dim).to(dtype),
        "weight": weight.to(dtype),
        "bias": 3 * numbers(heads, seed=3).to(dtype),
    }


SHAPES = {
    "usual": {},
    "one token": {"b": 3, "n": 1},
    "one head": {"heads": 1, "dim": 16},
    "many heads": {"heads": 70, "n": 5},
    "several parts": {"b": 1, "n": 300, "dim": 8},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@every_backend
def test_they_are_the_formula_with_its_gradients(backend: str, shape: str, kind: str) -> None:
    inputs = make(**SHAPES[shape])
    cases.assert_exact(inputs, partial(run, kind=kind), partial(written_out, kind=kind), backend)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", cases.HALF_PRECISION)
@every_backend
def test_half_precision_gives_gates_of_float32_and_gradients_of_its_own(
    backend: str, dtype: torch.dtype, kind: str
) -> None:
    inputs = make(dtype=dtype)
    exact = differentiate(inputs, partial(written_out, kind=kind), torch.float64)
    found = differentiate(inputs, partial(run, backend=backend, kind=kind))
    assert found[0].dtype == torch.float32
    assert cases.relative_error(found[0], exact[0]) < 2e-6
    for x, expected in zip(found[1:], exact[1:], strict=True):
        assert x.dtype == dtype
        assert cases.relative_error(x, expected) < torch.finfo(dtype).eps


@every_backend
def test_gates_at_the_ends_of_their_range_keep_their_digits(backend: str) -> None:
    y = torch.tensor([-1e30, -3e4, -90.0, -20.0, -1e-3, 0.0, 1e-3, 10.0, 17.5, 60.0, 85.0, 1e30])
    x, one, zero = y.view(1, -1, 1).requires_grad_(), torch.ones(1, 1), torch.zeros(1)
    log_decay, write = forget_and_write_gates(x, one, zero, backend=backend)
    share = gates(x, one, zero, activation="sigmoid", backend=backend)
    exact = y.double().view(1, -1, 1)
    assert_close(log_decay.double(), torch.nn.functional.logsigmoid(exact), rtol=1e-6, atol=1e-38)
    assert_close(write.double(), torch.sigmoid(-exact), rtol=1e-6, atol=1e-38)
    assert_close(share.double(), torch.sigmoid(exact), rtol=1e-6, atol=1e-38)
    (dx,) = torch.autograd.grad(log_decay.sum(), x)
    assert_close(dx.double(), torch.sigmoid(-exact), rtol=1e-6, atol=1e-38)


@every_backend
def test_not_a_number_stays_in_its_token(backend: str) -> None:
    inputs = make()
    clean = run(inputs, backend, "forget and write")
    inputs["x"][1, 7, 3] = torch.nan
    found = run(inputs, backend, "forget and write")
    assert bool(found[1, 7].isnan().all())
    clean[1, 7] = found[1, 7] = 0
    assert torch.equal(found, clean)


@every_backend
def test_each_of_two_gates_may_be_the_only_one_with_a_gradient(backend: str) -> None:
    inputs = make()
    leaves = [x.requires_grad_() for x in inputs.values()]
    for only in (0, 1):
        found = torch.autograd.grad(forget_and_write_gates(**inputs, backend=backend)[only].sum(), leaves)
        wide = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
        both = written_out(wide, "forget and write").chunk(2, -1)
        for x, expected in zip(found, torch.autograd.grad(both[only].sum(), [*wide.values()]), strict=True):
            assert cases.relative_error(x, expected) < 2e-6


@every_backend
def test_gradients_of_gradients(backend: str) -> None:
    run_both = partial(run, kind="forget and write")
    cases.assert_gradients_of_gradients(make(1, 3, 4, 2), run_both, backend, 1e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # PyTorch 2.15 reads it itself
@cases.needs_triton
def test_the_operator_passes_torch_library_s_checks() -> None:
    x, weight, bias = make(1, 3, 4, 2).values()
    leaves = [x.requires_grad_() for x in (x, weight, bias)]
    for more in (("log_sigmoid", True), ("sigmoid", False)):
        torch.library.opcheck(torch.ops.linrope.gates.default, (*leaves, *more, True))


@every_backend
def test_compiled_they_are_one_graph_for_any_length(backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda inputs: run(inputs, backend, "forget and write"),
        fullgraph=True,
        backend="aot_eager",
        dynamic=True,
    )
    for n in (5, 9):
        inputs = make(n=n)
        expected = differentiate(inputs, partial(run, backend=backend, kind="forget and write"))
        assert_close(differentiate(inputs, compiled), expected)


@every_backend
def test_no_tokens(backend: str) -> None:
    y, dx, d_weight, d_bias = differentiate(make(n=0), partial(run, backend=backend, kind="forget and write"))
    assert y.shape == (2, 0, 10)
    assert dx.shape == (2, 0, 70)
    assert not bool(d_weight.any())
    assert not bool(d_bias.any())


X, WEIGHT, BIAS = torch.zeros(2, 3, 4), torch.zeros(5, 4), torch.zeros(5)
REFUSED = {
    "x": ({"x": X[0]}, ValueError, r"x: got shape \(3, 4\)"),
    "weight of one axis": (
        {"weight": BIAS},
        ValueError,
        r"weight: got shape \(5,\), expected \(heads, dim\)",
    ),
    "weight": ({"weight": WEIGHT.T}, ValueError, r"weight: got shape \(4, 5\), expected \(4, 4\)"),
    "bias": ({"bias": BIAS[1:]}, ValueError, r"bias: got shape \(4,\), expected \(5,\)"),
    "integers": ({"x": X.long()}, TypeError, "x: got torch.int64"),
    "activation": ({"activation": "tanh"}, ValueError, "activation='tanh': expected one of"),
    "backend": ({"backend": "native"}, ValueError, "backend='native': expected one of auto, triton, eager"),
    "device": ({"bias": BIAS.to("meta")}, ValueError, "bias: got device meta"),
    "float64": ({"x": X.double(), "backend": "triton"}, RuntimeError, "triton.*cannot run: float64"),
}


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_arguments_are_refused(arguments: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        gates(**({"x": X, "weight": WEIGHT, "bias": BIAS} | arguments))

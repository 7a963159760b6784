"""What the Triton kernels of the gated norm alone promise: plans, sums in parts, launches.

tests/ops compares them, in Triton's interpreter, with the equation.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from linrope_kernels import norm, partial_sums, repeat
from linrope_kernels.norm import plan_of
from torch.utils._python_dispatch import TorchDispatchMode

from linrope.ops import gated_norm
from linrope.ops.norm import _GatedNorm
from tests.ops.cases import Tensors, differentiate, numbers, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiles of 256 elements, of looped norms 512, and up to four warps in all."""
    sizes = {"BLOCK": 256, "WHOLE": {"head": 256, "all": 256}, "LOOPED": 512, "WARPS": 4}
    for name, value in sizes.items():
        monkeypatch.setattr(norm, name, value)
    monkeypatch.setattr(repeat, "_PASSES", {})
    plan_of.cache_clear()
    yield
    plan_of.cache_clear()


def make(h: int, g: int, e: int, over: str = "head", b: int = 2, n: int = 5, **more: torch.dtype) -> Tensors:
    dtype = more.get("dtype", torch.float32)
    return {
        "out": numbers(b, n, h, e).to(dtype),
        "weight": numbers(h * e if over == "all" else e, seed=2),
        "gate": numbers(b, n, h * e, seed=3).to(dtype),
        "v": numbers(b, n, g, e, seed=4).to(dtype),
        "skip": numbers(h, seed=5),
    }


def compare(inputs: Tensors, **options: Any) -> None:
    """The result and all gradients, with float64."""
    exact = differentiate(inputs, lambda x: gated_norm(**x, **options, backend="eager"), torch.float64)
    actual = differentiate(inputs, lambda x: gated_norm(**x, **options, backend="triton"))
    assert max(relative_error(x, y) for x, y in zip(actual, exact, strict=True)) < 2e-6


def test_rows_are_summed_in_their_order_and_two_tables_at_once() -> None:
    a, b = numbers(600, 40), numbers(3, 5, seed=2)
    sums = torch.empty(40), torch.empty(5, dtype=torch.float16)
    partial_sums.sum_rows(a, sums[0], b, sums[1])
    assert torch.equal(sums[0], a.double().sum(0).float())
    assert torch.equal(sums[1], b.double().sum(0).half())
    partial_sums.sum_rows(None, None, b, sums[0][:5])
    assert torch.equal(sums[0][:5], b.double().sum(0).float())


@pytest.mark.parametrize(("has_norm", "over_all"), [(False, False), (True, False), (True, True)])
def test_tiles_cover_the_heads(has_norm: bool, over_all: bool) -> None:
    for h, group, e in (
        *((1, 1, 1), (16, 1, 64), (64, 1, 256), (12, 3, 96), (64, 64, 256), (128, 8, 128)),
        *((1, 1, 2048), (1, 1, 8192), (1, 1, 2**14), (1, 1, 2**15), (1, 1, 5000), (2048, 2048, 3)),
    ):
        shape, programs, loop, warps = plan_of(h, group, e, has_norm, over_all)
        elements = shape.T * shape.GB * shape.RP * shape.BE
        assert group <= shape.RP
        assert shape.BE * shape.COLUMNS >= e > shape.BE * (shape.COLUMNS - 1)
        assert shape.GB * programs * loop >= shape.COLUMNS * h // group
        assert loop == (1 if not has_norm else programs * loop if over_all else shape.COLUMNS)
        most = max(1024, norm.WHOLE["all" if over_all else "head"] * has_norm, 16 * shape.RP)
        assert 1024 <= elements <= most
        assert elements // 512 <= warps <= 16 or warps == 16


FORMS: dict[str, dict[str, Any]] = {
    "blocks of heads": {"h": 12, "g": 12, "e": 24},
    "blocks of heads that share a norm": {"h": 12, "g": 12, "e": 24, "over": "all"},
    "of heads that share v, too": {"h": 12, "g": 4, "e": 20, "over": "all", "skip_order": "before"},
    "blocks of columns": {"h": 2, "g": 1, "e": 300, "gate_order": "before"},
    "blocks of both": {"h": 8, "g": 4, "e": 150, "over": "all", "gate_order": "before"},
    "one head": {"h": 1, "g": 1, "e": 600},
    "columns without a norm": {"h": 4, "g": 2, "e": 280, "gate_activation": "sigmoid"},
}


@pytest.mark.parametrize("form", FORMS)
def test_norms_of_several_tiles_and_programs_that_sum_over_several(form: str, small: None) -> None:
    options = dict(FORMS[form])
    h, g, e = (options.pop(name) for name in ("h", "g", "e"))
    inputs = make(h, g, e, options.get("over", "head"), b=1, n=4)
    if "without" in form:
        inputs["weight"] = None
    compare(inputs, **options)


@pytest.mark.parametrize("over", ["head", "all"])
def test_the_magnitudes_of_models(over: str) -> None:
    """Outputs that a long sequence has made small, in some heads below eps; wide gates; one large channel."""
    inputs = make(4, 4, 16, over, n=20)
    inputs |= {"out": 1e-3 * inputs["out"], "gate": 5 * inputs["gate"], "v": None, "skip": None}
    inputs["out"][..., 2, :] *= 1e-4
    inputs["out"][..., 3] *= 30
    compare(inputs, over=over, gate_order="before" if over == "all" else "after")


class Calls(TorchDispatchMode):
    """Counts the operators of PyTorch that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("absent", "launches"),
    [((), 2), (("gate",), 2), (("weight",), 2), (("v", "skip"), 2), (("weight", "v", "skip"), 1)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_launch_forward_and_two_backward(
    dtype: torch.dtype, absent: tuple[str, ...], launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none by PyTorch: it only allocates."""
    started: list[Any] = []
    for module in (norm, partial_sums):
        monkeypatch.setattr(module, "start_kernel", lambda *x, **_: started.extend(x[1:2] if x[1] else ()))
    inputs = make(4, 2, 20, dtype=dtype) | dict.fromkeys(absent)
    record = _GatedNorm(**inputs, eps=1e-6, over_heads=False, gate_first=False, skip_first=False,
                        gate_activation="silu", kernel="triton")  # fmt: skip
    with Calls() as calls:
        y = norm.norm_fwd(record)
        assert len(started) == 1
        found = norm.norm_bwd(record, y)
    assert len(started) == 1 + launches
    assert [x is None for x in found] == [x is None for x in (record[:5])]
    assert set(calls.names) <= {"aten::new_empty", "aten::empty.memory_format"}


def test_compiled_in_one_graph_it_computes_the_same() -> None:
    torch._dynamo.reset()
    run = partial(gated_norm, backend="triton", over="all")
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (3, 8):
        inputs = make(2, 1, 12, "all", n=n)
        found, expected = (differentiate(inputs, lambda x, f=f: f(**x)) for f in (compiled, run))
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_what_it_cannot_do_is_named() -> None:
    x = torch.zeros(1, 2, 3, 4)
    for inputs, why in ((x.double(), "float64: use backend='eager'"), (x.to("meta"), "tensors on meta")):
        with pytest.raises(RuntimeError, match=f"backend='triton' cannot run: {why}"):
            gated_norm(inputs, backend="triton")

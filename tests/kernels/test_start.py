"""A launch that resembles an earlier one goes straight to the kernel that Triton compiled for that one."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from linrope_kernels import start
from linrope_kernels.start import likeness, start_kernel


class Compiled:
    def __init__(self, started: list[Any]) -> None:
        self.started = started

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.started.append(("compiled", grid, args))


class Kernel:
    """A kernel with the arguments x, n and the constants A, B, which notes how it is started."""

    arg_names = ("x", "n", "A", "B")
    params = tuple(SimpleNamespace(do_not_specialize=name == "n") for name in arg_names)

    def __init__(self, compiles: bool = True) -> None:
        self.started: list[Any] = []
        self.compiled = Compiled(self.started) if compiles else None

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **constants: Any) -> Any:
            self.started.append(("triton", grid, args, constants))
            return self.compiled

        return run


@pytest.fixture(autouse=True)
def _none_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "_LAUNCHES", {})


def test_the_second_launch_skips_triton_and_passes_the_constants_in_the_kernel_s_order() -> None:
    kernel, x, y = Kernel(), torch.zeros(32), torch.ones(32)
    start_kernel(kernel, 3, (x, (8, 1)), 5, B=2, A=1, num_warps=4)
    start_kernel(kernel, 7, (y, (8, 1)), 5, B=2, A=1, num_warps=4)
    first, second = kernel.started
    assert first[:2] == ("triton", (3,))
    assert first[3] == {"B": 2, "A": 1, "num_warps": 4}
    assert second[:2] == ("compiled", (7, 1, 1))
    assert second[2][1:] == (5, 1, 2)
    assert second[2][0][0] is y


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.zeros(33)[1:]},  # not aligned
        {"x": torch.zeros(32, dtype=torch.float64)},
        {"x": None},
        {"strides": (8, 2)},
        {"strides": (16, 1)},
        {"n": 2**31},
        {"n": 5.0},
        {"A": 3},
        {"num_warps": 8},
    ],
    ids=lambda other: "-".join(other),
)
def test_triton_looks_at_every_launch_that_may_need_another_kernel(other: dict[str, Any]) -> None:
    kernel = Kernel()
    for changes in ({}, other):
        with_changes = {
            "x": torch.zeros(32),
            "strides": (8, 1),
            "n": 5,
            "A": 1,
            "B": 2,
            "num_warps": 4,
        } | changes
        x, strides, n, *_ = with_changes.values()
        constants = {name: with_changes[name] for name in ("A", "B", "num_warps")}
        start_kernel(kernel, 3, (x, strides), n, **constants)
    assert [how for how, *_ in kernel.started] == ["triton", "triton"]


def test_no_programs_no_launch_and_the_interpreter_is_always_called() -> None:
    kernel = Kernel(compiles=False)
    for programs in (0, 2, 2):
        start_kernel(kernel, programs, torch.zeros(32), 5, A=1, B=2)
    assert [how for how, *_ in kernel.started] == ["triton", "triton"]


def test_lengths_that_vary_need_no_other_kernel() -> None:
    kernel = Kernel()
    for n in (1, 5, 16, 17, 1000):  # the kernel does not specialize n, and strides are multiples of 16
        start_kernel(kernel, n, (torch.zeros(32), (16 * n, 1)), n, A=1, B=2)
    assert [how for how, *_ in kernel.started] == ["triton", *["compiled"] * 4]


def test_strides_that_vary_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "MOST_LAUNCHES", 4)
    kernel = Kernel()
    for a in range(10):
        start_kernel(kernel, 1, torch.zeros(32), 5, A=a, B=2)
        assert len(start._LAUNCHES) <= 4


def test_triton_compiles_one_kernel_for_arguments_that_are_alike() -> None:
    jit = pytest.importorskip("triton.runtime.jit")
    if not hasattr(jit, "native_specialize_impl"):
        pytest.skip("this release of Triton has another way to look at arguments")
    assert start.why_forgetful() is None
    assert len({likeness((x,)) for x in start._examples()}) < len(start._examples()) / 2


@pytest.fixture
def _account_anew() -> Iterator[None]:
    start.why_forgetful.cache_clear()
    yield
    start.why_forgetful.cache_clear()


@pytest.mark.usefixtures("_account_anew")
@pytest.mark.parametrize("what", ["renamed", "other arguments", "other kernels"])
def test_if_triton_looks_at_arguments_in_another_way_it_is_asked_each_time(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    jit = pytest.importorskip("triton.runtime.jit")
    if what == "renamed":
        monkeypatch.delattr(jit, "native_specialize_impl", raising=False)
    else:
        by_address = (lambda _, x, *rest: id(x)) if what == "other kernels" else (lambda x: None)
        monkeypatch.setattr(jit, "native_specialize_impl", by_address, raising=False)
    kernel = Kernel()
    for _ in range(2):
        start_kernel(kernel, 1, torch.zeros(32), 5, A=1, B=2)
    assert [how for how, *_ in kernel.started] == ["triton", "triton"]
    reason = start.why_forgetful()
    assert reason is not None
    assert ("another way" in reason) == (what != "other kernels")

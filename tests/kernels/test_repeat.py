"""A pass that was recorded does what the kernels' own Python does, for other tensors that look the same."""

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from linrope_kernels import INTERPRETED, launch, repeat, start
from linrope_kernels.forward import scan_fwd_kernel
from linrope_kernels.repeat import repeated
from linrope_kernels.start import likeness, start_kernel

from linrope import LinearAttentionState, Rotary, linear_rope_attention
from linrope.backends.protocol import XPOS
from linrope.recurrence.call import RECEIVED
from tests.support.oracle import random_state, randoms

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="stands in for compiled kernels by interpreting them"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]
Arguments = dict[str, Any]


def in_form_of(example: Any, x: Any) -> Any:
    """x with the named tuples of the example, whose fields a compiled kernel knows."""
    if not isinstance(x, tuple):
        return x
    inside = [in_form_of(*pair) for pair in zip(example, x, strict=True)]
    return type(example)(*inside) if hasattr(example, "_fields") else tuple(inside)


class Compiled:
    """A kernel that is interpreted, but only for arguments like those that it was compiled for."""

    def __init__(self, kernel: Any, interpret: Any, args: tuple[Any, ...], constants: Arguments) -> None:
        self.kernel, self.interpret, self.args, self.constants = kernel, interpret, args, constants
        self.alike, self.started = likeness(args), 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any) -> None:
            n = len(self.args)
            assert likeness(args[:n]) == self.alike
            names = self.kernel.arg_names[n:]
            assert list(args[n:]) == [self.constants[name] for name in names]
            self.started += 1
            self.interpret(self.kernel, grid)(*in_form_of(self.args, args[:n]), **self.constants)

        return run


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Compiled]]:
    """The interpreter as a compiler: the kernels that it has compiled."""
    made: list[Compiled] = []
    kind = type(scan_fwd_kernel)
    interpret = kind.__getitem__

    def getitem(kernel: Any, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **constants: Any) -> Compiled:
            interpret(kernel, grid)(*args, **constants)
            made.append(Compiled(kernel, interpret, args, constants))
            return made[-1]

        return run

    monkeypatch.setattr(kind, "__getitem__", getitem)
    monkeypatch.setattr(start, "_LAUNCHES", {})
    monkeypatch.setattr(repeat, "_PASSES", {})
    yield made
    start._by_width.cache_clear()


def inputs(seed: int, b: int = 1, n: int = 20, h: int = 2, g: int = 1, d: int = 16) -> list[torch.Tensor]:
    return randoms(b, n, h, d, g=g, dtype=torch.float32, seed=seed)


def results(qkv: list[torch.Tensor], how: Arguments, seed: int) -> list[torch.Tensor]:
    """The results of a call, and their gradients."""
    generator = torch.Generator().manual_seed(seed)
    leaves = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in qkv]
    b, n, _, _ = qkv[0].shape
    rotary = Rotary(16, layout=how.get("layout", "interleaved"))
    options = {key: x for key, x in how.items() if key in ("causal", "return_state", "eps")}
    if "gates" in how:
        options["log_decay"] = -torch.rand(b, n, 1, generator=generator)
    if "mask" in how:
        options["key_mask"] = torch.rand(b, n, generator=generator) > 0.3
    if "units" in how:
        options["log_decay"] = -torch.rand(b, n, 1, 8, generator=generator)
    if "erase" in how:
        options |= {name: torch.rand(b, n, 1, generator=generator) for name in ("erase", "write")}
        options |= {"feature_map": "unit", "normalize": False}
    if "steps" in how:
        options["angle_steps"] = torch.rand(b, n, 1, 8, generator=generator)
    if "packed" in how:
        options["cu_seqlens"] = torch.tensor([0, 7, n])
    if "state" in how:
        options |= {"state": random_state(*leaves[1:], {"rotary": rotary}), "return_state": True}
    out: Any = linear_rope_attention(*leaves, rotary=rotary, backend="triton", **options)
    tensors = [out]
    if isinstance(out, tuple):
        assert isinstance(out[1], LinearAttentionState)
        tensors = [out[0], out[1].kv, out[1].z]
    weights = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in tensors]
    return [*tensors, *torch.autograd.grad(tensors, leaves, weights)]


CASES: list[tuple[Arguments, int]] = [  # and how many of the two passes are repeated
    ({}, 2),
    ({"gates": True, "layout": "half", "mask": True, "state": True}, 2),
    ({"causal": False}, 2),
    ({"steps": True}, 1),
    ({"packed": True}, 0),
    ({"erase": True, "units": True, "mask": True, "return_state": True}, 2),
]


@pytest.mark.parametrize(
    ("how", "recorded"), CASES, ids=lambda x: "-".join(x) if isinstance(x, dict) else None
)
def test_a_repeated_pass_has_the_same_results(
    how: Arguments, recorded: int, compiled: list[Compiled]
) -> None:
    expected, _ = (results(inputs(seed, h=1), how, seed) for seed in (1, 0))
    passes = [x is not repeat.NEVER for x in repeat._PASSES.values()]
    assert repeat.ONCE not in repeat._PASSES.values()
    assert (len(passes), sum(passes)) == (2, recorded)
    number, before = len(compiled), sum(x.started for x in compiled)
    actual = results(inputs(1, h=1), how, 1)
    assert len(compiled) == number
    assert sum(x.started for x in compiled) - before >= number
    assert all(map(torch.equal, actual, expected))


@pytest.mark.usefixtures("short_segments")
def test_also_with_states_before_segments(compiled: list[Compiled]) -> None:
    expected, _, actual = (results(inputs(seed, n=130, h=1), {"mask": True}, seed) for seed in (1, 0, 1))
    assert all(map(callable, repeat._PASSES.values()))
    assert all(map(torch.equal, actual, expected))


def test_the_key_has_every_field_that_a_backend_receives() -> None:
    assert {*launch.SETTINGS, *launch.TENSORS} == RECEIVED.keys() - XPOS


def unaligned(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)


OTHER_CALLS = [
    lambda q, k, v: (q[:, :19], k[:, :19], v[:, :19]),
    lambda q, k, v: (q.transpose(1, 2).contiguous().transpose(1, 2), k, v),
    lambda q, k, v: (q, k, unaligned(v)),
    lambda q, k, v: (q.half(), k.half(), v.half()),
    lambda q, k, v: (q, k, v, {"eps": 1}),
    lambda q, k, v: (q, k, v, {"eps_mode": "add"}),
    lambda q, k, v: (q, k, v, {"normalize": False}),
    lambda q, k, v: (q, k, v, {"feature_map": "exp"}),
    lambda q, k, v: (q, k, v, {"rotary": Rotary(16, layout="half")}),
    lambda q, k, v: (q, k, v, {"key_mask": torch.ones(1, 20, dtype=torch.bool)}),
]


def test_another_call_is_another_pass(compiled: list[Compiled]) -> None:
    q, k, v = inputs(0)
    for _ in range(2):
        linear_rope_attention(q, k, v, rotary=Rotary(16), backend="triton")
    for i, other in enumerate(OTHER_CALLS):
        *changed, options = (*other(q, k, v), {})[:4]
        how = {"rotary": Rotary(16), "backend": "triton"} | options
        expected, _, actual = (linear_rope_attention(*changed, **how) for _ in range(3))
        assert list(map(callable, repeat._PASSES.values())) == [True] * (i + 2), i
        assert torch.equal(actual, expected), i


def test_the_precision_of_products_makes_another_pass(compiled: list[Compiled]) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "high") * 2:
            torch.set_float32_matmul_precision(precision)
            linear_rope_attention(*inputs(0), backend="triton")
        assert list(map(callable, repeat._PASSES.values())) == [True, True]
    finally:
        torch.set_float32_matmul_precision(before)


def test_one_tensor_as_two_arguments_is_not_recorded(compiled: list[Compiled]) -> None:
    q, _, v = inputs(0, h=1)
    for _ in range(3):
        linear_rope_attention(q, q, v, backend="triton")
    assert list(repeat._PASSES.values()) == [repeat.ONCE]
    linear_rope_attention(q, q.clone(), v, backend="triton")
    assert all(map(callable, repeat._PASSES.values()))
    repeated_once = linear_rope_attention(q, q, v, backend="triton")
    assert torch.equal(repeated_once, linear_rope_attention(q, q.clone(), v, backend="triton"))


class Kernel:
    """A kernel that is compiled and notes what it is started with."""

    arg_names = ("x",)

    def __init__(self) -> None:
        self.started: list[weakref.ref[torch.Tensor]] = []
        self.alive: list[list[bool]] = []

    def __getitem__(self, grid: Any) -> Any:
        def run(x: torch.Tensor) -> Kernel:
            self.started.append(weakref.ref(x))
            self.alive.append([known() is not None for known in self.started])
            return self

        return run


def test_a_new_tensor_is_given_up_after_the_last_launch_that_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(start, "_LAUNCHES", {})
    monkeypatch.setattr(repeat, "_PASSES", {})
    kernel, x = Kernel(), torch.ones(3)

    def run() -> torch.Tensor:
        first, second, _ = x.new_empty(3), torch.empty_like(x), x.new_empty(5)
        start_kernel(kernel, 1, first)
        start_kernel(kernel, 1, second)
        return second

    for _ in range(3):
        repeated("key", (x,), run)
        kernel.alive.append([])
        kernel.started.clear()
    recorded = [[True], [True, True], []]
    assert kernel.alive == [*recorded, *recorded, [True], [False, True], []]


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x * 2,
        lambda x: x.new_zeros(3),
        lambda x: x.new_empty(2, 3).t().contiguous(),
        lambda x: x.view(3),
        lambda x: torch.full_like(x, float(x[0])),
        lambda x: start_kernel(Kernel(), 1, x.detach()),
    ],
)
def test_a_pass_that_computes_is_not_recorded(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "_LAUNCHES", {})
    monkeypatch.setattr(repeat, "_PASSES", {})
    x = torch.ones(3)
    for _ in range(2):
        repeated("key", (x,), lambda: run(x))
    assert repeat._PASSES == {"key": repeat.NEVER}


def test_no_more_passes_are_kept_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeat, "_PASSES", {})
    monkeypatch.setattr(repeat, "MOST_PASSES", 3)
    for key in range(10):
        repeated(key, (), lambda: None)
        assert len(repeat._PASSES) <= 3


def test_nothing_is_recorded_if_triton_s_own_account_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeat, "_PASSES", {})
    monkeypatch.setattr(repeat, "why_forgetful", lambda: "another way to look at arguments")
    x = torch.ones(3)
    for _ in range(3):
        assert repeated("key", (x,), lambda: x) is x
    assert not repeat._PASSES

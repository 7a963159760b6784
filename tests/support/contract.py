"""The one table of what each backend promises, and the comparison with the equation that all of them pass."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import cycle, islice, product
from typing import Any

import pytest
import torch
from torch import Tensor

from linrope import LinearAttentionState, backends, linear_rope_attention
from linrope.backends import native
from linrope.conformance.bounds import BOUNDS, ON_TILES
from linrope.recurrence.call import Settings
from tests.support.equation import Equation
from tests.support.options import OPTIONS
from tests.support.oracle import DATA, everything, native_sets

# The settings that tests draw, and their defaults
SETTINGS = {x.name: x.default for x in fields(Settings) if x.name not in ("feature_map", "return_state")}
ON_CPU = torch.get_default_device().type == "cpu"
LONG = pytest.mark.long


@dataclass(frozen=True, kw_only=True)
class Contract:
    """How far a backend may be off the equation in a dtype; that of float64 is of two, which share what is expected.

    out is in units of M of docs/numerics.md, the sum of the terms' sizes; sums (kv and z) and gradients are
    in units of the tensor's largest entry. Beside that, each entry of out and of the gradients may be off by
    ``rounding`` of its own size.
    """

    name: str
    dtype: torch.dtype
    out: float
    sums: float
    gradients: float
    rounding: float = 0.0
    # The error of any result, relative to its largest entry or to 1, if the map rounds or gates are as large as 1e4
    combined: float = 0.0
    marks: tuple[pytest.MarkDecorator, ...] = ()

    @property
    def backends(self) -> tuple[str, ...]:
        return ("reference", "eager") if self.name == "float64" else (self.name.split()[0],)

    @property
    def backend(self) -> str:
        """The only one, or the first of them, which computes the same calls."""
        return self.backends[0]

    @property
    def is_main(self) -> bool:
        """Whether it runs the product of all options, where others run each value of an option once."""
        return self.name in ("float64", "native")

    def in_use(self) -> "Contract":
        """Returns this contract with the bounds that hold for the instruction set whose native kernels are in use."""
        half = self.name in ("native float16", "native bfloat16")
        on_tiles = half and native.instruction_set() == "amx"
        return replace(self, **WITH_AMX) if on_tiles else self

    def allowed(self, name: str, expected: Tensor, size: Tensor) -> Tensor | float:
        largest, tiny = float(expected.abs().max()), TINY[self.dtype]
        if self.backend == "native":  # its results below the smallest normal number are 0
            tiny = max(tiny, 16 * torch.finfo(torch.float32).smallest_normal)
        if name == "out":
            return self.out * size + self.rounding * expected.abs() + tiny
        if name in ("kv", "z"):
            return self.sums * largest + tiny
        return self.gradients * max(largest, 1e-6) + self.rounding * expected.abs() + tiny


# Below the smallest normal number u is the distance of two numbers; a decay of e^-100 is one of them, and its error
# counts like any other.
TINY = {x: 16 * torch.finfo(x).smallest_normal * torch.finfo(x).eps for x in (*BOUNDS, torch.float64)}
U32, U16, UB16 = 2.0**-24, 2.0**-11, 2.0**-8
NATIVE = (pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not())),)
F64 = {"dtype": torch.float64, "out": 1e-12, "sums": 1e-12, "gradients": 1e-12, "combined": 1e-10}
F32 = {"dtype": torch.float32, "out": 16 * U32, "sums": 1e-6, "gradients": 1e-5, "combined": 128 * U32}
HALF = F32 | {"gradients": 2e-5}  # sums are float32, and each result is rounded once
WITH_AMX = {"out": ON_TILES / 2, "sums": ON_TILES, "gradients": 2e-5}
TABLE = [
    Contract(name="float64", **F64),
    Contract(name="native", **F32, marks=NATIVE),
    Contract(name="native float16", **HALF | {"dtype": torch.float16}, rounding=U16, marks=NATIVE),
    Contract(name="native bfloat16", **HALF | {"dtype": torch.bfloat16}, rounding=UB16, marks=NATIVE),
    Contract(name="triton", **F32 | {"sums": 32 * U32, "gradients": 32 * U32, "combined": 64 * U32}),
    *(
        Contract(name=f"triton {name}", dtype=dtype, out=4 * u, sums=8 * u, gradients=8 * u, marks=marks)
        for name, dtype, u, marks in (
            ("float16", torch.float16, U16, (LONG,) if ON_CPU else ()),
            ("bfloat16", torch.bfloat16, UB16, ()),
        )
        if not (ON_CPU and dtype == torch.bfloat16)  # whose bit patterns the interpreter multiplies
    ),
]


def every_contract(
    *names: str,
    skip: Callable[..., bool] = lambda *_: False,
    interpreted: Sequence[Any] | None = None,
    **axes: Any,
) -> pytest.MarkDecorator:
    """Parametrizes a test by ``contract`` and by axes, each a sequence of values or a dict of named ones.

    Float64 and native run the product of all axes; the others run each value once, and Triton
    the product too, under the mark long. interpreted: the combinations that the slow interpreter runs, if
    these are other ones.
    """
    columns = [list(x.items()) if isinstance(x, Mapping) else [(x, x) for x in x] for x in axes.values()]
    longest = max(map(len, columns), default=1)
    once = [tuple(row) for row in zip(*(islice(cycle(x), longest) for x in columns))] if columns else [()]
    rows = []
    for contract in TABLE:
        if names and contract.name not in names and not {*contract.backends} & {*names}:
            continue
        ordinary = once
        if contract.backend == "triton" and interpreted is not None:
            wanted = [x if isinstance(x, tuple) else (x,) for x in interpreted]
            ordinary = [row for row in product(*columns) if tuple(label for label, _ in row) in wanted]
            assert len(ordinary) == len(wanted), f"{interpreted}: expected values of {list(axes)}"
        for row in product(*columns):
            if skip(contract, *(value for _, value in row)) or (
                not contract.is_main and contract.name != "triton" and row not in ordinary
            ):
                continue
            marks = [*contract.marks, *((LONG,) if not contract.is_main and row not in ordinary else ())]
            label = "-".join([contract.name, *(str(label) for label, _ in row)])
            rows.append(pytest.param(contract, *(value for _, value in row), id=label, marks=marks))
    return pytest.mark.parametrize(("contract", *axes), rows)


def of_backends(names: str, **cases: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test by ``backend`` and by these names, with cases of each backend's own."""
    rows = [(name, *(x if isinstance(x, tuple) else (x,))) for name, xs in cases.items() for x in xs]
    marked = [pytest.param(*row, marks=NATIVE if row[0] == "native" else ()) for row in rows]
    return pytest.mark.parametrize(("backend", *names.split()), marked)


@contextmanager
def instruction_set(name: str | None) -> Iterator[None]:
    """Has the backend native run those kernels meanwhile; None: the ones in use."""
    before = native.instruction_set()
    try:
        if name is not None:
            native.use_instruction_set(name)
        yield
    finally:
        if name is not None and before is not None:
            native.use_instruction_set(before)


def refused(backend: str) -> list[str]:
    """The inputs of each token and the settings that the backend does not compute."""
    module, names = backends.load(backend), (*DATA, *SETTINGS)
    return [name for name in names if not isinstance(module, str) and name not in module.OPTIONS]


def computed(backend: str) -> dict[str, list[str]]:
    """The values of these options to draw from, for those of which the backend does not compute all values."""
    return {name: [next(iter(OPTIONS[name]))] for name in refused(backend)}


def narrow(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def check(
    contract: Contract, q: Tensor, k: Tensor, v: Tensor, state: LinearAttentionState | None = None, *,
    combined: bool = False, every_set: bool = False, **how: Any,
) -> None:  # fmt: skip
    """Output, last state and all gradients against the equation's, given the same numbers.

    combined: within that tolerance of the contract. every_set: the backend native runs the kernels of each
    instruction set that this machine has, not of the one in use alone.
    """
    q, k, v = (narrow(x, contract.dtype) for x in (q, k, v))
    wide = torch.float64 if contract.dtype == torch.float64 else torch.float32
    how |= {name: narrow(how[name], wide) for name in DATA if name in how}
    if state is not None:
        state = replace(state, kv=state.kv.detach().to(wide))
    actual = []
    sets = native_sets(contract.backend) if every_set else [None]
    for name, backend in product(sets, contract.backends):
        with instruction_set(name):
            promised = replace(contract.in_use(), name=backend)
            actual.append((promised, everything(q, k, v, state, backend=backend, **how)))
            if backend in ("eager", "native"):  # the others compute the same where nothing is differentiated
                with torch.no_grad():
                    out = linear_rope_attention(q, k, v, state=state, backend=backend, **how)
                actual.append((promised, {"out": out}))
    equation = Equation()
    exact = how | {name: how[name].double() for name in DATA if name in how}
    widened = None if state is None else replace(state, kv=state.kv.double())
    expected = everything(q.double(), k.double(), v.double(), widened, call=equation, **exact)
    for promised, found in actual:
        assert found.keys() in (expected.keys(), {"out"})
        for name, x in found.items():
            assert_within(promised, name, x, expected[name], equation.sizes.out, combined)


def assert_within(
    contract: Contract, name: str, actual: Tensor, expected: Tensor, size: Tensor, combined: bool
) -> None:
    assert actual.shape == expected.shape, name
    if not expected.is_floating_point():
        assert torch.equal(actual, expected), name
    elif expected.numel():
        allowed = contract.allowed(name, expected, size)
        if combined:
            rounding = contract.rounding * expected.abs()  # of a result in half precision
            allowed = contract.combined * max(1.0, float(expected.abs().max())) + rounding
        error = (actual.double() - expected).abs() / allowed
        times = f"{float(error.max()):.3g} times what is allowed"
        assert bool((error <= 1).all()), f"{contract.name}: {name} is off by {times}"

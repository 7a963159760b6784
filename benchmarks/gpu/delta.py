"""The delta rule and a decay per unit, as in Gated DeltaNet and Kimi Delta Attention: errors, times, decoding steps.

Keys have length 1 and queries length d^-0.5. What a token erases it writes.
"""

from collections.abc import Callable, Iterator
from copy import copy
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.bench.cases import AttentionCase
from benchmarks.gpu.machine import Machine, Row, Shape, each, finite, whole
from benchmarks.gpu.operation import extra_memory, measured, step_row
from linrope.conformance.bounds import FACTOR, SHARE

GDN, KDA = "erase with gates", "erase, decay per unit"
GATED = (GDN, KDA)
RULES = ("erase", "decay per unit", *GATED)
CHECKED = 200  # tokens
SMALL = (1, 40, 1, 128)  # the same compiled kernels
# How far bfloat16 may be from float64: 16 roundings of 2^-8
HALF_TOLERANCE = 2.0**-4


class DeltaCase(AttentionCase):
    """Inputs of a rule, with random gates in float32."""

    def __init__(
        self, on: Machine, rule: str, shape: Shape, rotates: bool = True, dtype: torch.dtype | None = None
    ) -> None:
        b, n, h, d = shape
        unit = {"name": "unit", "query_factor": d**-0.5}
        super().__init__(n, b, h, d, on.device, dtype or on.dtype, feature_map=unit, backend=on.backend)
        if not rotates:
            self.options["rotary"] = None
        generator, self.data = torch.Generator(on.device).manual_seed(0), dict[str, Tensor]()
        units = [d // 2 if rotates else d] if "unit" in rule else []
        if "gates" in rule or units:
            gates = torch.randn(b, n, h, *units, generator=generator, device=on.device) + 3
            self.data["log_decay"] = F.logsigmoid(gates).requires_grad_()
        if "erase" in rule:
            shares = torch.rand(b, n, h, generator=generator, device=on.device)
            self.data["erase"] = self.data["write"] = shares.requires_grad_()
        self.options |= self.data

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return *self.inputs, *(x for name, x in self.data.items() if name != "write")

    def on_cpu(self, dtype: torch.dtype) -> "DeltaCase":
        """The same numbers, all of them in this dtype."""
        other, new = copy(self), {id(x): x.detach().to("cpu", dtype).requires_grad_() for x in self.leaves}
        q, k, v = (new[id(x)] for x in self.inputs)
        other.inputs, other.data = (q, k, v), {name: new[id(x)] for name, x in self.data.items()}
        other.options, other.g_out = self.options | other.data, self.g_out.to("cpu", dtype)
        return other

    def results(self, attend: Callable[[], Tensor]) -> dict[str, Tensor]:
        """out and the gradients, float64 on the CPU."""
        out = attend()
        found = out, *torch.autograd.grad(out, self.leaves, self.g_out.to(out.dtype))
        finite(*found)
        names = "out", "dq", "dk", "dv", *(f"d{name}" for name in self.data if name != "write")
        return {name: x.detach().cpu().double() for name, x in zip(names, found)}

    def exact(self, backend: str = "eager", dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """By "eager" in float64 on the CPU, which tests hold to the equation."""
        there = self.on_cpu(dtype)
        return there.results(partial(there.linrope, backend=backend))


def half_errors(case: DeltaCase, attend: Callable[[], Tensor]) -> Row:
    """The errors of out and of the gradients, relative to each. AssertionError: one is too large."""
    found = case.results(attend)
    return {name: whole(name, found[name], x, HALF_TOLERANCE) for name, x in case.exact().items()}


def check(on: Machine, rule: str, shape: Shape) -> Row:
    """The errors of "triton" and "eager": in float32 in units of the contract's bound, in half precision relative."""
    case, errors = DeltaCase(on, rule, shape, dtype=torch.float32), Row()
    half, exact, narrow = DeltaCase(on, rule, shape), case.exact(), case.exact("reference", torch.float32)
    for backend in (on.backend, "eager"):
        found = case.results(partial(case.linrope, backend=backend))
        for name, x in exact.items():
            error, other = (float((y[name] - x).abs().max()) for y in (found, narrow))
            share = error / (FACTOR * other + SHARE * float(x.abs().max()))
            errors[f"{backend}: {name}, of the bound"] = share
            assert share <= 1, f"{backend}: {name} is off: {share:.3g} times the bound"
        relative = half_errors(half, partial(half.linrope, backend=backend))
        errors |= {f"{backend}: {name}, half": error for name, error in relative.items()}
    return errors


def times(on: Machine, case: DeltaCase, attend: Callable[[], Tensor]) -> Row:
    row = measured(on, case, attend)
    return row | ({"extra_memory": extra_memory(case, attend)} if on.on_gpu else {})


def delta(on: Machine) -> Iterator[Row]:
    yield from each(RULES, partial(delta_row, on))
    steps = [(rule, rotates) for rule in GATED for rotates in (True, False)]
    yield from each(steps, lambda how: step_row(on, step_case(on, *how)))


def delta_row(on: Machine, rule: str) -> Row:
    errors = check(on, rule, on.sizes((1, CHECKED, 2, 128), SMALL))
    shape = on.sizes((8, 2048, 16, 128), SMALL)
    rotated, other = (DeltaCase(on, rule, shape, rotates) for rotates in (True, False))
    functions = {"not rotated": times(on, other, other.linrope)}
    return {"errors": errors, **times(on, rotated, rotated.linrope), "functions": functions}


def step_case(on: Machine, rule: str, rotates: bool) -> DeltaCase:
    """One token and 4,096 states."""
    return DeltaCase(on, rule, on.sizes((256, 1, 16, 128), (1, 1, 2, SMALL[3])), rotates)

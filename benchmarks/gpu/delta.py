"""The delta rule and a decay per feature, which have no GPU kernel yet: "eager" on the GPU, beside other libraries."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu.machine import MODES, Machine, Row, Shape, each, finite, whole
from linrope import Rotary, linear_rope_attention
from linrope.cli.bounds import FACTOR, SHARE

RULES = ("erase", "erase with gates", "decay per feature", "erase, decay per feature")
CHECKED = 600  # tokens
# How far bfloat16 may be from float64: 16 roundings of 2^-8
HALF_TOLERANCE = 2.0**-4


def inputs(rule: str, shape: Shape, device: str) -> dict[str, Tensor]:
    """q, k, v, and what the rule takes, float64. Keys have length 1, as in Gated DeltaNet and KDA."""
    b, n, h, d = shape
    new: dict[str, Any] = {"generator": torch.Generator(device).manual_seed(0), "device": device}
    q, k, v = (torch.randn(b, n, h, d, **new, dtype=torch.float64) for _ in range(3))
    found = {"q": F.normalize(q, dim=-1), "k": F.normalize(k, dim=-1), "v": v}
    if "erase" in rule:
        found["erase"] = found["write"] = torch.rand(b, n, h, **new, dtype=torch.float64)
    units = [d // 2] if "feature" in rule else []
    if "gates" in rule or units:
        found["log_decay"] = F.logsigmoid(torch.randn(b, n, h, *units, **new, dtype=torch.float64) + 3)
    return {name: x.requires_grad_() for name, x in found.items()}


def rounded(x: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """q, k and v in the dtype, the rest in float32 unless the dtype is float64."""
    wide = torch.promote_types(dtype, torch.float32)
    return {
        name: x[name].detach().to(dtype if name in ("q", "k", "v") else wide).requires_grad_() for name in x
    }


def attend(x: dict[str, Tensor], backend: str = "eager") -> Tensor:
    out: Tensor = linear_rope_attention(
        **x, feature_map=None, normalize=False, rotary=Rotary(x["q"].shape[3]), backend=backend
    )
    return out


def results(x: dict[str, Tensor], backend: str = "eager") -> dict[str, Tensor]:
    out = attend(x, backend)
    g_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return {"out": out.detach(), **dict(zip(x, torch.autograd.grad(out, [*x.values()], g_out)))}


def check(on: Machine, rule: str, shape: Shape) -> Row:
    """The errors on the device: in float32 in units of the contract's bound, in half precision relative."""
    exact_inputs = rounded(rounded(inputs(rule, shape, "cpu"), torch.float32), torch.float64)
    exact = results(exact_inputs)  # by "eager" in float64 on the CPU, which tests hold to the equation
    there = {name: x.detach().to(on.device) for name, x in exact_inputs.items()}
    row: Row = {"errors": {}}
    narrow = results(rounded(exact_inputs, torch.float32), "reference")
    found = results(rounded(there, torch.float32))
    finite(*found.values())
    for name, x in exact.items():
        error, other = (float((y[name].cpu().double() - x).abs().max()) for y in (found, narrow))
        allowed = FACTOR * other + SHARE * float(x.abs().max())
        row["errors"][f"{name}, of the bound"] = error / allowed
        assert error <= allowed, f"{name} is off: {error / allowed:.3g} times the bound"
    exact_inputs = rounded(rounded(exact_inputs, on.dtype), torch.float64)
    exact = results(exact_inputs)
    half = results(rounded({name: x.detach().to(on.device) for name, x in exact_inputs.items()}, on.dtype))
    for name, x in exact.items():
        row["errors"][f"{name}, half"] = whole(name, half[name].cpu(), x, HALF_TOLERANCE)
    return row


def delta(on: Machine) -> Iterator[Row]:
    yield from each(RULES, partial(delta_row, on))


def delta_row(on: Machine, rule: str) -> Row:
    row = check(on, rule, on.sizes((1, CHECKED, 2, 128), (1, 40, 1, 16)))
    shape = on.sizes((8, 2048, 16, 128), (1, 40, 1, 16))
    x = rounded(inputs(rule, shape, on.device), on.dtype)
    g_out = torch.randn_like(x["v"])
    runs = {
        "forward": torch.no_grad()(partial(attend, x)),
        "training": lambda: torch.autograd.grad(attend(x), [*x.values()], g_out),
    }
    return row | {"shape": shape} | {name: on.timed(runs[name]) for name in MODES}

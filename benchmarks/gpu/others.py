"""linrope beside flash-linear-attention and mamba-ssm, where these are installed.

equation 19 composed of fla's public functions, with its default rotation layout, and fla's linear attention alone
gates       out_i = sum_(j<=i) e^(L_i - L_j) <q_i, k_j> v_j, L_i = sum_(t<=i) a_t: neither rotation, map nor normalizer
delta rule  Gated DeltaNet and Kimi Delta Attention

fla's simple_gla takes a_t itself. mamba's SSD computes a_t = A dt_t and adds dt_t v_t, so it is called with A = -1,
dt = -a and v / dt. A failure of another library is reported and does not count as one of linrope.
"""

from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu.delta import inputs, rounded
from benchmarks.gpu.machine import MODES, TOLERANCE, Machine, Row, Shape, compare, each
from benchmarks.gpu.operation import case_of, measured
from linrope import Rotary, linear_rope_attention
from linrope.cli.bench.cases import AttentionCase

Function = Callable[[], Tensor]
EXACT: dict[str, Any] = {"feature_map": None, "normalize": False, "backend": "eager"}


def attempt(row: Row, name: str, measure: Callable[[], None]) -> None:
    try:
        measure()
    except Exception as error:
        why = "not installed: " if isinstance(error, ImportError) else ""
        row["not_run"][name] = why + f"{type(error).__name__}: {error}"[:300]


# Equation 19


def fla(on: Machine) -> Iterator[Row]:
    yield from each([on.sizes((8, 2048, 16, 64), (1, 20, 2, 64))], partial(fla_row, on))


def fla_row(on: Machine, shape: Shape) -> Row:
    case, row = case_of(on, shape), Row(functions={}, not_run={})
    (q, k, v), rotary = case.inputs, Rotary(case.dim, layout="half")
    cos, sin = (x[:, 0] for x in rotary.cos_sin(torch.arange(case.n, device=case.device), case.dtype))
    ours = partial(case.linrope, rotary=rotary)

    def route() -> Tensor:
        rotate = import_module("fla.modules.rotary").rotary_embedding
        phi, psi = F.elu(q) + 1, F.elu(k) + 1
        num, _ = linear_attn().chunk_linear_attn(
            rotate(phi, cos, sin), rotate(psi, cos, sin), v, scale=1.0, normalize=False
        )
        divide = import_module("fla.ops.linear_attn.utils").normalize_with_z_state
        out: Tensor = divide(num, phi, psi, 1.0, None, False, None)[0]
        return out

    def linear_attn() -> Any:
        return import_module("fla.ops.linear_attn")

    def measure() -> None:
        row["version"] = import_module("fla").__version__
        expected = case.forward(ours)
        compare("its route", case.forward(route), expected, 4 * TOLERANCE[case.dtype])
        row["functions"]["route"] = measured(on, case, route)
        alone = lambda: linear_attn().chunk_linear_attn(q, k, v, normalize=False)[0]  # noqa: E731
        row["functions"]["bare"] = measured(on, case, alone)

    row["functions"]["linrope"] = measured(on, case, ours)
    attempt(row, "fla", measure)
    return row


# Forget gates


def simple_gla(case: AttentionCase) -> tuple[AttentionCase, Function]:
    """The case whose leaves are differentiated, and the function; ImportError if fla is not installed."""
    (q, k, v), function = case.inputs, import_module("fla.ops.simple_gla").chunk_simple_gla
    return case, lambda: function(q, k, v, g=case.log_decay, scale=1.0)[0]


def ssd(case: AttentionCase) -> tuple[AttentionCase, Function]:
    function = import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
    assert case.log_decay is not None
    (q, k, v), ssd_case = case.inputs, copy(case)
    dt = (-case.log_decay).detach().requires_grad_()
    x = (v / dt[..., None]).to(v.dtype).detach().requires_grad_()
    ssd_case.inputs, ssd_case.log_decay = (q, k, x), dt
    a: Any = -dt.new_ones(case.heads)
    return ssd_case, lambda: function(x, dt, a, k, q, chunk_size=256)


def others(on: Machine) -> Iterator[Row]:
    full = [(8, 2048, 16, 64), (1, 65_536, 8, 64), (8, 2048, 16, 128)]
    yield from each(on.sizes(full, [(1, 40, 2, 64)]), partial(gated_row, on))


def gated_row(on: Machine, shape: Shape) -> Row:
    case, row = case_of(on, shape, gates=True), Row(functions={}, not_run={})
    assert case.log_decay is not None
    q, k, v, log = (x.detach()[-1:, :, -1:].double() for x in (*case.inputs, case.log_decay))
    exact: Tensor = linear_rope_attention(q, k, v, log_decay=log, **EXACT)
    bare = partial(case.linrope, rotary=None, feature_map=None, normalize=False)
    compare("linrope", case.forward(bare)[-1:, :, -1:], exact, TOLERANCE[case.dtype])
    row["functions"]["linrope bare"] = measured(on, case, bare)
    for name, make in {"simple_gla": simple_gla, "mamba SSD": ssd}.items():

        def measure(name: str = name, make: Any = make) -> None:
            theirs, attend = make(case)
            compare(name, theirs.forward(attend)[-1:, :, -1:], exact, 4 * TOLERANCE[case.dtype])
            row["functions"][f"{name} bare"] = measured(on, theirs, attend)

        attempt(row, name, measure)
    return row


# The delta rule


def fla_delta(on: Machine) -> Iterator[Row]:
    cases = [(rule, n) for n in on.sizes(((8, 2048), (1, 16_384)), ((1, 40),)) for rule in ("gdn", "kda")]
    yield from each(cases, partial(fla_delta_row, on))


def fla_delta_row(on: Machine, case: tuple[str, tuple[int, int]]) -> Row:
    """Time of fla's function with 16 heads of 128, and of "eager" in linrope, with keys of length 1."""
    (rule, size), row = case, Row(functions={}, not_run={})
    shape: Shape = (*size, *on.sizes((16, 128), (1, 16)))
    x = rounded(inputs("erase with gates", shape, on.device), on.dtype)
    if rule == "kda":  # a number for each feature
        x["log_decay"] = x["log_decay"].detach()[..., None].repeat(1, 1, 1, shape[3]).requires_grad_()
    x["write"] = x["erase"]
    leaves = [x[name] for name in ("q", "k", "v", "log_decay", "erase")]
    g_out = torch.randn_like(x["v"])

    def theirs() -> Tensor:
        names = {
            "gdn": ("gated_delta_rule", "chunk_gated_delta_rule"),
            "kda": ("kda", "chunk_kda"),
        }
        module, name = names[rule]
        q, k, v, g, beta = leaves
        out: Tensor = getattr(import_module(f"fla.ops.{module}"), name)(q, k, v, g, beta, scale=1.0)[0]
        return out

    def ours() -> Tensor:
        out: Tensor = linear_rope_attention(**x, **EXACT)
        return out

    def measure(name: str, attend: Callable[[], Tensor], times: Callable[..., Row]) -> None:
        with torch.no_grad():
            last = (slice(-1, None), slice(None), slice(-1, None))
            wide = {key: y.detach()[last].double() for key, y in x.items()}
            exact: Tensor = linear_rope_attention(**wide, **EXACT)
            row[f"{name}, error"] = compare(name, attend()[last], exact, 8 * TOLERANCE[on.dtype])
        runs = {
            "forward": torch.no_grad()(attend),
            "training": lambda: torch.autograd.grad(attend(), leaves, g_out),
        }
        row["functions"][name] = {key: y for mode in MODES for key, y in times(mode, runs[mode]).items()}

    measure("eager", ours, lambda mode, run: {mode: on.timed(run)})
    attempt(row, "fla", partial(measure, "fla", theirs, on.both_times))
    return row

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

from benchmarks.bench.cases import AttentionCase
from benchmarks.gpu.delta import (
    CHECKED,
    GDN,
    HALF_TOLERANCE,
    KDA,
    SMALL,
    DeltaCase,
    half_errors,
    step_case,
    times,
)
from benchmarks.gpu.machine import TOLERANCE, Machine, Row, Shape, compare, each, whole
from benchmarks.gpu.operation import case_of, measured, share_of_copy, step_row
from linrope import Rotary, linear_rope_attention
from linrope.operation.from_sums import state_from_sums

Function = Callable[[], Tensor]
EXACT: dict[str, Any] = {"feature_map": None, "normalize": False, "backend": "eager"}
FLA = {
    GDN: ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    KDA: ("fla.ops.kda", "chunk_kda", "fused_recurrent_kda"),
}


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
    cases = [(rule, n) for n in on.sizes(((8, 2048), (1, 16_384)), ((1, 40),)) for rule in FLA]
    yield from each(cases, partial(fla_delta_row, on))
    yield from each(FLA, partial(fla_step_row, on))


def by_fla(rule: str, which: int, case: DeltaCase, **state: Any) -> Tensor:
    """out by fla's function; which: 1 for that of sequences, 2 for that of steps. It scales queries by d^-0.5."""
    function = getattr(import_module(FLA[rule][0]), FLA[rule][which])
    gates = {"g": case.data["log_decay"], "beta": case.data["erase"]}
    out: Tensor = function(*case.inputs, **gates, use_qk_l2norm_in_kernel=True, **state)[0]
    return out


def fla_delta_row(on: Machine, how: tuple[str, tuple[int, int]]) -> Row:
    """Times of linrope, with and without rotation, and of fla with 16 heads of 128; first the errors of 2 heads."""
    (rule, size), row, outs = how, Row(errors={}, functions={}, not_run={}), []

    def measure(name: str, attend: Callable[[DeltaCase], Tensor], rotates: bool = False) -> None:
        shapes = on.sizes(((1, CHECKED, 2, 128), (*size, 16, 128)), (SMALL, SMALL))
        short, case = (DeltaCase(on, rule, shape, rotates) for shape in shapes)
        errors = half_errors(short, partial(attend, short))
        row["errors"] |= {f"{name}: {key}": error for key, error in errors.items()}
        run = partial(attend, case)
        if not rotates:
            outs.append(case.forward(run))
            row["errors"][f"{name}: beside linrope"] = whole(name, outs[-1], outs[0], 2 * HALF_TOLERANCE)
        row["functions"][name] = times(on, case, run)

    measure("linrope", DeltaCase.linrope)
    measure("linrope, rotated", DeltaCase.linrope, rotates=True)
    attempt(row, "fla", partial(measure, "fla", partial(by_fla, rule, 1)))
    return row


@torch.no_grad()
def fla_step_row(on: Machine, rule: str) -> Row:
    """A step from 4,096 states by both. fla's writes the next state elsewhere."""
    case, row = step_case(on, rule, rotates=False), Row(not_run={})
    row["functions"] = {"linrope": step_row(on, case)}

    def measure() -> None:
        (b, _, h, d), wide = case.inputs[2].shape, case.on_cpu(torch.float64)
        kv = torch.randn(b, h, d, d, device=on.device)
        state = state_from_sums(kv.cpu().double(), feature_map=case.options["feature_map"])
        run = partial(by_fla, rule, 2, case, initial_state=kv, output_final_state=True)
        row["error"] = compare(
            "its step", run().cpu(), wide.linrope(state=state, backend="eager"), HALF_TOLERANCE
        )
        graph = on.timed(on.captured(run))
        row["functions"]["fla"] = {"graph": graph, "share of a copy": share_of_copy(on, graph, kv.nbytes)}

    attempt(row, "fla", measure)
    return row

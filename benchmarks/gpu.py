"""Measures linrope on one GPU: its floor, softmax attention, other libraries, gates, decoding, launches, a model.

    PYTHONPATH=.:kernels python3 benchmarks/gpu.py --out benchmarks/results/gpu-name-date.json

Every case is checked before it is timed. A case that fails is reported and not timed, and the exit status
is 1. Softmax attention rotates q and k inside the timed region with plain PyTorch operations, as its users
do. "bare" means without rotation; for flash-linear-attention also without feature map and normalizer.
"""

import argparse
import json
import math
import statistics
import subprocess
import time
from collections.abc import Callable
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_host import MODES, Row, Shape, host_row
from benchmarks.gpu_model import model_row
from benchmarks.gpu_others import OTHERS, bare
from linrope import LinearAttentionState, Rotary, linear_rope_attention
from linrope.cli.bench.benchmark import machine
from linrope.cli.bench.cases import AttentionCase

SECTIONS = ("linrope", "overtaking", "decode", "softmax", "fla", "gated", "host", "model")
TOLERANCE = {torch.bfloat16: 4 * 2.0**-8, torch.float16: 4 * 2.0**-11}
BACKENDS = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION")
WINDOW = 512  # tokens per comparison


def shapes(section: str, tiny: bool) -> list[Shape]:
    if tiny:
        return [(1, n, 2, 16) for n in {"overtaking": (16, 32), "decode": (1,)}.get(section, (40,))]
    if section == "overtaking":
        return [(8, n, 16, 64) for n in (256, 512, 1024, 2048, 4096)]
    if section == "decode":
        return [(heads // 16, 1, 16, d) for d in (64, 128) for heads in (128, 512, 1024, 4096)]
    if section == "host":
        return [(b, 512, 16, 64) for b in (1, 8)]
    if section == "model":
        return [(b, n, 16, 64) for b, n in ((8, 1024), (2, 4096), (1, 16_384))]
    if section == "gated":
        return [(*size, 64) for size in ((8, 2048, 16), (4, 8192, 16), (1, 65_536, 8))]
    sizes = ((8, 2048, 16), (4, 8192, 16), (1, 8192, 96), (1, 65_536, 8), (2, 131_072, 16))
    return [(*size, d) for d in (64, 128) for size in sizes]


def floor_bytes(d: int, e: int) -> dict[str, int]:
    """The fewest bytes per token and head, in bfloat16; "step": per decoding step and head, in float32."""
    return {"forward": 2 * (2 * d + 2 * e), "backward": 2 * (6 * d + 5 * e) + 12, "step": 8 * d * e}


def timed(function: Callable[[], Any], device: str, flush: bool = False) -> Row:
    """Times in ms: by events on a GPU, one run by the wall clock on a CPU (for tests only)."""
    if device == "cpu":
        start = time.perf_counter()
        function()
        times = [1e3 * (time.perf_counter() - start)]
    else:
        function()  # compiles
        (once,) = times_by_events(function, 1, flush)
        runs = 1 if once > 200 else max(10, min(100, int(200 / once)))
        # The GPU's clocks are low in the first runs.
        times = times_by_events(function, runs + runs // 2, flush)[runs // 2 :]
    median = statistics.median(times)
    return {"median_ms": median, "min_ms": min(times), "max_ms": max(times), "runs": len(times)}


def times_by_events(function: Callable[[], Any], runs: int, flush: bool) -> list[float]:
    """flush: reads another tensor before each run, which empties the L2 cache."""
    other = torch.zeros(2**26 if flush else 1, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
    for start, end in events:
        other.sum()
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def ceilings(device: str, tiny: bool) -> Row:
    """The best rates of the device: bytes read and written by a copy, and bfloat16 products."""
    new: Row = {"device": device, "dtype": torch.bfloat16}
    source, size = torch.randn(1000 if tiny else 2**30, **new), 64 if tiny else 8192
    copy = timed(partial(torch.empty_like(source).copy_, source), device)
    a, b, out = torch.randn(3, size, size, **new)
    product = timed(partial(torch.mm, a, b, out=out), device)
    copy |= {"rate": 2e3 * source.nbytes / copy["median_ms"], "unit": "byte/s"}
    product |= {"rate": 2e3 * size**3 / product["median_ms"], "unit": "flop/s"}
    return {"copy": copy, "product": product}


def check(case: AttentionCase, attend: Callable[[], Tensor]) -> Row:
    """Compares the last head's output and gradients with float64; also gives the output's error in units of
    the contract's bound. AssertionError: an error is too large, or a number of any head is not finite."""
    case.g_out.new_full((4 * case.g_out.numel(),), math.nan)  # freed at once: fresh memory holds NaN
    results = attend(), *case.training(attend)
    assert all(bool(x.isfinite().all()) for x in results), "not finite"
    actual = [x.detach()[-1:, :, -1:].double().cpu() for x in results]
    wide = (x.detach()[-1:, :, -1:].double().cpu() for x in (*case.inputs, case.g_out))
    q, k, v, g_out = (x.requires_grad_() for x in wide)
    linear = partial(linear_rope_attention, backend="eager")  # in time linear in n
    out = linear(q, k, v, rotary=case.rotary)
    exact = [x.detach() for x in (out, *torch.autograd.grad(out, (q, k, v), g_out))]
    with torch.no_grad():
        start = (x[:, :WINDOW] for x in (q, k, v))
        exact[0][:, :WINDOW] = linear_rope_attention(*start, rotary=case.rotary, backend="reference")
        # M_i = sum_j |R phi(q_i)|^T |R psi(k_j)| |v_j| / den_i
        positions = torch.arange(case.n, device="cpu")
        phi_hat, psi_hat = (case.rotary(F.elu(x) + 1, positions).abs() for x in (q, k))
        magnitude = linear(phi_hat, psi_hat, v.abs(), feature_map=None, normalize=False)
        magnitude /= linear(q, k, torch.ones_like(v[..., :1]), normalize=False)
    bound = float(((actual[0] - exact[0]).abs() / magnitude).max()) / TOLERANCE[case.dtype]
    assert bound <= 1, f"out is off: {bound:.3g} times the bound"
    tensors = zip(("out", "dq", "dk", "dv"), actual, exact)
    return {"bound": bound} | {name: compare(name, x, y, TOLERANCE[case.dtype]) for name, x, y in tensors}


def compare(name: str, actual: Tensor, expected: Tensor, tolerance: float) -> float:
    """The largest |actual - expected| / |expected| of all windows of tokens, in the 2-norm. Windows, because
    later tokens have far smaller outputs and gradients. AssertionError: it exceeds the tolerance."""
    windows = zip(actual.double().split(WINDOW, 1), expected.double().split(WINDOW, 1))
    error = float(torch.stack([(x - y).norm() / y.norm() for x, y in windows]).max())  # NaN if one is
    assert error <= tolerance, f"{name} is off: {error:.3g} of its size, expected at most {tolerance:.3g}"
    return error


def captured(run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Replays a CUDA graph of a call, without the time to launch each kernel from Python; and the call's results."""
    with torch.cuda.stream(torch.cuda.Stream()):
        run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        results = run()
    return graph.replay, results


def measured(case: AttentionCase, attend: Callable[[], Tensor], modes: tuple[str, ...] = MODES) -> Row:
    """Times of both modes, with an empty L2 cache if the inputs would fit into it; on a GPU also in a CUDA graph."""
    small, row = sum(x.nbytes for x in case.inputs) < 100e6, Row()
    for mode in modes:
        run = partial(getattr(case, mode), attend)
        row[mode] = timed(run, case.device, small)
        if case.device == "cuda":
            replay, _ = captured(run)
            row[f"{mode} graph"] = timed(replay, case.device, small)
    return row


def linrope_row(case: AttentionCase, bandwidth: float) -> Row:
    """Times, the floor relative to those in a CUDA graph, and a training step's memory beyond inputs, out and
    gradients."""
    attend = partial(linear_rope_attention, *case.inputs, rotary=case.rotary, backend="triton")
    row = {"errors": check(case, attend), **measured(case, attend)}
    forward, training = (row.get(f"{mode} graph", row[mode])["median_ms"] for mode in MODES)
    floor, per_byte = floor_bytes(case.dim, case.dim), case.tokens * case.heads / bandwidth * 1e3
    row |= {"forward_ms": forward, "forward_floor": floor["forward"] * per_byte / forward}
    row |= {"training_ms": training, "backward_floor": floor["backward"] * per_byte / (training - forward)}
    if case.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before, out = torch.cuda.memory_allocated(), attend()
        results = out, *torch.autograd.grad(out, case.inputs, case.g_out)
        extra = torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in results)
        row["extra_memory"] = extra / sum(x.nbytes for x in (*results, *case.inputs, case.g_out))
    return row


def check_softmax(case: AttentionCase) -> None:
    """AssertionError: the first rows of the last head differ from softmax attention in float64."""
    q, k, v = (x.detach()[-1:, :WINDOW, -1:].double().cpu() for x in case.inputs)
    q, k = (case.rotary(x, torch.arange(x.shape[1], device="cpu")).transpose(1, 2) for x in (q, k))
    with sdpa_kernel(SDPBackend.MATH):
        exact = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True).transpose(1, 2)
    compare("softmax", case.forward(case.softmax)[-1:, :WINDOW, -1:].cpu(), exact, TOLERANCE[case.dtype])


def softmax_row(case: AttentionCase, backends: tuple[str, ...]) -> Row:
    """Times of the available backends; only the forward pass of a backend half as fast as an earlier one."""
    row: Row = {"functions": {}, "not_run": {}}

    def bare() -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in case.inputs)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    for name in backends:
        try:
            with sdpa_kernel(getattr(SDPBackend, name)):
                check_softmax(case)
                row["functions"][name] = measured(case, case.softmax, ("forward",))
                times = [x["forward"]["median_ms"] for key, x in row["functions"].items() if key in backends]
                if times[-1] <= 2 * min(times):
                    row["functions"][name] |= measured(case, case.softmax, ("training",))
                    row["functions"][f"{name} bare"] = measured(case, bare)
        except (RuntimeError, AssertionError) as error:  # no kernel for these inputs, no memory, ..
            row["not_run"][name] = repr(error)[:200]
    return row


def fla_row(case: AttentionCase) -> Row:
    """Times of eq. 19 in flash-linear-attention's public functions, with its default rotation layout."""
    row: Row = {"functions": {}, "not_run": {}}
    (q, k, v), rotary = case.inputs, Rotary(case.dim, layout="half")
    cos, sin = (x[:, 0] for x in rotary.cos_sin(torch.arange(case.n, device=case.device), case.dtype))

    def route() -> Tensor:
        phi, psi = F.elu(q) + 1, F.elu(k) + 1
        phi_hat, psi_hat = rotary_embedding(phi, cos, sin), rotary_embedding(psi, cos, sin)
        num, _ = chunk_linear_attn(phi_hat, psi_hat, v, scale=1.0, normalize=False)
        return normalize_with_z_state(num, phi, psi, 1.0, None, False, None)[0]

    try:
        import fla
        from fla.modules.rotary import rotary_embedding
        from fla.ops.linear_attn import chunk_linear_attn
        from fla.ops.linear_attn.utils import normalize_with_z_state

        row["version"] = fla.__version__
        ours = partial(linear_rope_attention, q, k, v, rotary=rotary, backend="triton")
        compare("its route", case.forward(route), case.forward(ours), 4 * TOLERANCE[case.dtype])
        row["functions"]["route"] = measured(case, route)
        row["functions"]["bare"] = measured(case, lambda: chunk_linear_attn(q, k, v, normalize=False)[0])
    except Exception as error:  # a failure of that library is reported and does not count as one of linrope
        why = "not installed: " if isinstance(error, ImportError) else ""
        row["not_run"]["fla"] = why + repr(error)[:200]
    return row


def gated_row(case: AttentionCase) -> Row:
    """Times with a forget gate per head: of the whole equation, and bare, as in other libraries."""
    row: Row = {"functions": {}, "not_run": {}}
    assert case.log_decay is not None
    part = [x.detach()[-1:, :, -1:].double().cpu() for x in (*case.inputs, case.log_decay)]
    wide = copy(case)
    wide.inputs, wide.log_decay = (part[0], part[1], part[2]), part[3]
    options = {"rotary": case.rotary, "log_decay": part[3], "backend": "eager"}
    with torch.no_grad():
        full, exact = linear_rope_attention(*part[:3], **options), bare(wide, "eager")
    ours: dict[str, Callable[[], Tensor]] = {
        "linrope": partial(case.linrope, backend="triton"), "linrope bare": partial(bare, case)
    }  # fmt: skip
    for (name, attend), expected in zip(ours.items(), (full, exact)):
        compare(name, case.forward(attend)[-1:, :, -1:].cpu(), expected, TOLERANCE[case.dtype])
        row["functions"][name] = measured(case, attend)
    for name, make in OTHERS.items():
        try:
            theirs, attend = make(case)
            compare(name, theirs.forward(attend)[-1:, :, -1:].cpu(), exact, 4 * TOLERANCE[case.dtype])
            row["functions"][f"{name} bare"] = measured(theirs, attend)
        except Exception as error:  # their failures are reported and do not count as one of linrope
            row["not_run"][name] = ("not installed: " if isinstance(error, ImportError) else "") + repr(
                error
            )[:200]
    times = row["functions"]["linrope"]
    row |= {f"{mode}_ms": times.get(f"{mode} graph", times[mode])["median_ms"] for mode in MODES}
    return row


@torch.no_grad()
def decode_row(shape: Shape, device: str, dtype: torch.dtype, bandwidth: float) -> Row:
    """A step of many layers, whose states together exceed the L2 cache, as in a model."""
    b, _, h, d = shape
    token = torch.randn(3, *shape, device=device, dtype=dtype)
    attend = partial(linear_rope_attention, rotary=Rotary(d), return_state=True)
    step = partial(attend, *token, backend="triton")
    _, first = step()
    kv, z = torch.randn_like(first.kv), 1000 + torch.rand_like(first.z)
    state = LinearAttentionState(kv, z, first.position + 1000, first.identity)
    layers = [state.clone() for _ in range(min(128, int(256e6 / kv.nbytes) + 1) if device == "cuda" else 2)]
    exact, end = attend(*token.double(), state=state.to(dtype=torch.float64), backend="reference")
    out, after = step(state=layers[0].donate())
    assert after.kv is layers[0].kv, "the state is not updated in place"
    compare("out", out, exact, TOLERANCE[dtype])
    compare("kv", after.kv, end.kv, 1e-5)
    compare("z", after.z, end.z, 1e-6)

    def run() -> list[Tensor]:
        return [step(state=layer.donate())[0] for layer in layers]

    row: Row = {"layers": len(layers), "eager": timed(run, device)}
    if device == "cuda":
        replay, outs = captured(run)
        exact, _ = step(state=layers[-1].clone().donate())
        replay()
        assert torch.equal(outs[-1], exact), "the CUDA graph gives another output"
        row["graph"] = timed(replay, device)
    for name in [x for x in ("eager", "graph") if x in row]:
        seconds = row[name]["median_ms"] / 1e3 / len(layers)
        row[f"{name} tokens/s"] = b / seconds
        row[f"{name} floor"] = floor_bytes(d, d)["step"] * b * h / seconds / bandwidth
    return row


def speedups(functions: Row, base: Row) -> Row:
    """The time of the fastest function relative to linrope's, for the whole equation and bare."""
    ratios: Row = {}
    for name, times in functions.items():
        for mode, x in times.items():
            key = f"bare {mode} x" if name.endswith("bare") else f"{mode} x"
            ratios[key] = min(ratios.get(key, math.inf), x["median_ms"] / base[mode]["median_ms"])
    return ratios


def speedup_names(device: str) -> list[str]:
    """The names that speedups gives; on a GPU also those in a CUDA graph."""
    graphs = ("", " graph") if device == "cuda" else ("",)
    return [f"{bare}{mode}{graph} x" for bare in ("", "bare ") for graph in graphs for mode in MODES]


def overtaking(rows: list[Row], name: str) -> int | None:
    """The smallest length from which on the speed-up exceeds 1; a missing one counts as smaller."""
    slower = [i for i, row in enumerate(rows) if not row.get("speedups", {}).get(name, 0) > 1]
    faster = rows[max(slower, default=-1) + 1 :]
    return faster[0]["shape"][1] if faster else None


def measure(result: Row, section: str, cases: list[Shape], row_of: Callable[..., Row], end: float) -> None:
    """Adds a section's rows to the result, as long as another row like the last one fits into the budget."""
    previous, result[section] = 0.0, []
    for shape in cases:
        start, row = time.monotonic(), Row(shape=list(shape))
        if start + previous > end:
            row["skipped"] = "over the budget"
        else:
            try:
                row |= row_of(section, shape)
            except Exception as error:  # go on with the other cases
                row["failure"] = repr(error)[:200]
            previous = time.monotonic() - start
            print(f"{section} {shape}: {previous:.1f} s {row.get('not_run') or ''}", flush=True)
        result[section].append(row)


def table(result: Row) -> str:
    """The figures as text, one line for each case."""
    lines = []
    for section in (x for x in SECTIONS if x in result):
        every = [row | row.get("speedups", {}) for row in result[section]]
        figures = [{name: x for name, x in row.items() if isinstance(x, float)} for row in every]
        names = list(dict.fromkeys(name for found in figures for name in found))
        lines.append(f"{section:<21}" + "".join(f"{name:>17}" for name in names))
        for row, found in zip(result[section], figures):
            cells = "".join(f"{found.get(name, math.nan):17.4g}" for name in names)
            other = row.get("failure") or row.get("skipped")
            lines.append(f"{row['shape']!s:<21}" + (other or cells or str(row.get("not_run"))))
    lines += [f"{name}: {x['rate']:.4g} {x['unit']}" for name, x in result["ceilings"].items()]
    return "\n".join([*lines, f"linrope overtakes softmax attention at n: {result['overtakes']}"])


def main(arguments: list[str] | None = None) -> int:
    started, today = time.monotonic(), time.strftime("%Y-%m-%d")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(f"benchmarks/results/gpu-{today}.json"))
    parser.add_argument("--budget", type=float, default=420, help="seconds; later cases are skipped")
    parser.add_argument("--commit", help="the commit of the code, if there is no git")
    parser.add_argument("--only", nargs="+", default=SECTIONS, choices=SECTIONS)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="a test of this script: small shapes")
    options = parser.parse_args(arguments)
    device, environment = options.device, machine() | {"triton": triton.__version__, "device": options.device}
    backends = BACKENDS if device == "cuda" else ("MATH",)
    dtype = torch.bfloat16 if device == "cuda" else torch.float16  # Triton's interpreter has no bfloat16
    if device == "cuda":
        driver = subprocess.getoutput("nvidia-smi --query-gpu=driver_version --format=csv,noheader")
        environment |= {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "driver": driver}
    environment["commit"] = options.commit or environment["commit"]
    result: Row = {"machine": environment, "date": today, "ceilings": ceilings(device, options.tiny)}
    bandwidth, linrope = result["ceilings"]["copy"]["rate"], {}

    def row_of(section: str, shape: Shape) -> Row:
        if section == "decode":
            return decode_row(shape, device, dtype, bandwidth)
        if section == "model":
            return model_row(shape, device, dtype, timed)
        b, n, h, d = shape
        case, row = AttentionCase(n, b, h, d, device, dtype, gates=section == "gated"), {}
        if section == "gated":
            return gated_row(case)
        if section == "host":
            return host_row(case)
        if section in ("linrope", "overtaking"):
            row = linrope[shape] = linrope_row(case, bandwidth)
        if section in ("overtaking", "softmax"):
            row = row | softmax_row(case, backends)
        if section == "fla":
            row = fla_row(case)
        if section != "linrope" and shape in linrope:
            row["speedups"] = speedups(row["functions"], linrope[shape])
        return row

    options.out.parent.mkdir(parents=True, exist_ok=True)
    for section in (x for x in SECTIONS if x in options.only):
        measure(result, section, shapes(section, options.tiny), row_of, started + options.budget)
        result["overtakes"] = {x: overtaking(result.get("overtaking", []), x) for x in speedup_names(device)}
        # Written after each section, because a run may be cut short.
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result), options.out, sep="\n")
    return int(any("failure" in row for section in SECTIONS for row in result.get(section, [])))


if __name__ == "__main__":
    raise SystemExit(main())

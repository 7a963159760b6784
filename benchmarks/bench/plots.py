"""Plots a benchmark: tokens per second by length, and the time of a layer's decoding step by position."""

from pathlib import Path
from typing import Any

from matplotlib.ticker import FuncFormatter, LogLocator

from benchmarks.bench.report import times
from linrope.cli.charts import LINES, LINROPE, SOFTMAX, charts, legend_below, save


def plot(result: dict[str, Any], path: Path) -> None:
    """Plots all sides in both modes, and decoding in a third panel if it was measured."""
    decode = result["decode"]
    figure, axes = charts(21 if decode else 14, 6.8, 3 if decode else 2)
    axes[1].sharey(axes[0])
    for axis, mode, title in zip(axes, ("forward", "training"), ("forward", "forward + backward")):
        _throughput(axis, result["attention"], mode, result["case"]["batch"])
        axis.set_title(title)
    axes[0].set_ylabel("tokens per second")
    axes[1].tick_params(labelleft=False)
    if decode:
        _steps(axes[2], decode)
    legend_below(figure, 3, axes[0].get_legend_handles_labels()[0])
    figure.suptitle(_caption(result), fontsize=14)
    save(figure, path)


def plot_family(result: dict[str, Any], path: Path) -> None:
    """Plots the time per token of one of transformers' models with and without linrope."""
    rows = [row for row in result["rows"] if row["batch"] == 1]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    figure, axes = charts(6 * len(kinds), 5.6, len(kinds))
    for axis, kind in zip(axes, kinds, strict=True):
        cases = [row for row in rows if row["kind"] == kind]
        lengths = [row["length"] for row in cases]
        for side, color in (("linrope", LINROPE), ("transformers", SOFTMAX)):
            per_call = [1 if kind == "decoding" else row["length"] for row in cases]
            spent = [row["seconds"][side] * 1e3 / n for row, n in zip(cases, per_call, strict=True)]
            axis.plot(lengths, spent, "o-", label=side, color=color)
        for row, y in zip(cases, axis.lines[-1].get_ydata(), strict=True):
            ratio = times(row["seconds"]["transformers"] / row["seconds"]["linrope"])
            axis.annotate(ratio, (row["length"], y), (0, 8), textcoords="offset points", ha="center")
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [_short(n) for n in lengths])
        axis.margins(x=0.12)
        axis.set_ylim(0, 1.15 * max(axis.lines[-1].get_ydata()))
        axis.grid()
        axis.set_title(kind)
        axis.set_xlabel("tokens" if kind != "decoding" else "tokens before the step")
    axes[0].set_ylabel("milliseconds per token")
    legend_below(figure, 2, axes[0].get_legend_handles_labels()[0])
    machine = result["machine"]
    figure.suptitle(
        f"{result['family']} of transformers, {result['parameters'] / 1e6:.0f} M parameters, {result['dtype']}, "
        f"{machine['cpu']}, {machine['threads']} thread{'s' if machine['threads'] > 1 else ''}, {machine['clock']}",
        fontsize=14,
    )
    save(figure, path)


def _caption(result: dict[str, Any]) -> str:
    machine, case = result["machine"], result["case"]
    groups = "" if case["kv_heads"] == case["heads"] else f" ({case['kv_heads']} for keys and values)"
    parts = [f"{case['batch']} x {case['heads']} heads{groups} of {case['dim']}", case["dtype"]]
    fmap = case["feature_map"] if isinstance(case["feature_map"], str) else case["feature_map"]["name"]
    parts += [
        fmap,
        *([f"decay {case['decay']}"] if case["decay"] else []),
        *(["gates"] if case["gates"] else []),
    ]
    on_cpu = machine["device"] == "cpu"
    threads = f"{machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"
    return ", ".join(
        [*parts, *([machine["cpu"], threads] if on_cpu else [machine["device"]]), machine["clock"]]
    )


def _throughput(axis: Any, rows: list[dict[str, Any]], mode: str, batch: int) -> None:
    lines = [
        (
            "linear attention with RoPE (linrope)",
            LINROPE,
            [r[mode]["linrope_tokens_per_second"] for r in rows],
        ),
        (
            f"softmax attention with RoPE (SDPA, {rows[0]['softmax_backend']})",
            SOFTMAX,
            [r[mode]["softmax_tokens_per_second"] for r in rows],
        ),
    ]
    names = dict.fromkeys(name for row in rows for name in row[mode]["peer_seconds"])
    for name, color in zip(names, LINES[2:]):
        seconds = [row[mode]["peer_seconds"].get(name) for row in rows]
        rates = [batch * row["n"] / x if x else None for row, x in zip(rows, seconds, strict=True)]
        lines.append((f"{name}, no rotation", color, rates))
    lengths = [row["n"] for row in rows]
    for name, color, rates in lines:
        points = [(n, rate) for n, rate in zip(lengths, rates, strict=True) if rate]
        if points:
            axis.loglog(*zip(*points, strict=True), "o-", label=name, color=color)
    best = [row for row in rows if row[mode]["ratio"]]
    if best:
        last = best[-1]
        _mark(axis, last[mode]["ratio"], last["n"], last[mode]["softmax_tokens_per_second"], -14)
    _dress(axis, lengths)
    axis.set_xlabel("sequence length N")


def _steps(axis: Any, rows: list[dict[str, Any]]) -> None:
    positions = [row["position"] for row in rows]
    for key, color in (("linrope_layer_seconds", LINROPE), ("softmax_layer_seconds", SOFTMAX)):
        axis.loglog(positions, [row[key] * 1e6 for row in rows], "o-", color=color)
    last = rows[-1]
    _mark(axis, last["layer_ratio"], last["position"], last["softmax_layer_seconds"] * 1e6, 2)
    _dress(axis, positions)
    axis.set_title("decoding, one token of a layer")
    axis.set_xlabel("tokens before it (state, or key/value cache)")
    axis.set_ylabel("microseconds")


def _mark(axis: Any, ratio: float, x: float, y: float, up: int) -> None:
    """Writes linrope's advantage left of a point, ``up`` points above it, so that it stays inside the axes."""
    text = f"linrope: {times(ratio)}"
    axis.annotate(text, (x, y), (-8, up), textcoords="offset points", ha="right", color=LINROPE)


def _dress(axis: Any, ticks: list[int]) -> None:
    shown = ticks[:1]
    for n in ticks:
        if n > 1.4 * shown[-1]:  # closer labels would overlap
            shown.append(n)
    shown = shown[:: -(-len(shown) // 12)]
    axis.set_xticks(shown, [_short(n) for n in shown])
    axis.minorticks_off()
    low, high = axis.get_ylim()
    if high < 100 * low:  # one label per decade would be too few
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _decimal(y)))
    axis.margins(x=0.05, y=0.1)
    axis.grid(which="major")


def _short(n: int) -> str:
    for size, letter in ((2**20, "M"), (2**10, "k")):
        if n % size == 0:
            return f"{n // size}{letter}"
    return str(n)


def _decimal(y: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if y >= size:
            return f"{y / size:g}{letter}"
    return f"{y:g}"

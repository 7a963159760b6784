"""Benchmark results as tables on the terminal and as a plot."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def attention_table(rows: list[dict[str, Any]], mode: str, name: str) -> Table:
    table = Table(title=f"Causal attention with RoPE, (1, N, 8, 64) float32: {name}")
    columns = ("N", "linrope tok/s", "softmax tok/s", "ratio", "eager", "MB", "softmax MB")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        part = row[mode]
        slow = part["softmax_seconds"] is None
        table.add_row(
            f"{row['n']:,}",
            f"{part['linrope_tokens_per_second']:,.0f}",
            "too long" if slow else f"{part['softmax_tokens_per_second']:,.0f}",
            "" if slow else f"{part['ratio']:.2f}x",
            f"{part['eager_seconds'] / part['linrope_seconds']:.2f}x",
            _megabytes(part["linrope_bytes"]),
            _megabytes(part["softmax_bytes"]),
        )
    return table


def decode_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Decoding, one token after so many, 8 heads of 64, float32")
    for name in (
        "position",
        "op us",
        "donated",
        "softmax",
        "ratio",
        "layer us",
        "softmax",
        "ratio",
        "cache MB",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            f"{row['position']:,}",
            f"{row['linrope_seconds'] * 1e6:.0f}",
            f"{row['linrope_donated_seconds'] * 1e6:.0f}",
            f"{row['softmax_seconds'] * 1e6:.0f}",
            f"{row['ratio']:.2f}x",
            f"{row['linrope_layer_seconds'] * 1e6:.0f}",
            f"{row['softmax_layer_seconds'] * 1e6:.0f}",
            f"{row['layer_ratio']:.2f}x",
            f"{row['cache_bytes'] / 1e6:.1f}",
        )
    return table


def show(result: dict[str, Any], console: Console) -> None:
    """Prints both tables and what they come to."""
    machine = result["machine"]
    console.print(
        f"{machine['cpu']} ({machine['instruction_set'] or 'no native library'}), "
        f"{machine['threads']} threads, torch {machine['torch']}, {machine['clock']}"
    )
    rows = result["attention"]
    for mode, name in (("forward", "forward"), ("training", "forward + backward")):
        console.print(attention_table(rows, mode, name))
        length = result["overtaking"][mode]
        text = (
            "does not overtake softmax attention" if length is None else f"is faster from N = {length:,} on"
        )
        console.print(f"{name}: linrope {text}")
    console.print(
        f"softmax attention: scaled_dot_product_attention, backend '{rows[0]['softmax_backend']}'. "
        "eager: linrope over its eager backend. MB: growth of the process."
    )
    fractions = ", ".join(f"{row['flop_fraction']:.0%} at {row['n']:,}" for row in rows[-3:])
    console.print(f"forward FLOP/s over those of a 1024^3 float32 matmul: {fractions}")
    memory = rows[-1]["extra_memory_fraction"]
    if memory is not None:
        console.print(
            f"forward + backward at {rows[-1]['n']:,}: memory beyond inputs, outputs and gradients: "
            f"{memory:.0%} of their size"
        )
    growth = result["growth"]
    if growth is not None:
        console.print(
            f"time per token at {growth['long']:,} over that at {growth['short']:,}: "
            f"{growth['forward']:.2f} forward, {growth['training']:.2f} forward + backward"
        )
    costs = result["costs"]
    for mode, name in (("forward", "forward"), ("training", "forward + backward")):
        text = ", ".join(f"{what} {ratio:.2f}" for what, ratio in costs[mode].items())
        console.print(f"{name} at {costs['n']:,}, time over that of the plain call: {text}")
    if result["decode"]:
        console.print(decode_table(result["decode"]))


def plot(result: dict[str, Any], path: Path) -> None:
    """Tokens per second over N, both sides, both modes, log-log."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = result["attention"]
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")
    for axis, mode, title in zip(
        axes, ("forward", "training"), ("forward", "forward + backward"), strict=True
    ):
        for side, name, color in (
            ("linrope", "linear attention with RoPE (linrope)", "#0b6e4f"),
            ("softmax", f"softmax attention with RoPE (SDPA, {rows[0]['softmax_backend']})", "#c1440e"),
        ):
            points = [(r["n"], r[mode][f"{side}_tokens_per_second"]) for r in rows]
            points = [(n, rate) for n, rate in points if rate]
            axis.loglog(*zip(*points, strict=True), "o-", label=name, color=color, linewidth=2, markersize=5)
        best = [row for row in rows if row[mode]["ratio"]]
        if best:
            last = best[-1]
            axis.annotate(
                f"{last[mode]['ratio']:.0f}x",
                (last["n"], last[mode]["softmax_tokens_per_second"]),
                textcoords="offset points",
                xytext=(6, 8),
                color="#c1440e",
            )
        lengths = [row["n"] for row in rows]
        axis.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
        axis.minorticks_off()
        axis.set_title(title)
        axis.set_xlabel("sequence length N")
        axis.grid(True, which="major", alpha=0.3)
    axes[0].set_ylabel("tokens per second")
    axes[0].legend(loc="lower left", fontsize=8)
    machine = result["machine"]
    threads = f"{machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"
    figure.suptitle(f"8 heads of 64, float32, {machine['cpu']}, {threads}", fontsize=10)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _megabytes(x: float | None) -> str:
    return "" if x is None else f"{x / 1e6:,.0f}"

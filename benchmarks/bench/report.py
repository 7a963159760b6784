"""Prints benchmark results as tables."""

from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measuring import NOISY
from linrope.cli.console import plain_table


def attention_table(result: dict[str, Any], mode: str, name: str) -> Table:
    case, rows = result["case"], result["attention"]
    sizes = f"({case['batch']}, N, {case['heads']}, {case['dim']}) {case['dtype']}"
    table = plain_table(f"Causal attention with RoPE, {sizes}: {name}")
    peers = list(dict.fromkeys(peer for row in rows for peer in row[mode]["peer_seconds"]))
    columns = ("N", "linrope tok/s", "softmax tok/s", "ratio", "±", "eager", *peers, "MB", "softmax MB")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        part = row[mode]
        slow = part["softmax_seconds"] is None
        table.add_row(
            f"{row['n']:,}",
            f"{part['linrope_tokens_per_second']:,.0f}",
            "too long" if slow else f"{part['softmax_tokens_per_second']:,.0f}",
            "" if slow else times(part["ratio"]),
            f"{max(part['linrope_spread'], part['softmax_spread'] or 0.0):.0%}",
            times(part["eager_seconds"] / part["linrope_seconds"]),
            *(_ratio(part["peer_seconds"].get(peer), part["linrope_seconds"]) for peer in peers),
            _megabytes(part["linrope_bytes"]),
            _megabytes(part["softmax_bytes"]),
        )
    return table


def decode_table(result: dict[str, Any]) -> Table:
    case, rows = result["case"], result["decode"]
    sizes = f"{case['batch']} x {case['heads']} heads of {case['dim']}, {case['dtype']}"
    table = plain_table(f"Decoding, microseconds per token by position, {sizes}")
    sides = ("softmax", "in\nplace", "ratio", "new\nstate", "ratio", "softmax\nlayer", "layer", "ratio", "±")
    for name in ("after", *sides):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            f"{row['position']:,}",
            f"{row['softmax_seconds'] * 1e6:.0f}",
            f"{row['linrope_donated_seconds'] * 1e6:.0f}",
            times(row["softmax_seconds"] / row["linrope_donated_seconds"]),
            f"{row['linrope_seconds'] * 1e6:.0f}",
            times(row["ratio"]),
            f"{row['softmax_layer_seconds'] * 1e6:.0f}",
            f"{row['linrope_layer_seconds'] * 1e6:.0f}",
            times(row["layer_ratio"]),
            f"{max(row['linrope_spread'], row['softmax_spread']):.0%}",
        )
    return table


def show(result: dict[str, Any], console: Console) -> None:
    """Prints the tables and the derived figures."""
    machine = result["machine"]
    console.print(
        f"{machine['cpu']} ({machine['instruction_set'] or 'no native library'}), "
        f"{machine['threads']} threads, torch {machine['torch']}, {machine['clock']}"
    )
    rows = result["attention"]
    for mode, name in (("forward", "forward"), ("training", "forward + backward")):
        console.print(attention_table(result, mode, name), soft_wrap=False)
        length = result["overtaking"][mode]
        text = (
            "does not overtake softmax attention" if length is None else f"is faster from N = {length:,} on"
        )
        console.print(f"{name}: linrope {text}")
    console.print(
        f"softmax attention: scaled_dot_product_attention, backend '{rows[0]['softmax_backend']}'. "
        "eager and peers: speed of linrope relative to them; peers do not rotate. "
        "±: by how much the rounds differ. MB: growth of the process, on a GPU of PyTorch's allocations."
    )
    for peer, reason in result["peers_not_run"].items():
        console.print(f"{peer}: {reason}")
    fractions = ", ".join(f"{row['flop_fraction']:.0%} at {row['n']:,}" for row in rows[-3:])
    console.print(f"forward FLOP/s relative to a 1024^3 matmul: {fractions}")
    memory = rows[-1]["extra_memory_fraction"]
    if memory is not None:
        console.print(
            f"forward + backward at {rows[-1]['n']:,}: extra memory relative to inputs, outputs and "
            f"gradients: {memory:.0%}"
        )
    growth = result["growth"]
    if growth is not None:
        console.print(
            f"time per token at {growth['long']:,} relative to {growth['short']:,}: "
            f"{growth['forward']:.2f} forward, {growth['training']:.2f} forward + backward"
        )
    costs = result["costs"]
    for mode, name in (("forward", "forward"), ("training", "forward + backward")) if costs else ():
        text = ", ".join(f"{option} {ratio:.2f}" for option, ratio in costs[mode].items())
        console.print(f"{name} at {costs['n']:,}, time relative to the plain call: {text}")
    if result["decode"]:
        console.print(decode_table(result), soft_wrap=False)
        last = result["decode"][-1]
        console.print(
            f"after {last['position']:,} tokens a key/value cache takes {last['cache_bytes'] / 1e6:,.1f} MB, linrope's "
            f"state {last['state_bytes'] / 1e6:,.1f} MB"
        )
        way = "a step of linrope.decode" if last.get("prepared") else "a call with state.donate()"
        console.print(
            f"in place: {way} overwrites the state before it; new state: each step makes one. softmax: with a "
            "key/value cache. layer (as in the plot): with the projections around it, in place."
        )
    for line in noise_warning(_noise(result)):
        console.print(line)


def _noise(result: dict[str, Any]) -> dict[str, float]:
    """How much the rounds of each measurement differ, by the name of the measurement."""
    noise = {f"matmul at {row['n']:,}": row["matmul_spread"] for row in result["attention"]}
    for mode, name in (("forward", "forward"), ("training", "forward + backward")):
        for row in result["attention"]:
            part = row[mode]
            noise[f"{name} at {row['n']:,}"] = max(part["linrope_spread"], part["softmax_spread"] or 0.0)
    for row in result["decode"]:
        noise[f"decoding after {row['position']:,}"] = max(row["linrope_spread"], row["softmax_spread"])
    return noise


def noise_warning(noise: dict[str, float]) -> list[str]:
    """One line if the rounds of a measurement differ too much for its figures to be trusted, else none."""
    noisy = {name: x for name, x in noise.items() if x > NOISY}
    if not noisy:
        return []
    worst = sorted(noisy, key=lambda name: -noisy[name])[:4]
    others = f", and {len(noisy) - len(worst)} more" if len(noisy) > len(worst) else ""
    listed = ", ".join(f"{name} ±{noisy[name]:.0%}" for name in worst)
    return [
        f"warning: noise: rounds differ by more than {NOISY:.0%} even after further ones: {listed}{others}. "
        "Do not trust these figures: other programs use this machine, or its clock changes. Run it again, with more "
        "--rounds or with --threads 1."
    ]


def times(ratio: float) -> str:
    """The ratio with three digits."""
    return (
        f"{ratio:.2f}x"
        if ratio < 10
        else f"{ratio:.1f}x"
        if ratio < 100
        else f"{float(f'{ratio:.3g}'):,.0f}x"
    )


def _ratio(slow: float | None, fast: float) -> str:
    return "" if slow is None else times(slow / fast)


def _megabytes(x: float | None) -> str:
    return "" if x is None else f"{x / 1e6:,.0f}"

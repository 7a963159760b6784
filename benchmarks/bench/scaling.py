"""Measures how sequences in shards scale over processes: ``linrope bench --distributed``.

    torchrun --nproc-per-node 2 -m benchmarks.bench.scaling [tokens [heads [dim]]]

measures one group and prints a line of JSON. Each process has one thread.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.measuring import save_new
from linrope.distributed.shard import Shard
from linrope.layer.attention import LinearRoPEAttention
from linrope.operation.functional import linear_rope_attention

ROUNDS = 5
PASSES = ("forward", "training", "layer training")


def state_bytes(heads: int, features: int, values: int) -> int:
    """The bytes that a rank sends for each row of a batch: kv in float32, z in float64, one position."""
    return heads * features * (4 * values + 8) + 8


def measure(tokens: int, heads: int, dim: int) -> dict[str, Any]:
    """Measures one sequence split over all processes. Every process returns the slowest result.

    bytes: what a process sends to the others, which must be one state for each. seconds: medians. over_alone:
    the time relative to the same shard without a group; the two take turns. communication: the share of the
    time that a process spends in collectives and waiting for them.
    """
    size = dist.get_world_size()
    lengths = [len(part) for part in torch.arange(tokens).tensor_split(size)]
    shard = Shard(lengths=lengths)
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, shard.length, heads, dim))
    layer = LinearRoPEAttention(heads * dim, heads, gate=True)
    x = torch.randn(1, shard.length, heads * dim, requires_grad=True)

    def forward(shard: Shard | None) -> None:
        with torch.no_grad():
            linear_rope_attention(q, k, v, shard=shard)

    def training(shard: Shard | None) -> None:
        linear_rope_attention(q, k, v, shard=shard).sum().backward()

    def layer_training(shard: Shard | None) -> None:
        layer(x, shard=shard).sum().backward()

    result: dict[str, Any] = {"processes": size, "tokens": tokens}
    for name, run in zip(PASSES, (forward, training, layer_training), strict=True):
        run(shard)  # warm-up: in the first call the ranks compare their arguments
        result |= {f"{name}, {key}": value for key, value in _timed(run, shard).items()}
    sent = [result[f"{name}, bytes"] for name in PASSES[:2]]
    state = 0 if size == 1 else state_bytes(heads, dim, dim)
    expected = [(size - 1) * state, (size - 1) * max(0, 2 * state - 8)]  # a position has no gradient
    if sent != expected:
        raise RuntimeError(f"sent {sent} bytes, expected {expected}, whatever the length")
    return result


def _timed(run: Callable[[Shard | None], None], shard: Shard) -> dict[str, float]:
    channel, times, ratios, shares = shard.channel, [], [], []
    sent_before = channel.bytes_sent
    run(shard)
    sent = channel.bytes_sent - sent_before
    for _ in range(ROUNDS):
        waited = channel.seconds
        seconds = _seconds(run, shard)
        shares.append((channel.seconds - waited) / seconds)
        times.append(seconds)
        ratios.append(seconds / _seconds(run, None))
    medians = torch.tensor([statistics.median(x) for x in (times, ratios, shares)], dtype=torch.float64)
    if shard.size > 1:
        dist.all_reduce(medians, dist.ReduceOp.MAX)
    seconds, ratio, share = medians.tolist()
    return {"seconds": seconds, "over_alone": ratio, "communication": share, "bytes": sent}


def _seconds(run: Callable[[Shard | None], None], shard: Shard | None) -> float:
    dist.barrier()
    start = time.perf_counter()
    run(shard)
    return time.perf_counter() - start


def scale(groups: list[int], tokens: int, heads: int, dim: int, out: Path, console: Console) -> Path:
    """Runs groups of these sizes, one after another, and writes distributed-date.json into out.

    Strong scaling: every group has ``tokens`` tokens. Weak scaling: the largest group has ``tokens``
    tokens, and every group has as many per process.
    """
    rows = []
    for size in groups:
        measured: dict[int, dict[str, Any]] = {}  # by tokens; both kinds coincide for the largest group
        for kind, total in (("strong", tokens), ("weak", tokens * size // max(groups))):
            if total not in measured:
                console.print(f"{size} processes, {total:,} tokens ({kind})")
                measured[total] = _run_group(size, total, heads, dim)
            rows.append({"scaling": kind} | measured[total])
    case = {"tokens": tokens, "heads": heads, "dim": dim, "threads": 1, "backend": "gloo"}
    console.print(_table(rows), soft_wrap=False)
    path = save_new(out, "distributed", {"case": case, "rows": rows})
    console.print(f"written: {path}")
    return path


def _run_group(size: int, tokens: int, heads: int, dim: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    command += ["-m", "benchmarks.bench.scaling", str(tokens), str(heads), str(dim)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"a group of {size} processes ended with {done.returncode}: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("scaling", "processes", "tokens", *PASSES, "bytes sent")
    table.caption = "time; time relative to a shard alone; share of communication"
    for row in rows:
        cells = [
            f"{row[f'{name}, seconds'] * 1e3:.1f} ms\n{row[f'{name}, over_alone']:.2f}x, "
            f"{row[f'{name}, communication']:.0%}"
            for name in PASSES
        ]
        sent = f"{row['training, bytes']:,}"
        table.add_row(row["scaling"], str(row["processes"]), f"{row['tokens']:,}", *cells, sent)
    return table


def main(tokens: int = 65536, heads: int = 8, dim: int = 64) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    try:
        result = measure(tokens, heads, dim)
        if dist.get_rank() == 0:
            print(json.dumps(result), flush=True)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

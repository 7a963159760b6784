"""Training curves: three models of 50 million parameters, each trained for the same time on the same rows of bytes.

default block         LanguageModelConfig's defaults; only the sizes are larger
softmax in the block  `block-softmax-all-rotated`, the best of benchmarks/study's softmax models in language, with the
                      default block's heads. PyTorch's fused kernels require queries and keys as wide as values, so
                      they are padded from 64 to 128 numbers.
Gated DeltaNet        transformers' Qwen3-Next as in benchmarks/study: linrope computes its rule, convolution and gated
                      norm, unless flash-linear-attention or causal_conv1d is installed; the rest is plain PyTorch

The text is the source of Python's standard library and of the installed packages, so it differs from machine to
machine. A file that was copied may be in both the training text and the held-out text. The learning rates are those
that the study chose at 3.5 million parameters, but at most 0.002. None has been tried at this size.

The curves of a result over time, as a picture:

    PYTHONPATH=.:kernels python3 -m benchmarks.gpu.curves benchmarks/results/gpu-2026-12-01.json curves.svg
"""

import copy
import json
import math
import site
import sys
import sysconfig
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.machine import Machine, Row, each
from benchmarks.study import peers
from benchmarks.study.tasks import Task
from benchmarks.study.text import bits_of, rows_at
from benchmarks.study.training import WARM_UP, optimizer_of, update
from benchmarks.study.variants import Logits, check_parameters, fit, num_parameters
from linrope.models import LanguageModel, LanguageModelConfig
from linrope.models.training import Corpus
from linrope.models.training.batch import evenly_spaced_rows, row_starts

BLOCK, SOFTMAX, DELTA, PEER = "default block", "softmax in the block", "Gated DeltaNet", "gated-deltanet"
RATES = {BLOCK: 2e-3, SOFTMAX: 2e-3, DELTA: 1e-3}
OPTIONS: dict[str, dict[str, Any]] = {
    BLOCK: {},
    SOFTMAX: {"attention": "softmax", "skip": "before", "gate": "before", "out_norm": "all"},
}
FULL = Task("curves", length=2048, heads=4, head_dim=128, layers=14, rows=32, test_rows=256)
SMALL = Task("curves", length=32, heads=1, head_dim=128, layers=1, rows=2, test_rows=2)
SECONDS = 180.0  # each model trains for so long
OTHER = 60  # seconds of the step in which nothing is trained: reading, compiling, measuring
TEXT = 200_000_000  # bytes, at most
SEED = 0
POINTS = 6  # measurements on held-out text
PARTS = 50  # the most points of a curve


def curves(on: Machine) -> Iterator[Row]:
    yield from each(RATES, partial(curve_row, on, sources(on)))


def sources(on: Machine) -> Corpus:
    """Files in the order of a digest of their paths, so that a part of them is of all packages."""
    everything = [sysconfig.get_paths()["stdlib"], *site.getsitepackages()]
    roots = on.sizes(everything, [str(Path(json.__file__).parent)])
    files = {str(path) for root in roots for path in Path(root).rglob("*.py")}
    texts, size = list[str](), 0
    for name in sorted(files, key=lambda name: (zlib.crc32(name.encode()), name)):
        with suppress(UnicodeDecodeError, OSError):
            texts.append(Path(name).read_text("utf-8"))
            size += len(texts[-1])
        if size >= TEXT:
            break
    return Corpus.from_texts(texts, "Python's sources")


def curve_row(on: Machine, corpus: Corpus, name: str) -> Row:
    """The curve, speed and memory of a model. A copy of it trains first, which compiles the kernels."""
    if name == DELTA and (why := peers.why_not(PEER)) is not None:
        return {"not_run": {name: why}}
    task = on.sizes(FULL, SMALL)
    model = build(name, task, on.sizes(50_000_000, 500_000), on.backend).to(on.device)
    model.autocast = on.dtype
    run = partial(train, on, corpus, task, RATES[name])
    with peers.on_linrope(PEER if name == DELTA else name):
        run(copy.deepcopy(model), on.sizes(2.0, 0.1))
        if on.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        row = run(model, on.sizes(min(SECONDS, (on.limit - OTHER) / len(RATES)), 1.0))
    if on.on_gpu:
        row["peak_memory"] = torch.cuda.max_memory_allocated()
    settings = {
        "text": corpus.describe(),
        "bytes per row": task.length,
        "rows": task.rows,
        "rate": RATES[name],
    }
    return {"parameters": num_parameters(model)} | settings | row | {"options": model.options}


def build(name: str, task: Task, parameters: int, backend: str = "triton") -> Logits:
    """The model of about that many parameters. The hidden size is a multiple of 16, as fast matrix products require.

    Raises:
        ValueError: no such size brings it to that number of parameters.
    """

    def make(size: int) -> Logits:
        if name == DELTA:
            return Logits(*peers.make(PEER, task, size))
        sizes: dict[str, Any] = {"num_layers": task.layers, "hidden_dim": size, "embed_dim": task.dim}
        config = LanguageModelConfig(**sizes, num_heads=2 * task.heads, backend=backend, **OPTIONS[name])
        return Logits(LanguageModel(config), config.to_dict(), lambda x, y: x(y, return_states=False)[0])

    with torch.device("meta"):
        size = 16 * round(fit(lambda size: num_parameters(make(size)), parameters, 256) / 16)
    torch.manual_seed(SEED)
    model = make(size)
    check_parameters(name, num_parameters(model), parameters)
    return model


def train(on: Machine, corpus: Corpus, task: Task, rate: float, model: nn.Module, seconds: float) -> Row:
    """Trains for that time, without the time of the measurements. AssertionError: a loss is not finite."""
    optimizer, tokens = optimizer_of(model, rate), corpus.train.tokens.to(on.device)
    starts = evenly_spaced_rows(corpus.held_out, task.test_rows, task.length)
    test = rows_at(corpus.held_out.tokens, starts, task.length)
    losses, ends, held_out, used = list[float](), list[float](), list[list[float]](), 0.0
    while used < seconds:
        begun, step = time.perf_counter(), len(losses)
        for group in optimizer.param_groups:
            group["lr"] = rate * schedule(used / seconds)
        starts = row_starts(corpus.train, step * task.rows, task.rows, task.length, SEED)
        rows = rows_at(tokens, starts.to(on.device), task.length)
        losses.append(update(model, optimizer, rows[:, :-1], rows[:, 1:]))  # waits for the GPU
        assert math.isfinite(losses[-1]), f"the loss of step {step} is {losses[-1]}"
        used += time.perf_counter() - begun
        ends.append(used)
        if used >= seconds * (len(held_out) + 1) / POINTS:
            held_out.append([used, len(losses) * task.tokens, bits_of(model, test).mean().item()])
    seen = len(losses) * task.tokens
    figures = {"steps": len(losses), "tokens": seen, "seconds": used, "tokens/s": seen / used}
    figures["held-out bits per byte"] = held_out[-1][2]
    return figures | {"curve": thinned(losses, ends, task.tokens), "held_out": held_out}


def schedule(share: float) -> float:
    """The factor of the rate when that share of the time is used: warm-up, then a cosine down to a tenth."""
    return min(1.0, share / WARM_UP) * (0.55 + 0.45 * math.cos(math.pi * share))


def thinned(losses: list[float], ends: list[float], tokens: int) -> list[list[float]]:
    """The seconds and tokens until the end of each part of the run, and its mean bits per byte; at most PARTS parts."""
    part = -(-len(losses) // PARTS)
    parts = ((losses[i : i + part], min(i + part, len(losses))) for i in range(0, len(losses), part))
    return [[ends[end - 1], end * tokens, sum(x) / len(x) / math.log(2)] for x, end in parts]


def draw(results: Path, picture: Path) -> None:
    """Draws the curves of a file of results over time, with points for held-out text."""
    from linrope.cli import charts

    figure, axes = charts.charts(10, 6)
    colors = {BLOCK: charts.LINROPE, SOFTMAX: charts.SOFTMAX, DELTA: charts.BLUE}
    for row in (row for row in json.loads(results.read_text())["curves"] if "curve" in row):
        how = {"color": colors[row["case"]]}
        for name, style, label in (("curve", "-", row["case"]), ("held_out", "o", None)):
            seconds, _, bits = zip(*row[name])
            axes.plot(seconds, bits, style, label=label, **how)
    axes.set(xlabel="seconds of training", ylabel="bits per byte (points: held-out text)", yscale="log")
    axes.set_yticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    axes.minorticks_off()
    axes.grid()
    charts.legend_below(figure, 3)
    charts.save(figure, picture)


if __name__ == "__main__":
    draw(*map(Path, sys.argv[1:]))

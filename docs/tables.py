"""Writes the tables and charts of README.md and docs/performance.md from what was measured: benchmarks/results.

    python -m docs.tables

A table stands between <!-- NAME --> and <!-- /NAME -->. It is made from the newest file of its kind.
"""

import json
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.study import report, steps
from benchmarks.study.published import PUBLISHED
from docs import cost, families
from docs import gpu_tables as gpu
from docs.formats import milliseconds, multiple, newest_first, table, two_digits

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
LENGTHS = (32, 64, 128, 256, 1024, 4096, 16384)
OPTIONS = {
    "decay": "`decay`",
    "log_decay": "`log_decay`",
    "angle_steps": "`angle_steps`",
    "erase": "`erase`",
    "packed": "packed sequences of 128",
    "bfloat16": "bfloat16",
    "two threads": "two threads",
}
CONDITIONS = {  # what the names of files end with
    "": "float32, one thread",
    "-bfloat16": "bfloat16, one thread",
    "-2-threads": "float32, two threads",
}
MODELS = {  # models of the study, and what README.md calls them
    "block": "**the default block**",
    "block-softmax-all-rotated": "softmax attention in the block, all features rotated",
    "mamba-2": "Mamba-2",
    "eq19+init": "[equation 19](#what-it-computes) with output norm and gate, no block",
}
PRICES = {  # models of the study, and what docs/evidence.md calls them
    "block": "the default block",
    "block-mixers": "`block-mixers`",
    "block-softmax-all-rotated": "softmax attention in the block (`block-softmax-all-rotated`)",
    "mamba-2": "Mamba-2",
    "gated-deltanet": "Gated DeltaNet (Qwen3-Next's layer)",
    "kimi-linear": "Kimi Delta Attention (Kimi Linear's layer)",
    "minimax": "MiniMax's lightning attention",
}

READERS = {  # models and tasks of tiny Shakespeare
    ("gpt-2", "shakespeare-64"): "GPT-2",
    ("block", "shakespeare-64"): "the default block",
    ("gpt-2", "shakespeare-512"): "GPT-2, 512 characters",
    ("softmax-rope", "shakespeare-512"): "softmax attention with RoPE (`softmax-rope`), 512 characters",
    ("block", "shakespeare-512-equal-time"): "the default block, 512 characters",
}
TRACKING_MODELS = {
    "block-unrotated": "the block without rotation",
    "block-all-rotated": "fixed rotation",
    "block-selective-add": "selective rotation",
    "block-tied-2-unrotated": "erase up to 2, no rotation",
    "block-tied-2-selective-add": "erase up to 2 and selective rotation",
}


def newest(name: str, folder: str = ".") -> Any:
    """The last result of a kind. folder: a folder of RESULTS."""
    return json.loads(newest_first(RESULTS / folder, name)[0].read_text())


def by_family() -> dict[str, Any]:
    return {family: newest(f"transformers-{family}") for family in families.MODELS}


def lengths() -> str:
    found = {row["n"]: row for row in newest("cpu")["attention"]}
    rows = ([f"{n:,}", *(multiple(found[n][x]["ratio"]) for x in ("forward", "training"))] for n in LENGTHS)
    return table("tokens | forward | forward + backward", rows)


def decoding() -> str:
    def cells(row: dict[str, Any]) -> Iterator[str]:
        yield f"{row['position']:,}"
        for ours, theirs in (
            ("linrope_donated", "softmax"),
            ("linrope", None),
            ("linrope_layer", "softmax_layer"),
        ):
            yield " / ".join(milliseconds(row[f"{side}_seconds"]) for side in (ours, theirs) if side)

    head = "tokens before the step | in place: linrope / softmax | new state | whole layer: linrope / softmax"
    return table(head, (cells(row) for row in newest("cpu")["decode"]))


def memory() -> str:
    """Bytes per token of a block by width, and the peak of reading in pieces."""

    def rows() -> Iterator[list[str]]:
        for row in newest("memory")["rows"]:
            training, reading = row["training"], row["reading"]
            per_token = (training["first"], training["further"], reading["first"])
            first, further, read = (f"{two_digits(x / 1e3)} kB" for x in per_token)
            in_pieces = [f"{two_digits(x['pieces'] / 1e6)} MB" for x in (training, reading)]
            yield [f"{row['width']:,}", first, further, read, *in_pieces]

    head = "width | training, first block | each further block | without gradients | training in pieces"
    return table(f"{head} | without gradients in pieces", rows())


def options() -> str:
    costs = newest("cpu")["costs"]["training"]
    return table(
        "option | time", ([words, f"{costs[name]:.2f}"] for name, words in OPTIONS.items() if name in costs)
    )


def models() -> str:
    """Times and memory of both sides, a row for each kind of call."""

    def rows() -> Iterator[list[str]]:
        for family, result in by_family().items():
            for row in families.longest(result["rows"]):
                seconds, peaks = row["seconds"], row["bytes"]
                kind = row["kind"] if row["batch"] == 1 else f"{row['kind']}, {row['batch']} sequences"
                yield [
                    *(families.MODELS[family], kind, f"{row['length']:,}"),
                    *(f"{1e3 * seconds[side]:,.0f}" for side in ("transformers", "linrope")),
                    *(f"{peaks[side] / 1e6:,.0f}" for side in ("transformers", "linrope")),
                ]

    head = "model | | tokens | transformers, ms | linrope, ms | transformers, MB | linrope, MB"
    return table(head, rows())


def faster(rows: list[dict[str, Any]]) -> list[str]:
    """How many times as fast linrope is, for each kind of call."""
    return [
        multiple(row["seconds"]["transformers"] / row["seconds"]["linrope"]) for row in families.longest(rows)
    ]


def conditions() -> str:
    """How many times as fast linrope is on another processor, by dtype and number of threads."""
    return table(
        "model | | prompt | training step | next token | next token, batch of 8",
        (
            [name, words, *faster(newest(f"transformers-{family}{suffix}", "epyc")["rows"])]
            for family, name in families.MODELS.items()
            if family in ("mamba2", "granitemoehybrid", "qwen3_5")
            for suffix, words in CONDITIONS.items()
        ),
    )


def models_in_short() -> str:
    """How many times as fast linrope is, and its share of the memory to train."""

    def rows() -> Iterator[list[str]]:
        for family, result in by_family().items():
            rows = families.longest(result["rows"])
            peaks = next(row["bytes"] for row in rows if row["kind"] == "training")
            yield [
                f"{families.MODELS[family]}, {result['parameters'] / 1e6:.0f} M",
                *faster(rows),
                f"{peaks['linrope'] / peaks['transformers']:.2f}x",
            ]

    return table(
        "model | prompt | training step | next token | next token, batch of 8 | memory to train", rows()
    )


def _delta(file: str, case: str, kind: str, side: str = "linrope") -> str:
    """transformers' time divided by linrope's; empty: not measured."""
    times = newest(file)["milliseconds"].get(case, {})
    there = f"{kind}, {side}" in times
    return multiple(times[f"{kind}, transformers"] / times[f"{kind}, {side}"]) if there else ""


def delta_rule() -> str:
    rows = {
        "512": ("delta-rule", "512 tokens"),
        "2,048": ("delta-rule", "2,048 tokens"),
        "2,048, both with AVX2": ("delta-rule-avx2", "2,048 tokens"),
        "8,192": ("delta-rule-8192", "8,192 tokens"),
    }
    columns = [(model, kind) for model in ("gdn", "kda") for kind in ("forward", "with backward")]
    return table(
        "tokens | Gated DeltaNet | with backward | Kimi Delta Attention | with backward",
        (
            [words, *(_delta(file, f"{model}, {case}", kind) for model, kind in columns)]
            for words, (file, case) in rows.items()
        ),
    )


def delta_steps() -> str:
    rows = [
        [
            f"of {words}{more}",
            *(_delta("delta-rule", f"{model}, {batch}", "16 steps", side) for model in ("gdn", "kda")),
        ]
        for batch, words in (("batch 1", "one sequence"), ("batch 8", "8 sequences"))
        for side, more in (("linrope", ""), ("prepared", ", [prepared](#a-models-decoding-step)"))
    ]
    return table("a step | Gated DeltaNet | Kimi Delta Attention", rows)


@cache
def _study() -> tuple[dict[str, report.Rows], dict[str, Any]]:
    """The study's runs, and the seconds of a step by model."""
    folder = RESULTS / "study"
    return report.counted(folder), steps.read(folder)["seconds"]


def _of_study(task: str, model: str, names: Iterable[str]) -> list[str]:
    """Values by name, the state, the time of a step with the fastest kernels, and that in plain PyTorch."""
    runs, seconds = _study()
    rows = runs[task][model]
    sides = seconds[model.removesuffix("+init")]  # other initial weights take the same time
    times = {side: f"{x / seconds['block']['fastest']:.2f}" for side, x in sides.items()}
    values = [report.spread([line["results"][name] for line in rows]) for name in names]
    return [*values, report.state(rows[0]), times["fastest"], times.get("plain", "")]


def quality() -> str:
    rows = []
    for model, words in MODELS.items():
        bits, longer, _, *times = _of_study("language", model, ("bits", "8x - 1x"))
        rows.append([words, bits, longer, *times])
    return table(" | bits per byte | longer text | time | in plain PyTorch", rows)


def price() -> str:
    rows = [[words, *_of_study("language", model, ("bits",))] for model, words in PRICES.items()]
    rows.insert(1, ["the same with 950 steps", *_of_study("language-equal-time", "block", ("bits",))])
    return table(" | bits per byte | state | time of a step | in plain PyTorch", rows)


def shakespeare() -> str:
    """Nats per character of tiny Shakespeare, and the CPU time in per cent of GPT-2's on rows of that length."""
    rows = [["nanoGPT, published", f"{PUBLISHED['shakespeare-64']['nanoGPT']}", "2,000", ""]]
    runs, unit = _study()[0], 1.0
    for (model, task), words in READERS.items():
        lines = runs[task][model]
        seconds = mean(line["cpu_seconds"] for line in lines)
        unit = seconds if model == "gpt-2" else unit
        losses = report.spread([line["results"]["loss"] for line in lines])
        rows.append([words, losses, f"{lines[0]['settings']['steps']:,}", f"{seconds / unit:.0%}"])
    return table(" | loss | steps | CPU time", rows)


def tracking() -> str:
    """The scores in the tasks of state tracking: of our models, then those that others published."""
    tasks = [task for task in report.TASKS if task.startswith("track-")]
    models = {model: f"{words} (`{model}`)" for model, words in TRACKING_MODELS.items()}
    head, *rows = report.together(tasks, models, _study()[0])
    return table(" | ".join(head), rows)


def drafts() -> str:
    """Tokens per second of greedy search, and how many times as many with drafts, by model and text."""
    found = {(row["model"], row["text"], row["side"]): row for row in newest("drafts")["rows"]}

    def cells(model: str, text: str) -> Iterator[str]:
        yield {"qwen3_5": "Qwen3.5", "linrope": "LinRope"}[model]
        yield text
        yield f"{found[model, text, 'greedy']['tokens_per_second']:.1f}"
        for side in ("prompt lookup", "draft model"):
            row = found[model, text, side]
            yield f"{row['times_greedy']:.2f}x ({row['tokens_per_call']:.1f})"

    places = dict.fromkeys((model, text) for model, text, _ in found)
    head = "model | text | greedy search, tokens per second | prompt lookup (tokens per pass) | draft model"
    return table(head, (cells(*place) for place in places))


def hybrids() -> str:
    """Requests to a hybrid, by how they are served."""

    def cells(row: dict[str, Any]) -> list[str]:
        first = [f"{row[f'first_token_{x}']:.1f} s" for x in ("median", "longest")]
        return [row["side"], f"{row['tokens_per_second']:.1f}", *first, f"{row['bytes'] / 1e6:,.0f} MB"]

    head = "served by | tokens per second | first token, median | longest | memory"
    return table(head, map(cells, newest("serving-hybrids")["rows"]))


PAGES = {
    "docs/drafts.md": {"drafts": drafts},
    "docs/serving.md": {"hybrids": hybrids},
    "docs/backends.md": {"gpu-runs": gpu.gpu_runs, "gpu-errors": gpu.gpu_errors},
    "docs/evidence.md": {
        "shakespeare": shakespeare,
        "price": price,
        "tracking": tracking,
    },
    "README.md": {"families": models_in_short, "study": quality},
    "docs/performance.md": {
        "lengths": lengths,
        "decoding": decoding,
        "options": options,
        "memory": memory,
        "families": models,
        "conditions": conditions,
        "delta-rule": delta_rule,
        "delta-steps": delta_steps,
        "gpu-machine": gpu.gpu_machine,
        "gpu": gpu.gpu_softmax,
        "gpu-model": gpu.gpu_model,
        "gpu-fla": gpu.gpu_fla,
        "gpu-floor": gpu.gpu_shares,
        "gpu-decode": gpu.gpu_decode,
    },
}


def written(page: str) -> str:
    """The text of a page, with its tables as they follow from the results.

    Raises:
        ValueError: a table has no place on the page.
    """
    text = (ROOT / page).read_text("utf-8")
    for name, make in PAGES[page].items():
        before, start, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- /{name} -->")
        if not end:
            raise ValueError(f"{page}: expected a place between <!-- {name} --> and <!-- /{name} -->")
        text = f"{before}{start}{make()}\n{end}{after}"
    return text


if __name__ == "__main__":
    cost.main(newest("cpu"))
    families.main({family: result["rows"] for family, result in by_family().items()})
    for page in PAGES:
        (ROOT / page).write_text(written(page), "utf-8")

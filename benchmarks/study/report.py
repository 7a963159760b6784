"""The page of tables, from the lines of the results alone."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.study import lines, peers, steps
from benchmarks.study.lines import Line
from benchmarks.study.published import PUBLISHED
from benchmarks.study.variants import VARIANTS, WORDS, family

Rows = dict[str, list[Line]]  # by model, a line per seed
DEFAULT = "block"  # the default block
_HEAD = """# Tables of the study

After reading this page you know the figures behind [Evidence](evidence.md), which says what follows from them and what
they cannot say. One command writes this page from the committed lines:

    python -m benchmarks.study table benchmarks/results/study --out docs/evidence_tables.md

- A cell is the mean over the seeds, ± half the range. Differences smaller than that are undecided.
- A perfect solver gets 1. Bits per byte and losses have no such bound.
- `state`: the size of all layers' sums of keys times values together. "grows": a key/value cache.
- The learning rate is chosen for each task and family by the training loss of one model and one seed, which counts
  nowhere else.
- The runs come from several commits and machines, so these tables have no times. [Time of a step](#time-of-a-step) was
  measured in one run. The committed lines also have the commits, the machines and what lies between the columns, such
  as recall of fewer pairs."""
# The columns that the tables leave out
BETWEEN = {"2x - 1x", "4x - 1x", "2 pairs", "4 pairs", "256 bytes", "1,024 bytes", "beyond training"}
AVERAGED = "MAD"  # the heading of the tasks whose table has a mean
# The heading of each task's table, and what the task asks. Tasks with the same words before ": " share a table.
TASKS = {
    "language": (
        "Language",
        "The next byte of Python's standard library, rows of 256. `bits`: bits per byte of held-out files with no more "
        "context than that. `8x - 1x`: the change on the same bytes, 4 to 8 times the trained length into a file, when "
        "the model sees the whole row before them. Below 0 the longer context helps.",
    ),
    "language-equal-time": (
        "Language, in the time of Mamba-2",
        "The same, with as many steps of the default block as take about the CPU time of Mamba-2's in the table above, "
        "on linrope's kernels. The learning rate is that table's.",
    ),
    "language-long": ("Language, 3.5 million parameters", "The same, with rows of 1,024."),
    "language-long-600": (
        "Language, 3.5 million parameters, twice the steps",
        "The same, with 600 steps and the learning rates of the table above.",
    ),
    "recall-1024": (
        "Recall, 1,024 numbers of state",
        "6 pairs of a key and a value, then the keys again: MQAR as "
        "[Zoology](https://arxiv.org/abs/2312.04927) defines it, with a vocabulary of 16 and rows of "
        "24 tokens. A layer of linear attention has a state of 1,024 numbers.",
    ),
    "recall-256": ("Recall, 256 numbers of state", "The same, with a quarter of the state."),
    "copying": ("Copying", "A string of 8 to 20 of 16 symbols, once more. Measured at 20, 40 and 80."),
    "copying-1800": (
        "Copying, three times the steps",
        "The same, with 1,800 steps. The learning rates are those of the table above.",
    ),
    "distant": (
        "Recall over a distance",
        "The task is to recall the values of 4 keys, with 4,096 or 8,192 bytes of source code in between; training "
        "has 8 to 4,096. A model that knows the four values but not their keys gets 0.41.",
    ),
    "track-parity": (
        "State tracking: parity",
        "The sum so far, modulo 2. Rows grow from 8 to 160 bits during training. The accuracy over 40 to 256 bits is "
        "scaled so that guessing gets 0.",
    ),
    "track-arithmetic": (
        "State tracking: arithmetic without brackets",
        "The same for the value so far of digits with +, - and * between them, modulo 5.",
    ),
    "track-brackets": (
        "State tracking: arithmetic with brackets",
        "The same for nested brackets with + or - in each, in models of three layers.",
    ),
    "shakespeare-64": (
        "Tiny Shakespeare, 64 characters",
        "nanoGPT's run on a CPU, in its sizes and steps. `loss`: nats per character of the whole validation part; "
        "nanoGPT's is that of 20 random batches.",
    ),
    "shakespeare-512": ("Tiny Shakespeare, 512 characters", "The same with rows of 512."),
    "shakespeare-512-equal-time": (
        "Tiny Shakespeare, 512 characters, in GPT-2's time",
        "The same, with as many steps of the default block as take the CPU time of GPT-2's in the table above.",
    ),
    "mad-compress": (
        "MAD: compression",
        "31 of 15 symbols and a mark. A small network behind the model tells each from the model's output at the mark.",
    ),
    "mad-fuzzy-recall": (
        "MAD: fuzzy recall",
        "Keys and values of 1 to 3 symbols in turn; keys that were there before ask for their value of then.",
    ),
    "mad-recall": ("MAD: in-context recall", "The same with keys and values of one symbol."),
    "mad-memorize": (
        "MAD: memorization",
        "127 keys with values that are the same in all rows, of which training has 256.",
    ),
    "mad-noisy-recall": (
        "MAD: noisy recall",
        "In-context recall with a fifth of all pairs replaced by two of 16 other symbols.",
    ),
    "mad-copy": (
        "MAD: selective copying",
        "16 symbols with blanks between them, then the symbols in their order, in rows of 256.",
    ),
    "images": (
        "Images",
        "In which of 8 directions a disc lies from a square, in patches of 4 x 4 pixels; trained at 32 x 32.",
    ),
}


def counted(folder: Path) -> dict[str, Rows]:
    """By task and model the lines of the runs that count, models in the order of VARIANTS.

    Raises:
        ValueError: there are none; lines of one task and model that do not belong together.
    """
    found: dict[str, Rows] = defaultdict(lambda: defaultdict(list))
    for line in lines.read(folder):
        if line["phase"] == "run":
            found[line["task"]][line["model"]].append(line)
    if not found:
        raise ValueError(f"{folder / lines.NAME}: expected the results of at least one run")
    for task, rows in found.items():
        if len({str(line["settings"]) for row in rows.values() for line in row}) > 1:
            raise ValueError(
                f"{task}: got lines of several settings, expected those of one scale and version"
            )
        for model, row in rows.items():
            if len({line["seed"] for line in row}) < len(row):
                raise ValueError(f"{task}, {model}: got two lines of one seed")
    order = list(VARIANTS)
    return {
        task: dict(sorted(found[task].items(), key=lambda row: order.index(row[0])))
        for task in sorted(found, key=list(TASKS).index)
    }


def spread(values: Sequence[float], digits: int = 3) -> str:
    """The mean, and half the range."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{mean(values):.{digits}f} ± {(max(values) - min(values)) / 2:.{digits}f}"


def page(folder: Path) -> str:
    """The whole page, as Markdown."""
    found = counted(folder)
    shown = [name for name in VARIANTS if any(name in rows for rows in found.values())]
    models = _markdown([["model", "what it is", "family"], *([f"`{x}`", WORDS[x], family(x)] for x in shown)])
    parts = [_HEAD, f"## The models\n\n{models}"]
    for kind, tasks in groupby(found, lambda task: TASKS[task][0].partition(": ")[0]):
        parts.append(f"## {kind}\n\n{_section(kind, list(tasks), found)}")
    times = steps.read(folder)
    return "\n\n".join([*parts, *([_times(times)] if times else [])]) + "\n"


def _section(kind: str, tasks: Sequence[str], runs: dict[str, Rows]) -> str:
    """The text below a heading: each task's description and settings, then one table for all of them."""
    if len(tasks) == 1:
        (task,) = tasks
        return f"{TASKS[task][1]}\n\n**{task}**: {_conditions(runs[task])}\n\n{table(task, runs[task])}"
    words = [
        f"- **{TASKS[task][0].partition(': ')[2]}** (`{task}`): {TASKS[task][1]}\n  {_conditions(runs[task])}"
        for task in tasks
    ]
    models = {model: model for model in VARIANTS if any(model in runs[task] for task in tasks)}
    return "\n".join(words) + "\n\n" + _markdown(together(tasks, models, runs, averaged=kind == AVERAGED))


def together(
    tasks: Sequence[str], models: dict[str, str], runs: dict[str, Rows], *, averaged: bool = False
) -> list[list[str]]:
    """The first result of each task, ours and then what others published.

    models: the words for each model.
    averaged: with the mean of the tasks, for models that have all of them.
    """
    found: dict[str, list[tuple[str, float | None]]] = defaultdict(list)  # the cells, and their means
    for task in tasks:
        for model, words in models.items():
            found[words].append(_first(runs[task].get(model, [])))
        for who, value in PUBLISHED.get(task, {}).items():
            found[f"{who}, published"].append((f"{value:.3f}", value))
    rows = [["", *(TASKS[task][0].partition(": ")[2] for task in tasks), *(["mean"] if averaged else [])]]
    for words, cells in found.items():
        means = [x for _, x in cells if x is not None]
        average = [f"{mean(means):.3f}" if len(means) == len(tasks) else ""] if averaged else []
        rows.append([words, *(text for text, _ in cells), *average])
    return rows


def _first(row: list[Line]) -> tuple[str, float | None]:
    """The cell of the first result, and its mean over the seeds; of runs that diverged there is none."""
    results = [line["results"] for line in row]
    if not row or None in results:
        return _figures(row, [""])[0] if row else "", None
    values = [next(iter(each.values())) for each in results]
    return spread(values), mean(values)


def _conditions(rows: Rows) -> str:
    """The steps, seeds, sizes and learning rates, and what guessing gets."""
    every = [line for row in rows.values() for line in row]
    seeds = sorted({len(row) for row in rows.values()})
    text = (
        f"{every[0]['settings']['steps']} steps of about {every[0]['tokens_per_step']:,} tokens, "
        f"{' to '.join(map(str, sorted({seeds[0], seeds[-1]})))} seeds, "
        f"{mean(line['parameters'] for line in every):,.0f} parameters ± 1%, {_rates(rows)}."
    )
    guessing = sorted({f"{value:.3f}" for value in every[0]["floor"].values()})
    return f"{text} Guessing gets {' or '.join(guessing)}." if guessing else text


def _rates(rows: Rows) -> str:
    """The learning rate of most families, and those of the others."""
    families: dict[float, list[str]] = defaultdict(list)
    for rate, name in dict.fromkeys(
        (line["learning_rate"], family(model)) for model, row in rows.items() for line in row
    ):
        families[rate].append(name)
    usual, *others = sorted(families, key=lambda rate: -len(families[rate]))
    rest = "".join(f"; {rate:g} for {', '.join(families[rate])}" for rate in others)
    return f"learning rate {usual:g}{rest}"


def table(task: str, rows: Rows) -> str:
    every = [line for row in rows.values() for line in row]
    results: dict[str, Any] = next((line["results"] for line in every if line["results"]), {})
    names = [x for x, value in results.items() if not isinstance(value, list) and x not in BETWEEN]
    body = [["", *names, "state"]]
    body += [[model, *_figures(row, names), state(row[0])] for model, row in rows.items()]
    for who, value in PUBLISHED.get(task, {}).items():
        body.append([f"{who}, published", f"{value:g}", *[""] * len(names)])
    return _markdown(body)


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (rows[0], ["---"] * len(rows[0]), *rows[1:]))


def _figures(row: list[Line], names: Sequence[str]) -> list[str]:
    """A model with a diverged run shows that fact in place of a mean: diverged runs have no figures."""
    diverged = sum(line["results"] is None for line in row)
    if diverged:
        return [f"{diverged} of {len(row)} diverged"] + [""] * (len(names) - 1)
    return [spread([line["results"][name] for line in row]) for name in names]


def state(line: Line) -> str:
    """The number of numbers of the state, all layers together."""
    numbers = line["state_numbers"] or peers.state_numbers(line["model"], line["options"])
    return "grows" if numbers is None else f"{numbers:,}"


def _times(found: dict[str, Any]) -> str:
    """The table of step times, relative to the default block's."""
    seconds, machine = found["seconds"], found["machine"]
    unit = seconds[DEFAULT]["fastest"]
    body = [["", "time of a step", "with plain PyTorch"]]
    for name in sorted(seconds, key=lambda name: float(seconds[name]["fastest"])):
        sides = seconds[name]
        body.append(
            [name, *(f"{sides[side] / unit:.2f}" if side in sides else "" for side in ("fastest", "plain"))]
        )
    words = (
        f"CPU time of one thread for a training step of `{found['task']}`, forward to update, divided by the default "
        f"block's ({1e3 * unit:.0f} ms). One run on one machine ({machine['cpu']}, instruction set "
        f"{machine['instruction_set']}), the models in turn, the fastest of {found['rounds']} steps each. The linear "
        "layers of transformers' models run on linrope's kernels by `enable()`; the last column has the same models as "
        "transformers runs them on a CPU by itself. Softmax attention runs on PyTorch's fused kernel."
    )
    return f"## Time of a step\n\n{words}\n\n{_markdown(body)}"

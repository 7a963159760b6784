"""Tables, from the lines of the results alone."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.study import lines
from benchmarks.study.lines import Line
from benchmarks.study.variants import VARIANTS

Rows = dict[str, list[Line]]  # by model, a line per seed


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
        task: dict(sorted(rows.items(), key=lambda row: order.index(row[0]))) for task, rows in found.items()
    }


def spread(values: Sequence[float], digits: int = 3) -> str:
    """The mean, and half the range."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{mean(values):.{digits}f} ± {(max(values) - min(values)) / 2:.{digits}f}"


def tables(folder: Path) -> str:
    return "\n\n".join(table(task, rows) for task, rows in counted(folder).items())


def table(task: str, rows: Rows) -> str:
    every = [line for row in rows.values() for line in row]
    results: dict[str, Any] = next((line["results"] for line in every if line["results"]), {})
    names = [name for name, value in results.items() if not isinstance(value, list)]
    settings = every[0]["settings"]
    seeds = sorted({len(row) for row in rows.values()})
    title = (
        f"**{task}**: {settings['steps']} steps of about {every[0]['tokens_per_step']:,} tokens, "
        f"{' to '.join(map(str, sorted({seeds[0], seeds[-1]})))} seeds, commit "
        f"{', '.join(sorted({str(line['machine']['commit'])[:8] for line in every}))}"
    )
    head = ["", *names, "parameters", "state", "rate", "tokens per CPU s", "CPU s", "MB"]
    body = [head, ["---"] * len(head)]
    for label, key in (("guessing", "floor"), ("a perfect solver", "ceiling")):
        if every[0][key]:
            bounds = [f"{every[0][key][name]:.3f}" if name in every[0][key] else "" for name in names]
            body.append([label, *bounds, *[""] * (len(head) - 1 - len(names))])
    body += [[model, *_figures(row, names), *_costs(row)] for model, row in rows.items()]
    return "\n".join([title, "", *(f"| {' | '.join(cells)} |" for cells in body)])


def _figures(row: list[Line], names: Sequence[str]) -> list[str]:
    """A model with a diverged run shows that fact in place of a mean: diverged runs have no figures."""
    diverged = sum(line["results"] is None for line in row)
    if diverged:
        return [f"{diverged} of {len(row)} diverged"] + [""] * (len(names) - 1)
    return [spread([line["results"][name] for line in row]) for name in names]


def _costs(row: list[Line]) -> list[str]:
    first, memory = row[0], [line["memory_bytes"] for line in row if line["memory_bytes"] is not None]
    return [
        f"{first['parameters']:,}",
        "grows, or unknown" if first["state_numbers"] is None else f"{first['state_numbers']:,}",
        f"{first['learning_rate']:g}",
        # Of the processor's time, and of the seed that was disturbed least: the machine may be busy.
        f"{max(line['tokens_per_second'] * line['seconds'] / line['cpu_seconds'] for line in row):,.0f}",
        f"{min(line['cpu_seconds'] for line in row):.0f}",
        f"{min(memory) / 1e6:.0f}" if memory else "",  # the first run of a process loads libraries too
    ]

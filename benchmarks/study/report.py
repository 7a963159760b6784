"""Tables and plots, from the lines of the results alone."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.study import lines
from benchmarks.study.lines import Line

Rows = dict[str, list[Line]]  # by model, a line per seed


def counted(folder: Path) -> dict[str, Rows]:
    """By task and model the lines of the runs that count, in the order in which models first came.

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
    return found


def spread(values: Sequence[float], digits: int = 3) -> str:
    """The mean, and half of what lies between the largest and the smallest."""
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
    head = ["", *names, "parameters", "state", "rate", "tokens/s", "MB", "seconds"]
    body = [head, ["---"] * len(head)]
    for label, key in (("guessing", "floor"), ("a perfect solver", "ceiling")):
        if every[0][key]:
            bounds = [f"{every[0][key][name]:.3f}" if name in every[0][key] else "" for name in names]
            body.append([label, *bounds, *[""] * (len(head) - 1 - len(names))])
    body += [[model, *_figures(row, names), *_costs(row)] for model, row in rows.items()]
    return "\n".join([title, "", *(f"| {' | '.join(cells)} |" for cells in body)])


def _figures(row: list[Line], names: Sequence[str]) -> list[str]:
    """Of runs that diverged there are no figures: a model of which one did shows that, and no mean."""
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
        f"{mean(line['tokens_per_second'] for line in row):,.0f}",
        f"{min(memory) / 1e6:.0f}" if memory else "",  # the first run of a process loads libraries too
        f"{mean(line['seconds'] for line in row):.0f}",
    ]


def plots(folder: Path) -> list[Path]:
    """One picture per task that has curves or lengths, and one of recall over the size of the state."""
    import matplotlib

    matplotlib.use("Agg")
    found = counted(folder)
    drawn = []
    for task, rows in found.items():
        if task.startswith("language"):
            drawn.append(_draw(folder / f"{task}.png", partial(_positions, rows)))
        elif task in ("parity", "modulo-3", "copying", "distant"):
            drawn.append(_draw(folder / f"{task}.png", partial(_lengths, rows)))
    sizes = {
        task: rows for task, rows in found.items() if task.startswith("recall-") and task != "recall-maps"
    }
    if sizes:
        drawn.append(_draw(folder / "recall.png", partial(_recall, sizes)))
    return drawn


def _draw(path: Path, draw: Callable[[Any], None]) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    draw(axes)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small", ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _whole(row: list[Line]) -> list[dict[str, Any]]:
    return [line["results"] for line in row if line["results"] is not None]


def _positions(rows: Rows, axes: Any) -> None:
    """Bits per byte by position, and on the same bytes with the trained length's context at most."""
    for model, row in rows.items():
        if not (results := _whole(row)):
            continue
        n = row[0]["settings"]["length"]
        whole, alone = (
            [mean(x) for x in zip(*(result[key] for result in results))]
            for key in ("by position", "by position, 1x")
        )
        at = [(i + 0.5) * n / 8 for i in range(len(whole))]
        axes.plot(at, [x - y for x, y in zip(whole, alone)], label=model)
        axes.axvline(n, color="gray", linewidth=0.5)
    axes.set(
        xlabel="position (gray: the trained length)",
        ylabel="bits per byte over those with the trained length's context",
    )


def _lengths(rows: Rows, axes: Any) -> None:
    for model, row in rows.items():
        if results := _whole(row):
            names = list(results[0])
            means = [mean(result[name] for result in results) for name in names]
            low, high = (
                [abs(pick(result[name] for result in results) - y) for name, y in zip(names, means)]
                for pick in (min, max)
            )
            axes.errorbar(names, means, yerr=(low, high), label=model, marker="o", capsize=2)
    floor = next(iter(rows.values()))[0]["floor"]
    axes.plot(list(floor), list(floor.values()), color="gray", linestyle=":", label="guessing")
    axes.set(ylabel="share of the answers that are right", ylim=(0, 1.03))


def _recall(sizes: dict[str, Rows], axes: Any) -> None:
    """Over the most pairs trained on; the name of a task ends with the numbers of a layer's state."""
    curves: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for task, rows in sizes.items():
        for model, row in rows.items():
            pairs = f"{max(row[0]['settings']['trained_pairs'])} pairs"
            if results := _whole(row):
                size = int(task.removeprefix("recall-"))
                curves[model].append((size, mean(result[pairs] for result in results)))
    for model, points in curves.items():
        axes.plot(*zip(*sorted(points)), label=model, marker="o")
    axes.set(
        xlabel="numbers in a layer's state (of linear attention)", ylabel=f"share of {pairs} recalled",
        xscale="log", ylim=(0, 1.03),
    )  # fmt: skip

"""The tables of what ran on a GPU, from the results of ``make gpu-run``: benchmarks/results/gpu-DATE.json."""

import json
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill
from typing import Any

from docs.formats import multiple, newest_first, table

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
Row = dict[str, Any]


def runs() -> list[Row]:
    """All results, the newest first."""
    return [json.loads(path.read_text()) for path in newest_first(RESULTS, "gpu")]


def newest_with(step: str) -> tuple[Row, list[Row]]:
    """The newest result in which a step measured something, and its rows without failures."""
    for run in runs():
        if rows := [row for row in run.get(step, []) if "failure" not in row]:
            return run, rows
    raise LookupError(f"{step}: expected a file of {RESULTS} with its rows")


def measured(step: str) -> list[Row]:
    """The rows of a step, or none if it never ran."""
    try:
        return newest_with(step)[1]
    except LookupError:
        return []


def median(times: Row) -> float:
    return float(times["median_ms"])


def ends(rows: list[Any]) -> list[Any]:
    """The first and the last."""
    return rows if len(rows) < 2 else [rows[0], rows[-1]]


def fewest_bytes(d: int, e: int) -> dict[str, int]:
    """Per token and head, in bfloat16, if each pass reads its inputs once; "step": per head, of a float32 state."""
    return {"forward": 2 * (2 * d + 2 * e), "backward": 2 * (6 * d + 5 * e) + 12, "step": 8 * d * e}


def done_in(run: Row) -> list[str]:
    return [name for name, how in run["steps"].items() if how["status"] == "done"]


def gpu_runs() -> str:
    """By GPU the most tests that passed in a run, what any run measured, and what never ran."""
    from benchmarks.gpu.steps import STEPS  # requires Triton

    found: dict[str, list[Row]] = {}
    for run in runs():
        found.setdefault(run["machine"][0]["device"], []).append(run)

    def tested(run: Row) -> list[int]:
        (tests,) = run.get("tests") or [{}]
        return [tests.get(name, 0) for name in ("passed", "failed", "not run")]

    def cells(device: str) -> list[str]:
        run = max(found[device], key=tested)
        (machine,), numbers = run["machine"], tested(run)
        done = {name for run in found[device] for name in done_in(run)} - {"machine", "tests"}
        return [
            *(device, machine["torch"].partition("+")[0], machine["triton"]),
            *(f"{numbers[0]} of {sum(numbers)}", ", ".join(name for name in STEPS if name in done)),
        ]

    head = "GPU | PyTorch | Triton | most tests that passed in a run | measured"
    every = {name for run in runs() for name in done_in(run)}
    never = ", ".join(f"`{name}`" for name in STEPS if name not in every)
    left = fill(f"Steps of `make gpu-run` that have not run on any GPU: {never or 'none'}.", 120)
    return f"{table(head, map(cells, found))}\n\n{left}"


def gpu_errors() -> str:
    """The range of errors of the operation and of a model in the newest runs that measured them."""
    rows = [row["errors"] for step in ("bandwidth", "gates", "long", "softmax") for row in measured(step)]
    out = [row["out"] for row in rows]
    gradients = [x for row in rows for name, x in row.items() if name.startswith("d")]
    ranges = [f"{min(found):.1%} to {max(found):.1%}" for found in (out, gradients)]
    logits = max(row["errors"]["linear"] for row in newest_with("model")[1])
    text = f"In bfloat16, the output was off by {ranges[0]} and gradients by {ranges[1]}, in the 2-norm of the worst "
    return fill(
        f"{text}window of 512 tokens. A model's logits under autocast were off by {logits:.1%} of their size.",
        120,
    )


def gpu_machine() -> str:
    """The GPUs that the tables come from, each with its tables and with the best rate of a copy."""
    tables = {
        "softmax": "softmax attention",
        "model": "the model",
        "fla": "flash-linear-attention",
        "bandwidth": "shares of the copy bandwidth",
        "decode": "decoding",
    }
    machines: dict[str, tuple[Row, list[str]]] = {}
    for step, name in tables.items():
        (machine,) = newest_with(step)[0]["machine"]
        machines.setdefault(machine["device"], (machine, []))[1].append(name)
    lines = [
        f"- {device} (a copy moves {machine['copy']['rate'] / 1e12:.1f} TB/s), PyTorch "
        f"{machine['torch'].partition('+')[0]}, Triton {machine['triton']}: {', '.join(names)}"
        for device, (machine, names) in machines.items()
    ]
    return "\n".join(
        [
            "In bfloat16, medians:",
            "",
            *(fill(line, 120, subsequent_indent="  ", break_on_hyphens=False) for line in lines),
        ]
    )


def gpu_softmax() -> str:
    """How many times as fast as softmax attention linrope is in a CUDA graph, by the number of tokens."""
    head = "tokens | forward | forward, softmax unrotated | forward + backward | forward + backward, softmax unrotated"

    def least(row: Row, bare: bool, name: str) -> float:
        functions = row["functions"].items()
        return min(median(x[name]) for key, x in functions if key.endswith("bare") == bare and name in x)

    def cells(row: Row) -> Iterator[str]:
        yield f"{row['shape'][1]:,}"
        for name in ("forward graph", "training graph"):
            for bare in (False, True):
                yield multiple(least(row, bare, name) / median(row[name]))

    return table(head, map(cells, newest_with("softmax")[1]))


def gpu_model() -> str:
    """How many times as fast as the same model with softmax attention a model is."""
    rows, ways = newest_with("model")[1], {"forward": "forward", "training": "training step"}
    ways |= {"training graph": "training step in a CUDA graph"}
    there = {name: words for name, words in ways.items() if name in rows[0]["functions"]["linear"]}

    def cells(row: Row) -> Iterator[str]:
        yield "{} x {:,}".format(*row["shape"][:2])
        for name in there:
            linear, softmax = (median(row["functions"][x][name]) for x in ("linear", "softmax"))
            yield multiple(softmax / linear)

    return table(" | ".join(["tokens", *there.values()]), map(cells, rows))


def gpu_fla() -> str:
    """flash-linear-attention's time divided by linrope's, in a CUDA graph."""
    (row,) = newest_with("fla")[1]
    sides = {"route": "equation 19, composed of its functions", "bare": "its linear attention alone"}

    def cells(side: str) -> Iterator[str]:
        yield sides[side]
        for name in ("forward graph", "training graph"):
            yield multiple(median(row["functions"][side][name]) / median(row["functions"]["linrope"][name]))

    return table("flash-linear-attention | forward | forward + backward", map(cells, sides))


def gpu_shares() -> str:
    """Times in a CUDA graph, and the share of the copy bandwidth that they reach: the least and the most by size."""

    def rows(step: str, words: str) -> Iterator[list[str]]:
        found: dict[int, list[tuple[float, list[str]]]] = {}
        for row in measured(step):
            rate = newest_with(step)[0]["machine"][0]["copy"]["rate"]
            b, n, h, d = row["shape"]
            forward, training = (median(row[f"{mode} graph"]) for mode in ("forward", "training"))
            times = {"forward": forward, "backward": training - forward}
            least = {name: 1e3 * b * n * h * x / rate for name, x in fewest_bytes(d, d).items()}
            cells = [
                f"{d}",
                f"{b} x {n:,} tokens, {h} heads{words}",
                *(f"{x:.2f} ms" for x in times.values()),
                *(f"{least[name] / x:.0%}" for name, x in times.items()),
                f"{row['extra_memory']:.0%}",
            ]
            found.setdefault(d, []).append((least["forward"] / forward, cells))
        for ranked in map(sorted, found.values()):
            yield from (cells for _, cells in ends(ranked))

    steps = {"bandwidth": "", "gates": ", gates", "long": ""}
    head = "features | | forward | backward | forward's share | backward's share | more memory"
    return table(head, (cells for step, words in steps.items() for cells in rows(step, words)))


def gpu_decode() -> str:
    """The share of the copy bandwidth with which steps in a CUDA graph read and write the states."""
    run, rows = newest_with("decode")
    rate = run["machine"][0]["copy"]["rate"]

    def cells(row: Row) -> list[str]:
        b, _, h, d = row["shape"]
        milliseconds = median(row["graph"]) / row["layers"]
        share = 1e3 * fewest_bytes(d, d)["step"] * b * h / rate / milliseconds
        return [f"{d}", f"{b * h:,}", f"{1e3 * milliseconds:.0f} us", f"{share:.0%}"]

    by_size: dict[int, list[list[str]]] = {}
    for row in rows:
        by_size.setdefault(row["shape"][-1], []).append(cells(row))
    shown = (x for steps in by_size.values() for x in ends(steps))
    return table("features | states | a step | share of the bandwidth", shown)

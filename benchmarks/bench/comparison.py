"""Compares two results of ``linrope bench``."""

from pathlib import Path
from typing import Any

from rich.console import Group

from benchmarks.bench.report import times
from linrope.cli.console import plain_table
from linrope.common.files import parse_json

_SAME = ("cpu", "device", "threads", "clock", "instruction_set", "torch")


def read(path: Path) -> dict[str, Any]:
    """Reads a result and adds the name of its file.

    Raises:
        FileNotFoundError, ValueError: there is no such file, or it is not a result of ``linrope bench``.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    result = parse_json(path.read_bytes(), str(path))
    if (
        not isinstance(result, dict)
        or not isinstance(result.get("attention"), list)
        or "machine" not in result
    ):
        raise ValueError(f"{path}: expected a result of linrope bench")
    return {**result, "name": path.stem}


def compare(first: dict[str, Any], second: dict[str, Any]) -> Group:
    """A table of the second result's speed-ups, under a list of other differences between both runs.

    Raises:
        ValueError: the results have no length and no position in common, or one lacks a figure.
    """
    try:
        pairs = _times(first), _times(second)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{first['name']}, {second['name']}: expected results of linrope bench ({error})"
        ) from error
    common = [key for key in pairs[0] if key in pairs[1]]
    if not common:
        raise ValueError(f"{first['name']}, {second['name']}: have no length and no position in common")
    table = plain_table(f"Seconds of linrope: {first['name']}, {second['name']}, and first over second")
    for column in ("what", "first", "second", "speed-up", "softmax first", "softmax second"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for key in common:
        (a, a_softmax), (b, b_softmax) = pairs[0][key], pairs[1][key]
        table.add_row(key, f"{a:.3g}", f"{b:.3g}", times(a / b), _number(a_softmax), _number(b_softmax))
    return Group(*_differences(first, second), table)


def _times(result: dict[str, Any]) -> dict[str, tuple[float, float | None]]:
    """The seconds of linrope and of softmax attention, by measurement."""
    seconds = {}
    for mode in ("forward", "training"):
        for row in result["attention"]:
            seconds[f"{mode}, {row['n']:,}"] = row[mode]["linrope_seconds"], row[mode]["softmax_seconds"]
    for row in result.get("decode") or []:
        at = f"{row['position']:,}"
        seconds[f"step at {at}"] = row["linrope_donated_seconds"], row["softmax_seconds"]
        seconds[f"layer at {at}"] = row["linrope_layer_seconds"], row["softmax_layer_seconds"]
    return seconds


def _differences(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """One line for each setting in which the runs differ, which makes their times hard to compare."""
    parts = [(first["machine"], second["machine"], _SAME)]
    if "case" in first and "case" in second:
        parts.append((first["case"], second["case"], tuple(first["case"])))
    return [
        f"differs: {name}: {one.get(name)}, {other.get(name)}"
        for one, other, names in parts
        for name in names
        if one.get(name) != other.get(name)
    ]


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:.3g}"

"""The command ``linrope check``; linrope.conformance computes the errors."""

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from linrope.cli.console import console, plain_table

if TYPE_CHECKING:
    from linrope.conformance.comparison import Row


def check(
    seconds: Annotated[
        float, typer.Option(help="Begin no further case after this time; the first one always runs.")
    ] = 15.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Compare every available backend with the equation in float64, on this machine.

    Each number is the largest error of outputs, gradients or states, divided by the bound that linrope promises. If one
    is above 1, or a call fails, a line names the call and the exit status is 1.
    """
    if not seconds >= 0:
        raise ValueError(f"--seconds={seconds}: expected at least 0")
    from linrope.conformance.cases import CASES
    from linrope.conformance.comparison import compared
    from linrope.versions import versions

    found = versions()
    rows, absent = compared(seconds, {name: x["reason"] for name, x in found["backends"].items()})
    failures = [line for row in rows for line in row.failures]
    if as_json:
        results = [asdict(row) for row in rows]
        report = {"passed": not failures, "cases": len(CASES), "results": results, "not_available": absent}
        print(json.dumps(_finite(report | {"versions": found}), indent=2))
        return int(bool(failures))
    console.print(
        f"linrope {found['linrope']}, torch {found['torch']}, {found['platform']}, instruction set "
        f"{found['instruction_set'] or 'none'}"
    )
    console.print(_table(rows), soft_wrap=False)
    for name, reason in absent.items():
        console.print(f"{name}: not available: {' '.join(reason.split())}")
    if any(row.cases < row.all_cases for row in rows) and not failures:
        console.print(
            "not all cases were compared in this time; a larger number of --seconds compares the others"
        )
    for line in failures:
        console.print(line)
    if not failures:
        console.print("all errors are within the bounds")
    return int(bool(failures))


def _table(rows: "list[Row]") -> Table:
    from linrope.conformance.cases import PARTS

    table = plain_table("The largest error, as a share of the promised bound")
    for name in ("backend", "device", "dtype"):
        table.add_column(name)
    for name in (*PARTS, "cases"):
        table.add_column(name, justify="right")
    for row in rows:
        errors = [f"{row.errors[part]:.2f}" if part in row.errors else "" for part in PARTS]
        table.add_row(row.backend, row.device, row.dtype, *errors, f"{row.cases} of {row.all_cases}")
    return table


def _finite(value: Any) -> Any:
    """Numbers that JSON does not have, as texts."""
    if isinstance(value, dict):
        return {key: _finite(x) for key, x in value.items()}
    if isinstance(value, list):
        return [_finite(x) for x in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

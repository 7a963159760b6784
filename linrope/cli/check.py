"""The command ``linrope check``; conformance.py computes the errors."""

import json
import math
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import Annotated, Any

import typer
from rich.table import Table

from linrope.cli.console import console


@dataclass
class Row:
    """A backend on a device with inputs of a dtype: its largest errors, as shares of the bounds."""

    backend: str
    device: str
    dtype: str
    cases: int = 0  # number of cases compared
    all_cases: int = 0  # number of cases that the backend computes
    errors: dict[str, float] = field(default_factory=dict)  # by part: forward, gradients, state
    failures: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.backend} {self.device} {self.dtype}"

    def add(self, case: str, errors: dict[str, float]) -> None:
        for part, error in errors.items():
            self.errors[part] = max(self.errors.get(part, 0.0), error)
            if not error <= 1:
                self.failures.append(
                    f"{self.name}: {part} has {error:.3g} times the error allowed, in: {case}"
                )


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
    from linrope.cli.conformance import CASES
    from linrope.versions import versions

    found = versions()
    rows, absent = _rows(found["backends"])
    _compare(rows, monotonic() + seconds)
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


def _rows(known: dict[str, dict[str, Any]]) -> tuple[list[Row], dict[str, str]]:
    """A row for each backend that "auto" may choose, device and dtype; why the other backends are not available."""
    import torch

    from linrope.backends import BACKENDS
    from linrope.cli.bounds import BOUNDS
    from linrope.cli.conformance import cases_of

    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    rows, absent = [], {}
    for name, places in BACKENDS.items():
        if not places:  # "reference" is the oracle, and "onnx" computes nothing
            continue
        here = [device for device in devices if device in places]
        if (reason := known[name]["reason"]) is not None or not here:
            absent[name] = reason or f"it runs on {' and '.join(places)}, which PyTorch does not have here"
            continue
        count = len(cases_of(name))
        dtypes = [str(x).removeprefix("torch.") for x in BOUNDS]
        rows += [Row(name, device, dtype, all_cases=count) for device in here for dtype in dtypes]
    return rows, absent


def _compare(rows: list[Row], end: float) -> None:
    """Fills the rows, case by case, so that all rows have the same cases if the time runs out."""
    from linrope.cli.bounds import BOUNDS
    from linrope.cli.conformance import CASES, Exact, cases_of

    for case in CASES:
        for dtype in BOUNDS:
            exact: Exact | None = None
            for row in (row for row in rows if row.dtype == str(dtype).removeprefix("torch.")):
                if (row.cases and monotonic() > end) or case not in cases_of(row.backend):
                    continue
                exact = exact or Exact(case, dtype)
                row.cases += 1
                _add(row, exact)


def _add(row: Row, exact: Any) -> None:
    from linrope.cli.conformance import errors

    try:
        row.add(exact.case.name, errors(row.backend, row.device, exact))
    except Exception as error:  # such as kernels that do not compile here: the other rows still count
        cause = " ".join(str(error).split())
        row.failures.append(f"{row.name}: {type(error).__name__}: {cause}, in: {exact.case.name}")


def _table(rows: list[Row]) -> Table:
    from linrope.cli.bench.report import plain_table
    from linrope.cli.conformance import PARTS

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

"""Compares all backends that this machine has with the equation, for ``linrope check``."""

from dataclasses import dataclass, field
from time import monotonic

import torch

from linrope.backends import BACKENDS
from linrope.conformance import cases
from linrope.conformance.bounds import BOUNDS
from linrope.conformance.cases import Exact, cases_of, errors


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

    def add(self, exact: Exact) -> None:
        """Compares one more case."""
        self.cases += 1
        name, case = f"{self.backend} {self.device} {self.dtype}", exact.case.name
        try:
            found = errors(self.backend, self.device, exact)
        except Exception as error:  # such as kernels that do not compile here: the other rows still count
            cause = " ".join(str(error).split())
            self.failures.append(f"{name}: {type(error).__name__}: {cause}, in: {case}")
            return
        for part, share in found.items():
            self.errors[part] = max(self.errors.get(part, 0.0), share)
            if not share <= 1:
                self.failures.append(f"{name}: {part} has {share:.3g} times the error allowed, in: {case}")


def compared(seconds: float, reasons: dict[str, str | None]) -> tuple[list[Row], dict[str, str]]:
    """A row for each backend that "auto" may choose, device and dtype; why the other backends are not available.

    All rows have the same cases if the time runs out. The first case always runs.

    reasons: why a backend cannot run here, by name.
    """
    end = monotonic() + seconds
    rows, absent = _rows(reasons)
    for case in cases.CASES:
        for dtype in BOUNDS:
            exact: Exact | None = None
            for row in (row for row in rows if row.dtype == _name(dtype)):
                if (row.cases and monotonic() > end) or case not in cases_of(row.backend):
                    continue
                exact = exact or Exact(case, dtype)
                row.add(exact)
    return rows, absent


def _rows(reasons: dict[str, str | None]) -> tuple[list[Row], dict[str, str]]:
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    rows, absent = [], {}
    for name, places in BACKENDS.items():
        if not places:  # "reference" is the oracle, and "onnx" computes nothing
            continue
        here = [device for device in devices if device in places]
        if (reason := reasons[name]) is not None or not here:
            absent[name] = reason or f"it runs on {' and '.join(places)}, which PyTorch does not have here"
            continue
        count = len(cases_of(name))
        rows += [Row(name, device, _name(dtype), all_cases=count) for device in here for dtype in BOUNDS]
    return rows, absent


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

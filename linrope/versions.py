"""Versions, available backends, instruction sets, threads and GPUs of this machine."""

import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

import torch

from linrope import backends
from linrope.backends import library


def versions() -> dict[str, Any]:
    """Everything that ``show_versions`` prints, as JSON types.

    Returns:
        linrope, torch, triton (None if not installed), python, platform: strings. backends: for each name
        whether it is available, a bool, and the reason why not, a string or None. instruction_sets: those of the
        native backend, and instruction_set: the one in use ([] and None without that backend). untested: a warning,
        a string, where the native kernels have not passed all tests on machines like this one. threads: how many
        PyTorch uses for an operation. slow_launches: why Triton looks up the kernel of each launch, a string; None:
        linrope remembers it. gpus: names and compute capabilities.

    Example:
        >>> found = versions()["backends"]
        >>> found["eager"]
        {'available': True, 'reason': None}
    """
    from linrope import __version__  # at call time, since linrope imports this module

    modules = {name: backends.available(name) for name in backends.NAMES if name != "auto"}
    native, triton = modules["native"], modules["triton"]
    sets, in_use, untested = [], None, None
    if isinstance(native, ModuleType):
        sets, in_use, untested = native.instruction_sets(), native.instruction_set(), library.UNTESTED
    return {
        "linrope": __version__,
        "torch": torch.__version__,
        "triton": _installed("triton"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "backends": {
            name: {"available": not reason, "reason": reason}
            for name, module in modules.items()
            for reason in [module if isinstance(module, str) else None]
        },
        "instruction_sets": sets,
        "instruction_set": in_use,
        "untested": untested,
        "threads": torch.get_num_threads(),
        "slow_launches": triton.why_slow_launches() if isinstance(triton, ModuleType) else None,
        "gpus": [_gpu(i) for i in range(torch.cuda.device_count())],
    }


def show_versions(*, as_json: bool = False) -> None:
    """Prints the versions, the available backends, and why the others are not available; for bug reports.

    Args:
        as_json: prints one JSON object, ``linrope.versions.versions()``, in place of lines of text.

    Example:
        >>> show_versions()  # doctest: +ELLIPSIS
        linrope           ...
        torch             ...
    """
    report = versions()
    if as_json:
        print(json.dumps(report, indent=2))
        return
    for name in ("linrope", "torch", "triton", "python", "platform"):
        _line(name, report[name] or "not installed")
    for name, found in report["backends"].items():
        _line(f"backend {name}", "yes" if found["available"] else f"no: {found['reason']}")
    if report["instruction_set"] is not None:
        _line("instruction set", f"{report['instruction_set']}, of {', '.join(report['instruction_sets'])}")
    if report["untested"] is not None:
        _line("untested", report["untested"])
    _line("threads", str(report["threads"]))
    if report["slow_launches"] is not None:
        _line("slow launches", report["slow_launches"])
    for gpu in report["gpus"] or ["none"]:
        _line("GPU", gpu)


def _line(name: str, text: str) -> None:
    sys.stdout.write(f"{name:<17} {' '.join(text.split())}\n")


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpu(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}"

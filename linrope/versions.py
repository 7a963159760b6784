"""What runs here: versions, backends and why not, instruction sets, threads, GPUs."""

import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

import torch

from linrope import backends
from linrope.backends.protocol import Backend


def versions() -> dict[str, Any]:
    """All that ``show_versions`` prints, in types that JSON has.

    Returns:
        linrope, torch, triton (None: not installed), python, platform: strings. ``backends``: by name None or
        why it cannot run here. ``instruction_sets`` of the native backend and the one ``instruction_set`` in
        use; [] and None without it. ``threads`` that PyTorch takes for an operation; ``gpus``: names and
        compute capabilities.

    Example:
        >>> reasons = versions()["backends"]
        >>> reasons["eager"] is None
        True
    """
    from linrope import __version__  # linrope is complete only when this runs

    modules = {name: _backend(name) for name in backends.NAMES if name != "auto"}
    native = modules["native"]
    sets, in_use = [], None
    if isinstance(native, ModuleType):
        sets, in_use = native.instruction_sets(), native.instruction_set()
    return {
        "linrope": __version__,
        "torch": torch.__version__,
        "triton": _installed("triton"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "backends": {name: found if isinstance(found, str) else None for name, found in modules.items()},
        "instruction_sets": sets,
        "instruction_set": in_use,
        "threads": torch.get_num_threads(),
        "gpus": [_gpu(i) for i in range(torch.cuda.device_count())],
    }


def show_versions(*, as_json: bool = False) -> None:
    """Prints the versions, the backends that run here, and why others do not: for reports of bugs.

    Args:
        as_json: in place of lines of text one JSON object, ``linrope.versions.versions()``.

    Example:
        >>> show_versions()  # doctest: +ELLIPSIS
        linrope           ...
        torch             ...
    """
    found = versions()
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for name in ("linrope", "torch", "triton", "python", "platform"):
        _line(name, found[name] or "not installed")
    for name, reason in found["backends"].items():
        _line(f"backend {name}", "yes" if reason is None else f"no: {reason}")
    if found["instruction_set"] is not None:
        _line("instruction set", f"{found['instruction_set']}, of {', '.join(found['instruction_sets'])}")
    _line("threads", str(found["threads"]))
    for gpu in found["gpus"] or ["none"]:
        _line("GPU", gpu)


def _line(name: str, text: str) -> None:
    sys.stdout.write(f"{name:<17} {' '.join(text.split())}\n")


def _backend(name: str) -> Backend | str:
    """The backend, or why it can run no call at all on this machine."""
    module = backends.load(name)
    if isinstance(module, str):
        return module
    reason = module.why_not()
    return module if reason is None else reason


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpu(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}"

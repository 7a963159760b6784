"""The compiled kernels of kernels/cpu: loads them, and runs their operators.

The library is built without PyTorch. It names the functions of PyTorch's stable C interface that it calls, and gets
their addresses here, from the PyTorch that this process has loaded. Its operators raise nothing: one that fails returns
None, and its error is raised here.
"""

import ctypes
import json
import platform
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from linrope.common.private_names import arguments_of, results_of, watched

_NAMES = {
    "darwin": ("liblinrope_native.dylib", "libtorch_cpu.dylib"),
    "win32": ("linrope_native.dll", "torch_cpu.dll"),
}
_LIBRARY, _PYTORCH = _NAMES.get(sys.platform, ("liblinrope_native.so", "libtorch_cpu.so"))
LIBRARY = Path(__file__).parents[1] / "lib" / _LIBRARY
WHY_PURE = LIBRARY.with_name("why_pure.txt")  # hatch_build.py puts it into wheels without the library
# A warning on machines where the kernels have not passed all tests; docs/backends.md has the table of wheels
UNTESTED = (
    None
    if (sys.platform, platform.machine()) == ("linux", "x86_64")
    else f"the kernels for {platform.system()} on {platform.machine()} are new: run `linrope check`"
)
_ERRORS = {"ValueError": ValueError, "MemoryError": MemoryError}


def load(path: Path) -> ctypes.CDLL | str:
    """Loads the library and defines its operators. Returns the reason if that fails."""
    if not path.is_file():
        return _why_absent(path)
    try:
        library = ctypes.CDLL(str(path))
        if not hasattr(library, "linrope_facts"):
            return "the library was built from other sources: run `make native`"
        for name in ("pytorch_functions", "start", "error", "instruction_set", "facts"):
            getattr(library, f"linrope_{name}").restype = ctypes.c_char_p
        failed = library.linrope_start(_addresses(_names_in(library)))
    except OSError as error:
        return f"the native library cannot be loaded: {error}"
    return f"the native library cannot be loaded: {failed.decode()}" if failed else library


def _why_absent(path: Path) -> str:
    if WHY_PURE.is_file():
        return f"a build without the compiled kernels ({WHY_PURE.read_text(encoding='utf-8').strip()})"
    if (Path(__file__).parents[2] / "kernels" / "cpu" / "build.py").is_file():
        return "not built in this tree: run `make native`"
    return f"the native library is missing: {path}; run `make native` in a clone, or `pip install .` again"


def _names_in(library: ctypes.CDLL) -> list[str]:
    names: str = library.linrope_pytorch_functions().decode()
    return names.split()


def _addresses(names: list[str]) -> ctypes.Array[Any]:
    """Where this process has these functions of PyTorch."""
    file = Path(torch.__file__).parent / "lib" / _PYTORCH
    pytorch = ctypes.CDLL(str(file) if file.exists() else _PYTORCH)
    missing = [name for name in names if not hasattr(pytorch, name)]
    if missing:
        raise OSError(f"PyTorch {torch.__version__} has no {missing[0]}; expected PyTorch 2.11 or later")
    return (ctypes.c_void_p * len(names))(
        *(ctypes.cast(getattr(pytorch, name), ctypes.c_void_p) for name in names)
    )


_library = load(LIBRARY)
WHY_NOT = _library if isinstance(_library, str) else None  # it cannot be loaded


# The library's limits, and names in the order of its numbers for them; without a library there are none
FACTS: dict[str, Any] = {} if isinstance(_library, str) else json.loads(_library.linrope_facts())


def limit(name: str) -> int:
    """One of the library's limits; 0 without a library, which cannot run any call."""
    return int(FACTS.get(name, 0))


def numbers_of(name: str) -> dict[str, int]:
    """The library's numbers for the names of this list; none without a library."""
    return {word: i for i, word in enumerate(FACTS.get(name, ()))}


def pytorch_functions() -> list[str]:
    """The functions of PyTorch that the library calls."""
    return [] if isinstance(_library, str) else _names_in(_library)


_untrusted = UNTESTED is not None and WHY_NOT is None  # not compared yet, or different
_difference: str | None = None


def why_not() -> str | None:
    """The reason why the kernels cannot run on this machine; None: they can."""
    if _untrusted and _difference is None and not watched():
        _try()
    return WHY_NOT or _difference


def _try() -> None:
    """Compares the kernels with plain PyTorch where they have not been tested. If they differ, none of them runs."""
    global _untrusted, _difference
    _untrusted = False  # the comparison runs the kernels, too
    # Imported at run time, because first_use imports modules that import this one
    try:
        found = import_module("linrope.first_use").difference()
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    if found is not None:
        _untrusted = True
        _difference = (
            f"its kernels compute something else than PyTorch on this machine ({found}); "
            "please report what `linrope check` says"
        )


def run(operator: str, *arguments: Any, **named: Any) -> Any:
    """The results of one of the library's operators.

    Raises:
        ValueError, RuntimeError, MemoryError: what the operator found wrong. It has written nothing then.
    """
    # A compiled program chose these kernels while it was traced, when they could not be compared
    if _untrusted and (reason := why_not()) is not None:
        raise RuntimeError(f"backend='native' cannot run: {reason}")
    results = _operator(operator)(*arguments, **named)
    if results is None or (type(results) is tuple and results[0] is None):
        raise _error()
    return results


class Prepared:
    """Runs an operator for calls that differ in some of its arguments alone.

    What they share is put in the schema's order once. PyTorch takes 0.1 us for each None that it gets, and less for
    each argument that is left out: those at the end are, if all calls share them.
    """

    def __init__(self, operator: str, shared: dict[str, Any], names: Sequence[str]) -> None:
        """names: the arguments that differ, which calls pass in this order."""
        self._operator, defaults = operator, arguments_of(_operator(operator))
        fixed = {name: shared.get(name, default) for name, default in defaults.items() if name not in names}
        order, given = [*defaults], [*fixed, *names]
        while order[-1] not in names and fixed[order[-1]] is defaults[order[-1]]:
            order.pop()
        self._fixed, self._count = (*fixed.values(),), len(names)
        self._in_order = itemgetter(*map(given.index, order))

    def __call__(self, *values: Any) -> Any:
        """The results, as of ``run``."""
        assert len(values) == self._count
        return run(self._operator, *self._in_order((*self._fixed, *values)))


def run_by_name(operator: str, arguments: dict[str, Any]) -> Any:
    """run(operator, **arguments), but passed by position: PyTorch takes 5 us to match keywords."""
    return run(operator, *_in_order(operator)(arguments))


def named_results(operator: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The results of ``run_by_name``, by their names in the schema."""
    return dict(zip(result_names(operator), run_by_name(operator, arguments)))


@cache
def _operator(name: str) -> Any:
    return getattr(torch.ops.linrope_native, name).default


@cache
def argument_names(operator: str) -> list[str]:
    """The names of an operator's arguments, in its schema's order."""
    return [*arguments_of(_operator(operator))]


@cache
def result_names(operator: str) -> list[str]:
    """The names of an operator's results, in its schema's order."""
    return results_of(_operator(operator))


@cache
def _in_order(operator: str) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """A function that puts a dict of the operator's arguments in the order of its schema."""
    return itemgetter(*argument_names(operator))


def _error() -> Exception:
    """The exception for the operator that has just failed in this thread."""
    assert not isinstance(_library, str)
    kind, _, text = _library.linrope_error().decode().partition(": ")
    return _ERRORS.get(kind, RuntimeError)(text)


def _instruction_sets() -> list[str]:
    if isinstance(_library, str):
        return []
    names: list[str] = []
    while name := _library.linrope_instruction_set(ctypes.c_size_t(len(names))):
        names.append(name.decode())
    return names


INSTRUCTION_SETS = _instruction_sets()  # that this machine can run, the best one first


def use_instruction_set(name: str) -> None:
    """Switches to one of INSTRUCTION_SETS."""
    assert not isinstance(_library, str)
    _library.linrope_use_instruction_set(ctypes.c_size_t(INSTRUCTION_SETS.index(name)))

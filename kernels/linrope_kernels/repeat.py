"""Repeats a pass of a call, forward or backward, without the Python that decides what it launches.

A pass makes new tensors and starts kernels. Which ones follows from its key: the call's settings, and what its tensors
look like. So the second pass with a key is recorded as a function of its tensors, which later passes call:

    def repeat(t0, t1, t2):
        n0 = empty((8, 512, 16, 64), dtype=c0, device=c1)
        c2((t0, (524288, 1024, 64, 1)), (n0, (524288, 1024, 64, 1)), 512, 16, 1e-06, True)
        return (n0, None)

A pass that does anything else with tensors is not recorded, but runs as it is each time.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from linrope_kernels.start import RECORDER, start, why_forgetful

MOST_PASSES = 1024  # to remember: shapes may vary without end
_PASSES: dict[Hashable, Callable[..., Any] | str] = {}
ONCE, NEVER = "seen once", "not to be repeated"  # instead of a function

_MAKES = frozenset((Tensor.new_empty, torch.empty_like))
_FACTS: tuple[Any, ...] = (Tensor.shape, Tensor.dtype, Tensor.device, Tensor.ndim, Tensor.is_cuda)
_READS = frozenset(
    (Tensor.stride, Tensor.get_device, Tensor.numel, torch.sym_max, *(fact.__get__ for fact in _FACTS))
)


def repeat_alike(settings: Hashable, tensors: Sequence[Tensor | None], run: Callable[[], Any]) -> Any:
    """``repeated`` for a pass that depends on these settings and on what the tensors look like."""
    alike = [None if x is None else (x.dtype, x.shape, x.stride(), x.data_ptr() % 16) for x in tensors]
    device = next(x.get_device() for x in tensors if x is not None)
    return repeated((settings, device, tuple(alike)), tensors, run)


def repeat_launcher(launcher: Callable[..., Any], record: Sequence[Any], *others: Tensor | None) -> Any:
    """launcher(record, *others), for a record of tensors and settings."""
    flat = *record, *others
    tensors = [x if isinstance(x, Tensor) else None for x in flat]
    settings = tuple([None if isinstance(x, Tensor) else x for x in flat])
    return repeat_alike((launcher, settings), tensors, lambda: launcher(record, *others))


def repeated(key: Hashable, tensors: Sequence[Tensor | None], run: Callable[[], Any]) -> Any:
    """Returns the result of run(): tuples and lists of tensors that the pass allocates or that it was given.

    key: all that it depends on: settings, and the shape, strides, dtype, device, and address modulo 16 of each of the
    tensors. New tensors follow from these, as PyTorch allocates memory at multiples of 16.
    """
    known = _PASSES.get(key)
    if known is None and why_forgetful() is None:
        if len(_PASSES) >= MOST_PASSES:
            _PASSES.clear()
        _PASSES[key] = ONCE  # recording takes as long as many passes: a length met once is not recorded
    if known is None or known is NEVER:
        return run()
    if known is not ONCE:
        return known(*tensors)  # type: ignore[operator]
    present = [id(x) for x in tensors if x is not None]
    if len(present) != len(set(present)):  # a name must stand for one argument
        return run()
    with (recording := _Recording(tensors)):
        results = run()
    _PASSES[key] = recording.function(results)
    return results


def forget() -> None:
    """Forgets all passes: something that they depend on has changed, other than their keys."""
    _PASSES.clear()


class _Recording(TorchFunctionMode):
    """Writes down what a pass does."""

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.parameters = [f"t{i}" for i in range(len(tensors))]
        self.names = {id(x): name for x, name in zip(tensors, self.parameters) if x is not None}
        self.new: dict[str, Tensor] = {}  # held, so that no other tensor gets the id of one of them
        self.lines: list[tuple[str, set[str]]] = []  # each with the names of the tensors in it
        self.constants: dict[str, Any] = {"empty": torch.empty}
        self.complete, self.launching = True, False

    def __enter__(self) -> "_Recording":
        self.token = RECORDER.set(self._start)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        RECORDER.reset(self.token)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        x = func(*args, **(kwargs or {}))
        if self.launching:
            pass  # an operation of Triton's own
        elif func in _MAKES and x.is_contiguous():
            name = self.names[id(x)] = f"n{len(self.new)}"
            self.new[name] = x
            dtype, device = self._constant(x.dtype), self._constant(x.device)
            self.lines.append((f"{name} = empty({tuple(x.shape)}, dtype={dtype}, device={device})", {name}))
        elif func not in _READS and not (func == Tensor.contiguous and x is args[0]):
            self.complete = False
        return x

    def _start(self, *launch: Any) -> None:
        self.launching = True
        again, names = start(*launch), set[str]()
        self.launching = False
        if again is None:
            self.complete = False
        else:
            self.lines.append((self._constant(again[0]) + self._written(again[1], names), names))

    def _constant(self, x: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = x
        return name

    def _written(self, x: Any, names: set[str], *, result: bool = False) -> str:
        """An expression for x, with its names added to ``names``. A compiled kernel takes any tuple for a named one."""
        if isinstance(x, Tensor):
            name = self.names.get(id(x))
            self.complete &= name is not None  # else something but the pass made it
            names.add(name or "None")
            return name or "None"
        if isinstance(x, (tuple, list)):
            inside = "".join(f"{self._written(y, names, result=result)}, " for y in x)
            if isinstance(x, list):
                return f"[{inside}]"
            return (self._constant(type(x)) if result and type(x) is not tuple else "") + f"({inside})"
        return repr(x) if x is None or type(x) in (bool, int, str) else self._constant(x)

    def function(self, results: Any) -> Callable[..., Any] | str:
        """The pass as a function of its tensors; NEVER if it does what cannot be written down."""
        last: set[str] = set()
        lines = [f"return {self._written(results, last, result=True)}"]
        if not self.complete:
            return NEVER
        for line, names in reversed(self.lines):
            if line.startswith("n") and not names <= last:
                continue  # nothing reads this new tensor
            # Each new tensor is given up after the last line that has it.
            lines += [f"del {name}" for name in sorted((names & self.new.keys()) - last)]
            lines.append(line)
            last |= names
        header = f"def repeat({', '.join(self.parameters)}):"
        source = "\n    ".join((header, *reversed(lines)))
        exec(compile(source, "<a repeated pass>", "exec"), self.constants)
        found: Callable[..., Any] = self.constants["repeat"]
        return found

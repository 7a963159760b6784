"""Stands in for ``linrope.cuda_graphs.Recorder`` without a GPU: records PyTorch's operations, and replays only these.

As in a CUDA graph, a replay runs no Python of the recorded function. It reads and writes the tensors of the recording,
so a value that Python would have changed between two calls shows as a wrong result. What a CUDA graph cannot record is
an error: reading values, shapes that depend on values, and copies from and to the host.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from linrope import cuda_graphs
from linrope.common import tracing
from linrope.decode import generation

T = TypeVar("T")
aten = torch.ops.aten
WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
BY_INDEX = {
    aten.index.Tensor,
    aten.index_put_.default,
    aten.index_put.default,
}  # only masks have dynamic shapes
FROM_HOST = {aten.lift_fresh.default, aten.lift_fresh_copy.default}  # torch.tensor(..)
TO_HOST = ("cpu", "numpy", "tolist")  # methods that a dispatch mode does not see


def tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def refuse(what: object, *_: Any, **__: Any) -> Any:
    raise RuntimeError(f"{what}: operation not permitted when stream is capturing")


class Recording(TorchDispatchMode):
    """The operations inside the block, each with the tensors that it has read and made."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masked = any(x.dtype in (torch.bool, torch.uint8) for x in tensors(args[1:2]))
        if func in FROM_HOST or (masked if func in BY_INDEX else WAITS & set(func.tags)):
            refuse(func)
        results = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, results))
        return results

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, results in self.calls:
            before = {x.untyped_storage().data_ptr() for x in tensors((args, kwargs))}
            for own, x in zip(tensors(results), tensors(func(*args, **kwargs)), strict=True):
                if own.untyped_storage().data_ptr() not in before:  # neither a view nor written in place
                    own.copy_(x)


class Recorder:
    """With the methods of ``cuda_graphs.Recorder``. Here recording also runs the function, as the first replay."""

    def __init__(self, device: torch.device) -> None:
        self.runs = self.replays = 0

    def run(self, function: Callable[[], T]) -> T:
        self.runs += 1
        with pytest.MonkeyPatch.context() as patch:
            as_on_a_gpu(patch)
            return function()

    def record(
        self, function: Callable[[], T], generators: Sequence[torch.Generator] = ()
    ) -> Callable[[], T]:
        recording = Recording()
        with pytest.MonkeyPatch.context() as patch, recording:
            as_on_a_gpu(patch)
            for name in TO_HOST:
                patch.setattr(Tensor, name, lambda *_, name=name: refuse(name))
            results = function()

        def replay() -> T:
            if self.replays:
                recording.replay()
            self.replays += 1
            return results

        return replay


def as_on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """linrope looks at no values, and takes no notice of the dispatch mode: its own operations are recorded."""
    patch.setattr(tracing, "watched", lambda: False)
    for name, module in list(sys.modules.items()):
        if name.startswith("linrope.") and hasattr(module, "values_readable"):
            patch.setattr(module, "values_readable", lambda _: False)


def replaces_cuda(patch: pytest.MonkeyPatch) -> list[Recorder]:
    """Puts the stand-in in the place of CUDA. Returns the recorders, to which each new one is added."""
    made: list[Recorder] = []

    def recorder(device: torch.device) -> Recorder:
        made.append(Recorder(device))
        return made[-1]

    patch.setattr(cuda_graphs, "Recorder", recorder)
    patch.setattr(generation, "check_on_cuda", lambda *_: None)
    if "linrope.models.huggingface.prepared" in sys.modules:
        patch.setattr("linrope.models.huggingface.prepared.check_on_cuda", lambda *_: None)
    return made

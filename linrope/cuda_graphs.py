"""CUDA graphs: a function of tensors is recorded once, and later calls replay it without launching from Python."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from linrope.common.argument_checks import check_sizes
from linrope.common.private_names import pytree

T = TypeVar("T")


def check_on_cuda(name: str, device: torch.device) -> None:
    """Raises RuntimeError unless the device is a CUDA device.

    >>> from linrope.cuda_graphs import check_on_cuda
    >>> check_on_cuda("tensors", torch.device("cpu"))
    Traceback (most recent call last):
    RuntimeError: tensors: got tensors on cpu, expected a CUDA device, since other devices have no CUDA graphs
    """
    if device.type != "cuda":
        raise RuntimeError(
            f"{name}: got tensors on {device}, expected a CUDA device, since other devices have no CUDA graphs"
        )


class Recorder:
    """Runs and records functions on one CUDA device, on a stream of its own.

    A graph cannot be recorded on the default stream. What PyTorch prepares in earlier runs, such as the nodes that add
    up gradients, belongs to the stream of those runs, so runs and recordings share one stream.
    """

    def __init__(self, device: torch.device) -> None:
        check_on_cuda("tensors", device)
        self.device, self.stream = device, torch.cuda.Stream(device)

    def run(self, function: Callable[[], T]) -> T:
        """Calls the function without recording it."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            results = function()
        current.wait_stream(self.stream)
        return results

    def record(
        self, function: Callable[[], T], generators: Sequence[torch.Generator] = ()
    ) -> Callable[[], T]:
        """Calls the function to record its kernels, which do not run yet. Returns the replay, whose results are always
        the same tensors.

        Raises:
            RuntimeError: the function does what a graph cannot record. PyTorch is then as it was before.
        """
        with torch.cuda.device(self.device):
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            for generator in generators:
                graph.register_generator_state(generator)
            drawn = (torch.cuda.default_generators[torch.cuda.current_device()], *generators)
            before = [generator.get_state() for generator in drawn]
            try:
                # Other threads, such as those of a DataLoader, may meanwhile allocate pinned memory.
                with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                    results = function()
            except BaseException as error:
                torch.cuda.set_stream(stream)  # PyTorch leaves its stream and generators in recording mode
                for generator, state in zip(drawn, before, strict=True):
                    generator.graphsafe_set_state(torch.Generator(self.device).graphsafe_get_state())
                    generator.set_state(state)
                if isinstance(error, RuntimeError):
                    raise RuntimeError(f"{_CANNOT}: {error}") from error
                raise

        def replay() -> T:
            with torch.cuda.device(self.device):
                graph.replay()
            return results

        return replay


_CANNOT = (
    "function: cannot be recorded in a CUDA graph, expected one that reads no tensor's value (item(), if, print) and "
    "copies nothing from or to the CPU"
)


class GraphedStep(Generic[T]):
    """Calls a function of tensors and, from the fourth call on, replays it as a CUDA graph.

        results = step(*tensors)        is        results = function(*tensors)

    Replaying takes the time of the kernels alone, without that of launching each from Python. Every call does exactly
    once what the function does: the first ``warmup`` calls run it, the next call records it, and that call and all
    later ones replay it on copies of their tensors. A training step may therefore contain its backward pass and its
    optimizer, and no warm-up has to be undone.

    A replay repeats the recorded kernels and runs no Python. The function must not read values of tensors, or depend on
    anything in Python that changes between calls: pass tensors, or overwrite tensors that it uses. All tensors that it
    uses must stay where they are.

    Args:
        function: takes tensors on one CUDA device. It returns a tensor, None, or tuples, lists and dicts of them.
        warmup: the number of calls before the recording. DistributedDataParallel requires 11.
        generators: of the random numbers that the function draws, apart from the device's default generator.

    A call takes the function's tensors, with the shapes, dtypes and device of those of the first call, and without
    gradients. It returns copies of the results, without gradients.

    Raises:
        TypeError, ValueError: an argument, or a call's tensor, is not as expected.
        RuntimeError: the tensors are not on a CUDA device, or the function cannot be recorded.

    >>> from linrope.cuda_graphs import GraphedStep
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> layer = LinearRoPEAttention.block(64, 2, device=device).requires_grad_(False)
    >>> step = GraphedStep(layer) if device == "cuda" else layer
    >>> [step(torch.randn(2, 100, 64, device=device)).shape for _ in range(5)][-1]
    torch.Size([2, 100, 64])
    """

    def __init__(
        self, function: Callable[..., T], *, warmup: int = 3, generators: Sequence[torch.Generator] = ()
    ) -> None:
        check_sizes(warmup=warmup)
        self.function, self.warmup, self.generators = function, warmup, tuple(generators)
        self._inputs: list[Tensor] = []  # the graph's own memory
        self._recorder: Recorder | None = None
        self._replay: Callable[[], T] | None = None

    def __call__(self, *tensors: Tensor) -> T:
        self._check(tensors)
        if self._recorder is None:
            self._recorder = Recorder(tensors[0].device)
            self._inputs = [x.detach().clone(memory_format=torch.contiguous_format) for x in tensors]
        else:
            for own, x in zip(self._inputs, tensors, strict=True):
                own.copy_(x)
        if self._replay is None:
            _check_autocast(tensors[0].device.type)
            call = partial(self.function, *self._inputs)
            if self.warmup > 0:
                self.warmup -= 1
                return _copied(self._recorder.run(call))
            self._replay = self._recorder.record(call, self.generators)
        return _copied(self._replay())

    def _check(self, tensors: Sequence[Tensor]) -> None:
        for i, x in enumerate(tensors):
            if not isinstance(x, Tensor):
                raise TypeError(f"tensors[{i}]: got {type(x).__name__}, expected torch.Tensor")
            if x.requires_grad:
                raise ValueError(f"tensors[{i}]: got a tensor that requires gradients, expected detach()")
        if not tensors:
            raise ValueError("tensors: got none, expected at least one")
        expected = self._inputs or [tensors[0]] * len(tensors)
        if len(tensors) != len(expected):
            raise ValueError(f"tensors: got {len(tensors)}, expected {len(expected)}, as in the first call")
        for i, (x, own) in enumerate(zip(tensors, expected, strict=True)):
            if x.device != own.device:
                raise ValueError(f"tensors[{i}]: got device {x.device}, expected {own.device}")
            if self._inputs and x.dtype != own.dtype:
                raise TypeError(f"tensors[{i}]: got {x.dtype}, expected {own.dtype}, as in the first call")
            if self._inputs and x.shape != own.shape:
                shapes = f"got shape {tuple(x.shape)}, expected {tuple(own.shape)}"
                raise ValueError(f"tensors[{i}]: {shapes}, as in the first call")


def _check_autocast(device: str) -> None:
    """Raises RuntimeError if the graph could use weights that autocast cast before the recording."""
    if torch.is_autocast_enabled(device) and torch.is_autocast_cache_enabled():
        raise RuntimeError(
            "autocast: got a call inside of it, expected autocast inside of the function, or cache_enabled=False"
        )


def _copied(results: T) -> T:
    """The results in memory of their own, since the next replay overwrites the graph's."""

    def copied(x: object) -> object:
        if x is not None and not isinstance(x, Tensor):
            raise TypeError(
                f"function: returned {type(x).__name__}, expected tensors: a replay computes nothing in Python"
            )
        return None if x is None else x.detach().clone()

    found: T = pytree.tree_map(copied, results)
    return found

"""A group of gloo processes on this machine, which run functions as long as a module's tests need them."""

import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from inspect import Parameter, signature
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

PATIENCE = 300  # seconds for one function; a hang then fails one test and not the run


class Processes:
    """``run(function, ...)`` calls a function of an importable module on each rank."""

    def __init__(self, size: int, folder: Path) -> None:
        # One server imports PyTorch, and each process is a fork of it: a spawn would import it again.
        context = get_context("forkserver")
        modules = ("models", "operation", "tensor_parallel", "training")
        context.set_forkserver_preload([f"tests.distributed.test_{name}" for name in modules])
        self.size, self.pipes, self.processes = size, [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, size, str(folder / "store"), theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., None], *args: Any, **options: Any) -> None:
        """Fails with the tracebacks of the ranks on which the function raised an error."""
        for pipe in self.pipes:
            pipe.send((function, args, options))
        errors = []
        for rank, pipe in enumerate(self.pipes):
            try:
                error = pipe.recv() if pipe.poll(PATIENCE) else "no answer"
            except EOFError:
                error = "ended"
            errors += [f"rank {rank}: {error}"] if error else []
        if errors:
            pytest.fail("\n".join(errors), pytrace=False)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(10)
            process.kill()


def on_each_rank(test: Callable[..., None]) -> Callable[..., None]:
    """A test whose body runs on each rank of a group, with the arguments that it names."""

    @wraps(test)
    def run(processes: Processes, **arguments: Any) -> None:
        processes.run(run, **arguments)  # found by name; the body is its __wrapped__

    own = signature(test)
    given = Parameter("processes", Parameter.POSITIONAL_OR_KEYWORD)
    run.__signature__ = own.replace(parameters=[given, *own.parameters.values()])  # type: ignore[attr-defined]
    return run


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", CUDA_VISIBLE_DEVICES="")
    # What torchrun sets, and accelerate and transformers ask for.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500")
    torch.set_num_threads(1)
    timeout = timedelta(seconds=PATIENCE - 60)
    dist.init_process_group("gloo", f"file://{store}", timeout, rank=rank, world_size=size)
    while True:
        try:
            function, args, options = pipe.recv()
        except EOFError:
            break
        error = ""
        try:
            getattr(function, "__wrapped__", function)(*args, **options)
        except BaseException:
            error = f"\n{traceback.format_exc()}"
        pipe.send(error)
    dist.destroy_process_group()

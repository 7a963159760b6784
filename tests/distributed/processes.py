"""A group of gloo processes on this machine, which run functions as long as a module's tests need them."""

import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

PATIENCE = 300  # seconds for one function; a hang then fails one test and not the run


class Processes:
    """``run(function, *args)`` calls a function of an importable module on each rank."""

    def __init__(self, size: int, folder: Path) -> None:
        # One server imports PyTorch, and each process is a fork of it: a spawn would import it again.
        context = get_context("forkserver")
        modules = ("cases", "checks", "heads", "training")
        context.set_forkserver_preload([f"tests.distributed.{name}" for name in modules])
        self.size, self.pipes, self.processes = size, [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, size, str(folder / "store"), theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What each rank returned, or a failed test with the tracebacks of those that failed."""
        for pipe in self.pipes:
            pipe.send((function, args))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            try:
                answers.append(pipe.recv() if pipe.poll(PATIENCE) else (False, f"rank {rank}: no answer"))
            except EOFError:
                answers.append((False, f"rank {rank}: ended"))
        failed = [text for done, text in answers if not done]
        if failed:
            pytest.fail("\n".join(failed), pytrace=False)
        return [result for _, result in answers]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(10)
            process.kill()


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
            function, args = pipe.recv()
        except EOFError:
            break
        try:
            answer = (True, function(*args))
        except BaseException:
            answer = (False, f"rank {rank}:\n{traceback.format_exc()}")
        pipe.send(answer)
    dist.destroy_process_group()

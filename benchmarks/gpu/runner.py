"""Runs steps in processes of their own, with time limits, and keeps every row as soon as it is there."""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.gpu.machine import Machine, Row

# The server imports everything once; each step is a fork of it, which costs milliseconds. No process but a step's own
# may use CUDA, which does not survive a fork.
CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["benchmarks.gpu.steps"])
GRACE = 5  # seconds in which an interrupted step may end by itself

Run = Callable[[Machine], Iterator[Row]]


class Step:
    """Rows of a step that runs in another process, as they come; then ``status`` says how it ended."""

    def __init__(self, run: Run, on: Machine, log: Path | None) -> None:
        self.status, self.seconds, self._limit = "", 0.0, on.limit
        self._receiver, sender = CONTEXT.Pipe(duplex=False)
        self._process = CONTEXT.Process(target=_serve, args=(run, on, sender, log))
        self._process.start()
        sender.close()

    def rows(self) -> Iterator[Row]:
        begun = time.monotonic()
        try:
            while True:
                if not self._receiver.poll(max(0.0, begun + self._limit - time.monotonic())):
                    self.status = f"stopped after {self._limit:.0f} s"
                    break
                message = self._receiver.recv()
                if isinstance(message, str):
                    self.status = message
                    break
                yield message
        except EOFError:
            self._process.join()
            self.status = f"ended with exit code {self._process.exitcode}"
        finally:
            self.seconds = time.monotonic() - begun
            self._end()

    def _end(self) -> None:
        """Ends the step's process and all that it started, which share a process group."""
        assert self._process.pid is not None
        for number in (signal.SIGINT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
            self._process.join(GRACE)
        self._receiver.close()


def _serve(run: Run, on: Machine, sender: Connection, log: Path | None) -> None:
    os.setsid()
    if log is not None:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    import torch

    if on.small:  # others run beside this one, and more threads than cores wait for each other
        torch.set_num_threads(1)
    if not on.on_gpu:
        from tests.support.interpreter import quicken

        quicken()
    try:
        if torch.cuda._is_in_bad_fork():
            raise RuntimeError(
                "an import of benchmarks.gpu.steps has used CUDA, which does not survive a fork"
            )
        for row in run(on):
            sender.send(row)
        sender.send("done")
    except KeyboardInterrupt:
        pass
    except BaseException as error:
        sender.send(f"{type(error).__name__}: {error}"[:1000])
        raise


def failures(name: str, rows: Iterable[Row], status: str) -> list[str]:
    """Why a step did not give all that it should."""
    cases = ((row.get("shape", row.get("case", "")), row["failure"]) for row in rows if "failure" in row)
    return [
        *(f"{name} {case}: {why}" for case, why in cases),
        *([] if status == "done" else [f"{name}: {status}"]),
    ]


class Results:
    """The JSON file of a run. A file that is there is continued: a step that runs again replaces its former rows."""

    def __init__(self, path: Path, logs: Path) -> None:
        self.path, self.logs, self.failures = path, logs, list[str]()
        for folder in (path.parent, logs):
            folder.mkdir(parents=True, exist_ok=True)
        self.found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.found.setdefault("date", time.strftime("%Y-%m-%d"))
        self.found.setdefault("steps", {})

    def log(self, name: str) -> Path:
        """The file of what a step prints."""
        return self.logs.absolute() / f"{name}.log"

    def add(self, name: str, rows: list[Row], status: str, seconds: float) -> None:
        self.found[name] = rows
        self.found["steps"][name] = {"status": status, "seconds": round(seconds, 1)}
        temporary = self.path.with_suffix(".part")
        temporary.write_text(json.dumps(self.found, indent=1, default=str) + "\n")
        temporary.replace(self.path)

    def rehearse(self, steps: dict[str, Run], on: Machine, processes: int) -> None:
        """Runs steps in small sizes, several side by side: it compiles the kernels, and shows what will fail."""
        begun, rows = time.monotonic(), []

        def one(name: str) -> Row:
            step = Step(steps[name], replace(on, small=True), self.log(name))
            found = list(step.rows())
            wrong = failures(name, found, step.status)
            return {"case": name, "seconds": step.seconds, "rows": len(found), "failures": wrong}

        with ThreadPoolExecutor(processes) as pool:
            for row in pool.map(one, steps):
                rows.append(row)
                self.failures += row["failures"]
                print("rehearsal: " + text_of(row), flush=True)
        self.add("rehearsal", rows, "done", time.monotonic() - begun)

    def measure(self, name: str, run: Run, on: Machine) -> None:
        step, rows = Step(run, on, self.log(name)), list[Row]()
        for row in step.rows():
            rows.append(row)
            self.add(name, rows, "cut", 0)
            print(f"{name}: {text_of(row)}", flush=True)
        self.add(name, rows, step.status, step.seconds)
        self.failures += failures(name, rows, step.status)
        print(f"{name}: {step.status}, {step.seconds:.0f} s", flush=True)


def text_of(row: Row) -> str:
    """A row's numbers in a line, or its failure."""
    cells = []
    for name, x in row.items():
        if isinstance(x, dict) and "median_ms" in x:
            cells.append(f"{name} {x['median_ms']:.3g} ms")
        elif isinstance(x, int | float | str):
            cells.append(f"{name} {x:.4g}" if isinstance(x, float) else f"{name} {x}")
        elif name == "errors" and x:
            cells.append(f"error {max(x.values()):.2g}")
        elif name == "functions":
            cells += [f"[{key}] {text_of(times)}" for key, times in x.items()]
        elif name in ("shape", "failures", "not_run") and x:
            cells.append(f"{name} {x}")
    return "  ".join(cells)

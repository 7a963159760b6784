"""The training loop: progress, metrics, checkpoints, and signals that end it."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from linrope.common.files import parse_json, replace_file
from linrope.common.optional import need
from linrope.models.training import Trainer

_SMOOTHING = 0.95  # weight of the earlier steps in the printed loss, a running mean
_SECONDS = 5.0  # between two lines
# An evaluation reads at most this share of the rows trained on between two checkpoints, and at least one row
_EVALUATED = 0.1
_MOST_EVALUATED_ROWS = 64


class Lines:
    """Prints a line every few seconds where there is no terminal for a progress bar."""

    def __init__(self, console: Console) -> None:
        self.console, self.last = console, time.perf_counter()

    def __call__(self, text: str) -> None:
        now = time.perf_counter()
        if not self.console.is_terminal and now - self.last >= _SECONDS:
            self.console.print(text)
            self.last = now


class Log:
    """Writes the metrics of every step to metrics.jsonl and, on request, to TensorBoard.

    Removes the metrics of later steps than ``step``: the run before was killed after its last checkpoint.
    """

    def __init__(self, folder: Path, step: int, tensorboard: bool) -> None:
        self.board: Any = None
        if tensorboard:
            need("tensorboard", "linrope[train]")
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        path = folder / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
        kept = [
            line
            for number, line in enumerate(lines, 1)
            if line.endswith("}\n") and _step(line, f"{path}, line {number}") <= step  # else half a line
        ]
        replace_file(path, lambda temporary: temporary.write_text("".join(kept)))
        self.file = open(path, "a")  # noqa: SIM115 - stays open until the run ends

    def write(self, values: dict[str, float]) -> None:
        self.file.write(json.dumps(values) + "\n")
        self.file.flush()
        if self.board is not None:
            for name, value in values.items():
                if name != "step":
                    self.board.add_scalar(name, value, values["step"])

    def close(self) -> None:
        self.file.close()
        if self.board is not None:
            self.board.close()


def _step(line: str, name: str) -> int:
    """The step whose metrics the line holds."""
    step: object = parse_json(line, name).get("step")
    if not isinstance(step, int):
        raise ValueError(f"{name}: got step {step!r}, expected the metrics of a step")
    return step


def accelerator_on(device: torch.device, mixed_precision: str | None = None) -> Any:
    """An Accelerator for this device and the available processes; None: the precision of accelerate's settings."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    # cpu=True: without it accelerate treats each of several processes without a GPU as a lone one.
    accelerator = need("accelerate", "linrope[train]").Accelerator(
        cpu=device.type == "cpu", mixed_precision=mixed_precision
    )
    if accelerator.device.type != device.type:
        raise ValueError(f"--device={device}: accelerate uses {accelerator.device} here")
    return accelerator


def describe(trainer: Trainer, console: Console) -> None:
    size = sum(parameter.numel() for parameter in trainer.model.parameters())
    accelerator = trainer.accelerator
    precision = {"no": "float32", "bf16": "mixed bfloat16"}.get(
        accelerator.mixed_precision, accelerator.mixed_precision
    )
    text = f"{size / 1e6:.2f} M parameters on {accelerator.device}, {precision}; {trainer.corpus.describe()}"
    if accelerator.num_processes > 1:
        processes = trainer.processes
        split = (
            ("rows", processes.row_groups),
            ("tokens", processes.token_parts),
            ("heads", processes.head_parts),
        )
        factors = ", ".join(f"{name} split {count} ways" for name, count in split if count > 1)
        text += f"; {accelerator.num_processes} processes: {factors}"
    console.print(text)


class Stopped(BaseException):
    """A signal asked the run to end, with this exit status. ``except Exception`` lets it pass."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def run_steps(
    trainer: Trainer,
    console: Console,
    out: Path | None = None,
    save_every: int = 0,
    tensorboard: bool = False,
) -> int:
    """Trains to the end or until a signal; returns 0, or 128 plus the signal's number: 130 after Ctrl-C.

    With out, it saves a checkpoint every save_every steps and at the end, and then evaluates the model. A signal stops
    a step or an evaluation in the middle; the checkpoint is then that of the last whole step.
    """
    config, first, start = trainer.config, trainer.step, time.perf_counter()
    main = trainer.accelerator.is_main_process
    log = Log(out, first, tensorboard) if out and main and first < config.steps else None
    total = bits = rate = 0.0
    status, saved, line = 0, first or None, Lines(console)
    held_out: float | None = None
    try:
        at_once = trainer.accelerator.num_processes == 1
        with (
            _signals(lambda: at_once and trainer.may_stop) as received,
            progress_bar(console) as progress,
        ):
            task = progress.add_task("", total=config.steps, completed=first)
            doing = ""

            def on_piece(done: int, pieces: int) -> None:
                if status := _largest_of_processes(max(received, default=0), trainer):
                    raise Stopped(status)
                if 0 < done < pieces:
                    text = f"{doing}: {done:,} of {pieces:,} pieces"
                    line(text)
                    progress.update(task, description=text)

            def evaluate() -> float:
                nonlocal doing
                doing = f"evaluation after {trainer.step:,} steps"
                share = int(_EVALUATED * min(save_every, config.steps) * _rows_per_step(trainer))
                return trainer.evaluate(max(1, min(_MOST_EVALUATED_ROWS, share)), on_piece)

            try:
                while trainer.step < config.steps:
                    doing = f"step {trainer.step + 1:,} of {config.steps:,}"
                    values = trainer.train_step(on_piece)
                    loss, seconds = values["bits_per_byte"], time.perf_counter() - start
                    total, done = _SMOOTHING * total + (1 - _SMOOTHING) * loss, trainer.step - first
                    # A weighted mean of all steps, in which the latest count most
                    bits = total / (1 - _SMOOTHING**done)
                    rate = done * _bytes_per_step(trainer) / seconds
                    left = timedelta(seconds=round(seconds / done * (config.steps - trainer.step)))
                    line(
                        f"step {trainer.step:,} of {config.steps:,}: loss {bits:.3f} bits per byte; {rate:,.0f} "
                        f"bytes/s; {left} left"
                    )
                    description = f"loss {bits:.3f} bits/byte  {rate:,.0f} bytes/s"
                    progress.update(task, completed=trainer.step, description=description)
                    try:
                        if out and (trainer.step == config.steps or trainer.step % save_every == 0):
                            # First, since who sends a signal may kill the process some seconds later
                            trainer.save(out, {"save_every": str(save_every)})
                            saved, held_out = trainer.step, evaluate()
                            values["held_out_bits_per_byte"] = held_out
                    finally:
                        if log:
                            log.write(values | {"seconds": seconds})
                on_piece(0, 0)
                if out and held_out is None:  # the run was complete when it was resumed
                    held_out = evaluate()
            except Stopped as stopped:
                status = stopped.status
                if out and trainer.step != saved:
                    trainer.save(out, {"save_every": str(save_every)})
    finally:
        if log:
            log.close()
    if trainer.step > first:
        console.print(f"{trainer.step} steps; loss {bits:.3f} bits per byte; {rate:,.0f} bytes/s")
    if held_out is not None and not status:
        console.print(f"held-out text: {held_out:.3f} bits per byte after {trainer.step} steps")
    return status


@contextmanager
def _signals(at_once: Callable[[], bool] = lambda: False) -> Iterator[list[int]]:
    """Collects 128 plus the number of each signal that asks the process to end; a second Ctrl-C ends it at once.

    Also raises Stopped, if ``at_once`` says so. SIGTERM comes from kill, containers and schedulers, SIGHUP from a
    terminal that closes, unless nohup ignores it.
    """
    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {
        n: signal.getsignal(n) for n in numbers if n == signal.SIGINT or signal.getsignal(n) != signal.SIG_IGN
    }
    received: list[int] = []

    def receive(number: int, _: object) -> None:
        received.append(128 + number)
        signal.signal(signal.SIGINT, before[signal.SIGINT])
        if at_once():
            raise Stopped(128 + number)

    try:
        for number in before:
            signal.signal(number, receive)
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _largest_of_processes(number: int, trainer: Trainer) -> int:
    """The largest number of all processes: all must stop after the same piece, or some would wait forever."""
    accelerator = trainer.accelerator
    if accelerator.num_processes == 1:
        return number
    return int(accelerator.gather(torch.tensor([number], device=accelerator.device)).max())


def _rows_per_step(trainer: Trainer) -> int:
    config, groups = trainer.config, trainer.processes.row_groups
    rows: int = config.batch_size * config.accumulation * groups
    return rows


def _bytes_per_step(trainer: Trainer) -> float:
    return _rows_per_step(trainer) * trainer.config.sequence_length * trainer.corpus.train.bytes_per_token


class _QuietProgress(Progress):
    """Prints nothing if it is disabled. rich before 15 ends with an empty line even then."""

    def stop(self) -> None:
        if not self.disable:
            super().stop()


def progress_bar(console: Console) -> Progress:
    return _QuietProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )

"""Commands and their options. What they do lies in the modules beside this one and in linrope.models."""

import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

import linrope
from linrope.cli import evaluation
from linrope.cli.bench.command import bench
from linrope.cli.convert import convert
from linrope.cli.demo import PROMPT, demo
from linrope.cli.devices import HELP as DEVICE_HELP
from linrope.cli.devices import pick_device
from linrope.cli.generation import stream
from linrope.cli.train import train
from linrope.models import LanguageModel
from linrope.models.training import latest_checkpoint
from linrope.models.training.checkpoint import tokenizer_of
from linrope.versions import show_versions

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
console = Console()


def run(arguments: list[str]) -> int:
    """Runs a command; without one, prints the help.

    Exit status: 0; 2 with one line naming the cause where input is at fault; 1 with a line that leads to the
    traceback at any other error; 130 after Ctrl-C. With --traceback, wherever it stands, errors are raised.
    """
    rest = [part for part in arguments if part != "--traceback"]
    try:
        return int(app(rest or ["--help"], prog_name="linrope", standalone_mode=False) or 0)
    except typer.Exit as stop:
        return stop.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception as error:
        if len(rest) < len(arguments):
            raise
        usage = getattr(error, "format_message", None)  # of typer's own errors
        cause = " ".join((str(error) if usage is None else usage()).split())
        too_large = _is_of_memory(error)
        if too_large:
            cause = f"not enough memory: {cause}"
        if usage is not None or too_large or isinstance(error, ValueError | OSError | ModuleNotFoundError):
            print(f"linrope: {cause}", file=sys.stderr)
            return 2
        kind = type(error).__name__
        print(f"linrope: {kind}: {cause} (linrope --traceback .. shows where)", file=sys.stderr)
        return 1


def _is_of_memory(error: Exception) -> bool:
    """Whether sizes were asked for that do not fit; on a CPU PyTorch has no type for it."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "you tried to allocate" in str(error)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"linrope {linrope.__version__}")
        raise typer.Exit


@app.callback()
def _linrope(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True)
    ] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error arose.")] = False,
) -> None:
    """Linear attention with rotary position embedding: models, training, benchmarks."""


app.command(short_help="Train a language model on text.")(train)


@app.command("generate", short_help="Generate text from a checkpoint, streaming.")
def generate_text(
    checkpoint: Annotated[Path, typer.Option(help="Folder of a run, or one checkpoint.")],
    prompt: Annotated[str, typer.Option(help="Text to go on from.")] = PROMPT,
    max_new_tokens: Annotated[int, typer.Option(help="Bytes, or tokens, to generate.")] = 500,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest byte.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Sample among the k likeliest bytes.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample among the likeliest bytes up to this probability.")
    ] = 0.95,
    seed: Annotated[int | None, typer.Option(help="Of the sampling; default: another one each time.")] = None,
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = "auto",
) -> int:
    """Generate text from a checkpoint, streaming; linear attention: at constant time and memory per byte."""
    if not prompt:
        raise ValueError("--prompt: got an empty text, expected at least one byte")
    latest = latest_checkpoint(checkpoint)
    model = LanguageModel.load(latest).eval().to(pick_device(device))
    stream(
        model,
        tokenizer_of(latest),
        prompt,
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
    )
    return 0


app.command(short_help="Turn a softmax model into a linear one.")(convert)


@app.command("eval", short_help="Measure bits per byte by position.")
def evaluate(
    checkpoint: Annotated[list[Path], typer.Option(help="Folder of a run, or one checkpoint; several.")],
    path: Annotated[
        Path | None,
        typer.Argument(help="Text as for train. Default: what the run was trained on.", show_default=False),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            help="Tokens per sequence. Default: 4 times the trained length, if a document is that long.",
            show_default=False,
        ),
    ] = None,
    sequences: Annotated[int, typer.Option(help="At most so many sequences.")] = 64,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for JSON and plot. Default: the first --checkpoint.", show_default=False),
    ] = None,
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = "auto",
) -> int:
    """Measure bits per byte by position, past the trained length too.

    Of the text that a run was trained on, the held-out part is read; of any other, all.
    """
    if sequences < 1 or (length is not None and length < 1):
        raise ValueError(f"--sequences={sequences}, --length={length}: expected at least 1")
    result = evaluation.evaluate(checkpoint, path, length, sequences, pick_device(device), console)
    console.print(evaluation.table(result))
    written = evaluation.write(result, checkpoint[0] if out is None else out)
    console.print(f"written: {', '.join(str(file) for file in written)}")
    return 0


app.command(short_help="Measure against softmax attention and installed peers.")(bench)


@app.command(short_help="Show versions and which backends run here.")
def env(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object in place of lines.")] = False,
) -> int:
    """Show versions, the backends that run here, why others do not, and the instruction set in use."""
    show_versions(as_json=as_json)
    return 0


app.command(short_help="Train, generate and measure in 4 minutes.")(demo)

"""The commands and their options. The other modules of this package and linrope.models do the work."""

import sys
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

import linrope
from linrope.cli.bench import SETTINGS as BENCH_SETTINGS
from linrope.cli.bench import bench
from linrope.cli.check import check
from linrope.cli.checks import check_at_least, check_folder
from linrope.cli.console import console
from linrope.cli.convert import convert
from linrope.cli.demo import PROMPT, demo
from linrope.cli.devices import HELP as DEVICE_HELP
from linrope.cli.devices import pick_device
from linrope.cli.option_words import in_option_words
from linrope.cli.train import train

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# What --help calls the types of options that have no metavar.
_WORDS = {int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "PATH"}
_CHECKPOINT = "Folder of a run, a single checkpoint, or a model in Hugging Face format."


def run(arguments: list[str]) -> int:
    """Runs a command, or prints the help if there is none.

    Exit status: 0; 2, with one line that names the cause, if the input is at fault; 1, with one line that
    says how to get the traceback, for any other error; 130 after Ctrl-C, 128 plus the number of another signal that
    ends a training. With --traceback, anywhere in the arguments, errors are raised.
    """
    rest = [argument for argument in arguments if argument != "--traceback"]
    try:
        return int(_command()(rest or ["--help"], prog_name="linrope", standalone_mode=False) or 0)
    except typer.Exit as stop:
        return stop.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception as error:
        if len(rest) < len(arguments):
            raise
        usage = getattr(error, "format_message", None)  # typer's errors have it
        cause = _in_words_of_the_command(error, rest) if usage is None else usage()
        cause = " ".join(cause.split())
        too_large = _is_out_of_memory(error)
        if too_large:
            cause = f"not enough memory: {cause}"
        if usage is not None or too_large or isinstance(error, ValueError | OSError | ModuleNotFoundError):
            print(f"linrope: {cause}", file=sys.stderr)
            return 2
        kind = type(error).__name__
        print(f"linrope: {kind}: {cause} (linrope --traceback .. shows where)", file=sys.stderr)
        return 1


@cache
def _command() -> Any:
    """The commands, as typer makes them of the functions, with readable types."""
    group: Any = typer.main.get_command(app)
    for info in app.registered_commands:
        function: Any = info.callback
        hints = get_type_hints(function)
        for parameter in group.commands[info.name or function.__name__].params:
            types = {hints.get(parameter.name)}
            types |= {kind for one in types for kind in get_args(one)}
            word = next((word for kind, word in _WORDS.items() if kind in types), None)
            parameter.metavar = parameter.metavar or (word if _takes_a_value(parameter) else None)
    return group


def _takes_a_value(parameter: Any) -> bool:
    return parameter.param_type_name == "option" and not parameter.is_flag


def _in_words_of_the_command(error: Exception, arguments: list[str]) -> str:
    """The error's text, with options in place of the names of Python's parameters: --heads=5 for num_heads=5."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return f"{error.filename}: {error.strerror}"
    commands = _command().commands
    command = next((commands[argument] for argument in arguments if argument in commands), None)
    if command is None or not isinstance(error, ValueError | TypeError | OSError):
        return str(error)
    return in_option_words(str(error), command.params)


def _is_out_of_memory(error: Exception) -> bool:
    """True if memory ran out. On a CPU PyTorch has no exception type for that."""
    torch = sys.modules.get("torch")  # a command that imports it takes seconds more
    kinds = (MemoryError,) if torch is None else (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "you tried to allocate" in str(error)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"linrope {linrope.__version__}")
        raise typer.Exit


@app.callback()
def _linrope(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True)
    ] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show the traceback of an error.")] = False,
) -> None:
    """Linear attention with rotary position embedding: models, training, benchmarks."""


app.command(short_help="Train a language model on text.")(train)


@app.command("generate", short_help="Generate text from a checkpoint, streaming.")
def generate_text(
    checkpoint: Annotated[Path, typer.Option(help=_CHECKPOINT, metavar="FOLDER")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = PROMPT,
    max_new_tokens: Annotated[int, typer.Option(help="Number of bytes or tokens to generate.")] = 500,
    temperature: Annotated[
        float,
        typer.Option(help="Divides the logits; 0: always the likeliest token (without a tokenizer: byte)."),
    ] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Sample only among the k likeliest tokens.")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample among the likeliest tokens whose probabilities add up to this."),
    ] = 0.95,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the sampling; default: a new one each time.")
    ] = None,
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = "auto",
) -> int:
    """Generate text from a checkpoint, streaming; with linear attention each byte takes the same time.

    With a tokenizer that has an end-of-sequence token, the text ends where the model puts that. On a CPU with the
    C++ kernels, models of transformers with linear layers run on these.
    """
    if not prompt:
        raise ValueError("--prompt: got an empty text, expected at least one byte")
    from linrope.cli.generation import stream
    from linrope.cli.pretrained import is_pretrained, load_pretrained, on_linrope, tokenizer_beside
    from linrope.models import LanguageModel
    from linrope.models.training import latest_checkpoint

    latest = latest_checkpoint(checkpoint)
    model: Any
    model = load_pretrained(latest) if is_pretrained(latest) else LanguageModel.load(latest)
    where = pick_device(device)
    with on_linrope(model, where):
        stream(
            model.eval().to(where),
            tokenizer_beside(latest, model.config.vocab_size),
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
    checkpoint: Annotated[
        list[Path],
        typer.Option(help=f"{_CHECKPOINT[:-1]}; may be given several times.", metavar="FOLDER"),
    ],
    path: Annotated[
        Path | None,
        typer.Argument(help="Text as for train. Default: the text of the run.", show_default=False),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            help="Tokens per sequence. Default: 4 times the trained length, if a document is that long.",
            show_default=False,
        ),
    ] = None,
    sequences: Annotated[int, typer.Option(help="Largest number of sequences.")] = 64,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the JSON file and the plot. Default: the first --checkpoint.", show_default=False
        ),
    ] = None,
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = "auto",
) -> int:
    """Measure bits per byte by position, also past the trained length.

    Reads the held-out part of the text that a run was trained on, or all of another text. A model in Hugging
    Face format does not record its text, so it requires PATH. On a CPU with the C++ kernels, models of transformers
    with linear layers run on these.
    """
    check_at_least(sequences=(sequences, 1), length=(1 if length is None else length, 1))
    folder, option = (checkpoint[0], "--checkpoint") if out is None else (out, "--out")
    check_folder(folder, option)
    from linrope.cli import evaluation

    result = evaluation.evaluate(checkpoint, path, length, sequences, pick_device(device), console)
    console.print(evaluation.table(result), soft_wrap=False)
    written = evaluation.write(result, folder)
    console.print(f"written: {', '.join(str(file) for file in written)}")
    return 0


@app.command(short_help="Draw the losses of runs.")
def plot(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs of linrope train.", metavar="RUN..")],
    out: Annotated[
        Path | None,
        typer.Option(help="The .png or .svg file. Default: losses.png in the first RUN.", show_default=False),
    ] = None,
) -> int:
    """Draw the training loss, smoothed, and the held-out loss of runs by step, in bits per byte."""
    file = runs[0] / "losses.png" if out is None else out
    if file.suffix not in (".png", ".svg"):
        raise ValueError(f"--out={file}: expected a file that ends in .png or .svg")
    if out is not None:
        check_folder(out.parent)
    from linrope.cli import plotting

    plotting.plot(runs, file)
    console.print(f"written: {file}")
    return 0


app.command(
    "bench",
    short_help="Measure against softmax attention and installed peers.",
    context_settings=BENCH_SETTINGS,
)(bench)


@app.command(short_help="Show versions and available backends.")
def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Show versions, the available backends, why the others are not available, and the instruction set."""
    from linrope.versions import show_versions

    show_versions(as_json=as_json)
    return 0


app.command(short_help="Compare every backend with the equation.")(check)
app.command(short_help="Train, generate and measure in 4 minutes.")(demo)

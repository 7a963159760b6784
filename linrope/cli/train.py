"""The options of ``linrope train``; run.py does the work. Nothing here imports PyTorch: --help would wait for it."""

from pathlib import Path
from typing import Annotated, Any

import typer

from linrope.cli.checks import check_at_least
from linrope.cli.config_files import read_config
from linrope.cli.devices import HELP as DEVICE_HELP
from linrope.cli.layer_flags import FLAGS, check_flags, layer_flags


@layer_flags(*(name for name in FLAGS if name != "backend"))
def train(
    context: typer.Context,
    path: Annotated[
        Path | None,
        typer.Argument(
            help="Text file, .jsonl file, folder of these, dataset saved to disk, or - for standard input. "
            "Default: Python's standard library, with --resume the text of the checkpoint.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the checkpoints.")] = Path("runs/train"),
    config: Annotated[
        Path | None,
        typer.Option(
            help="File of options, .json or .yaml, such as steps: 500; the command line overrides it.",
            callback=read_config,
            is_eager=True,
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(help="Total number of updates, those before --resume included.")
    ] = 1000,
    batch_size: Annotated[
        int, typer.Option(help="Rows per batch, for each process or group of processes that shares rows.")
    ] = 8,
    accumulation: Annotated[int, typer.Option(help="Batches per update.")] = 1,
    sequence_length: Annotated[int, typer.Option(help="Tokens per row (bytes without a tokenizer).")] = 512,
    pieces: Annotated[
        int,
        typer.Option(
            help="Pieces per row. Each continues from the state of the piece before; memory is that of a single piece."
        ),
    ] = 1,
    gradients_through_pieces: Annotated[
        bool,
        typer.Option(
            "--gradients-through-pieces",
            help="Gradients pass from piece to piece too. Memory is then that of the whole row.",
        ),
    ] = False,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 3e-3,
    warmup_steps: Annotated[int, typer.Option(help="Steps until the peak.")] = 20,
    weight_decay: Annotated[float, typer.Option(help="Weight decay of AdamW.")] = 0.1,
    clip: Annotated[float, typer.Option(help="Largest norm of the gradient.")] = 1.0,
    held_out: Annotated[
        Path | None,
        typer.Option(help="Text to hold out, as PATH. Default: a twentieth of PATH.", show_default=False),
    ] = None,
    binary: Annotated[
        bool,
        typer.Option("--binary", help="Files are documents whatever they hold; their bytes are the tokens."),
    ] = False,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Tokenizer of transformers, folder or name. Default: bytes.", show_default=False),
    ] = None,
    embed_dim: Annotated[int, typer.Option(help="Width of the model.")] = 128,
    layers: Annotated[int, typer.Option(help="Blocks.")] = 4,
    heads: Annotated[int, typer.Option(help="Heads per block.")] = 8,
    feed_forward: Annotated[
        bool, typer.Option(help="Whether a feed-forward network follows the attention in each block.")
    ] = True,
    attention: Annotated[str, typer.Option(help="linear or softmax.")] = "linear",
    sequence_parallel: Annotated[int, typer.Option(help="Processes that share the tokens of a batch.")] = 1,
    tensor_parallel: Annotated[int, typer.Option(help="Processes that share the heads.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and the data order.")] = 0,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 200,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the last checkpoint in --out.")
    ] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write metrics for TensorBoard.")
    ] = False,
    mixed_precision: Annotated[
        str | None,
        typer.Option(
            help="bf16 or no. Default: the setting of accelerate, without one no.", show_default=False
        ),
    ] = None,
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = "auto",
    **flags: Any,
) -> int:
    """Train a language model on text.

    The options of the attention change the block of linrope's models, which has a convolution, a forget gate with a
    tied write gate unless --decay is given, an output norm, a skip and a gate, and rotates a quarter of the features.
    Ctrl-C, SIGTERM and SIGHUP stop the step, save a checkpoint of the steps before, and end. The same command with
    --resume continues from the last checkpoint. The result is bit for bit that of an uninterrupted run; with more
    --steps than before it continues beyond the old end. With --resume the sizes, rates and tokenizer are those of the
    checkpoint, and the command lists the options that it ignores. For several processes or GPUs: accelerate launch -m
    linrope.cli train .., or torchrun -m linrope.cli train .., whose restarts (--max-restarts) act like --resume.
    """
    options = dict(locals())  # converted to their types, as context.params is not in all versions of typer
    del options["context"], options["flags"]
    options |= flags
    check_at_least(save_every=(save_every, 1))
    check_flags(flags, attention)
    explicit = {
        str(name)
        for name in options
        if (source := context.get_parameter_source(name)) is not None and source.name != "DEFAULT"
    }
    from linrope.cli.run import run

    return run(options, explicit)

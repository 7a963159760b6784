"""The command ``linrope train`` and its options."""

import json
import os
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from linrope.cli.checks import check_at_least, check_folder, check_taps, option_of
from linrope.cli.config_files import read_config
from linrope.cli.console import console
from linrope.cli.devices import HELP as DEVICE_HELP
from linrope.cli.devices import pick_device
from linrope.cli.training import accelerator_on, describe, run_steps
from linrope.common.files import check_readable
from linrope.common.locks import locked
from linrope.models import LanguageModel, LanguageModelConfig
from linrope.models.defaults import SHORT_CONV, resolve_block
from linrope.models.language_model_config import ATTENTION, POSITIONS
from linrope.models.training import Corpus, Trainer, TrainingConfig, checkpoints, latest_checkpoint
from linrope.models.training.checkpoint import load_training, tokenizer_of
from linrope.models.training.corpus import load_tokenizer

# Options that apply to a resumed run; the checkpoint determines all others.
_RESUMABLE = {"path", "out", "steps", "save_every", "resume", "tensorboard", "device", "config"}
_RESUMABLE |= {"sequence_parallel", "tensor_parallel"}
# "True" if torchrun uses one store for all restarts of a group. A process may then find the address of a
# process that has ended: PyTorch issue 135712.
_SHARED_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_FRESH_STORES = (
    "torchrun: a restart may fail, because processes may find the addresses of processes that ended; to be "
    "safe, start it with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and --standalone, or --rdzv-backend c10d"
)
# Fields of the configs whose options have other names.
RENAMED = {"num_layers": "layers", "num_heads": "heads", "num_kv_heads": "kv_heads"}


def train(
    context: typer.Context,
    path: Annotated[
        Path | None,
        typer.Argument(
            help="Text file, .jsonl file, folder of these, or dataset saved to disk. "
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
    feature_map: Annotated[str, typer.Option(help="Feature map of the attention.")] = "elu+1",
    attention: Annotated[str, typer.Option(help=f"{' or '.join(ATTENTION)}.")] = "linear",
    positions: Annotated[
        str, typer.Option(help=f"{', '.join(POSITIONS)}; the last three with softmax attention only.")
    ] = "rope",
    rotary: Annotated[
        str,
        typer.Option(
            help="Rotation with --positions rope: auto (a quarter of the features; all with softmax attention), "
            "interleaved or half (all features), selective (from the input) or none."
        ),
    ] = "auto",
    decay: Annotated[
        str | None,
        typer.Option(
            help="Instead of the forget gate, how keys decay: spread (half-lives from 1 token to a row), learned "
            "(starts as spread), retnet or none.",
            show_default=False,
        ),
    ] = None,
    forget_gate: Annotated[
        bool | None,
        typer.Option(
            help="Decay keys by a gate computed from the input. Default: yes with linear attention, unless "
            "--decay is given.",
            show_default=False,
        ),
    ] = None,
    short_conv: Annotated[
        int, typer.Option(help="Taps of the convolution on queries, keys and values; 0: none.")
    ] = 4,
    qk_norm: Annotated[bool, typer.Option("--qk-norm", help="RMS norm of queries and keys.")] = False,
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
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = "auto",
) -> int:
    """Train a language model on text.

    Ctrl-C, SIGTERM and SIGHUP save a checkpoint and stop. The same command with --resume continues from the last
    checkpoint.
    The result is bit for bit that of an uninterrupted run; with more --steps than before it
    continues beyond the old end. With --resume the sizes, rates and tokenizer are those of the checkpoint,
    and the command lists the options that it ignores. For several processes or GPUs: accelerate launch -m
    linrope.cli train .., or torchrun -m linrope.cli train .., whose restarts (--max-restarts) act like
    --resume.
    """
    # torchrun restarts a group after one of its processes ended.
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) and checkpoints(out):
        resume = True
    check_at_least(save_every=(save_every, 1))
    check_taps(short_conv)
    options = dict(context.params)
    explicit = {
        str(name)
        for name in options
        if (source := context.get_parameter_source(name)) is not None and source.name != "DEFAULT"
    }
    accelerator = accelerator_on(pick_device(device))
    console.quiet = not accelerator.is_main_process
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) and os.environ.get(_SHARED_STORE) == "True":
        console.print(_FRESH_STORES)
    with ExitStack() as stack:
        if resume:
            latest_checkpoint(out)  # raises if there is none, before the lock makes the folder
            if accelerator.is_main_process:
                stack.enter_context(locked(out))
            trainer = _resume(out, path, accelerator, options, explicit)
        else:
            trainer = _start(out, path, accelerator, options, explicit)
            if accelerator.is_main_process:
                stack.enter_context(locked(out))
                _check_new(out)  # again: another run may have ended meanwhile
        describe(trainer, console)
        status = run_steps(trainer, console, out, save_every, tensorboard)
        if not status:
            console.print(f"held-out text: {trainer.evaluate():.3f} bits per byte after {trainer.step} steps")
        console.print(f"checkpoint: {latest_checkpoint(out)}")
        trainer.accelerator.end_training()
    return status


def _start(
    out: Path, path: Path | None, accelerator: Any, options: dict[str, Any], explicit: set[str]
) -> Trainer:
    """A run from step 0, of which nothing is written yet."""
    check_readable(out)
    _check_new(out)
    _check_choices(options, explicit)
    training, tokenizer = _training(options), options["tokenizer"]
    corpus = Corpus.load(path, None if tokenizer is None else load_tokenizer(tokenizer))
    torch.manual_seed(options["seed"])
    model = LanguageModel(_model(options, corpus.vocab_size))
    return Trainer(model, corpus, training, accelerator, **_parallel(options))


def _check_new(out: Path) -> None:
    check_folder(out)
    if checkpoints(out):
        raise ValueError(f"--out={out}: already has checkpoints; expected --resume or an empty folder")


def _check_choices(options: dict[str, Any], explicit: set[str]) -> None:
    """Raises ValueError for options that have no effect with the other options."""
    if "rotary" in explicit and options["positions"] != "rope":
        raise ValueError(
            f"--rotary={options['rotary']}: expected --positions=rope, not {options['positions']}"
        )
    if options["attention"] == "softmax" and "feature_map" in explicit:
        raise ValueError(
            "--feature-map: softmax attention has no feature map; leave the option out or use --attention=linear"
        )
    if "gradients_through_pieces" in explicit and options["pieces"] == 1:
        raise ValueError(
            "--gradients-through-pieces has no effect with --pieces=1; expected at least 2 pieces"
        )
    heads, dim = options["heads"], options["embed_dim"]
    rotated = options["positions"] == "rope" and options["rotary"] != "none"
    if rotated and heads > 0 and dim % heads == 0 and dim // heads % 2:
        raise ValueError(
            f"--embed-dim={dim}, --heads={heads}: heads of {dim // heads}, expected an even size"
        )


def _training(options: dict[str, Any]) -> TrainingConfig:
    return TrainingConfig(**{name: options[name] for name in TrainingConfig.__dataclass_fields__})


def _parallel(options: dict[str, Any]) -> dict[str, int]:
    return {name: options[name] for name in ("sequence_parallel", "tensor_parallel")}


def _model(options: dict[str, Any], vocab_size: int) -> LanguageModelConfig:
    length = options["sequence_length"]
    rotary = _or_none(options["rotary"])
    linear = options["attention"] == "linear"
    rotated = linear and options["positions"] == "rope" and rotary is not None
    gate = options["forget_gate"]
    decay, forget_gate, write_gate = None, False, None
    if linear:
        block = resolve_block(
            decay="auto" if options["decay"] is None else _or_none(options["decay"]),
            forget_gate="auto" if gate is None else gate,
            rotated=rotated,
        )
        decay, forget_gate, write_gate = (block[name] for name in ("decay", "forget_gate", "write_gate"))
    elif options["decay"] is not None or gate:
        name = "decay" if options["decay"] is not None else "forget gate"
        raise ValueError(
            f"--{name.replace(' ', '-')}: softmax attention has no {name}; leave the option out or use "
            "--attention=linear"
        )
    half_lives: dict[str, Any] = {"longest": length}
    short_conv: dict[str, Any] | None = SHORT_CONV | {"taps": options["short_conv"]}
    if options["short_conv"] == 0:
        short_conv = None
    feature_map: Any = options["feature_map"]
    max_length = max(length, LanguageModelConfig.max_length)
    if feature_map == "cosformer":  # which refuses positions from max_length on
        feature_map = {"name": feature_map, "max_length": max_length}
    return LanguageModelConfig(
        vocab_size=vocab_size,
        embed_dim=options["embed_dim"],
        num_layers=options["layers"],
        num_heads=options["heads"],
        attention=options["attention"],
        positions=options["positions"],
        max_length=max_length,
        feature_map=feature_map,
        rotary=rotary,
        decay={"name": decay, **half_lives} if decay in ("spread", "learned") else decay,
        forget_gate=half_lives if forget_gate else False,
        write_gate=write_gate,
        short_conv=short_conv,
        feed_forward=options["feed_forward"],
        qk_norm=options["qk_norm"],
    )


def _or_none(name: str) -> str | None:
    return None if name == "none" else name


def _resume(
    out: Path, path: Path | None, accelerator: Any, options: dict[str, Any], explicit: set[str]
) -> Trainer:
    """Loads the run in a folder; prints its step, its last step, and the options that it ignores."""
    latest = latest_checkpoint(out)
    if path is None:
        recorded = load_training(latest)[2].get("corpus")
        if recorded is None:
            raise ValueError(f"{latest}: does not record the text it was trained on; expected a PATH to read")
        path = Path(recorded) if recorded else None
    corpus = Corpus.load(path, tokenizer_of(latest))
    trainer = Trainer.load(out, corpus, accelerator, **_parallel(options))
    saved = {**asdict(trainer.config), **asdict(trainer.model.config)}
    requested = {**asdict(_training(options)), **asdict(_model(options, saved["vocab_size"]))}
    ignored = []
    for field in saved:
        option = RENAMED.get(field, field)
        if option in explicit - _RESUMABLE and requested[field] != saved[field]:
            ignored.append(f"{option_of(option)} (the checkpoint has {json.dumps(saved[field])})")
    if "tokenizer" in explicit:
        ignored.append("--tokenizer (the checkpoint has its own)")
    if ignored:
        console.print(f"ignored with --resume: {', '.join(ignored)}")
    if "steps" in explicit and options["steps"] != trainer.config.steps:
        if options["steps"] < trainer.step:
            raise ValueError(f"--steps={options['steps']}: expected at least {trainer.step}, the steps done")
        old_steps = trainer.config.steps
        trainer.config = replace(trainer.config, steps=options["steps"])
        steps = trainer.config.steps
        console.print(f"steps: {steps} (was {old_steps}); the learning rate follows the new schedule")
    left = trainer.config.steps - trainer.step
    console.print(
        f"{latest}: continues at step {trainer.step:,} of {trainer.config.steps:,}"
        if left
        else f"{latest}: is complete after {trainer.step:,} steps; a larger number of --steps continues it",
    )
    return trainer

"""What ``linrope train`` does: a new run, or one that continues from its last checkpoint."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from linrope.cli.checks import RENAMED, check_feature_map, check_folder, option_of
from linrope.cli.console import console
from linrope.cli.devices import pick_device
from linrope.cli.layer_flags import FLAGS, chosen_options
from linrope.cli.training import accelerator_on, describe, run_steps
from linrope.common.argument_checks import check_name
from linrope.common.files import check_readable
from linrope.common.locks import locked
from linrope.layer.config import LayerConfig
from linrope.models import LanguageModel, LanguageModelConfig
from linrope.models.training import Corpus, Trainer, TrainingConfig, checkpoints, latest_checkpoint
from linrope.models.training.checkpoint import load_training, tokenizer_of
from linrope.models.training.tokenizer import load_tokenizer

# Options that apply to a resumed run; the checkpoint determines all others.
_RESUMABLE = {"path", "held_out", "out", "steps", "save_every", "resume", "tensorboard", "device", "config"}
_RESUMABLE |= {"sequence_parallel", "tensor_parallel"}
# "True" if torchrun uses one store for all restarts of a group. A process may then find the address of a
# process that has ended: PyTorch issue 135712.
_SHARED_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_FRESH_STORES = (
    "torchrun: a restart may fail, because processes may find the addresses of processes that ended; to be "
    "safe, start it with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and --standalone, or --rdzv-backend c10d"
)


def run(options: dict[str, Any], explicit: set[str]) -> int:
    """Trains with the options of the command line, of which the user gave the explicit ones; the exit status."""
    out, path, resume = options["out"], options["path"], options["resume"]
    # torchrun restarts a group after one of its processes ended.
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) and checkpoints(out):
        resume = True
    precision, save_every = options["mixed_precision"], options["save_every"]
    check_name("--mixed-precision", precision or "no", ("no", "bf16"))
    if resume and not out.is_dir():
        raise ValueError(f"--out={out}: no such folder; expected that of a run, or no --resume to start one")
    killed_early = resume and not checkpoints(out)
    if killed_early and path is None:  # nothing in the folder says which options and text the run had
        raise ValueError(f"--out={out}: has no checkpoint yet; expected the run's own command, with its PATH")
    resume = resume and not killed_early
    if resume:
        saved = load_training(latest_checkpoint(out))[2]
        precision = saved.get("mixed_precision")
        if "save_every" not in explicit:
            save_every = int(saved.get("save_every", save_every))
    accelerator = accelerator_on(pick_device(options["device"]), precision)
    console.quiet = not accelerator.is_main_process
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) and os.environ.get(_SHARED_STORE) == "True":
        console.print(_FRESH_STORES)
    if killed_early:
        console.print(f"{out}: has no checkpoint yet, so the run starts anew")
    with ExitStack() as stack:
        if resume:
            if accelerator.is_main_process:
                stack.enter_context(locked(out))
            trainer = _resume(out, path, accelerator, options, explicit)
        else:
            trainer = _start(out, path, accelerator, options, explicit)
            if accelerator.is_main_process:
                stack.enter_context(locked(out))
                _check_new(out)  # again: another run may have ended meanwhile
        describe(trainer, console)
        status = run_steps(trainer, console, out, save_every, options["tensorboard"])
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
    tokenizer = None if tokenizer is None else load_tokenizer(tokenizer)
    source = {"corpus": ""} | ({"binary": "true"} if options["binary"] else {})
    corpus = _corpus(path, options["held_out"], tokenizer, source)
    torch.manual_seed(options["seed"])
    model = LanguageModel(_model(options, corpus.vocab_size))
    return Trainer(model, corpus, training, accelerator, **_parallel(options))


def _corpus(path: Path | None, held_out: Path | None, tokenizer: Any, source: dict[str, str]) -> Corpus:
    """The text of these paths, or where they are None that of the source."""
    if path is None and "corpus" not in source:
        raise ValueError("the checkpoint does not record the text it was trained on; expected a PATH to read")
    name = source["corpus"] if path is None else str(path)
    console.print(f"reading {name or 'the sources of Python'}")
    with _ended_by_ctrl_c():
        if path == Path("-"):
            return _standard_input(held_out, tokenizer, "binary" in source)
        given = {"corpus": path, "held_out": held_out}
        source = source | {name: str(x) for name, x in given.items() if x is not None}
        return Corpus.load_source(source, tokenizer)


def _standard_input(held_out: Path | None, tokenizer: Any, binary: bool) -> Corpus:
    """One document, which a file of the same bytes equals."""
    if held_out is not None:
        raise ValueError(f"--held-out={held_out}: expected a PATH with it, not standard input")
    name, document = "standard input", sys.stdin.buffer.read()
    try:
        text = "" if binary else document.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{name}: expected UTF-8 text, or --binary to train on its bytes") from None
    return (
        Corpus.from_bytes([document], name)
        if tokenizer is None
        else Corpus.from_texts([text], name, tokenizer)
    )


@contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """Ctrl-C ends the process at once, where Python would wait for a tokenizer that reads a whole document."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _check_new(out: Path) -> None:
    check_folder(out)
    if checkpoints(out):
        raise ValueError(f"--out={out}: already has checkpoints; expected --resume or an empty folder")


def _check_choices(options: dict[str, Any], explicit: set[str]) -> None:
    """Raises ValueError for names that the command line does not take, and options without effect beside others."""
    erases = options["erase_gate"] not in (None, "none")
    if options["feature_map"] is not None:
        check_feature_map(options["feature_map"], options["erase_gate"])
    if erases and options["feature_map"] not in (None, "unit"):
        raise ValueError(
            f"--feature-map={options['feature_map']}: expected unit with --erase-gate, which requires keys of length 1"
        )
    if "gradients_through_pieces" in explicit and options["pieces"] == 1:
        raise ValueError(
            "--gradients-through-pieces has no effect with --pieces=1; expected at least 2 pieces"
        )
    heads, dim = options["heads"], options["embed_dim"]
    if options["rotary"] != "none" and heads > 0 and dim % heads == 0 and dim // heads % 2:
        raise ValueError(
            f"--embed-dim={dim}, --heads={heads}: heads of {dim // heads}, expected an even size"
        )


def _training(options: dict[str, Any]) -> TrainingConfig:
    return TrainingConfig(**{name: options[name] for name in TrainingConfig.__dataclass_fields__})


def _parallel(options: dict[str, Any]) -> dict[str, int]:
    return {name: options[name] for name in ("sequence_parallel", "tensor_parallel")}


def _model(options: dict[str, Any], vocab_size: int) -> LanguageModelConfig:
    length = options["sequence_length"]
    sizes = {"embed_dim": options["embed_dim"], "num_heads": options["heads"]}
    flags = {name: options[name] for name in FLAGS if name in options}
    chosen = chosen_options(flags, LayerConfig.block(**sizes))
    config = LanguageModelConfig(
        vocab_size=vocab_size,
        num_layers=options["layers"],
        attention=options["attention"],
        feed_forward=options["feed_forward"],
        **sizes,
        **chosen,
    )
    return replace(config, layer=config.layer.with_longest(length))


def _resume(
    out: Path, path: Path | None, accelerator: Any, options: dict[str, Any], explicit: set[str]
) -> Trainer:
    """Loads the run in a folder; prints its step, its last step, and the options that it ignores."""
    latest = latest_checkpoint(out)
    corpus = _corpus(path, options["held_out"], tokenizer_of(latest), load_training(latest)[2])
    trainer = Trainer.load(out, corpus, accelerator, **_parallel(options))
    saved = {**asdict(trainer.config), **trainer.model.config.to_dict()}
    requested = {**asdict(_training(options)), **_model(options, saved["vocab_size"]).to_dict()}
    ignored = []
    for field in saved:
        option = RENAMED.get(field, field)
        if option in explicit - _RESUMABLE and requested[field] != saved[field]:
            ignored.append(f"{option_of(option)} (the checkpoint has {json.dumps(saved[field])})")
    if "tokenizer" in explicit:
        ignored.append("--tokenizer (the checkpoint has its own)")
    if "mixed_precision" in explicit and options["mixed_precision"] != accelerator.mixed_precision:
        ignored.append(f"--mixed-precision (the checkpoint has {accelerator.mixed_precision})")
    if "binary" in explicit and not (corpus.source or {}).get("binary"):
        ignored.append("--binary (the checkpoint has text)")
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

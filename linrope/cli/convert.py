"""The command ``linrope convert``; models/huggingface/conversion.py does the work."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from linrope.cli.checks import check_at_least, check_feature_map, check_folder, check_positive
from linrope.cli.console import console
from linrope.cli.devices import pick_device
from linrope.cli.layer_flags import FLAGS, check_flags, chosen_options, layer_flags
from linrope.common.optional import need
from linrope.layer.config import LayerConfig

if TYPE_CHECKING:  # where --help would wait for it
    from torch import Tensor

    from linrope.models.training import Text

_HELD_OUT_BATCHES = 8


@layer_flags(*(name for name in FLAGS if name not in ("feature_map", "rotary", "backend")))
def convert(
    model_folder: Annotated[
        Path, typer.Argument(help="Folder of a Llama, Mistral or Qwen2 in Hugging Face format.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the new model; must be empty or new.")],
    text: Annotated[
        Path | None,
        typer.Option(
            help="Text file, .jsonl file, folder of these, or dataset saved to disk. "
            "Default: Python's standard library.",
            show_default=False,
        ),
    ] = None,
    feature_map: Annotated[str, typer.Option(help="Feature map of the attention.")] = "hedgehog",
    rope_order: Annotated[str, typer.Option(help="Rotate before or after the feature map.")] = "before",
    keep_softmax: Annotated[
        str, typer.Option(help="Layers that keep softmax attention, such as 0,3; default: none.")
    ] = "",
    match_steps: Annotated[
        int, typer.Option(help="Updates of the new weights, such as feature maps; 0: none.")
    ] = 300,
    match_learning_rate: Annotated[float, typer.Option(help="Initial learning rate of matching.")] = 1e-2,
    finetune: Annotated[
        str, typer.Option(help="How to finetune: lora, full (all weights) or none.")
    ] = "lora",
    finetune_steps: Annotated[int, typer.Option(help="Updates on the next-token loss.")] = 1000,
    finetune_learning_rate: Annotated[
        float, typer.Option(help="Initial learning rate of finetuning.")
    ] = 1e-3,
    rank: Annotated[int, typer.Option(help="Rank of LoRA's updates.")] = 8,
    batch_size: Annotated[int, typer.Option(help="Sequences per update.")] = 8,
    sequence_length: Annotated[int, typer.Option(help="Tokens per sequence.")] = 512,
    seed: Annotated[int, typer.Option(help="Seed of the data order and of new random weights.")] = 0,
    **flags: Any,
) -> int:
    """Replace the softmax attention of a pretrained model with linear attention, and train it to match.

    The model is read, trained and saved in float32; nothing is downloaded. The loss on held-out text is measured
    before, after the replacement, and after matching and finetuning, unless these are skipped. Options of the attention
    add parts with new weights.
    """
    layers = _layers(keep_softmax)
    check_at_least(
        match_steps=(match_steps, 0),
        finetune_steps=(finetune_steps, 1),
        batch_size=(batch_size, 1),
        rank=(rank, 1),
        sequence_length=(sequence_length, 2),
    )
    check_positive(match_learning_rate=match_learning_rate, finetune_learning_rate=finetune_learning_rate)
    check_flags(flags)
    check_folder(out)
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"--out={out}: expected an empty or new folder")
    check_feature_map(feature_map, flags["erase_gate"])
    import torch
    from rich.progress import track
    from safetensors import SafetensorError

    from linrope.cli.pretrained import load_pretrained, tokenizer_beside
    from linrope.cli.training import Lines
    from linrope.common.files import replace_file
    from linrope.models.training import Corpus

    for package in ("transformers", "peft")[: 1 + (finetune == "lora")]:
        need(package, "linrope[huggingface]")
    from linrope.models.huggingface import conversion

    if finetune not in (*conversion.FINETUNING, "none"):
        raise ValueError(f"--finetune={finetune!r}: expected {', '.join(conversion.FINETUNING)} or none")
    torch.manual_seed(seed)
    teacher = load_pretrained(model_folder).to(pick_device("auto"))
    tokenizer = tokenizer_beside(model_folder, teacher.config.vocab_size)
    student = conversion.convert(
        teacher,
        feature_map=feature_map,
        rope_order=rope_order,
        keep_softmax=layers,
        **chosen_options(flags, LayerConfig(1, 1)),
    )
    if match_steps and "linear_attention" not in (student.config.layer_types or ()):
        raise ValueError(
            f"--keep-softmax={keep_softmax}: got all layers of the model, expected fewer, or --match-steps=0"
        )
    if match_steps and not conversion.new_parameters(student):
        raise ValueError(
            f"--match-steps={match_steps}: --feature-map={feature_map} has no weights to match; expected 0, or a "
            "learned map such as hedgehog"
        )
    corpus = Corpus.load(text, tokenizer)
    for name, part in (("training", corpus.train), ("held-out", corpus.held_out)):
        if len(part) <= sequence_length:
            raise ValueError(
                f"--sequence-length={sequence_length}: expected less than the {name} text, {len(part)} tokens"
            )
    held_out = _held_out(corpus.held_out, batch_size, sequence_length)
    rows = _rows(corpus.train, batch_size, sequence_length, seed)
    console.print(f"{corpus.name}: {len(corpus.train):,} tokens to train on")

    def measure(name: str, model: Any) -> float:
        bits: float = conversion.evaluate(model, held_out) / math.log(2) / corpus.held_out.bytes_per_token
        console.print(f"{name:18} {bits:.4f} bits per byte")
        return bits

    def batches(name: str, steps: int) -> Iterator[Tensor]:
        bar: dict[str, Any] = {"console": console, "transient": True, "disable": not console.is_terminal}
        line = Lines(console)
        for step, batch in enumerate(track(islice(rows, steps), name, total=steps, **bar)):
            yield batch
            line(f"{name}: step {step + 1:,} of {steps:,}")

    matched = finetuned = None
    before, replaced = measure("before", teacher), measure("after replacement", student)
    if match_steps:
        conversion.match(
            student,
            teacher,
            batches("matching", match_steps),
            steps=match_steps,
            learning_rate=match_learning_rate,
        )
        matched = measure("after matching", student)
    if finetune != "none":
        conversion.finetune(
            student,
            batches("finetuning", finetune_steps),
            steps=finetune_steps,
            method=finetune,
            learning_rate=finetune_learning_rate,
            rank=rank,
        )
        finetuned = measure("after finetuning", student)

    try:
        student.save_pretrained(out)
    except SafetensorError as error:
        raise OSError(f"{out}: cannot be written ({error})") from error
    if tokenizer is not None:
        tokenizer.save_pretrained(out)
    report = json.dumps(asdict(conversion.Losses(before, replaced, matched, finetuned)))
    replace_file(out / "losses.json", lambda path: path.write_text(report + "\n"))
    console.print(report)
    console.print(f"written: {out}")
    return 0


def _layers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"--keep-softmax={text!r}: expected integers separated by commas") from None


def _rows(text: Text, batch_size: int, length: int, seed: int) -> Iterator[Tensor]:
    """An endless stream of batches (b, n)."""
    from linrope.models.training.batch import Batch, row_starts

    first = 0
    while True:
        yield Batch.read(text, row_starts(text, first, batch_size, length, seed), length).tokens
        first += batch_size


def _held_out(text: Text, batch_size: int, length: int) -> list[Tensor]:
    """Batches (b, n) of rows that are spread evenly over the text."""
    from linrope.models.training.batch import Batch, evenly_spaced_rows

    starts = evenly_spaced_rows(text, batch_size * _HELD_OUT_BATCHES, length)
    return [Batch.read(text, part, length).tokens for part in starts.split(batch_size)]

"""Bits per byte by position of one or more checkpoints: numbers, JSON file, plot."""

import json
import textwrap
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from linrope.cli.charts import GREY, LINES, charts, labels, legend_below, save
from linrope.cli.pretrained import is_pretrained, load_pretrained, on_linrope, tokenizer_beside
from linrope.cli.training import Lines
from linrope.common.files import replace_file
from linrope.decode.with_cache import WithCache
from linrope.models import LanguageModel
from linrope.models.training import Corpus, bits_by_position, latest_checkpoint
from linrope.models.training.checkpoint import load_training

# Config fields that the plot's legend leaves out.
_NOT_SHOWN = {"architectures", "auto_map", "dtype", "model_type", "transformers_version", "_name_or_path"}
_NOT_SHOWN |= {"layer_types", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id"}

_WORDS = {"None": "none", "False": "no", "True": "yes"}


def evaluate(
    runs: list[Path],
    path: Path | None,
    length: int | None,
    sequences: int,
    device: torch.device,
    console: Console,
) -> dict[str, Any]:
    """The results of each run: on the text that was held out from its training, or on another text."""
    loaded = [_load(run) for run in runs]
    if path is None and (without := [str(each.run) for each in loaded if "corpus" not in each.source]):
        raise ValueError(f"{without[0]}: does not record the text it was trained on; expected a PATH to read")
    results, line = [], Lines(console)

    def report(done: int, pieces: int) -> None:
        line(f"{done:,} of {pieces:,} pieces")

    for each, label in zip(loaded, labels(runs, "--checkpoint"), strict=True):
        source = each.source
        if path is not None:
            source = {"corpus": str(path)} | {name: x for name, x in source.items() if name == "binary"}
        # It may be too short to train on.
        corpus = Corpus.load_source(source, each.tokenizer, for_training=False)
        trained_on = each.source.get("checksum") == str(corpus.checksum)
        if path is None and not trained_on:
            raise ValueError(
                f"{each.run}: was trained on another version of {corpus.name}, so nothing of it is known to be held "
                "out; expected a PATH, all of which is then read"
            )
        text = corpus.held_out if trained_on else corpus.all()
        if text.longest < 2:
            got = f"documents of at most {corpus.count(1)}" if text.longest else "no text"
            raise ValueError(
                f"{corpus.name}: got {got}, expected a document of at least {corpus.count(2)}: the model reads one and "
                "predicts the next"
            )
        if length is None and each.trained_length is None:
            raise ValueError(f"{each.run}: does not record the trained length; expected --length")
        until = length or min(4 * (each.trained_length or 0), text.longest - 1)
        console.print(
            f"{each.run}: {'the held-out part' if trained_on else 'all'} of {corpus.name}, {until:,} tokens"
        )
        with on_linrope(each.model, device):
            model = each.model.eval().to(device)
            bins = bits_by_position(model, text, until, sequences=sequences, on_piece=report)
        results.append(
            {
                "run": str(each.run),
                "label": label,
                "step": each.step,
                "config": each.config,
                "attention": each.attention,
                "positions": each.positions,
                "trained_length": each.trained_length,
                "corpus": corpus.name,
                "held_out": trained_on,
                "bits_per_byte": sum(b["bits_per_byte"] * (b["end"] - b["start"]) for b in bins) / until,
                "bins": bins,
            }
        )
    return {"models": results}


@dataclass(frozen=True)
class _Loaded:
    """A model and what its folder says about it."""

    run: Path
    model: nn.Module  # maps tokens (b, n) and states to logits and new states
    tokenizer: Any
    config: dict[str, Any]
    attention: str
    positions: str
    trained_length: int | None  # None: the folder does not say
    step: int | None = None
    # What the folder records of the training text: Corpus.source, and its checksum
    source: dict[str, str] = field(default_factory=dict)


def _load(run: Path) -> _Loaded:
    checkpoint = latest_checkpoint(run)
    if is_pretrained(checkpoint):
        pretrained = load_pretrained(checkpoint)
        values = pretrained.config
        with on_linrope(pretrained, torch.device("cpu")):
            with_cache = WithCache(pretrained)
        return _Loaded(
            run,
            with_cache,
            tokenizer_beside(checkpoint, values.vocab_size),
            config=json.loads(values.to_json_string(use_diff=False)),
            attention=_attention(values),
            positions="rope" if getattr(values, "rope_parameters", None) else "its own",
            trained_length=getattr(values, "max_position_embeddings", None),
        )
    model = LanguageModel.load(checkpoint)
    loaded = _Loaded(
        run,
        model,
        tokenizer_beside(checkpoint, model.config.vocab_size),
        config=model.config.to_dict(),
        attention=model.config.attention,
        positions="none" if model.config.layer.rotary is None else "rope",
        trained_length=None,
    )
    if not (checkpoint / "training.safetensors").is_file():  # LanguageModel.save wrote the folder, not a run
        return loaded
    training, _, metadata = load_training(checkpoint)
    return replace(
        loaded,
        trained_length=training.sequence_length,
        step=int(metadata["step"]),
        source=metadata,
    )


def _attention(config: Any) -> str:
    """The kind of attention of a model in Hugging Face format; for other models than linrope's, their type."""
    if config.model_type != "linrope":
        return str(config.model_type)
    kinds = {"linear_attention": "linear", "full_attention": "softmax"}
    return " and ".join(name for kind, name in kinds.items() if kind in config.layer_types)


def legends(models: list[dict[str, Any]]) -> list[str]:
    """Each model's label, attention and positions, and the options in which the models differ."""
    configs = [model["config"] for model in models]
    shared = set.intersection(*map(set, configs)) - {"attention", *_NOT_SHOWN}
    options: list[str] = [""] * len(models)
    for name in (name for name in configs[0] if name in shared):
        values = [config[name] for config in configs]
        if all(isinstance(value, dict) and value.keys() == values[0].keys() for value in values):
            rows = {f"{name} {key}": [value[key] for value in values] for key in values[0]}
        else:
            rows = {name: [value.get("name", True) if isinstance(value, dict) else value for value in values]}
        for key, row in rows.items():
            if len(set(map(repr, row))) > 1:
                words = key.replace("_", " ")
                options = [
                    f"{text}, {words} {_WORDS.get(repr(x), x)}" for text, x in zip(options, row, strict=True)
                ]
    return [
        f"{model['label']}: {model['attention']}, positions {model['positions']}{text}"
        for model, text in zip(models, options, strict=True)
    ]


def table(result: dict[str, Any]) -> Table:
    """A table with a row for each bin and a column for each run."""
    shown = Table(title="Bits per byte by position")
    shown.add_column("positions, from 1", justify="right")
    for model in result["models"]:
        shown.add_column(model["label"], justify="right")
    columns = [{b["end"]: b for b in model["bins"]} for model in result["models"]]
    for end in sorted({end for column in columns for end in column}):
        start = next(int(column[end]["start"]) for column in columns if end in column)
        cells = [f"{column[end]['bits_per_byte']:.3f}" if end in column else "" for column in columns]
        shown.add_row(f"{start + 1:,} .. {end:,}" if end > start + 1 else f"{end:,}", *cells)
    shown.add_row("all", *(f"{model['bits_per_byte']:.3f}" for model in result["models"]))
    return shown


def write(result: dict[str, Any], folder: Path) -> tuple[Path, Path]:
    """Writes evaluation.json and evaluation.png into the folder."""
    numbers, picture = folder / "evaluation.json", folder / "evaluation.png"
    text = json.dumps(result, indent=1) + "\n"
    replace_file(numbers, lambda temporary: temporary.write_text(text))
    _plot(result, picture)
    return numbers, picture


def _plot(result: dict[str, Any], path: Path) -> None:
    models = result["models"]
    texts = [textwrap.fill(text, 96, subsequent_indent="   ") for text in legends(models)]
    lines = sum(1 + text.count("\n") for text in texts) + 1
    figure, axis = charts(11, 6 + 0.3 * lines)
    for index, (model, text) in enumerate(zip(models, texts, strict=True)):
        bins, color = model["bins"], LINES[index % len(LINES)]
        middle = [((b["start"] + 1) * b["end"]) ** 0.5 for b in bins]  # positions from 1, for the logarithm
        bits = [b["bits_per_byte"] for b in bins]
        axis.plot(middle, bits, "o-", color=color, label=text)
        low, high = ([b["bits_per_byte"] + sign * b["error"] for b in bins] for sign in (-1, 1))
        axis.fill_between(middle, low, high, color=color, alpha=0.2, linewidth=0)
    trained = sorted({model["trained_length"] for model in models} - {None})
    name = f"trained length: {', '.join(f'{length:,}' for length in trained)} tokens"
    for length in trained:
        axis.axvline(length, color=GREY, linestyle="--", linewidth=1.5, label=name)
        name = "_"  # a single entry in the legend
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}" if x >= 1 else "")
    axis.set(xlabel="position, from 1", ylabel="bits per byte")
    axis.grid(which="major")
    legend_below(figure, 1, size=12)
    save(figure, path)

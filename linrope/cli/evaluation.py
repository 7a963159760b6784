"""Bits per byte by position of one or more checkpoints: numbers, JSON file, plot."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from linrope.common.files import replace_file
from linrope.models import LanguageModel
from linrope.models.training import Corpus, bits_by_position, latest_checkpoint
from linrope.models.training.checkpoint import load_training, tokenizer_of


def evaluate(
    runs: list[Path],
    path: Path | None,
    length: int | None,
    sequences: int,
    device: torch.device,
    console: Console,
) -> dict[str, Any]:
    """The results of each run: on the text that was held out from its training, or on another text."""
    models = []
    for run, label in zip(runs, labels(runs), strict=True):
        checkpoint = latest_checkpoint(run)
        config, _, metadata = load_training(checkpoint)
        corpus_path = metadata["corpus"] or None if path is None else path
        corpus = Corpus.load(corpus_path, tokenizer_of(checkpoint))
        trained_on = metadata["checksum"] == str(corpus.checksum)
        text = corpus.held_out if trained_on else corpus.all()
        until = length or min(4 * config.sequence_length, text.longest - 1)
        model = LanguageModel.load(checkpoint).eval().to(device)
        console.print(
            f"{run}: {'the held-out part' if trained_on else 'all'} of {corpus.name}, {until:,} tokens"
        )
        bins = bits_by_position(model, text, until, sequences=sequences)
        models.append(
            {
                "run": str(run),
                "label": label,
                "step": int(metadata["step"]),
                "config": asdict(model.config),
                "attention": model.config.attention,
                "positions": _positions(model),
                "trained_length": config.sequence_length,
                "corpus": corpus.name,
                "held_out": trained_on,
                "bits_per_byte": sum(b["bits_per_byte"] * (b["end"] - b["start"]) for b in bins) / until,
                "bins": bins,
            }
        )
    return {"models": models}


def labels(runs: list[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart.

    Raises:
        ValueError: two paths are the same.
    """
    parts = [run.resolve().parts for run in runs]
    if len(set(parts)) < len(parts):
        raise ValueError(f"--checkpoint: got {', '.join(map(str, runs))}, expected each checkpoint once")
    for count in range(1, max(map(len, parts)) + 1):
        ends = ["/".join(part[-count:]) for part in parts]
        if len(set(ends)) == len(ends):
            break
    return ends


def legends(models: list[dict[str, Any]]) -> list[str]:
    """Each model's label, attention and positions, and the options in which the models differ."""
    configs = [model["config"] for model in models]
    differ = [name for name in configs[0] if any(config[name] != configs[0][name] for config in configs)]
    texts = []
    for model, config in zip(models, configs, strict=True):
        options = {name: config[name] for name in differ if name not in ("attention", "positions")}
        options = {
            name: x["name"] if isinstance(x, dict) and "name" in x else x for name, x in options.items()
        }
        suffix = "".join(f", {name} {value}" for name, value in options.items())
        texts.append(f"{model['label']}: {model['attention']}, positions {model['positions']}{suffix}")
    return texts


def _positions(model: LanguageModel) -> str:
    config = model.config
    return "none" if config.positions == "rope" and config.rotary is None else config.positions


def table(result: dict[str, Any]) -> Table:
    """A table with a row for each bin and a column for each run."""
    shown = Table(title="Bits per byte by position")
    shown.add_column("positions", justify="right")
    for model in result["models"]:
        shown.add_column(model["label"], justify="right")
    columns = [{b["end"]: b for b in model["bins"]} for model in result["models"]]
    for end in sorted({end for column in columns for end in column}):
        start = next(int(column[end]["start"]) for column in columns if end in column)
        cells = [f"{column[end]['bits_per_byte']:.3f}" if end in column else "" for column in columns]
        shown.add_row(f"{start:,} .. {end - 1:,}", *cells)
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
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    colors = ("#0b6e4f", "#c1440e", "#2a4b8d", "#8a6d1d", "#6b2d73")
    for index, (model, label) in enumerate(zip(result["models"], legends(result["models"]), strict=True)):
        bins, color = model["bins"], colors[index % len(colors)]
        middle = [((b["start"] + 1) * b["end"]) ** 0.5 for b in bins]  # positions from 1, for the logarithm
        bits = [b["bits_per_byte"] for b in bins]
        axis.plot(middle, bits, "o-", color=color, label=label, linewidth=2, markersize=4)
        low, high = ([b["bits_per_byte"] + sign * b["error"] for b in bins] for sign in (-1, 1))
        axis.fill_between(middle, low, high, color=color, alpha=0.15, linewidth=0)
    for length in sorted({model["trained_length"] for model in result["models"]}):
        axis.axvline(length, color="gray", linestyle="--", linewidth=1)
        axis.annotate(
            "trained length", (length, 1), (3, -10), ("data", "axes fraction"), "offset points", fontsize=8
        )
    axis.set_xscale("log", base=2)
    axis.set_xlabel("position, from 1")
    axis.set_ylabel("bits per byte")
    axis.grid(True, which="major", alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)

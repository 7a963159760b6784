"""Commands and their options. What they do lies in the modules beside this one and in linrope.models."""

import datetime
import json
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from linrope.cli import benchmark, evaluation, report
from linrope.cli.convert import convert
from linrope.cli.generation import stream
from linrope.cli.training import describe, progress_bar, run_steps
from linrope.files import replace_file
from linrope.models import LanguageModel, LanguageModelConfig
from linrope.models.language_model import ATTENTION, POSITIONS
from linrope.models.training import Corpus, Trainer, TrainingConfig, checkpoints, latest_checkpoint
from linrope.models.training.checkpoint import tokenizer_of
from linrope.models.training.corpus import load_tokenizer
from linrope.versions import show_versions

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)
app.command()(convert)
console = Console()

DEMO_PROMPT = "def main("
DEMO_DECAY = {"name": "spread", "longest": 256}  # half-lives up to the rows it is trained on


def run(arguments: list[str]) -> int:
    """Exit status: 0, 2 with one line naming the cause where input is at fault, 130 after Ctrl-C."""
    try:
        return int(app(arguments, standalone_mode=False) or 0)
    except typer.Exit as stop:
        return stop.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except (ValueError, OSError, RuntimeError, ModuleNotFoundError, typer.TyperException) as error:
        cause = error.format_message() if hasattr(error, "format_message") else str(error)
        print(f"linrope: {' '.join(cause.split())}", file=sys.stderr)
        return 2


@app.callback()
def _linrope() -> None:
    """Linear attention with rotary position embedding: models, training, benchmarks."""


@app.command()
def train(
    path: Annotated[
        Path | None,
        typer.Argument(
            help="Text file, .jsonl file, folder of these, or dataset saved to disk. "
            "Default: Python's standard library.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the checkpoints.")] = Path("runs/train"),
    steps: Annotated[int, typer.Option(help="Updates in all.")] = 1000,
    batch_size: Annotated[int, typer.Option(help="Rows per process and batch.")] = 8,
    accumulation: Annotated[int, typer.Option(help="Batches per update.")] = 1,
    sequence_length: Annotated[int, typer.Option(help="Tokens (bytes, if no tokenizer) per row.")] = 512,
    pieces: Annotated[
        int, typer.Option(help="Cut rows into so many pieces; states pass on, memory is that of one piece.")
    ] = 1,
    through: Annotated[
        bool, typer.Option("--through", help="Gradients pass from piece to piece too; costs their memory.")
    ] = False,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 3e-3,
    warmup_steps: Annotated[int, typer.Option(help="Steps up to the peak.")] = 20,
    weight_decay: Annotated[float, typer.Option(help="Of AdamW.")] = 0.1,
    clip: Annotated[float, typer.Option(help="Largest norm of the gradient.")] = 1.0,
    tokenizer: Annotated[
        str | None, typer.Option(help="Of transformers: folder or name. Default: bytes.", show_default=False)
    ] = None,
    embed_dim: Annotated[int, typer.Option(help="Width of the model.")] = 128,
    layers: Annotated[int, typer.Option(help="Blocks.")] = 4,
    heads: Annotated[int, typer.Option(help="Heads per block.")] = 4,
    feature_map: Annotated[str, typer.Option(help="Feature map of the attention.")] = "elu+1",
    attention: Annotated[str, typer.Option(help=f"{' or '.join(ATTENTION)}.")] = "linear",
    positions: Annotated[
        str, typer.Option(help=f"{', '.join(POSITIONS)}; the last three with softmax attention only.")
    ] = "rope",
    rotary: Annotated[
        str,
        typer.Option(
            help="Of the positions 'rope': interleaved, half, selective (made from the input) or none."
        ),
    ] = "interleaved",
    decay: Annotated[
        str | None,
        typer.Option(
            help="How keys fade: spread (half-lives from 1 token to a row; the default of linear attention "
            "without --forget-gate), learned (starts there), retnet or none.",
            show_default=False,
        ),
    ] = None,
    forget_gate: Annotated[
        bool, typer.Option("--forget-gate", help="Keys fade by a gate made from the input, too.")
    ] = False,
    short_conv: Annotated[
        int, typer.Option(help="Taps of a convolution on queries, keys and values, as 4; 0: none.")
    ] = 0,
    qk_norm: Annotated[bool, typer.Option("--qk-norm", help="RMS norm of queries and keys.")] = False,
    seed: Annotated[int, typer.Option(help="Of initial weights and data order.")] = 0,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 200,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint in --out.")
    ] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write metrics for TensorBoard too.")
    ] = False,
) -> int:
    """Train a language model on text.

    Ctrl-C saves a checkpoint and stops. The same command with --resume goes on from the last checkpoint,
    bit for bit as if the run had never stopped, or been killed. With --resume the sizes, rates and tokenizer
    are those of the checkpoint. For several processes or GPUs: accelerate launch -m linrope.cli train ..
    """
    if save_every < 1:
        raise ValueError(f"--save-every={save_every}: expected at least 1")
    if resume:
        trainer = Trainer.load(out, Corpus.load(path, tokenizer_of(latest_checkpoint(out))))
    else:
        if out.exists() and any(out.glob("step-*")):
            raise ValueError(f"--out={out}: has checkpoints already; expected --resume or an empty folder")
        corpus = Corpus.load(path, None if tokenizer is None else load_tokenizer(tokenizer))
        config = TrainingConfig(
            steps, batch_size, sequence_length, learning_rate, warmup_steps, weight_decay, clip, seed,
            accumulation, pieces, through,
        )  # fmt: skip
        if decay is None:
            decay = "spread" if attention == "linear" and not forget_gate else "none"
        half_lives: dict[str, Any] = {"longest": sequence_length}
        torch.manual_seed(seed)
        model = LanguageModel(
            LanguageModelConfig(
                vocab_size=corpus.vocab_size,
                embed_dim=embed_dim,
                num_layers=layers,
                num_heads=heads,
                attention=attention,
                positions=positions,
                max_length=max(sequence_length, LanguageModelConfig.max_length),
                feature_map=feature_map,
                rotary=_or_none(rotary),
                decay={"name": decay, **half_lives} if decay in ("spread", "learned") else _or_none(decay),
                forget_gate=half_lives if forget_gate else False,
                short_conv=short_conv or None,
                qk_norm=qk_norm,
            )
        )
        trainer = Trainer(model, corpus, config)
    console.quiet = not trainer.accelerator.is_main_process
    describe(trainer, console)
    stopped = run_steps(trainer, console, out, save_every, tensorboard)
    console.print(f"held-out text: {trainer.evaluate():.3f} bits per byte after {trainer.step} steps")
    console.print(f"checkpoint: {latest_checkpoint(out)}")
    trainer.accelerator.end_training()
    return 130 if stopped else 0


@app.command("generate")
def generate_text(
    checkpoint: Annotated[Path, typer.Option(help="Folder of a run, or one checkpoint.")],
    prompt: Annotated[str, typer.Option(help="Text to go on from.")] = DEMO_PROMPT,
    max_new_tokens: Annotated[int, typer.Option(help="Bytes, or tokens, to generate.")] = 500,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest byte.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Sample among the k likeliest bytes.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample among the likeliest bytes up to this probability.")
    ] = 0.95,
    seed: Annotated[int | None, typer.Option(help="Of the sampling; default: another one each time.")] = None,
) -> int:
    """Generate text from a checkpoint, streaming; linear attention: at constant time and memory per byte."""
    if not prompt:
        raise ValueError("--prompt: got an empty text, expected at least one byte")
    latest = latest_checkpoint(checkpoint)
    model = LanguageModel.load(latest).eval()
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


@app.command("eval")
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
) -> int:
    """Measure bits per byte by position, past the trained length too.

    Of the text that a run was trained on, the held-out part is read; of any other, all.
    """
    if sequences < 1 or (length is not None and length < 1):
        raise ValueError(f"--sequences={sequences}, --length={length}: expected at least 1")
    result = evaluation.evaluate(checkpoint, path, length, sequences, console)
    console.print(evaluation.table(result))
    written = evaluation.write(result, checkpoint[0] if out is None else out)
    console.print(f"written: {', '.join(str(file) for file in written)}")
    return 0


@app.command()
def bench(
    max_length: Annotated[int, typer.Option(help="Longest sequence, a power of two from 256 on.")] = 65536,
    threads: Annotated[
        int, typer.Option(help="Of both sides; 0: PyTorch's. With 1, times are the thread's CPU time.")
    ] = 0,
    positions: Annotated[
        str, typer.Option(help="Positions to decode at, separated by commas; empty: none.")
    ] = "256,1024,16384,1048576",
    softmax_limit: Annotated[
        float, typer.Option(help="Seconds one call of softmax attention may take.")
    ] = 12.0,
    budget: Annotated[float, typer.Option(help="Seconds per measurement.")] = 3.0,
    rounds: Annotated[int, typer.Option(help="Turns that the sides take.")] = 4,
    out: Annotated[Path, typer.Option(help="Folder for the JSON and the plot.")] = Path("benchmarks/results"),
) -> int:
    """Measure throughput and memory against softmax attention with RoPE.

    Each output is first compared with the equation in float64. Both sides take turns in one run;
    figures are medians.
    """
    if max_length < 256 or max_length & (max_length - 1):
        raise ValueError(f"--max-length={max_length}: expected a power of two from 256 on")
    try:
        places = [int(part) for part in positions.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"--positions={positions!r}: expected integers separated by commas") from None
    if any(place < 1 or place >= 2**31 for place in places) or budget <= 0 or rounds < 1 or softmax_limit < 0:
        raise ValueError("--positions, --budget, --rounds, --softmax-limit: expected positive numbers")
    if threads < 0:
        raise ValueError(f"--threads={threads}: expected 0 or more")
    if threads:
        torch.set_num_threads(threads)
    lengths = [2**i for i in range(5, max_length.bit_length())]
    _bench(lengths, places, softmax_limit, budget, rounds, out, "cpu")
    return 0


@app.command()
def env(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object in place of lines.")] = False,
) -> int:
    """Show versions, the backends that run here, why others do not, and the instruction set in use."""
    show_versions(as_json=as_json)
    return 0


@app.command()
def demo(
    seconds: Annotated[float, typer.Option(help="How long to train.")] = 80.0,
    out: Annotated[Path, typer.Option(help="Folder for all results.")] = Path("runs/demo"),
) -> int:
    """Train a small model on real text, generate from it, and outrun softmax attention: 4 minutes."""
    console.rule("1. A language model on linear attention with RoPE")
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(embed_dim=128, num_layers=4, num_heads=4, decay=DEMO_DECAY))
    trainer = Trainer(model, Corpus.load(), TrainingConfig(steps=1, sequence_length=256))
    describe(trainer, console)
    before = trainer.evaluate()
    # The schedule needs a number of steps: as many as the time allows at the speed of the first ones.
    start, trial = time.perf_counter(), 4
    for _ in range(trial):
        trainer.train_step()
    steps = max(trial + 1, round(seconds / (time.perf_counter() - start) * trial))
    trainer.config = replace(trainer.config, steps=steps)
    stopped = run_steps(trainer, console)
    after = trainer.evaluate()
    console.print(f"bits per byte on held-out files: [bold]{before:.2f} before, {after:.2f} after[/bold]")
    for earlier in checkpoints(out):  # of another demo: a longer one would count as the latest
        shutil.rmtree(earlier)
    console.print(f"checkpoint: {trainer.save(out)}")
    if stopped:
        return 130
    console.rule("2. Text from it, at constant memory per byte")
    stream(model.eval(), None, DEMO_PROMPT, 300, temperature=0.7, top_k=None, top_p=0.9, seed=0)
    console.rule("3. Against softmax attention with RoPE")
    _bench([2**i for i in range(8, 15)], [1024, 65536], 2.0, 0.5, 2, out, "demo")
    return 0


def _or_none(name: str) -> str | None:
    return None if name == "none" else name


def _bench(
    lengths: list[int], positions: list[int], limit: float, budget: float, rounds: int, out: Path, name: str
) -> None:
    rows: list[dict[str, Any]] = []
    with progress_bar("{task.description}", console) as progress:
        task = progress.add_task("benchmark", total=len(lengths) + 1)
        for n in lengths:
            progress.update(task, description=f"N = {n:,}")
            rows.append(benchmark.attention_row(n, rows[-1] if rows else None, limit, budget, rounds))
            progress.advance(task)
        scaling = None
        if lengths[-1] > 4096:
            progress.update(task, description="growth")
            scaling = benchmark.growth(4096, lengths[-1], budget, rounds)
        progress.update(task, description="extra costs")
        costs = benchmark.extra_costs(min(4096, lengths[-1]), budget, rounds)
        progress.update(task, description="decoding")
        decode = benchmark.decode_rows(positions, budget, rounds) if positions else []
        progress.advance(task)
    today = datetime.date.today().isoformat()
    result = {
        "date": today,
        "machine": benchmark.machine(),
        "attention": rows,
        "overtaking": {mode: benchmark.overtaking(rows, mode) for mode in ("forward", "training")},
        "growth": scaling,
        "costs": costs,
        "decode": decode,
    }
    report.show(result, console)
    path = out / f"{name}-{today}.json"
    replace_file(path, lambda temporary: temporary.write_text(json.dumps(result, indent=1) + "\n"))
    report.plot(result, path.with_suffix(".png"))
    console.print(f"written: {path}, {path.with_suffix('.png')}")

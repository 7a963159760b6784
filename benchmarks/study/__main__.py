"""The commands of the study."""

from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.study import plan, plots, report, runner
from benchmarks.study.steps import save, step_seconds

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)
Folder = Annotated[Path, typer.Argument(help="Folder with the results (runs.jsonl).")]


@app.command()
def run(
    out: Annotated[Path, typer.Option(help="Folder of the results; runs that it already has are skipped.")],
    only: Annotated[
        list[str] | None, typer.Option(help="Tasks and models, such as mad-*; may be repeated.")
    ] = None,
    scale: Annotated[
        float, typer.Option(help="Factor for the number of steps and, roughly, of parameters.")
    ] = 1.0,
    seeds: Annotated[int, typer.Option(help="Number of seeds per model and task.")] = 3,
    jobs: Annotated[int, typer.Option(help="Runs side by side, one thread each on a CPU.")] = 1,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "",
) -> None:
    """Runs what is missing. A run that was killed resumes from its last checkpoint, at most about a minute old."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    runner.study(out, only or [], scale, seeds, jobs, device)


@app.command()
def steps(
    only: Annotated[list[str], typer.Option(help="A task and models; may be repeated.")],
    rounds: Annotated[int, typer.Option(help="Steps of each model; the fastest counts.")] = 8,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results, in which to save the times.")
    ] = None,
) -> None:
    """Prints the CPU time of a training step of each model, relative to that of the default block or the first model.

    Linear layers of transformers run on linrope's kernels, and once more in plain PyTorch.
    """
    selected = [(task, names) for task, names in plan.chosen(only, 1.0) if task.name in only]
    if len(selected) != 1:
        raise ValueError(f"only: got {len(selected)} names of tasks, expected one")
    ((task, names),) = selected
    seconds = step_seconds(task, names, rounds)
    unit = seconds.get(report.DEFAULT, next(iter(seconds.values())))["fastest"]
    for name, sides in seconds.items():
        times = (f"{1e3 * x:.1f} ms, {x / unit:.2f} ({side})" for side, x in sides.items())
        print(f"{name}: {'; '.join(times)}")
    if out is not None:
        save(out, task, rounds, seconds)


@app.command()
def table(
    folder: Folder,
    out: Annotated[
        Path | None, typer.Option(help="Page to write, docs/evidence_tables.md. Default: print it.")
    ] = None,
) -> None:
    """Writes the page of tables: what the models are, and by task the mean over the seeds and half the range."""
    page = report.page(folder)
    if out is None:
        print(page)
    else:
        out.write_text(page)


@app.command()
def plot(
    folder: Folder,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the plots. Default: beside the results.")
    ] = None,
) -> None:
    """Writes the plots."""
    for path in plots.plots(folder, out or folder):
        print(path)


def main(arguments: list[str] | None = None) -> None:
    """Exit status 1 and one line where the arguments or the results are at fault."""
    try:
        app(arguments)
    except (ValueError, RuntimeError) as error:
        raise SystemExit(f"study: {error}") from error


if __name__ == "__main__":
    main()

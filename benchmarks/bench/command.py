"""The command ``linrope bench``; run.py measures. Nothing here imports PyTorch at once: --help would wait for it."""

from pathlib import Path
from typing import Annotated, Any

import typer

from linrope.cli.checks import check_at_least, check_folder, option_of
from linrope.cli.console import console
from linrope.cli.devices import HELP as DEVICE_HELP
from linrope.cli.devices import pick_device
from linrope.cli.layer_flags import check_flags, layer_flags

DTYPES = ("float32", "bfloat16", "float16")


# For each of these kinds of run: the options that it reads.
_READ = {
    "compare": ("compare",),
    "distributed": ("distributed", "max_length", "heads", "dim", "out"),
    "transformers": ("transformers", "lengths", "dtype", "threads", "rounds", "budget", "out"),
}


@layer_flags("feature_map", "decay", "backend")
def bench(
    context: typer.Context,
    max_length: Annotated[int, typer.Option(help="Longest sequence, a power of two, at least 256.")] = 65536,
    lengths: Annotated[str, typer.Option(help="Lengths separated by commas, instead of powers of two.")] = "",
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")] = "float32",
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = "cpu",
    batch: Annotated[int, typer.Option(help="Sequences per call.")] = 1,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 8,
    kv_heads: Annotated[
        int | None, typer.Option(help="Key/value heads. Default: --heads.", show_default=False)
    ] = None,
    dim: Annotated[int, typer.Option(help="Size of a head.")] = 64,
    gates: Annotated[
        bool, typer.Option("--gates", help="A forget gate for each token and key/value head.")
    ] = False,
    threads: Annotated[
        int,
        typer.Option(
            help="Threads; 0: PyTorch's default. With 1, times are minima of the thread's CPU time."
        ),
    ] = 0,
    decode_at: Annotated[
        str | None,
        typer.Option(
            help="Numbers of tokens before a decoding step, separated by commas; empty: no decoding. Default: 256, "
            "1024, 16384 and the longest length, none above that.",
            show_default=False,
        ),
    ] = None,
    positions: Annotated[str | None, typer.Option(hidden=True)] = None,  # the former name of decode_at
    softmax_limit: Annotated[
        float,
        typer.Option(
            help="Skip softmax attention at lengths where one call would take longer than this many seconds."
        ),
    ] = 12.0,
    budget: Annotated[float, typer.Option(help="Seconds per measurement.")] = 3.0,
    rounds: Annotated[int, typer.Option(help="How often each side is measured, in turns.")] = 4,
    distributed: Annotated[
        str,
        typer.Option(
            help="Numbers of processes, such as 1,2,4. Instead of the benchmark, measure how a sequence of "
            "--max-length tokens scales over them, with gloo and one thread each."
        ),
    ] = "",
    transformers: Annotated[
        str,
        typer.Option(
            metavar="FAMILY",
            help="A family of transformers' models, such as mamba2. Instead of the benchmark, measure one of its "
            "models with and without linrope, for 512, 2048, 8192 tokens or those of --lengths. Families whose own "
            "code needs too much memory for these have fewer.",
        ),
    ] = "",
    out: Annotated[Path, typer.Option(help="Folder for the JSON file and the plot.")] = Path(
        "benchmarks/results"
    ),
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            help="Instead of running, compare two JSON files of earlier runs.",
            metavar="FIRST SECOND",
            show_default=False,
        ),
    ] = None,
    **flags: Any,
) -> int:
    """Measure throughput and memory against softmax attention with RoPE, and against installed peers.

    Each output is first compared with the equation in float64. All sides take turns in one run. Times are
    medians, or minima with --threads 1. Nothing is overwritten: the files of later runs on a day are
    numbered.
    """
    for kind in _READ:
        if context.params[kind]:
            _check_choices(context, kind)
    if compare is not None:
        from benchmarks.bench import comparison

        console.print(comparison.compare(*(comparison.read(path) for path in compare)), soft_wrap=False)
        return 0
    check_folder(out)
    check_at_least(rounds=(rounds, 1), threads=(threads, 0))
    if not budget > 0:
        raise ValueError(f"--budget={budget}: expected a positive number")
    if softmax_limit < 0:
        raise ValueError(f"--softmax-limit={softmax_limit}: expected at least 0")
    if positions is not None:
        raise ValueError(f"--positions={positions}: expected --decode-at={positions}")
    chosen = _lengths(max_length, lengths)
    places = [n for n in (256, 1024, 16384) if n < chosen[-1]] + [chosen[-1]]
    if decode_at is not None:
        places = _integers("--decode-at", decode_at, 2**31 - 2**20)
    if distributed:
        from benchmarks.bench import scaling

        scaling.scale(_integers("--distributed", distributed, 65), max_length, heads, dim, out, console)
        return 0
    import torch

    from benchmarks.bench.cases import Case
    from benchmarks.bench.rows import Effort
    from benchmarks.bench.run import measure
    from linrope import backends, feature_maps
    from linrope.common.argument_checks import check_name
    from linrope.versions import versions

    check_name("--dtype", dtype, DTYPES)
    if transformers:
        from benchmarks.bench import families

        torch.set_num_threads(threads or torch.get_num_threads())
        families.compare(transformers, dtype, chosen if lengths else None, rounds, budget, out, console)
        return 0
    feature_map, backend = flags["feature_map"] or "elu+1", flags["backend"] or "auto"
    decay = None if flags["decay"] in (None, "none") else flags["decay"]
    check_name("--backend", backend, backends.NAMES)
    check_flags(flags)
    check_name("--feature-map", feature_map, feature_maps.NAMES)
    if backend != "auto" and (reason := versions()["backends"][backend]["reason"]) is not None:
        raise ValueError(f"--backend={backend}: cannot run here: {reason}")
    case = Case(
        batch,
        heads,
        dim,
        str(pick_device(device)),
        getattr(torch, dtype),
        kv_heads,
        feature_map,
        decay,
        gates,
        backend,
    )
    case.arguments()  # reports bad values before anything is measured
    if threads:
        torch.set_num_threads(threads)
    effort = Effort(softmax_limit, budget, rounds)
    measure(case, chosen, places, effort, out, torch.device(case.device).type, console)
    return 0


def _check_choices(context: typer.Context, kind: str) -> None:
    """Raises ValueError for options that this kind of run does not read."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT" and name not in _READ[kind]:
            others = ", ".join(option_of(other) for other in _READ[kind] if other != kind)
            expected = f"only --{kind}'s options: {others}" if others else "no other option"
            raise ValueError(f"{option_of(name)} has no effect with --{kind}; expected {expected}")


def _lengths(max_length: int, lengths: str) -> list[int]:
    if lengths:
        if not (chosen := sorted(set(_integers("--lengths", lengths, 2**31 - 1)))):
            raise ValueError(f"--lengths={lengths!r}: expected at least one length")
        return chosen
    if max_length < 256 or max_length & (max_length - 1):
        raise ValueError(f"--max-length={max_length}: expected a power of two, at least 256")
    return [2**i for i in range(5, max_length.bit_length())]


def _integers(option: str, text: str, end: int) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"{option}={text!r}: expected integers separated by commas") from None
    if any(number < 1 or number >= end for number in numbers):
        raise ValueError(f"{option}={text!r}: expected numbers from 1 to {end - 1}")
    return numbers

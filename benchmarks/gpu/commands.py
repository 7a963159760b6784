"""Steps that run other programs: the tests, linrope's commands, and two processes that share a GPU."""

import contextlib
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.machine import Machine, Row, each, whole
from linrope import LinearRoPEAttention, Rotary, linear_rope_attention
from linrope.distributed import Shard

ROOT = Path(__file__).parents[2]
# The tests compile 2,000 kernels, of 1 GB, which stay out of the steps' cache.
CACHE, KERNELS_OF_TESTS = ROOT / "build/gpu-cache/pytest", ROOT / "build/gpu-test-cache"
WORKERS = 14  # pytest processes on a machine with 16 cores or more
PATIENCE = 20  # seconds in which pytest writes its report after it was interrupted


# Tests


def tests(on: Machine) -> Iterator[Row]:
    """Every test that runs on a GPU; first those that failed in the last run, if the cache has it."""
    yield from each(["pytest"], lambda _: pytest_row(on))


def pytest_command(on: Machine, report: Path) -> list[str]:
    """Warnings are no errors here, and plugins that this machine happens to have are left out."""
    folders = on.sizes(["tests/kernels", "tests/backends", "tests/ops"], ["tests/kernels/test_angles.py"])
    count = on.sizes(min(WORKERS, max(1, (os.cpu_count() or 1) - 1)), 0)
    options = (
        f"-m 'gpu and not long and not ptx' --device {on.device} -n {count} -W default -p no:benchmark "
        f"-p no:cov -p no:randomly --ff -o cache_dir={CACHE} -q --durations 20 --junitxml={report}"
    )
    return [sys.executable, "-m", "pytest", *shlex.split(options), *folders]


def pytest_row(on: Machine) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        environment = os.environ | {"TRITON_CACHE_DIR": str(KERNELS_OF_TESTS)}
        process = subprocess.Popen(
            pytest_command(on, report), cwd=ROOT, env=environment, start_new_session=True
        )
        cut = False
        try:
            process.wait(max(10, on.limit - PATIENCE - 5))
        except subprocess.TimeoutExpired:
            cut = True
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        row = outcomes(report)
    if cut or row["failed"] or not row["passed"]:
        row["failure"] = f"{row['passed']} tests passed, {row['failed']} failed{', then time was up' * cut}"
    return row


def outcomes(report: Path) -> Row:
    """The counts, the first lines of all failures, and the slowest tests of pytest's report."""
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None, "pytest wrote no report"
    cases = list(suite.iter("testcase"))
    names = {case: f"{case.get('classname')}::{case.get('name')}" for case in cases}
    failures = {
        names[case]: str(part.get("message"))[:300]
        for case in cases
        for part in case
        if part.tag in ("failure", "error")
    }
    skipped = sum(part.tag == "skipped" for case in cases for part in case)
    slowest = sorted(((float(case.get("time", 0)), names[case]) for case in cases), reverse=True)[:10]
    return {
        "passed": len(cases) - len(failures) - skipped,
        "failed": len(failures),
        "skipped": skipped,
        "seconds": float(suite.get("time", 0)),
        "failures": failures,
        "slowest": {name: seconds for seconds, name in slowest},
    }


# linrope's commands


def command(line: str) -> str:
    """Runs a command of linrope in this process and returns what it prints."""
    from linrope.cli.app import run

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = run(["--traceback", *shlex.split(line)])
    assert status == 0, f"linrope {line}: exit status {status}: {printed.getvalue()[-500:]}"
    return printed.getvalue()


def train(on: Machine) -> Iterator[Row]:
    yield from each(["linrope train"], lambda _: train_row(on))


def train_row(on: Machine) -> Row:
    """A run with a checkpoint half-way, and one that stops there and is resumed: they should learn the same."""
    steps = on.sizes(100, 4)
    size = on.sizes(
        "--embed-dim 512 --heads 8 --batch-size 8 --sequence-length 1024",
        "--embed-dim 32 --heads 2 --batch-size 2 --sequence-length 32",
    )
    losses = {}
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text(Path(json.decoder.__file__).read_text() * on.sizes(40, 2))
        options = f"{text} {size} --layers 2 --save-every {steps // 2} --device {on.device}"
        command(f"train {options} --out {folder}/whole --steps {steps}")
        command(f"train {options} --out {folder}/parts --steps {steps // 2}")
        command(f"train --out {folder}/parts --resume --steps {steps} --device {on.device}")
        for name in ("whole", "parts"):
            lines = (Path(folder) / name / "metrics.jsonl").read_text().splitlines()
            losses[name] = {row["step"]: row["bits_per_byte"] for row in map(json.loads, lines)}
    assert set(losses["whole"]) == set(losses["parts"]) == set(range(1, steps + 1))
    differences = [abs(losses["whole"][i] - losses["parts"][i]) for i in range(1, steps // 2 + 1)]
    row = {"steps": steps, "first": losses["whole"][1], "last": losses["whole"][steps]}
    row |= {"first half differs by": max(differences)}
    assert row["last"] < row["first"], f"it learned nothing: {row}"
    assert row["first half differs by"] < 0.2, f"the same run again: {row}"
    return row


def check(on: Machine) -> Iterator[Row]:
    yield from each(["linrope check"], lambda _: check_row(on))


def check_row(on: Machine) -> Row:
    report = json.loads(command(f"check --json --seconds {on.sizes(40, 0)}"))
    assert report["passed"], report
    return {"not available": report["not_available"], "results": report["results"]}


# Sequence parallelism


def parallel(on: Machine) -> Iterator[Row]:
    """Two processes share one GPU and a sequence, through gloo, and give the numbers of one process."""
    yield from each(["two processes"], lambda _: parallel_row(on))


def parallel_row(on: Machine) -> Row:
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        receiver, sender = context.Pipe(duplex=False)
        processes = [context.Process(target=rank_main, args=(on, rank, folder, sender)) for rank in (0, 1)]
        for process in processes:
            process.start()
        sender.close()
        try:
            found = receiver.recv() if receiver.poll(on.limit - 5) else "no answer"
        except EOFError:
            found = "both processes ended without an answer"
        for process in processes:
            process.join(1)
            process.kill()
    if isinstance(found, str):
        raise AssertionError(found)
    return dict(found)


def rank_main(on: Machine, rank: int, folder: str, sender: Any) -> None:
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
        errors = shard_errors(on, rank)
        if rank == 0:
            sender.send({"errors": errors})
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        sender.send(f"rank {rank}: {type(error).__name__}: {error}"[:1000])


def shard_errors(on: Machine, rank: int) -> Row:
    """Output and gradients of this rank's tokens against one call with all tokens, of the operation and a layer."""
    n, h, d = on.sizes((8192, 8, 64), (70, 2, 16))
    lengths = [n // 3, n - n // 3]
    mine = slice(0, lengths[0]) if rank == 0 else slice(lengths[0], n)
    torch.manual_seed(0)
    layer = LinearRoPEAttention.block(h * d, h, device=on.device)
    q, k, v, g = torch.randn(4, 1, n, h, d).to(on.device)
    x, g_x = torch.randn(2, 1, n, h * d).to(on.device)
    attend = partial(linear_rope_attention, rotary=Rotary(d), backend=on.backend)
    cases: dict[str, tuple[Any, list[torch.Tensor], torch.Tensor]] = {
        "operation": (attend, [q, k, v], g),
        "layer": (layer, [x], g_x),
    }
    errors: Row = {}
    for name, (call, inputs, g_out) in cases.items():
        results = []
        for part, shard in ((mine, Shard(lengths=lengths)), (slice(None), None)):
            leaves = [y[:, part].detach().requires_grad_() for y in inputs]
            out = call(*leaves, shard=shard)
            results.append([out, *torch.autograd.grad(out, leaves, g_out[:, part])])
        for i, (actual, expected) in enumerate(zip(*results, strict=True)):
            errors[f"{name}, {i}"] = whole(name, actual.detach(), expected[:, mine].detach(), 1e-4)
    return errors

"""Measures the host time and the launches of a call, and adds the times that the cycle model predicts."""

import json
import os
import subprocess
import sys
import time
from functools import partial
from typing import Any

import torch

from linrope import linear_rope_attention
from linrope.cli.bench.cases import AttentionCase

Row = dict[str, Any]
MODES = ("forward", "training")


def host_row(case: AttentionCase) -> Row:
    """The time to launch a call, averaged over many calls without waiting for the GPU, and its launches."""
    attend, row = partial(linear_rope_attention, *case.inputs, rotary=case.rotary, backend="triton"), Row()
    for mode in MODES:
        run = partial(getattr(case, mode), attend)
        run()
        calls = 100 if case.device == "cuda" else 1
        if case.device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        row[f"{mode} host us"] = 1e6 * (time.perf_counter() - start) / calls
        if case.device == "cuda":
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                run()
                torch.cuda.synchronize()
            row[f"{mode} launches"] = float(sum(x.count for x in profile.key_averages()))
    return row


def predicted(rows: list[Row], decay: bool) -> None:
    """Adds the model's times relative to the measured ones, to calibrate the model; Hopper only."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    for d in sorted({row["shape"][3] for row in rows}):
        chosen = [row for row in rows if row["shape"][3] == d and "training_ms" in row]
        shapes = [x for row in chosen for x in ("--shape", *map(str, row["shape"][:3]))]
        command = [
            sys.executable,
            "-m",
            "linrope_kernel_tools.report",
            "--calls",
            "--json",
            "--dim",
            str(d),
            *shapes,
        ]
        command += ["--decay"] if decay else []
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        for row, line in zip(chosen, done.stdout.splitlines()):
            prediction, forward = json.loads(line), row["forward_ms"]
            row["predicted_forward"] = 1e3 * prediction["forward"] / forward
            row["predicted_backward"] = 1e3 * prediction["backward"] / (row["training_ms"] - forward)

"""Measures the host time and the launches of a call."""

import time
from functools import partial
from typing import Any

import torch

from linrope import linear_rope_attention
from linrope.cli.bench.cases import AttentionCase

Row = dict[str, Any]
Shape = tuple[int, int, int, int]  # batch, length, heads, dim
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
            kernels = [x for x in profile.key_averages() if x.device_type == torch.autograd.DeviceType.CUDA]
            row[f"{mode} launches"] = float(sum(x.count for x in kernels))
    return row

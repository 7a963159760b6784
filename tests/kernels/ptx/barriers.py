"""Leaves out one barrier of a kernel after the other: does the emulator see it?

    python -m tests.kernels.ptx.barriers CAPABILITY [KERNEL ..]

Prints a line of JSON for each kernel of a call in bfloat16, forward and backward.
"""

import json
import sys

import torch

from linrope import Rotary, linear_rope_attention
from tests.kernels.ptx.grid import Report
from tests.kernels.ptx.launcher import install


def main(capability: str, *names: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    emulator = install(int(capability))
    q, k, v = (torch.randn(1, 130, 1, 64).bfloat16().requires_grad_() for _ in range(3))
    out = linear_rope_attention(q, k, v, rotary=Rotary(64), backend="triton")
    if set(names) != {"scan_fwd_kernel"}:
        out.float().sum().backward()
    for name in names or sorted(emulator.last):
        kernel, values, programs = emulator.last[name]
        unseen = []
        for barrier in kernel.barriers:
            report = Report()
            kernel.run(values, programs, report, frozenset([barrier]))
            if not report.findings:
                unseen.append(str(kernel.program.code[barrier]))
        line = {"kernel": name, "found": len(emulator.report.findings), "barriers": len(kernel.barriers)}
        print(json.dumps(line | {"unseen": unseen}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

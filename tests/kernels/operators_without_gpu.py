"""Compiles the kernels of the layer's operators for an absent GPU, from the arguments that calls pass.

    python tests/kernels/operators_without_gpu.py CAPABILITY [all]

Prints a line of JSON for each: registers, spilled bytes per thread, shared memory per program.
"""

import json
import sys

import torch
from linrope_kernel_tools import cycle_model
from linrope_kernel_tools.report import recorded

from linrope.ops import convolve, convolve_step, gated_norm, triton

BF16 = torch.bfloat16


def convolution(c: int = 1024, taps: int = 4, dtype: torch.dtype = BF16, packed: bool = False) -> None:
    """q, k or v as a slice of what one projection gives."""
    x = torch.zeros(1, 300, 2 * c, dtype=dtype)[..., :c].requires_grad_()
    weight, bias = torch.zeros(c, taps, requires_grad=True), torch.zeros(c)
    cu_seqlens = torch.tensor([0, 100, 300], dtype=torch.int32) if packed else None
    before = torch.zeros(2, taps - 1, c, dtype=dtype) if packed else None
    y = convolve(x, weight, bias, before=before, cu_seqlens=cu_seqlens, silu=True, backend="triton")
    y.backward(torch.zeros_like(y))
    pool = torch.zeros(4, taps - 1, c, dtype=dtype)
    with torch.no_grad():
        convolve_step(x[:, :1], weight, bias, pool, silu=True, slots=torch.tensor([3]), backend="triton")


def norm(
    h: int, g: int, e: int, over: str = "head", order: str = "after", dtype: torch.dtype = BF16, n: int = 3000
) -> None:
    out = torch.zeros(1, n, h, e, dtype=dtype, requires_grad=True)
    weight = torch.zeros(h * e if over == "all" else e, requires_grad=True)
    orders = {"gate_order": order, "skip_order": order, "over": over, "backend": "triton"}
    v, skip = torch.zeros(1, n, g, e, dtype=dtype), torch.zeros(h)
    y = gated_norm(out, weight, gate=torch.zeros(1, n, h * e, dtype=dtype), v=v, skip=skip, **orders)
    y.backward(torch.zeros_like(y))


def usual() -> None:
    convolution(packed=True)
    norm(32, 32, 128, "all", "before")


def others() -> None:
    convolution()
    norm(16, 16, 64)
    norm(64, 64, 256, "all", "before")
    convolution(1000, 8, packed=True)
    convolution(dtype=torch.float32, packed=True)
    convolution(20, 3, torch.float16)
    norm(16, 4, 256)
    norm(5, 5, 20, "all")
    norm(6, 2, 96, dtype=torch.float16)
    norm(32, 32, 128, "all", "before", torch.float32)
    norm(64, 64, 256, "all", dtype=torch.float32)


def main(capability: str, forms: str = "usual") -> None:
    triton.why_not_tensors = lambda *_, **__: None
    with recorded(int(capability)) as launches:
        usual()
        if forms == "all":
            others()
    for x in {x.compiled.hash: x for x in launches}.values():
        code = cycle_model.machine_code(x.compiled.asm["cubin"])
        line = {
            "kernel": x.kernel.__name__,
            "registers": code.registers,
            "spills": sum(i.bytes for i in code.instructions if i.unit == "local"),
            "shared": x.compiled.metadata.shared,
        }
        print(json.dumps(line))


if __name__ == "__main__":  # it replaces parts of Triton and of linrope
    main(*sys.argv[1:])

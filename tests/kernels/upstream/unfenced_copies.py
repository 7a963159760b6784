"""Triton 3.6: in a loop Hopper's matrix unit reads a tile that cp.async wrote, with no fence.proxy.async in between.

    python unfenced_copies.py

compiles the kernel for compute capability 9.0, without a GPU, and prints how often its machine code has cp.async,
fence.proxy.async and wgmma, before the loop and from its start on. This file needs Triton only.

cp.async writes shared memory through the generic proxy and wgmma reads it through the asynchronous one. PTX requires
a fence between them. Triton 3.6 has the one fence before the loop, for the operand that was stored there. The tiles
that are copied in the loop are read without one.
"""

import re

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SIZE = 64


@triton.jit
def pipelined_product(X, Y, OUT, n, SIZE: tl.constexpr):
    """OUT = X Y, SIZE rows of X at a time; X (n, SIZE), Y (SIZE, SIZE)."""
    rows, columns = tl.arange(0, SIZE), tl.arange(0, SIZE)
    at = rows[:, None] * SIZE + columns[None, :]
    y = tl.load(Y + at)
    for first in tl.range(0, n, SIZE, num_stages=3):
        inside = (first + rows < n)[:, None]
        x = tl.load(X + first * SIZE + at, mask=inside, other=0)
        tl.store(OUT + first * SIZE + at, tl.dot(x, y), mask=inside)


def compiled():
    signature = {"X": "*bf16", "Y": "*bf16", "OUT": "*fp32", "n": "i32", "SIZE": "constexpr"}
    attributes = {(i,): [["tt.divisibility", 16]] for i in range(4)}
    source = ASTSource(pipelined_product, signature, {"SIZE": SIZE}, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32))


def counts(ptx: str) -> dict[str, tuple[int, int]]:
    """How often each instruction stands before the loop, and from its start on."""
    jump = re.search(r"^(\$\w+):(?=.*bra[.\w]*\s+\1;)", ptx, re.M | re.S)
    assert jump is not None, "no loop"
    return {
        name: (ptx[: jump.start()].count(name), ptx[jump.start() :].count(name))
        for name in ("cp.async.cg", "fence.proxy.async", "wgmma.mma_async")
    }


if __name__ == "__main__":
    print(f"Triton {triton.__version__}")
    for name, (before, inside) in counts(compiled().asm["ptx"]).items():
        print(f"{name:<18} {before} before the loop, {inside} from its start on")

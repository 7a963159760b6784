"""Triton 3.9: the interpreter refuses a mask that was made from a comparison of scalars and a tile.

    python scalar_masks.py

runs the kernel in the interpreter, without a GPU. This file needs PyTorch and Triton only.

The interpreter's comparisons return booleans in a handle whose type is still that of what was compared. For a scalar
next to a tile, create_splat makes a tile of that type, here int32, and "and" with booleans leaves int32. Triton up to
3.7 takes such a mask; 3.9's loads and stores raise "mask has unsupported dtype". Compiled kernels are not affected.
"""

import os

if __name__ == "__main__":  # before Triton is imported
    os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl


@triton.jit
def fill(OUT, n, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(OUT + at, 1.0, mask=(at < 3) & (n > 0))


if __name__ == "__main__":
    print(f"Triton {triton.__version__}")
    out = torch.zeros(8)
    try:
        fill[(1,)](out, 1, 8)
        print(f"{out.sum().item():.0f} numbers written, expected 3")
    except Exception as error:
        print(error)

"""Triton 3.6 to 3.8: a product over 16 rows of a masked tile takes half of the rows twice and the others never.

    python masked_rows.py

compiles the kernel for compute capability 8.0, without a GPU, and prints the layout of the product's masked
operand; on a GPU it also prints the result. This file needs PyTorch and Triton only.

The 16-bit tile is loaded, masked by an 8-bit mask, split into pairs and joined again. Triton derives the number of
rows that each thread holds (kWidth) from the narrowest load behind the operand, which is the mask's. Four threads
that hold 8 rows each hold 32, where the product has 16.
"""

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ROWS, COLUMNS = 16, 32


@triton.jit
def masked_product(X, MASK, Y, OUT, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """OUT = Y^T X, with the rows of X that MASK hides replaced by 0."""
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    at = rows[:, None] * COLUMNS + columns[None, :]
    x = tl.where((tl.load(MASK + rows) != 0)[:, None], tl.load(X + at), 0.0)
    even, odd = tl.split(tl.reshape(x, [ROWS, COLUMNS // 2, 2]))
    x = tl.reshape(tl.join(-odd, even), [ROWS, COLUMNS])
    out = tl.dot(tl.trans(tl.load(Y + at)), x)
    tl.store(OUT + columns[:, None] * COLUMNS + columns[None, :], out)


def compiled(capability: int = 80):
    signature = {"X": "*bf16", "MASK": "*i1", "Y": "*bf16", "OUT": "*fp32"}
    sizes = {"ROWS": ROWS, "COLUMNS": COLUMNS}
    # As in a launch: Triton specializes on pointers that are multiples of 16
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(signature))}
    source = ASTSource(masked_product, signature | dict.fromkeys(sizes, "constexpr"), sizes, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32))


def operands(ttgir: str) -> list[str]:
    """The layouts of the product's two operands."""
    (line,) = (line for line in ttgir.splitlines() if "tt.dot " in line)
    return [part.split(">>")[0] + ">>" for part in line.split("tensor<")[1:3]]


def inputs(device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """Row i of X is 2^i, so that OUT / 2^i shows which rows were added."""
    x = torch.full((ROWS, COLUMNS), 1.0, dtype=torch.bfloat16) * 2.0 ** torch.arange(ROWS)[:, None]
    mask = torch.ones(ROWS, dtype=torch.bool)
    y = torch.ones(ROWS, COLUMNS, dtype=torch.bfloat16)
    return tuple(a.to(device) for a in (x.bfloat16(), mask, y, torch.zeros(COLUMNS, COLUMNS)))


if __name__ == "__main__":
    print(f"Triton {triton.__version__}")
    for layout in operands(compiled().asm["ttgir"]):
        print(layout)
    if torch.cuda.is_available():
        x, mask, y, out = inputs("cuda")
        masked_product[(1,)](x, mask, y, out, ROWS, COLUMNS)
        print(f"out[0, 1] = {out[0, 1].item():.0f}, expected {x.float().sum(0)[0].item():.0f}")

"""Prints how exactly the delta rule's triangular system is solved with operands rounded for a GPU's matrix unit.

A chunk of 64 tokens solves (I + L) U = R, where L_ij = b <k_i, k_j> for j < i. linrope inverts blocks of 16 tokens row
by row in float32, completes the rows of M = (I + L)^-1 block by block with matrix products, and multiplies, U = M R.
Here a CPU rounds the operands of these products and adds up in float32. A matrix unit adds up a little less exactly.

An error is the largest |U - exact| over the largest |exact| of a system; the table has that of the worst system. Keys
are of unit length, then rounded to bfloat16, with the cosine "cos" between them on average; L and R are the same in all
rows. R is w V, as without an earlier state: V Gaussian in bfloat16, w in (0, 1).

    python benchmarks/triangular_system.py
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

SYSTEMS, C, D = 64, 64, 64  # systems of each case; tokens of a chunk; features and values
BLOCK = 16  # tokens that are inverted row by row
CASES = {"cos 0, b 1": (0.0, 1.0), "cos .9, b 1": (0.9, 1.0), "cos .9999, b 2": (0.9999, 2.0)}
ROWS = {  # the operands of the products that make the inverse M, and of U = M R
    ("float32", "float32"): "",
    ("tf32 x 3", "float32"): "",
    ("tf32 x 3", "tf32"): "linrope in bfloat16 and float16 calls",
    ("tf32", "tf32"): "",
    ("tf32", "bfloat16"): "M and R are stored in bfloat16, as in flash-linear-attention",
    ("bfloat16", "bfloat16"): "",
    ("Neumann", "float32"): "M = (I - L)(I + L^2)(I + L^4) ..",
}
Product = Callable[[Tensor, Tensor], Tensor]


def tf32(x: Tensor) -> Tensor:
    """x rounded to 10 explicit bits of the mantissa, in float32."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def three_times(x: Tensor, y: Tensor) -> Tensor:
    """x y with operands of two parts each, without the product of the small parts."""
    large_x, large_y = tf32(x), tf32(y)
    return large_x @ tf32(y - large_y) + tf32(x - large_x) @ large_y + large_x @ large_y


PRODUCTS: dict[str, Product] = {
    "float32": torch.matmul,
    "tf32 x 3": three_times,
    "tf32": lambda x, y: tf32(x) @ tf32(y),
    "bfloat16": lambda x, y: x.bfloat16().float() @ y.bfloat16().float(),
}


def inverse_of(L: Tensor, product: Product) -> Tensor:
    """(I + L)^-1 of each system, as ``inverse_of`` in linrope_kernels/chunk_scores.py finds it."""
    x = torch.eye(C).repeat(len(L), 1, 1)
    for start in range(0, C, BLOCK):
        block = slice(start, start + BLOCK)
        for row in range(start + 1, start + BLOCK):
            x[:, row, block] -= (L[:, row, block, None] * x[:, block, block]).sum(1)
        right = torch.eye(C)[block] - product(L[:, block, :start], x[:, :start])
        x[:, block] = product(x[:, block, block], right)
    return x


def neumann(L: Tensor) -> Tensor:
    """(I + L)^-1 = (I - L) (I + L^2) (I + L^4) .. in float32."""
    x, power, exponent = torch.eye(C) - L, L @ L, 2
    while exponent < C:
        x, power, exponent = x + x @ power, power @ power, 2 * exponent
    return x


def system(cos: float, b: float) -> tuple[Tensor, Tensor]:
    """L and R in float32."""
    common, own = (F.normalize(torch.randn(SYSTEMS, n, D, dtype=torch.float64), dim=-1) for n in (1, C))
    k = F.normalize(cos**0.5 * common + (1 - cos) ** 0.5 * own, dim=-1).bfloat16().double()
    values = torch.rand(SYSTEMS, C, 1) * torch.randn(SYSTEMS, C, D).bfloat16().float()
    return (b * k @ k.mT).tril(-1).float(), values


def error(U: Tensor, L: Tensor, R: Tensor) -> str:
    """How far U is from the solution in float64."""
    matrix = L.double() + torch.eye(C, dtype=torch.float64)
    exact = torch.linalg.solve_triangular(matrix, R.double(), upper=False, unitriangular=True)
    worst = (U.double() - exact).abs().amax((1, 2)) / exact.abs().amax((1, 2))
    return f"{worst.max():.0e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cases = {name: system(*case) for name, case in CASES.items()}
    print("| inverse | U = M R |", *(f"{name} |" for name in cases), "|")
    print("|---|---|" + "---|" * len(cases) + "---|")
    for (blocks, solve), note in ROWS.items():
        errors = []
        for L, R in cases.values():
            inverse = neumann(L) if blocks == "Neumann" else inverse_of(L, PRODUCTS[blocks])
            errors.append(error(PRODUCTS[solve](inverse, R), L, R))
        print(f"| {blocks} | {solve} |", " | ".join([*errors, note]), "|")


if __name__ == "__main__":
    main()

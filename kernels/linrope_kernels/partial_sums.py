"""Sums over many tokens: each program writes its own sum, and these are added up in a fixed order, without atomics."""

import triton
import triton.language as tl
from torch import Tensor

from linrope_kernels.start import start_kernel

ROWS, COLUMNS = 256, 16  # the tile that one iteration adds: a thousand rows take four iterations


@triton.jit
def _sum_rows(X, SUM, rows, columns, block, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """One block of the columns of X (rows, columns), summed over the rows in float64."""
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float64)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        x = tl.load(X + row.to(tl.int64)[:, None] * columns + column[None, :], mask=inside, other=0)
        total += x.to(tl.float64)
    sums = tl.sum(total, 0).to(tl.float32)  # the interpreter rounds float64 to bfloat16 wrongly
    tl.store(SUM + column, sums.to(SUM.dtype.element_ty), mask=column < columns)


@triton.jit(do_not_specialize=["a_rows", "b_rows"])
def sum_rows_kernel(
    A, A_SUM, a_rows, a_columns,  # (rows, columns) float32 contiguous, (columns,); None: absent
    B, B_SUM, b_rows, b_columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The sums of two tables over their rows, in one launch."""
    block, blocks = tl.program_id(0), 0
    if A is not None:
        blocks = tl.cdiv(a_columns, COLUMNS)
        if block < blocks:
            _sum_rows(A, A_SUM, a_rows, a_columns, block, ROWS, COLUMNS)
    if B is not None:  # noqa: SIM102 (constant, unlike the next condition)
        if block >= blocks:
            _sum_rows(B, B_SUM, b_rows, b_columns, block - blocks, ROWS, COLUMNS)


def sum_rows(a: Tensor | None, a_sum: Tensor | None, b: Tensor | None, b_sum: Tensor | None) -> None:
    """Writes the sums of a and b (rows, columns) over their rows, each with its own size, in the dtype of the sum."""
    sizes = [(0, 0) if x is None else x.shape for x in (a, b)]
    blocks = sum(-(-columns // COLUMNS) for _, columns in sizes)
    start_kernel(
        sum_rows_kernel, blocks, a, a_sum, *sizes[0], b, b_sum, *sizes[1], ROWS=ROWS, COLUMNS=COLUMNS, num_warps=8
    )  # fmt: skip

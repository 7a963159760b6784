"""Products of several tensors in the order that costs least."""

import opt_einsum
import torch
from torch import Tensor


def contract(equation: str, *operands: Tensor) -> Tensor:
    """einsum in the order that opt_einsum finds cheapest for these sizes.

    A traced graph serves many sizes, so there the order is from left to right.

    >>> from linrope.backends.contraction import contract
    >>> x = torch.ones(2, 3)
    >>> contract("nf,mf,me->ne", x, x, x).tolist()
    [[6.0, 6.0, 6.0], [6.0, 6.0, 6.0]]
    """
    if not torch.compiler.is_compiling():
        return opt_einsum.contract(equation, *operands)  # type: ignore[no-any-return]
    terms, output = equation.split("->")
    axes, *rest = terms.split(",")
    x = operands[0]
    for i, (term, operand) in enumerate(zip(rest, operands[1:], strict=True)):
        needed = set("".join(rest[i + 1 :]) + output)
        kept = "".join(axis for axis in dict.fromkeys(axes + term) if axis in needed)
        x, axes = torch.einsum(f"{axes},{term}->{kept}", x, operand), kept
    return torch.einsum(f"{axes}->{output}", x)

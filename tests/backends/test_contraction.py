"""The order of products: opt_einsum's for the sizes at hand."""

import opt_einsum
import pytest
import torch
from torch.testing import assert_close

from linrope import linear_rope_attention
from linrope.backends.contraction import contract
from tests.support.oracle import randoms

NUMERATOR = "bgrnf,bgmf,bgme->bgrne"


@pytest.mark.parametrize(
    ("n", "m", "d", "first"),
    [(2, 64, 16, (0, 1)), (16, 16, 64, (0, 1)), (256, 256, 8, (1, 2))],
    ids=["few queries", "many features", "both long"],
)
def test_a_bidirectional_call_multiplies_in_the_cheapest_order(n, m, d, first, monkeypatch) -> None:
    """phi (psi^T v) makes the state first, (phi psi^T) v the scores."""
    orders, multiply = {}, opt_einsum.contract

    def recorded(equation, *operands):
        orders[equation] = opt_einsum.contract_path(equation, *operands)[0][0]
        return multiply(equation, *operands)

    monkeypatch.setattr(opt_einsum, "contract", recorded)
    linear_rope_attention(*randoms(1, n, 1, d, m=m), causal=False, backend="reference")
    assert orders[NUMERATOR] == first


def test_an_exported_contraction_keeps_its_sizes_symbolic() -> None:
    """Export refuses sizes that become constants on the way."""
    equation = "bnf,bmf,bme->bne"

    class Contraction(torch.nn.Module):
        def forward(self, phi: torch.Tensor, psi: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return contract(equation, phi, psi, v)

    def tensors(n: int, m: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(2, n, 3), torch.randn(2, m, 3), torch.randn(2, m, 4)

    n, m = torch.export.Dim("n"), torch.export.Dim("m")
    program = torch.export.export(Contraction(), tensors(7, 5), dynamic_shapes=({1: n}, {1: m}, {1: m}))
    others = tensors(4, 9)
    assert_close(program.module()(*others), contract(equation, *others))

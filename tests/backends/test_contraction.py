"""The order of products: opt_einsum's for the sizes at hand."""

import opt_einsum
import pytest
import torch
from torch.testing import assert_close

from linrope import linear_rope_attention
from linrope.backends import reference
from linrope.backends.contraction import contract
from tests.oracle import randoms

NUMERATOR = "bgrnf,bgmf,bgme->bgrne"


@pytest.mark.parametrize(
    ("n", "m", "d", "state_first"),
    [(2, 64, 16, False), (16, 16, 64, False), (256, 256, 8, True)],
    ids=["few queries", "many features", "both long"],
)
def test_a_bidirectional_call_multiplies_in_the_cheapest_order(
    n: int, m: int, d: int, state_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """phi (psi^T v) makes the state first, (phi psi^T) v the scores."""

    orders = []

    def recorded(equation, *operands):
        path, _ = opt_einsum.contract_path(equation, *operands)
        orders.append((equation, path[0]))
        return contract(equation, *operands)

    monkeypatch.setattr(reference, "contract", recorded)
    q, k, v = randoms(1, n, 1, d, m=m)
    out = linear_rope_attention(q, k, v, causal=False, backend="reference")
    first = dict(orders)[NUMERATOR]
    assert first == ((1, 2) if state_first else (0, 1))
    monkeypatch.undo()
    assert_close(out, linear_rope_attention(q, k, v, causal=False, backend="eager"))


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


@pytest.mark.parametrize("backend", ["reference", "eager"])
def test_a_bidirectional_call_without_keys_gives_zeros(backend: str) -> None:
    q, k, v = randoms(1, 3, 2, 4, m=0)
    out = linear_rope_attention(q, k, v, causal=False, backend=backend)
    assert torch.equal(out, torch.zeros_like(q))

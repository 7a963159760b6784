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


def test_a_traced_contraction_has_the_same_value_and_any_sizes() -> None:
    phi, psi, v = torch.randn(2, 7, 3), torch.randn(2, 5, 3), torch.randn(2, 5, 4)
    equation = "bnf,bmf,bme->bne"
    compiled = torch.compile(lambda *operands: contract(equation, *operands), backend="eager", fullgraph=True)
    assert_close(compiled(phi, psi, v), contract(equation, phi, psi, v))


@pytest.mark.parametrize("backend", ["reference", "eager"])
def test_a_bidirectional_call_without_keys_gives_zeros(backend: str) -> None:
    q, k, v = randoms(1, 3, 2, 4, m=0)
    out = linear_rope_attention(q, k, v, causal=False, backend=backend)
    assert torch.equal(out, torch.zeros_like(q))

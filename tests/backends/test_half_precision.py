"""Long sequences and wide heads in bfloat16 and float16: sums are float32; only results are rounded to 16 bits."""

from itertools import product
from typing import Any

import pytest
import torch

from linrope import Rotary, linear_rope_attention
from tests.support.contract import TABLE, Contract, check
from tests.support.oracle import random_state, randoms

N, D = 2048, 64
# Log decays of a token: none, as Mamba-2 starts, and gates that end a chunk of the native kernels early.
GATES = {"no gates": 0.0, "weak gates": 1e-2, "strong gates": 5.0}
HALF = [x for x in TABLE if x.backend == "native" and x.rounding > 0]
in_half_precision = pytest.mark.parametrize(
    "contract", [pytest.param(x, id=x.name, marks=x.marks) for x in HALF]
)


# Each strength of gates with each scale, in one dtype or in the other
@pytest.mark.parametrize(
    ("name", "scale", "contract"),
    [
        pytest.param(*case, HALF[i % 2], id=f"{HALF[i % 2].name}-{case}", marks=HALF[i % 2].marks)
        for i, case in enumerate(product(GATES, (0.3, 1.0, 6.0)))
    ],
)
def test_long_sequences_are_within_the_contract(name: str, scale: float, contract: Contract) -> None:
    """The size of the terms is linear attention with absolute values: no rotation, no normalizer."""
    q, k, v = randoms(1, N, 2, D, dtype=contract.dtype, scale=scale)
    log_decay = -GATES[name] * torch.rand(1, N, 2, generator=torch.Generator().manual_seed(1))
    wide, exact = (q.double(), k.double(), v.double()), {"log_decay": log_decay.double(), "backend": "eager"}
    rotary, plain = Rotary(D), {"feature_map": None, "normalize": False}
    phi, psi = (torch.where(x > 0, x + 1, x.exp()) for x in wide[:2])
    phi_hat, psi_hat = (rotary(x, torch.arange(N)).abs() for x in (phi, psi))
    den = linear_rope_attention(phi, psi, torch.ones_like(v).double(), **plain, **exact)
    size = linear_rope_attention(phi_hat, psi_hat, wide[2].abs(), **plain, **exact) / den
    oracle = linear_rope_attention(*wide, rotary=rotary, **exact)
    out = linear_rope_attention(q, k, v, rotary=rotary, log_decay=log_decay, backend="native")
    allowed = contract.in_use().allowed("out", oracle, size)
    assert bool(((out.double() - oracle).abs() <= allowed).all())


# Heads of q, of k and v; tokens; features and values. The last chunks have 1, 2, 5, 6 and 32 tokens; the widths have
# padding or none, and rows of one or several panels.
WIDE: dict[str, tuple[int, int, int, int, int]] = {
    "more than a block": (1, 1, 261, 32, 64),
    "grouped": (4, 2, 70, 96, 128),
    "padded": (2, 2, 65, 40, 36),
    "even chunks": (1, 1, 64, 128, 32),
    "widest": (1, 1, 34, 256, 256),
}
DECAYS = ("no decay", "decay per head", "decay per unit")
# Each width with each decay, in one dtype with erase and in the other without
OF_WIDE_HEADS = [
    pytest.param(*case, (i + j) % 2 == 1, contract, id="-".join((contract.name, *case)), marks=contract.marks)
    for i, case in enumerate(product(WIDE, DECAYS))
    for j, contract in enumerate(HALF)
]


@pytest.mark.parametrize(("name", "decay", "erases", "contract"), OF_WIDE_HEADS)
def test_wide_heads_are_within_the_contract(name: str, decay: str, erases: bool, contract: Contract) -> None:
    h, g, n, f, e = WIDE[name]
    q, k, v = randoms(1, n, h, f, g=g, e=e, scale=0.5)
    generator = torch.Generator().manual_seed(1)
    how: dict[str, Any] = {"rotary": Rotary(f)}
    if decay != "no decay":
        units = (f // 2,) if decay == "decay per unit" else ()
        how["log_decay"] = -0.3 * torch.rand(1, n, g, *units, generator=generator, dtype=torch.float64)
    if erases:
        how |= {"normalize": False, "feature_map": None}
        how["erase"] = torch.rand(1, n, g, generator=generator, dtype=torch.float64) / f
    check(contract, q, k, v, random_state(k, v, how), **how)


@in_half_precision
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_a_loss_on_the_last_state_alone_ignores_what_an_earlier_call_left_in_memory(
    causal: bool, contract: Contract
) -> None:
    _, k, v = randoms(1, 70, 1, 64, dtype=contract.dtype)

    def gradients(k: torch.Tensor, v: torch.Tensor, backend: str, **how: Any) -> tuple[torch.Tensor, ...]:
        k, v = (x.clone().requires_grad_() for x in (k, v))
        out, state = linear_rope_attention(
            k, k, v, rotary=Rotary(64), return_state=True, backend=backend, **how
        )
        loss = state.kv.square().sum() / 100
        return torch.autograd.grad(loss + out.sum() if k.isnan().any() else loss, (k, v))

    expected = gradients(k.double(), v.double(), "eager", causal=causal)
    gradients(k * torch.nan, v, "native", causal=True)
    for actual, exact in zip(gradients(k, v, "native", causal=causal), expected, strict=True):
        allowed = contract.in_use().allowed("gradients", exact, exact)
        assert bool(((actual.double() - exact).abs() <= allowed).all())

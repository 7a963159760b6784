"""Exact cases: integers turned by quarters, and decays near the ends of float32's range."""

import math

import pytest
import torch
from torch import Tensor

from linrope import Rotary, linear_rope_attention, state_from_sums
from tests.support.oracle import BACKENDS, NATIVE, both_directions, every_kernel

PLAIN = {"feature_map": None, "normalize": False, "return_state": True}


def quarter_turns(x: Tensor, turns: Tensor, layout: str) -> Tensor:
    """x (n, f) of integers, turned turns (n,) times by 90 degrees."""
    cos, sin = (torch.tensor(table)[turns % 4][:, None] for table in ([1, 0, -1, 0], [0, 1, 0, -1]))
    x1, x2 = (x[:, 0::2], x[:, 1::2]) if layout == "interleaved" else x.chunk(2, -1)
    pairs = x1 * cos - x2 * sin, x1 * sin + x2 * cos
    return torch.stack(pairs, -1).flatten(1) if layout == "interleaved" else torch.cat(pairs, -1)


@pytest.mark.parametrize("start", [0, 4001])
@pytest.mark.parametrize("layout", ["interleaved", "half"])
@both_directions
@every_kernel
def test_integers_turned_by_quarters_are_exact(backend: str, causal: bool, layout: str, start: int) -> None:
    n, f = 150, 4
    generator = torch.Generator().manual_seed(0)
    # No zeros: cos(pi/2) is 6e-17, and vanishes only when it is added to something.
    sizes, signs = (torch.randint(low, 4, (3, n, f), generator=generator) for low in (1, 0))
    q, k, v = (sizes * (2 * (signs % 2) - 1)).double()  # exact, and GPUs do not multiply matrices of integers
    positions = start + torch.arange(n)
    scores = quarter_turns(q, positions, layout) @ quarter_turns(k, positions, layout).T
    expected = (scores.tril() if causal else scores) @ v
    out = linear_rope_attention(
        *(x.float()[None, :, None] for x in (q, k, v)), feature_map=None, normalize=False, causal=causal,
        rotary=Rotary(f, layout=layout, theta=torch.full((f // 2,), math.pi / 2, dtype=torch.float64)),
        positions=positions, backend=backend,
    )  # fmt: skip
    assert torch.equal(out[0, :, 0], expected.float())


@pytest.mark.parametrize("backend", [*BACKENDS, NATIVE])
def test_a_sum_keeps_its_digits_where_the_decay_of_its_chunk_alone_is_denormal(backend: str) -> None:
    """e^-99 from the chunk's first key, of which the second key has been spared e^-32."""
    q = k = torch.ones(1, 3, 1, 2)
    v = torch.tensor([1.0, 1.0, 0.0]).view(1, 3, 1, 1)
    log_decay = torch.tensor([0.0, -32.5, -66.3]).view(1, 3, 1)
    out, state = linear_rope_attention(q, k, v, log_decay=log_decay, backend=backend, **PLAIN)
    expected = math.exp(log_decay[0, 2, 0].item())
    assert math.isclose(out[0, 2, 0, 0].item(), 2 * expected, rel_tol=1e-6)
    assert math.isclose(state.kv[0, 0, 0, 0].item(), expected, rel_tol=1e-6)


@pytest.mark.parametrize("log_decay", [-70.0, -95.0, -1e3])
@pytest.mark.parametrize("features", [4, 16])
@pytest.mark.parametrize("backend", [*BACKENDS, NATIVE])
def test_a_step_decays_every_number_of_the_state_alike(backend: str, features: int, log_decay: float) -> None:
    """Twenty values are one vector and a rest, and sixteen features are a vector of a state stored as kv.mT."""
    q, k, v = torch.ones(1, 1, 1, features), torch.zeros(1, 1, 1, features), torch.zeros(1, 1, 1, 20)
    gate = torch.full((1, 1, 1), log_decay)
    expected = torch.full((features, 20), log_decay, dtype=torch.float64).exp().float()
    for kv in (torch.ones(1, 1, features, 20), torch.ones(1, 1, 20, features).mT):
        state = state_from_sums(kv, feature_map=None)
        _, last = linear_rope_attention(q, k, v, state=state, log_decay=gate, backend=backend, **PLAIN)
        # native's numbers below the smallest normal one are 0
        atol = torch.finfo(torch.float32).smallest_normal if backend == "native" else 1e-44
        torch.testing.assert_close(last.kv[0, 0], expected, rtol=1e-6, atol=atol)
        assert last.kv.unique().numel() == 1

"""Every backend gives what the equation gives: output, last state and the gradients of all inputs."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from linrope import Rotary, linear_rope_attention
from linrope.backends import eager
from linrope.recurrence.chunks import CHUNK
from tests.support.contract import Contract, check, every_contract
from tests.support.oracle import (
    MAPS,
    computes,
    num_features,
    random_mask,
    random_state,
    randoms,
    use_map,
)

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # NumPy's
DIRECTIONS = {"causal": True, "bidirectional": False}


# favor+ rounds its exponents to half precision before a backend sees the features.
@every_contract(
    name=MAPS, causal=DIRECTIONS, interpreted=(),  # test_every_two_options has each of them once
    skip=lambda x, name, _: (x.rounding > 0 and name == "favor+") or not computes(x.backend, name),
)  # fmt: skip
def test_every_map(contract: Contract, name: str, causal: bool) -> None:
    q, k, v = randoms(2, CHUNK + 6, 2, 6, g=1, e=5)
    how = use_map(name, 6)
    how["rotary"] = Rotary(num_features(how, 6))
    check(contract, q, k, v, random_state(k, v, how), causal=causal, **how)


LENGTHS = (0, 1, 2, 31, 33, CHUNK - 1, CHUNK, CHUNK + 1, 200, 8 * CHUNK, 8 * CHUNK + 1)


@every_contract(
    n=LENGTHS, causal=DIRECTIONS, skip=lambda contract, n, causal: contract.backend == "triton" and n > 200,
    interpreted=[(0, "causal"), (1, "bidirectional"), (64, "bidirectional"), (65, "causal")],
)  # fmt: skip
def test_every_length(contract: Contract, n: int, causal: bool) -> None:
    q, k, v = randoms(1, n, 2, 4, g=1, e=3)
    how: dict[str, Any] = {"rotary": Rotary(4)}
    check(contract, q, k, v, random_state(k, v, how), causal=causal, **how)


SIZES = {  # of a head, of its values, and how many features turn
    "1, 1": (1, 1, 0), "2, 1": (2, 1, 2), "7, 3": (7, 3, 0), "5, 3": (5, 3, 0), "16, 17": (16, 17, 10),
    "8, 16": (8, 16, 8), "6, 96": (6, 96, 6), "18, 8": (18, 8, 16), "40, 33": (40, 33, 18), "32, 40": (32, 40, 32),
    "40, 128": (40, 128, 40), "96, 16": (96, 16, 96), "128, 40": (128, 40, 128), "64, 64": (64, 64, 64),
    "256, 256": (256, 256, 256), "192, 192": (192, 192, 192), "256, 200": (256, 200, 256),
}  # fmt: skip
CAUSAL = ("2, 1", *[*SIZES][2::2])  # the others see all keys


@every_contract(size=SIZES, interpreted=["2, 1", "5, 3", "6, 96", "96, 16", "40, 128", "256, 256"])
def test_every_size_of_heads(contract: Contract, size: tuple[int, int, int]) -> None:
    d, e, turning = size
    large = d > 128
    q, k, v = randoms(1, 40 if large else CHUNK + 6, 1 if large else 2, d, g=1, e=e)
    rotary = Rotary(d, layout="half" if large else "interleaved", rotary_dim=turning) if turning else None
    # With one feature and the normalizer dq is 0, and all of it rounding.
    how: dict[str, Any] = {"rotary": rotary, "normalize": d > 1, "causal": f"{d}, {e}" in CAUSAL}
    check(contract, q, k, v, random_state(k, v, how), every_set=True, **how)


@every_contract()
def test_with_one_key_the_output_is_its_value_whatever_the_query_is(contract: Contract) -> None:
    q, k, v = (x.to(contract.dtype) for x in randoms(2, 1, 2, 6, g=1, e=5))
    unit = 8 * torch.finfo(contract.dtype).eps
    for backend in contract.backends:
        out = linear_rope_attention(q.requires_grad_(), k, v, rotary=Rotary(6), backend=backend)
        torch.testing.assert_close(out, v.repeat_interleave(2, 2), rtol=unit, atol=0)
        assert float(torch.autograd.grad(out.sum(), q)[0].abs().max()) <= unit * float(v.abs().max())


def gates(b: int, n: int, g: int, strength: str) -> torch.Tensor:
    """Strong ones let nothing pass at some tokens, beside others that hardly fade."""
    log = -torch.rand(b, n, g, generator=torch.Generator().manual_seed(3), dtype=torch.float64).square()
    log = log * {"weak": 0.2, "strong": 4.0}[strength]
    if strength == "strong":
        log[:, 3::17], log[:, 7::23], log[:, 11::29], log[:, 12::29] = -20, 0, -1e4, -1e-3
    return log


def over_segments(b: int, n: int) -> dict[str, dict[str, Any]]:
    """Options of calls whose tokens lie in several chunks or segments."""
    generator = torch.Generator().manual_seed(4)
    ends = [0, 2 * n // 3, 2 * n // 3, 2 * n // 3 + 1, n]  # one of several segments, an empty one, ..
    packed = {"cu_seqlens": torch.tensor(ends)}
    steps = {"angle_steps": 2 * torch.randn(b, n, 1, 8, generator=generator, dtype=torch.float64)}
    mask = {"key_mask": torch.rand(b, n, generator=generator) > 0.3}
    decay = {"decay": torch.tensor([0.97])}
    decay["positions"] = 20 + torch.randint(0, 4, (b, n), generator=generator).cumsum(1)
    weak, strong = ({"log_decay": gates(b, n, 1, strength)} for strength in ("weak", "strong"))
    cases = {
        "masked": mask,
        "bidirectional, masked": mask | {"causal": False},
        "decay with gaps, eps where normalizers are": mask | decay | {"eps": 600.0},
        "decay with gaps, packed": mask | decay | packed,
        "weak gates, eps added": mask | weak | {"eps": 0.5, "eps_mode": "add"},
        "strong gates, steps": steps | strong,
        "strong gates, steps, packed": steps | strong | packed,
        "bidirectional, packed": {"causal": False} | packed,
    }
    return {name: {"rotary": Rotary(16)} | how for name, how in cases.items()}


SEGMENTED = tuple(over_segments(1, 1))
OF_LONG_CALLS = ("bidirectional, masked", "strong gates, steps")


@every_contract(
    "native", "triton", name=SEGMENTED,
    interpreted=[
        "bidirectional, packed", "decay with gaps, eps where normalizers are", "strong gates, steps, packed",
    ],
    skip=lambda contract, name: contract.rounding > 0 or (contract.name == "native" and name not in OF_LONG_CALLS),
)  # fmt: skip
@pytest.mark.usefixtures("short_segments")
def test_long_sequences_of_few_heads_are_cut_into_segments(contract: Contract, name: str) -> None:
    n = 190 if contract.backend == "triton" else 2100
    q, k, v = randoms(1, n, 1, 16, e=8)
    how = over_segments(1, n)[name]
    check(contract, q, k, v, random_state(k, v, how), **how)


# Half precision has as many chunks in test_every_two_options.
@every_contract("float64", "native", name=SEGMENTED, skip=lambda contract, _: contract.rounding > 0)
def test_over_many_chunks(contract: Contract, name: str) -> None:
    n = 3 * CHUNK + 5
    q, k, v = randoms(1 if "packed" in name else 2, n, 4, 16, g=1, e=3)
    how = over_segments(len(q), n)[name]
    state = random_state(k, v, how)
    if contract.name == "float64" and "strong" in name:
        # The reference takes differences of sums that are as large as 1e5.
        check(replace(contract, name="reference", out=1e-10, gradients=1e-10), q, k, v, state, **how)
        contract = replace(contract, name="eager")
    check(contract, q, k, v, state, **how)


@pytest.mark.usefixtures("short_segments")
@every_contract("triton", causal=DIRECTIONS)
def test_segments_of_large_heads_and_decay_beside_split_feature_pairs(contract, causal) -> None:
    how: dict[str, Any] = {"causal": False, "eps": 0.5, "eps_mode": "add"}
    if causal:
        how = {"decay": torch.tensor([0.9]), "cu_seqlens": torch.tensor([0, 30, 130])}
    check(contract, *randoms(1, 130, 1, 128, e=40 if causal else 96), rotary=Rotary(128), **how)


@every_contract(causal=DIRECTIONS)
def test_eps_bounds_the_normalizer(contract: Contract, causal: bool) -> None:
    q, k, v = randoms(1, CHUNK + 6, 2, 4)
    den = linear_rope_attention(q, k, torch.ones_like(v), normalize=False, causal=causal, backend="reference")
    eps = float(den.median()) * 1.01  # not a normalizer itself, which backends round differently
    check(contract, q, k, v, rotary=Rotary(4), causal=causal, eps=eps)


@pytest.mark.parametrize(
    ("b", "n", "h", "g"),
    [(3, 70, 4, 1), (3, 70, 6, 3), (3, 70, 24, 8), (1, 130, 24, 24), (2, 70, 36, 12)],
)
@every_contract("eager")
def test_eager_works_on_heads_in_groups(contract, b, n, h, g, monkeypatch) -> None:
    monkeypatch.setattr(eager, "MAX_K_PER_PASS", b * n * 4 * 2)  # two heads' numbers
    q, k, v = randoms(b, n, h, 4, g=g, e=2)
    how = {"rotary": Rotary(4, theta=torch.rand(g, 2, generator=torch.Generator().manual_seed(0)))}
    positions = torch.arange(n) + 10 * torch.arange(b)[:, None]
    state, contract = random_state(k, v, how), replace(contract, name="eager")
    check(contract, q, k, v, state, key_mask=random_mask(b, n), positions=positions, **how)
    check(contract, q, k, v, state, **how)


@pytest.mark.parametrize(
    ("name", "causal"), [*((name, True) for name in MAPS), ("elu+1", False), ("softmax", False)]
)
def test_gradients_are_those_of_finite_differences(name: str, causal: bool) -> None:
    q, k, v = randoms(2, 3, 2, 2, g=1)
    how = use_map(name, 2)
    how["rotary"] = Rotary(num_features(how, 2))
    state = random_state(k, v, how)
    mask = torch.tensor([[True, True, False], [False, True, True]])

    def call(q, k, v, kv, z) -> tuple[torch.Tensor, ...]:
        """kv and z of the keys themselves, not of e^-m times them: m is a constant to the gradient."""
        out, last = linear_rope_attention(
            q, k, v, state=replace(state, kv=kv, z=z), return_state=True, key_mask=mask, causal=causal,
            backend="eager", **how,
        )  # fmt: skip
        scale = torch.zeros(2, 1) if last.log_scale is None else last.log_scale
        return out, last.kv * scale.exp()[..., None, None], last.z * scale.exp()[..., None]

    leaves = [x.detach().requires_grad_() for x in (q, k, v, state.kv, state.z)]
    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)

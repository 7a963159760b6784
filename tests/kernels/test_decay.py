"""Fixed decay, forget gates, angles of the data: within the numerics contract at any strength and age."""

from typing import Any

import pytest
import torch
from torch import Tensor

from linrope import LinearAttentionState, Rotary, linear_rope_attention
from tests.kernels import comparison
from tests.kernels.comparison import compare
from tests.oracle import random_state, randoms

pytestmark = comparison.marks


def elu1(x: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1, x.exp())


def worst(q: Tensor, k: Tensor, v: Tensor, *, rotary: Rotary, **how: Any) -> float:
    """The largest |out - oracle| / (u M_i), M_i = sum_j |R phi_i|^T |R psi_j| |v_j| e^(L_i - L_j) / den_i.

    M's two sums are themselves such calls, of other features.
    """
    out = linear_rope_attention(q, k, v, rotary=rotary, backend="triton", **how)
    q, k, v = (x.double() for x in (q, k, v))
    how["backend"] = "reference"
    oracle = linear_rope_attention(q, k, v, rotary=rotary, **how)
    how |= {"feature_map": None, "normalize": False}
    positions = how.get("positions", torch.arange(q.shape[1]))
    phi_hat, psi_hat = (rotary(elu1(x), positions).abs() for x in (q, k))
    sizes = linear_rope_attention(phi_hat, psi_hat, v.abs(), **how)
    den = linear_rope_attention(elu1(q), elu1(k), torch.ones_like(v[..., :1]), **how)
    return float(((out.double() - oracle).abs() * den.clamp(min=1e-6) / sizes).nan_to_num(0).max() * 2.0**24)


def gates(b: int, n: int, g: int, strength: str) -> Tensor:
    """Forget gates; strong ones let nothing pass at some tokens, beside others that hardly fade."""
    log = -torch.rand(b, n, g).square() * (0.2 if strength == "weak" else 4)
    if strength == "strong":
        log[:, 3::17], log[:, 7::23], log[:, 11::29], log[:, 12::29] = -20, 0, -1e4, -1e-3
    return log


@pytest.mark.parametrize("strength", ["weak", "strong"])
@pytest.mark.usefixtures("short_segments")
def test_gates_keep_the_error_bound(strength: str) -> None:
    q, k, v = randoms(1, 200, 4, 16, g=2, e=8, dtype=torch.float32)
    assert worst(q, k, v, rotary=Rotary(16), log_decay=gates(1, 200, 2, strength)) <= 16


@pytest.mark.parametrize("segments", [False, True])
def test_a_fixed_decay_with_gaps_keeps_it(segments: bool, request: pytest.FixtureRequest) -> None:
    if segments:
        request.getfixturevalue("short_segments")
    q, k, v = randoms(1, 200, 2, 16, dtype=torch.float32)
    positions = torch.randint(1, 9, (200,)).cumsum(0)
    assert worst(q, k, v, rotary=Rotary(16), positions=positions, decay=torch.tensor([0.8, 0.999])) <= 16


@pytest.mark.parametrize("gap", [60, 200])
@pytest.mark.parametrize("n", [1, 70])
def test_a_state_of_long_ago_keeps_it(n: int, gap: int) -> None:
    """Nothing but the state is seen: its own decay is all that can be off."""
    q, k, v = randoms(1, n, 2, 16, dtype=torch.float32)
    how: dict[str, Any] = {"rotary": Rotary(16), "decay": torch.tensor([0.8, 0.8]), "normalize": False}
    first = randoms(1, 64, 2, 16, dtype=torch.float32, seed=1)
    _, state = linear_rope_attention(*first, rotary=Rotary(16), return_state=True, backend="triton")
    how |= {"positions": 64 + gap + torch.arange(n), "key_mask": torch.zeros(1, n, dtype=torch.bool)}
    out = linear_rope_attention(q, k, v, state=state, backend="triton", **how)
    oracle = linear_rope_attention(*(x.double() for x in (q, k, v)), state=state, backend="reference", **how)
    positions = how.pop("positions")
    size = linear_rope_attention(
        Rotary(16)(elu1(q.double()), positions).abs(), k.double(), v.double(), feature_map=None,
        decay=how["decay"], normalize=False, key_mask=how["key_mask"], positions=positions,
        backend="reference",
        state=LinearAttentionState(state.kv.abs(), state.z, state.position, "features; None"),
    )  # fmt: skip
    assert float(((out.double() - oracle).abs() / size).max()) <= 16 * 2.0**-24


def test_keys_of_several_chunks_ago_keep_it() -> None:
    """64 keys are kept, then 128 tokens hidden."""
    q, k, v = randoms(1, 192, 2, 16, dtype=torch.float32)
    mask = torch.arange(192)[None] < 64
    how: dict[str, Any] = {"rotary": Rotary(16), "key_mask": mask, "decay": torch.tensor([0.8, 0.8])}
    assert worst(q, k, v, **how) <= 16


def test_a_gate_that_is_not_a_number_shows_from_its_token_on() -> None:
    q, k, v = randoms(1, 130, 2, 16, dtype=torch.float32)
    log_decay = gates(1, 130, 1, "weak")
    log_decay[0, 40] = float("nan")
    out = linear_rope_attention(q, k, v, log_decay=log_decay, backend="triton")
    assert out[:, :40].isfinite().all()
    assert out[:, 40:].isnan().all()


@pytest.mark.parametrize(("strength", "dtype"), [("weak", torch.float16), ("strong", torch.float32)], ids=str)
@pytest.mark.usefixtures("short_segments")
def test_gradients_with_gates(strength: str, dtype: torch.dtype) -> None:
    q, k, v = randoms(2, 130, 2, 16, g=1, e=8, dtype=dtype)
    how: dict[str, Any] = {"rotary": Rotary(16)}
    state = random_state(k, v, how)
    compare(q, k, v, state, log_decay=gates(2, 130, 1, strength), **how)


def test_sums_of_the_gradient_of_gates_are_as_exact_as_eager_s() -> None:
    """A parameter receives the sum over all tokens: a rounding error may reach few tokens' gradients only."""

    def sums(heads: int, dtype: torch.dtype, backend: str) -> Tensor:
        q, k, v, w = (x[:, :, :heads].to(dtype) for x in (*inputs, weights))
        log_decay = torch.full((1, 400, heads), -0.75, dtype=dtype, requires_grad=True)
        how = {"log_decay": log_decay, "feature_map": None, "normalize": False, "backend": backend}
        out = linear_rope_attention(q, k, v, **how)
        return torch.autograd.grad((out * w).sum(), log_decay)[0].double().sum((0, 1))

    def error(heads: int, backend: str) -> Tensor:
        """Root mean square over heads."""
        return (sums(heads, torch.float32, backend) - exact[:heads]).square().mean().sqrt()

    inputs, (_, _, weights) = (randoms(1, 400, 64, 16, dtype=torch.float32, seed=seed) for seed in (0, 1))
    exact = sums(64, torch.float64, "eager")
    assert error(3, "triton") <= 3 * error(64, "eager")


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_of_gates_over_many_anchors(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from linrope_kernels import gradients

    monkeypatch.setattr(gradients, "ANCHOR", 16)
    b, n = (1, 100) if packed else (2, 50)
    q, k, v = randoms(b, n, 2, 16, g=1, e=8, dtype=torch.float32)
    how: dict[str, Any] = {"rotary": Rotary(16), "log_decay": gates(b, n, 1, "weak")}
    if packed:  # an empty sequence, one of a single token, one that ends with a segment
        how["cu_seqlens"] = torch.tensor([0, 40, 40, 41, 73, 100], dtype=torch.int32)
    state = random_state(k, v, how)
    compare(q, k, v, state, key_mask=torch.rand(b, n) > 0.3, **how)


def test_gates_of_one_head_or_one_row_serve_all() -> None:
    q, k, v = randoms(2, 40, 2, 16, dtype=torch.float32)
    for shape in ((1, 40, 2), (2, 40, 1)):
        compare(q, k, v, log_decay=-torch.rand(shape).double(), rotary=Rotary(16))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.usefixtures("short_segments")
def test_angles_of_the_data(packed: bool) -> None:
    q, k, v = randoms(1, 130, 4, 16, g=2, e=8, dtype=torch.float32)
    how: dict[str, Any] = {"rotary": Rotary(16), "angle_steps": 2 * torch.randn(1, 130, 2, 8)}
    if packed:
        how["cu_seqlens"] = torch.tensor([0, 50, 130])
    compare(q, k, v, **how)


def test_angles_of_the_data_turn_the_first_pairs_of_all_rows_and_heads() -> None:
    q, k, v = randoms(2, 70, 2, 16, e=8, dtype=torch.float32)
    compare(q, k, v, angle_steps=torch.randn(1, 70, 1, 3))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_eps_may_be_added(causal: bool) -> None:
    q, k, v = randoms(1, 70, 2, 16, dtype=torch.float32)
    compare(q, k, v, rotary=Rotary(16), eps=0.5, eps_mode="add", causal=causal)
    q, k, v = randoms(1, 40, 1, 128, dtype=torch.float32)
    compare(q, k, v, rotary=Rotary(128), eps=0.5, eps_mode="add", causal=causal)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.usefixtures("short_segments")
def test_segments_with_decay_and_gaps(packed: bool) -> None:
    q, k, v = randoms(1 if packed else 2, 190, 2, 16, g=1, e=8, dtype=torch.float32)
    how: dict[str, Any] = {"rotary": Rotary(16), "decay": torch.tensor([0.9])}
    if packed:  # a sequence of three segments, an empty one, one that ends with a segment
        how["cu_seqlens"] = torch.tensor([0, 130, 130, 131, 190], dtype=torch.int32)
    state = random_state(k, v, how)
    steps = torch.randint(0, 4, (len(q), 190))
    positions = 20 + steps.cumsum(1)
    compare(q, k, v, state, key_mask=torch.rand(len(q), 190) > 0.3, positions=positions, **how)

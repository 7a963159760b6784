"""Every backend against the reference: output, last state and all gradients."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from linrope import LinearAttentionState, Rotary, linear_rope_attention
from linrope.backends import eager, native
from linrope.sequence.chunks import CHUNK
from tests.oracle import (
    DTYPES,
    MAPS,
    TOLERANCES,
    assert_same,
    both_directions,
    every_backend,
    every_fast,
    everything,
    num_features,
    random_mask,
    random_state,
    randoms,
    use_map,
)


def plain_sums(state: LinearAttentionState) -> tuple[Tensor, Tensor]:
    """kv and z of the keys themselves, not of e^-m times them: m is a constant to the gradient."""
    scale = torch.zeros(()) if state.log_scale is None else state.log_scale
    scale = scale.exp().expand(state.kv.shape[:2])
    return state.kv * scale[..., None, None], state.z * scale[..., None]


def compare(
    backend: str, q: Tensor, k: Tensor, v: Tensor, state: LinearAttentionState | None = None, **how: Any
) -> None:
    """Against reference in float64, given the same numbers: output, last state, all gradients."""
    dtype, tolerance = DTYPES[backend], 1e-12 if backend == "eager" else TOLERANCES[backend]
    q, k, v = (x.to(dtype) for x in (q, k, v))
    if state is not None:
        state = replace(state, kv=state.kv.detach().to(dtype))
    actual = everything(q, k, v, state, backend=backend, **how)
    oracle = everything(q.double(), k.double(), v.double(), state, backend="reference", **how)
    assert_same(actual, {name: x.to(actual[name].dtype) for name, x in oracle.items()}, tolerance)
    out = linear_rope_attention(q, k, v, state=state, backend=backend, **how)
    assert_same({"out": out.detach()}, {"out": actual["out"]}, tolerance)


@every_fast
@both_directions
@pytest.mark.parametrize("name", MAPS)
def test_it_is_reference_with_every_map(name: str, causal: bool, backend: str) -> None:
    q, k, v = randoms(2, CHUNK + 6, 4, 6, g=2, e=5)
    how = use_map(name, 6)
    how["rotary"] = Rotary(num_features(how, 6))
    compare(backend, q, k, v, random_state(k, v, how), causal=causal, **how)


@every_fast
@both_directions
@pytest.mark.parametrize("n", [1, 2, 31, 33, CHUNK - 1, CHUNK, CHUNK + 1, 200, 8 * CHUNK - 1, 8 * CHUNK, 600])
def test_it_is_reference_at_every_length(n: int, causal: bool, backend: str) -> None:
    q, k, v = randoms(1, n, 2, 4, g=1, e=3)
    how: dict[str, Any] = {"rotary": Rotary(4)}
    compare(backend, q, k, v, random_state(k, v, how), causal=causal, **how)


@every_fast
@both_directions
@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("rotary_dim", [2, 4, 6])
@pytest.mark.parametrize("per_head", [False, True])
def test_it_is_reference_with_every_rotation(
    per_head: bool, rotary_dim: int, layout: str, causal: bool, backend: str
) -> None:
    q, k, v = randoms(2, CHUNK + 6, 4, 6, g=2, e=5)
    theta = torch.rand((2, rotary_dim // 2) if per_head else rotary_dim // 2).double()
    how = {"rotary": Rotary(6, layout=layout, rotary_dim=rotary_dim, theta=theta)}
    compare(backend, q, k, v, random_state(k, v, how), causal=causal, **how)


@every_fast
@both_directions
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("rotary", [None, Rotary(4)], ids=["no rotary", "rotary"])
def test_it_is_reference_with_every_option(
    rotary: Rotary | None, with_state: bool, masked: bool, normalize: bool, causal: bool, backend: str
) -> None:
    q, k, v = randoms(3, 2 * CHUNK + 1, 2, 4, g=1, e=8)
    how: dict[str, Any] = {"rotary": rotary, "normalize": normalize}
    state = random_state(k, v, how) if with_state else None
    mask = random_mask(3, k.shape[1]) if masked else None
    compare(backend, q, k, v, state, causal=causal, key_mask=mask, **how)


@pytest.mark.parametrize(
    ("b", "n", "h", "g"),
    [(3, 70, 4, 1), (3, 70, 6, 3), (3, 130, 24, 24), (3, 130, 24, 8), (1, 400, 24, 24), (2, 300, 36, 12)],
)
def test_eager_is_reference_when_heads_are_worked_on_in_groups(
    b: int, n: int, h: int, g: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eager, "AT_ONCE", b * n * 4 * 2)  # two heads' numbers
    q, k, v = randoms(b, n, h, 4, g=g, e=2)
    how = {"rotary": Rotary(4, theta=torch.rand(g, 2))}
    positions = torch.arange(n) + 10 * torch.arange(b)[:, None]
    state = random_state(k, v, how)
    compare("eager", q, k, v, state, key_mask=random_mask(b, n), positions=positions, **how)
    compare("eager", q, k, v, state, **how)


@every_fast
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize(("n", "m"), [(5, 70), (70, 5), (70, 70), (1, 1)])
def test_it_is_reference_in_cross_attention(
    n: int, m: int, with_state: bool, masked: bool, backend: str
) -> None:
    q, k, v = randoms(2, n, 4, 6, g=2, m=m, e=5)
    how: dict[str, Any] = {"rotary": Rotary(6, base=50.0)}
    state = random_state(k, v, how) if with_state else None
    how |= {"causal": False, "key_mask": random_mask(2, m) if masked else None}
    generator = torch.Generator().manual_seed(1)
    where = torch.randint(0, 1000, (2, n), generator=generator)
    key_where = torch.randint(0, 1000, (m,), generator=generator)
    compare(backend, q, k, v, state, positions=where, key_positions=key_where, **how)
    compare(backend, q, k, v, state, positions=where[0], **how)
    compare(backend, q, k, v, state, key_positions=key_where, **how)
    compare(backend, q, k, v, state, **how)


@every_fast
def test_causal_attention_takes_key_positions_of_their_own(backend: str) -> None:
    q, k, v = randoms(2, CHUNK + 6, 4, 4, g=2)
    key_positions = torch.randint(0, 1000, (2, CHUNK + 6), generator=torch.Generator().manual_seed(1))
    compare(backend, q, k, v, rotary=Rotary(4), key_positions=key_positions)


@every_fast
@pytest.mark.parametrize("rotation", ["rotary", "gates", "xpos", "xpos, half"])
def test_it_is_reference_where_keys_fade_by_given_positions_over_many_chunks(
    rotation: str, backend: str
) -> None:
    if "xpos" in rotation and backend != "eager":
        pytest.skip("eager alone takes xpos")
    n = 4 * CHUNK + 5
    q, k, v = randoms(2, n, 4, 8, g=2, e=3)
    layout = "half" if "half" in rotation else "interleaved"
    how: dict[str, Any] = {"rotary": Rotary(8, layout=layout, xpos=20.0 if "xpos" in rotation else None)}
    state = random_state(k, v, how)
    generator = torch.Generator().manual_seed(2)
    how["positions"] = 20 + torch.randint(0, 4, (2, n), generator=generator).cumsum(1)
    how["decay"] = torch.tensor([0.97, 0.999], dtype=torch.float64)
    if rotation == "gates":
        how["log_decay"] = -torch.rand(2, n, 2, generator=generator).to(DTYPES[backend]) / 10
    compare(backend, q, k, v, state, key_mask=torch.rand(2, n, generator=generator) > 0.2, **how)


@both_directions
def test_eager_is_reference_where_eps_bounds_the_normalizer(causal: bool) -> None:
    q, k, v = randoms(2, CHUNK + 6, 2, 4)
    den = linear_rope_attention(q, k, torch.ones_like(v), normalize=False, causal=causal)
    eps = float(den.median()) * (1 + 1e-9)  # not a normalizer itself, which backends round differently
    compare("eager", q, k, v, rotary=Rotary(4), causal=causal, eps=eps)


@every_backend
@both_directions
@pytest.mark.parametrize("name", MAPS)
def test_gradients_are_those_of_finite_differences(name: str, causal: bool, backend: str) -> None:
    q, k, v = randoms(2, 3, 2, 2, g=1)
    how = use_map(name, 2)
    how["rotary"] = Rotary(num_features(how, 2))
    state = random_state(k, v, how)
    mask = torch.tensor([[True, True, False], [False, True, True]])

    def call(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        out, last = linear_rope_attention(
            q, k, v, state=replace(state, kv=kv, z=z), return_state=True, key_mask=mask, causal=causal,
            backend=backend, **how,
        )  # fmt: skip
        return out, *plain_sums(last)

    leaves = [x.detach().requires_grad_() for x in (q, k, v, state.kv, state.z)]
    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


@pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))
@pytest.mark.parametrize(("d", "e"), [(258, 8), (8, 258)])
def test_native_names_sizes_that_it_cannot_take(d: int, e: int) -> None:
    q, k, v = randoms(1, 2, 1, d, e=e, dtype=torch.float32)
    with pytest.raises(RuntimeError, match=f"{d} features and {e} values per head: it takes up to 256"):
        linear_rope_attention(q, k, v, backend="native")

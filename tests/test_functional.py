"""The operation: backends against each other, cut and whole sequences, invariances, and PyTorch's modes."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from linrope import LinearAttentionState, Rotary, linear_rope_attention
from linrope.backends import eager
from linrope.chunks import CHUNK
from tests.oracle import (
    BACKENDS,
    POSITIVE,
    SIGNED,
    assert_same,
    everything,
    examples,
    num_features,
    random_state,
    randoms,
    use_map,
)

MAPS = (*POSITIVE, *SIGNED)
both_backends = pytest.mark.parametrize("backend", BACKENDS)
both_directions = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])


def random_mask(b: int, m: int) -> Tensor:
    """A third hidden; the first key of the first sequence, and the whole second sequence, hidden too."""
    mask = torch.rand(b, m, generator=torch.Generator().manual_seed(3)) > 1 / 3
    mask[0, :1] = False
    mask[1:2] = False
    return mask


def plain_sums(state: LinearAttentionState) -> tuple[Tensor, Tensor]:
    """kv and z of the keys themselves, not of e^-m times them: m is a constant to the gradient."""
    scale = torch.zeros(()) if state.log_scale is None else state.log_scale
    scale = scale.exp().expand(state.kv.shape[:2])
    return state.kv * scale[..., None, None], state.z * scale[..., None]


def compare(q: Tensor, k: Tensor, v: Tensor, state: LinearAttentionState | None = None, **how: Any) -> None:
    """eager against reference: output, last state, all gradients."""
    actual = everything(q, k, v, state, backend="eager", **how)
    assert_same(actual, everything(q, k, v, state, backend="reference", **how))
    out = linear_rope_attention(q, k, v, state=state, backend="eager", **how)
    assert_same({"out": out.detach()}, {"out": actual["out"]})


# Every backend against the reference, in float64


@both_directions
@pytest.mark.parametrize("name", MAPS)
def test_eager_is_reference_with_every_map(name: str, causal: bool) -> None:
    q, k, v = randoms(2, CHUNK + 6, 4, 6, g=2, e=5)
    how = use_map(name, 6)
    how["rotary"] = Rotary(num_features(how, 6))
    compare(q, k, v, random_state(k, v, how), causal=causal, **how)


@both_directions
@pytest.mark.parametrize("n", [1, 2, 31, 33, CHUNK - 1, CHUNK, CHUNK + 1, 200, 8 * CHUNK - 1, 8 * CHUNK, 600])
def test_eager_is_reference_at_every_length(n: int, causal: bool) -> None:
    q, k, v = randoms(1, n, 2, 4, g=1, e=3)
    how: dict[str, Any] = {"rotary": Rotary(4)}
    compare(q, k, v, random_state(k, v, how), causal=causal, **how)


@both_directions
@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("rotary_dim", [2, 4, 6])
@pytest.mark.parametrize("per_head", [False, True])
def test_eager_is_reference_with_every_rotation(
    per_head: bool, rotary_dim: int, layout: str, causal: bool
) -> None:
    q, k, v = randoms(2, CHUNK + 6, 4, 6, g=2, e=5)
    theta = torch.rand((2, rotary_dim // 2) if per_head else rotary_dim // 2).double()
    how = {"rotary": Rotary(6, layout=layout, rotary_dim=rotary_dim, theta=theta)}
    compare(q, k, v, random_state(k, v, how), causal=causal, **how)


@both_directions
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("rotary", [None, Rotary(4)], ids=["no rotary", "rotary"])
def test_eager_is_reference_with_every_option(
    rotary: Rotary | None, with_state: bool, masked: bool, normalize: bool, causal: bool
) -> None:
    q, k, v = randoms(3, 2 * CHUNK + 1, 2, 4, g=1, e=8)
    how: dict[str, Any] = {"rotary": rotary, "normalize": normalize}
    state = random_state(k, v, how) if with_state else None
    mask = random_mask(3, k.shape[1]) if masked else None
    compare(q, k, v, state, causal=causal, key_mask=mask, **how)


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
    compare(q, k, v, state, key_mask=random_mask(b, n), positions=positions, **how)
    compare(q, k, v, state, **how)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize(("n", "m"), [(5, 70), (70, 5), (70, 70), (1, 1)])
def test_eager_is_reference_in_cross_attention(n: int, m: int, with_state: bool, masked: bool) -> None:
    q, k, v = randoms(2, n, 4, 6, g=2, m=m, e=5)
    how: dict[str, Any] = {"rotary": Rotary(6, base=50.0)}
    state = random_state(k, v, how) if with_state else None
    how |= {"causal": False, "key_mask": random_mask(2, m) if masked else None}
    generator = torch.Generator().manual_seed(1)
    where = torch.randint(0, 1000, (2, n), generator=generator)
    key_where = torch.randint(0, 1000, (m,), generator=generator)
    compare(q, k, v, state, positions=where, key_positions=key_where, **how)
    compare(q, k, v, state, positions=where[0], **how)
    compare(q, k, v, state, key_positions=key_where, **how)
    compare(q, k, v, state, **how)


def test_causal_attention_takes_key_positions_of_their_own() -> None:
    q, k, v = randoms(2, CHUNK + 6, 4, 4, g=2)
    key_positions = torch.randint(0, 1000, (2, CHUNK + 6), generator=torch.Generator().manual_seed(1))
    compare(q, k, v, rotary=Rotary(4), key_positions=key_positions)


@both_directions
def test_eager_is_reference_where_eps_bounds_the_normalizer(causal: bool) -> None:
    q, k, v = randoms(2, CHUNK + 6, 2, 4)
    den = linear_rope_attention(q, k, torch.ones_like(v), normalize=False, causal=causal)
    eps = float(den.median()) * (1 + 1e-9)  # not a normalizer itself, which backends round differently
    compare(q, k, v, rotary=Rotary(4), causal=causal, eps=eps)


@both_backends
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


# Cut and whole


def in_pieces(
    q: Tensor, k: Tensor, v: Tensor, *, cuts: list[int], state: LinearAttentionState | None,
    key_mask: Tensor | None = None, return_state: bool = True, **how: Any,
) -> tuple[Tensor, LinearAttentionState]:  # fmt: skip
    outs, borders = [], [0, *cuts, q.shape[1]]
    for a, b in pairwise(borders):
        mask = None if key_mask is None else key_mask[:, a:b]
        out, state = linear_rope_attention(
            q[:, a:b], k[:, a:b], v[:, a:b], state=state, key_mask=mask, return_state=True, **how
        )
        outs.append(out)
    assert state is not None
    return torch.cat(outs, 1), state


@both_backends
@examples(25)
@given(
    cuts=st.lists(st.integers(0, 140), max_size=4).map(sorted),
    layout=st.sampled_from([None, "interleaved", "half"]),
    masked=st.booleans(),
    normalize=st.booleans(),
    decay=st.sampled_from([None, 0.3, 0.9, 0.9999, 1.0]),
    xpos=st.sampled_from([None, 20.0]),
)
def test_a_sequence_cut_anywhere_gives_what_one_call_gives(
    backend: str, cuts: list[int], layout: str | None, masked: bool, normalize: bool, decay: float | None,
    xpos: float | None,
) -> None:  # fmt: skip
    q, k, v = randoms(2, 140, 2, 4, g=1, e=3)
    how: dict[str, Any] = {"rotary": layout and Rotary(4, layout=layout, xpos=xpos), "normalize": normalize}
    state = random_state(k, v, how)
    how |= {"key_mask": random_mask(2, 140) if masked else None, "backend": backend}
    how["decay"] = None if decay is None else torch.tensor([decay])
    whole = everything(q, k, v, state, **how)
    assert_same(everything(q, k, v, state, call=in_pieces, cuts=cuts, **how), whole)


@both_backends
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("layout", [None, "interleaved", "half"])
def test_decoding_token_by_token_gives_what_one_call_gives(
    layout: str | None, name: str, backend: str
) -> None:
    q, k, v = randoms(2, 20, 4, 6, g=2, e=5)
    how: dict[str, Any] = use_map(name, 6) | {"backend": backend}
    f = num_features(how, 6)
    how["rotary"] = layout and Rotary(f, layout=layout, rotary_dim=f - 2)
    how["key_mask"] = random_mask(2, 20)
    how["cuts"] = list(range(1, 20))
    with torch.no_grad():
        out, state = in_pieces(q, k, v, state=None, **how)
    assert state.position.tolist() == [20, 20]
    with_gradients = everything(q, k, v, call=in_pieces, **how)
    del how["cuts"]
    whole = everything(q, k, v, **how)
    assert_same(with_gradients, whole)
    assert_same({"out": out, "kv": state.kv, "z": state.z}, {x: whole[x] for x in ("out", "kv", "z")})


@both_backends
def test_keys_may_come_in_pieces_before_the_queries(backend: str) -> None:
    q, k, v = randoms(2, 9, 2, 4, m=30)
    how: dict[str, Any] = {"rotary": Rotary(4), "causal": False, "backend": backend}
    whole = linear_rope_attention(q, k, v, positions=torch.arange(9), **how)
    _, state = linear_rope_attention(q[:, :0], k[:, :11], v[:, :11], return_state=True, **how)
    _, state = linear_rope_attention(q[:, :0], k[:, 11:], v[:, 11:], state=state, return_state=True, **how)
    assert state.position.tolist() == [30, 30]
    out = linear_rope_attention(q, k[:, :0], v[:, :0], state=state, positions=torch.arange(9), **how)
    assert_same({"out": out}, {"out": whole})


@both_backends
@examples(20)
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=5),
    causal=st.booleans(),
    fading=st.booleans(),
    masked=st.booleans(),
    given_positions=st.booleans(),
)
def test_packed_sequences_give_what_each_gives_alone(
    backend: str, lengths: list[int], causal: bool, fading: bool, masked: bool, given_positions: bool
) -> None:
    n, bounds = sum(lengths), [0, *accumulate(lengths)]
    q, k, v = randoms(1, n, 4, 4, g=2, e=3)
    how: dict[str, Any] = {"rotary": Rotary(4), "causal": causal}
    packed = {"cu_seqlens": torch.tensor(bounds, dtype=torch.int32)}
    state = random_state(k, v, how | packed)
    how["backend"] = backend
    if fading and causal:
        how["decay"] = torch.tensor([0.6, 0.98])
    mask = random_mask(1, n) if masked else None
    positions = 40 + torch.arange(n) * 2 if given_positions else None
    together = everything(q, k, v, state, key_mask=mask, positions=positions, **packed, **how)

    def apart(q: Tensor, k: Tensor, v: Tensor, state: LinearAttentionState, **how: Any) -> Any:
        outs, states = [], []
        for i, (low, high) in enumerate(pairwise(bounds)):
            own = state._map(lambda x, i=i: x[i : i + 1])
            out, last = linear_rope_attention(
                q[:, low:high], k[:, low:high], v[:, low:high], state=own,
                key_mask=None if mask is None else mask[:, low:high],
                positions=None if positions is None else positions[low:high], **how,
            )  # fmt: skip
            outs.append(out)
            states.append(last)
        kv, z, position = (torch.cat([getattr(x, name) for x in states]) for name in ("kv", "z", "position"))
        return torch.cat(outs, 1), replace(state, kv=kv, z=z, position=position)

    assert_same(together, everything(q, k, v, state, call=apart, **how))


@both_backends
@pytest.mark.parametrize("grad", [True, False])
def test_one_token_at_a_given_position_fades_the_state_by_the_gap(grad: bool, backend: str) -> None:
    q, k, v = randoms(2, 1, 2, 4)
    how: dict[str, Any] = {"rotary": Rotary(4)}
    state = random_state(k, v, how)
    how |= {"decay": torch.tensor([0.9, 0.5]), "positions": state.position[:, None] + 5, "backend": backend}
    with torch.set_grad_enabled(grad):
        _, last = linear_rope_attention(q, k, v, state=state, return_state=True, **how)
        del how["decay"]
        faded = state.kv.detach() * torch.tensor([0.9, 0.5])[:, None, None] ** 6
        _, same = linear_rope_attention(q, k, v, state=replace(state, kv=faded), return_state=True, **how)
    torch.testing.assert_close(last.kv, same.kv)


# Padding, grouping, permuting, shifting


@both_backends
@pytest.mark.parametrize("fading", [True, False])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("lengths", [[70, 3, 1], [5]])
def test_with_positions_from_the_mask_padded_sequences_have_the_states_of_unpadded_ones(
    lengths: list[int], side: str, fading: bool, backend: str
) -> None:
    n, how = 80, {"rotary": Rotary(4), "backend": backend}
    if fading:
        how["decay"] = torch.tensor([0.9])
    q, k, v = randoms(len(lengths), n, 2, 4, g=1)
    mask = torch.arange(n) < torch.tensor(lengths)[:, None]
    mask = mask if side == "right" else mask.flip(1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    out, state = linear_rope_attention(q, k, v, key_mask=mask, positions=positions, return_state=True, **how)
    token = randoms(len(lengths), 1, 2, 4, g=1, seed=1)
    following = linear_rope_attention(*token, state=state, **how)
    assert state.position.tolist() == lengths
    for i in range(len(lengths)):
        own = slice(i, i + 1)
        parts = (x[own, mask[i]] for x in (q, k, v))
        alone, last = linear_rope_attention(*parts, return_state=True, **how)
        after = linear_rope_attention(*(x[own] for x in token), state=last, **how)
        actual = {"out": out[own, mask[i]], "kv": state.kv[own], "z": state.z[own], "next": following[own]}
        assert_same(actual, {"out": alone, "kv": last.kv, "z": last.z, "next": after})


@both_backends
@both_directions
@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_sequences_give_what_unpadded_ones_give(side: str, causal: bool, backend: str) -> None:
    lengths, n = [70, 3, 1], 70
    how: dict[str, Any] = {"rotary": Rotary(4), "causal": causal, "backend": backend}
    q, k, v = randoms(3, n, 2, 4, g=1)
    mask, positions = torch.zeros(3, n, dtype=torch.bool), torch.zeros(3, n, dtype=torch.int64)
    real = [slice(0, length) if side == "right" else slice(n - length, n) for length in lengths]
    for i, where in enumerate(real):
        mask[i, where], positions[i, where] = True, torch.arange(lengths[i])
    out, state = linear_rope_attention(
        q, k, v, key_mask=mask, positions=positions if side == "left" else None, return_state=True, **how
    )
    if side == "left":
        assert state.position.tolist() == lengths
    for i, where in enumerate(real):
        parts = (x[i : i + 1, where] for x in (q, k, v))
        alone, last = linear_rope_attention(*parts, return_state=True, **how)
        actual = {"out": out[i : i + 1, where], "kv": state.kv[i : i + 1], "z": state.z[i : i + 1]}
        assert_same(actual, {"out": alone, "kv": last.kv, "z": last.z})


@both_backends
@both_directions
def test_grouped_heads_are_expanded_heads(causal: bool, backend: str) -> None:
    q, k, v = randoms(2, 70, 6, 4, g=2, e=3)
    how: dict[str, Any] = {"rotary": Rotary(4), "causal": causal, "backend": backend}
    grouped = everything(q, k, v, **how)
    full = everything(q, k.repeat_interleave(3, 2), v.repeat_interleave(3, 2), **how)
    assert_same({"out": grouped["out"], "dq": grouped["dq"]}, {"out": full["out"], "dq": full["dq"]})


@both_backends
@both_directions
def test_interleaved_is_half_with_permuted_pairs(causal: bool, backend: str) -> None:
    q, k, v = randoms(2, 70, 2, 6)
    order = [0, 2, 4, 1, 3, 5]
    how: dict[str, Any] = {"causal": causal, "backend": backend}
    interleaved = linear_rope_attention(q, k, v, rotary=Rotary(6), **how)
    half = linear_rope_attention(q[..., order], k[..., order], v, rotary=Rotary(6, layout="half"), **how)
    assert_same({"out": half}, {"out": interleaved})


@both_backends
@both_directions
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("explicit", [True, False])
def test_shifting_all_positions_changes_nothing(
    explicit: bool, normalize: bool, causal: bool, backend: str
) -> None:
    q, k, v = randoms(2, 70, 2, 4)
    how: dict[str, Any] = {"rotary": Rotary(4), "causal": causal, "backend": backend, "normalize": normalize}
    at_zero = linear_rope_attention(q, k, v, **how)
    shift = 1_000_000
    if explicit:
        shifted = linear_rope_attention(q, k, v, positions=shift + torch.arange(70), **how)
    else:
        _, empty = linear_rope_attention(q[:, :0], k[:, :0], v[:, :0], return_state=True, **how)
        state = replace(empty, position=empty.position + shift)
        shifted = linear_rope_attention(q, k, v, state=state, **how)
    # A float64 angle near 1e6 is spaced by 1e-10.
    assert_same({"out": shifted}, {"out": at_zero}, tolerance=1e-9)


@both_backends
@both_directions
def test_rotation_by_zero_is_plain_linear_attention(causal: bool, backend: str) -> None:
    q, k, v = randoms(2, 70, 2, 4)
    how: dict[str, Any] = {"causal": causal, "backend": backend}
    still = Rotary(4, theta=torch.zeros(2))
    assert_same(everything(q, k, v, rotary=still, **how), everything(q, k, v, rotary=None, **how))


# Nothing to attend to, and numbers that are none


@both_backends
@pytest.mark.parametrize(
    ("b", "n", "m", "causal"),
    [
        (2, 0, 0, True),
        (2, 0, 0, False),
        (0, 5, 5, True),
        (0, 5, 5, False),
        (2, 5, 0, False),
        (2, 0, 5, False),
    ],
)
@pytest.mark.parametrize("with_state", [True, False])
def test_empty_tensors_give_zeros_and_empty_gradients(
    with_state: bool, b: int, n: int, m: int, causal: bool, backend: str
) -> None:
    q, k, v = randoms(b, n, 2, 4, m=m)
    how: dict[str, Any] = {"rotary": Rotary(4)}
    state = random_state(k, v, how) if with_state else None
    if m != n:
        how["positions"] = torch.arange(n)
    results = everything(q, k, v, state, causal=causal, backend=backend, **how)
    assert results["out"].shape == (b, n, 2, 4)
    assert all(x.isfinite().all() for x in results.values())
    if m == 0 and not with_state:
        assert not results["out"].any()


@both_backends
@both_directions
@pytest.mark.parametrize("name", POSITIVE)
def test_a_query_without_keys_gives_zero_and_finite_gradients(name: str, causal: bool, backend: str) -> None:
    q, k, v = randoms(2, 70, 2, 4, dtype=torch.float32)
    how = use_map(name, 4)
    mask = torch.ones(2, 70, dtype=torch.bool)
    mask[0] = False
    mask[1, :3] = False
    rotary = Rotary(num_features(how, 4))
    results = everything(q, k, v, rotary=rotary, key_mask=mask, causal=causal, backend=backend, **how)
    assert not results["out"][0].any()
    assert not (causal and results["out"][1, :3].any())
    assert results["out"][1, 3:].any()
    assert all(x.isfinite().all() for x in results.values())
    assert not results["dk"][0].any()


@both_backends
@both_directions
def test_a_nan_stays_in_its_sequence(causal: bool, backend: str) -> None:
    q, k, v = randoms(3, 70, 2, 4, dtype=torch.float32)
    how: dict[str, Any] = {"rotary": Rotary(4), "causal": causal, "backend": backend}
    state = random_state(k, v, {"rotary": how["rotary"]})
    clean = everything(q, k, v, state, **how)
    for x in (q, k, v):
        x[1, 5, 0, 0] = math.nan
    dirty = everything(q, k, v, state, **how)
    for name, x in clean.items():
        assert torch.equal(dirty[name][[0, 2]], x[[0, 2]]), name
    assert dirty["out"][1].isnan().any()


@both_backends
@both_directions
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1000.0])
def test_what_masked_keys_hold_does_not_matter(garbage: float, name: str, causal: bool, backend: str) -> None:
    q, k, v = randoms(2, 70, 2, 4, dtype=torch.float32)
    how = use_map(name, 4) | {"causal": causal, "backend": backend, "key_mask": random_mask(2, 70)}
    how["rotary"] = Rotary(num_features(how, 4))
    clean = everything(q, k, v, **how)
    dirty_k, dirty_v = (x.masked_fill(~how["key_mask"][..., None, None], garbage) for x in (k, v))
    dirty = everything(q, dirty_k, dirty_v, **how)
    for tensor in ("out", "kv", "z", "dq", "dv", "dk"):
        assert torch.equal(dirty[tensor], clean[tensor]), tensor


# Strides, dtypes, modes, threads


@both_backends
@both_directions
def test_strides_of_inputs_and_gradients_do_not_matter(causal: bool, backend: str) -> None:
    b, n, h, d = 3, 70, 2, 4
    q, k, v = randoms(b, n, h, d)
    q, k, v = q, k[:1].expand_as(k), v[:, :, :1].expand_as(v)
    views = q.transpose(1, 2).contiguous().transpose(1, 2), k, v
    how: dict[str, Any] = {"rotary": Rotary(d), "causal": causal, "backend": backend}
    assert_same(everything(*views, **how), everything(*(x.clone() for x in (q, k, v)), **how))

    weights = torch.randn(n, dtype=torch.float64)[None, :, None, None].expand(b, n, h, d)
    grads = []
    for weight in (weights, weights.contiguous(), weights.transpose(2, 3).contiguous().transpose(2, 3)):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = linear_rope_attention(*leaves, **how)
        grads.append(dict(zip("qkv", torch.autograd.grad(out, leaves, weight), strict=True)))
    assert_same(grads[0], grads[1])
    assert_same(grads[2], grads[1])


@both_backends
@both_directions
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_output_has_the_dtype_of_v_and_the_state_is_wide(
    dtype: torch.dtype, name: str, causal: bool, backend: str
) -> None:
    q, k, v = (x.requires_grad_() for x in randoms(1, 5, 2, 4, dtype=dtype))
    how = use_map(name, 4) | {"causal": causal, "backend": backend}
    out, state = linear_rope_attention(q, k, v, return_state=True, **how)
    assert out.dtype == dtype
    assert state.kv.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert state.z.dtype == torch.float64
    out.sum().backward()
    assert {x.grad.dtype for x in (q, k, v) if x.grad is not None} == {dtype}


@both_directions
@pytest.mark.parametrize("name", POSITIVE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_does_not_narrow_the_sums(dtype: torch.dtype, name: str, causal: bool) -> None:
    q, k, v = randoms(2, 70, 2, 4, dtype=dtype)
    how = use_map(name, 4) | {"causal": causal, "backend": "eager"}
    how["rotary"] = Rotary(num_features(how, 4))
    plain = everything(q, k, v, **how)

    def call(*args: Any, **kwargs: Any) -> Any:  # PyTorch wants backward passes outside of autocast
        with torch.autocast("cpu", torch.bfloat16):
            return linear_rope_attention(*args, **kwargs)

    cast = everything(q, k, v, call=call, **how)
    for tensor, x in plain.items():
        assert torch.equal(cast[tensor], x), tensor
        assert cast[tensor].dtype == x.dtype


@both_directions
@pytest.mark.parametrize("order", ["inference first", "inference last"])
def test_inference_mode_and_training_may_follow_each_other(order: str, causal: bool) -> None:
    q, k, v = randoms(2, 70, 2, 4, dtype=torch.float32)
    how: dict[str, Any] = {"rotary": Rotary(4), "causal": causal, "backend": "eager"}

    def infer() -> Tensor:
        with torch.inference_mode():
            return linear_rope_attention(q, k, v, **how)

    def train() -> Tensor:
        return everything(q, k, v, **how)["out"]

    calls = (infer, train) if order == "inference first" else (train, infer)
    with ThreadPoolExecutor(1) as fresh:  # a thread of its own has no memory kept from earlier calls
        first, second = fresh.submit(lambda: [call() for call in calls]).result()
    assert torch.equal(first, second)


@both_backends
@both_directions
def test_threads_at_once_give_the_bits_of_one(causal: bool, backend: str) -> None:
    inputs = [randoms(2, 50 + 40 * i, 4, 8, g=2, dtype=torch.float32, seed=i) for i in range(8)]
    how: dict[str, Any] = {"rotary": Rotary(8), "causal": causal, "backend": backend}
    alone = [everything(*qkv, **how) for qkv in inputs]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            together = list(pool.map(lambda qkv: everything(*qkv, **how), inputs))
            for one, other in zip(alone, together, strict=True):
                for name, x in one.items():
                    assert torch.equal(other[name], x), name


@both_directions
def test_eager_refuses_a_second_derivative(causal: bool) -> None:
    q, k, v = (x.requires_grad_() for x in randoms(1, 5, 2, 4))
    out = linear_rope_attention(q, k, v, causal=causal, backend="eager")
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(dq.square().sum(), q)

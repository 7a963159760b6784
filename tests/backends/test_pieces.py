"""A sequence in pieces, packed, or padded gives what it gives whole and alone."""

from itertools import accumulate, cycle, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from linrope import LinearAttentionState, Rotary, feature_maps, linear_rope_attention
from tests.support.oracle import (
    DATA,
    MAPS,
    NATIVE,
    assert_same,
    every_backend,
    everything,
    examples,
    num_features,
    random_mask,
    random_state,
    randoms,
    use_map,
)

OF_TOKENS = ("key_mask", "positions", *DATA)


def part(options: dict[str, Any], low: int, high: int) -> dict[str, Any]:
    """The options of some of the tokens."""
    own = {name: options[name] for name in OF_TOKENS if options.get(name) is not None}
    return {name: x[..., low:high] if name == "positions" else x[:, low:high] for name, x in own.items()}


def in_pieces(
    q: Tensor, k: Tensor, v: Tensor, *, cuts: list[int], state: LinearAttentionState | None,
    return_state: bool = True, **how: Any,
) -> tuple[Tensor, LinearAttentionState]:  # fmt: skip
    outs = []
    for a, b in pairwise([0, *cuts, q.shape[1]]):
        more = how | part(how, a, b) | {"state": state, "return_state": True}
        out, state = linear_rope_attention(q[:, a:b], k[:, a:b], v[:, a:b], **more)
        outs.append(out)
    return torch.cat(outs, 1), state


CHOICES: dict[str, list[Any]] = {
    "name": ["elu+1", "elu+1", "exp", "softmax", "favor+"],
    "decay": [None, 0.3, 0.9, 0.9999, 1.0],
    "gates": [None, "shared", "per head"],
    "steps": [None, "shared", "per head"],
    "masked": [False, True],
}
FADING = st.fixed_dictionaries({name: st.sampled_from(x) for name, x in CHOICES.items()})


def fading(
    b: int, n: int, name: str, decay: float | None, gates: str | None, steps: str | None, masked: bool
) -> dict[str, Any]:
    """Options of calls with two key heads of four numbers each."""
    generator, heads = torch.Generator().manual_seed(1), {"shared": 1, "per head": 2}
    fmap = feature_maps.make(name, 4, **({"seed": 0, "num_features": 8} if "favor" in name else {}))
    how: dict[str, Any] = {"feature_map": fmap, "rotary": Rotary(fmap.feature_dim)}
    if gates is not None:
        how["log_decay"] = -3 * torch.rand(b, n, heads[gates], generator=generator, dtype=torch.float64)
    if steps is not None:
        shape = b, n, heads[steps], fmap.feature_dim // 2
        how["angle_steps"] = 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    how["decay"] = None if decay is None else torch.tensor([decay, 0.98], dtype=torch.float64)
    how["key_mask"] = random_mask(b, n) if masked else None
    return how


def tolerance(how: dict[str, Any]) -> float:
    """Logarithms are summed from other tokens on."""
    return 1e-10 if how["feature_map"].log_scaled else 1e-11 if how.get("log_decay") is not None else 1e-12


@every_backend
@examples(12)
@given(
    options=FADING, cuts=st.lists(st.integers(0, 140), max_size=4).map(sorted), normalize=st.booleans(),
    layout=st.sampled_from([None, "interleaved", "half"]), xpos=st.sampled_from([None, 20.0]),
)  # fmt: skip
def test_a_sequence_cut_anywhere_gives_what_one_call_gives(
    backend: str, options: dict[str, Any], cuts: list[int], layout: str | None, normalize: bool,
    xpos: float | None,
) -> None:  # fmt: skip
    how = fading(2, 140, **options) | {"normalize": normalize}
    q, k, v = randoms(2, 140, 4, 4, g=2, e=3, scale=3.0 if normalize else 0.5)
    if "angle_steps" not in how:
        how["rotary"] = layout and Rotary(how["feature_map"].feature_dim, layout=layout, xpos=xpos)
    state = random_state(k, v, how)
    how["backend"] = backend
    whole = everything(q, k, v, state, **how)
    assert_same(everything(q, k, v, state, call=in_pieces, cuts=cuts, **how), whole, tolerance(how))


@every_backend
@pytest.mark.parametrize(
    ("name", "layout"), [*zip(MAPS, cycle([None, "interleaved", "half"])), ("elu+1", "half")]
)
def test_decoding_token_by_token_gives_what_one_call_gives(name, layout, backend) -> None:
    n = 8
    q, k, v = randoms(2, n, 4, 6, g=2, e=5)
    how: dict[str, Any] = use_map(name, 6) | {"backend": backend, "key_mask": random_mask(2, n)}
    f = num_features(how, 6)
    how["rotary"] = layout and Rotary(f, layout=layout, rotary_dim=f - 2)
    whole, cuts = everything(q, k, v, **how), list(range(1, n))
    assert_same(everything(q, k, v, call=in_pieces, cuts=cuts, **how), whole)
    with torch.no_grad():
        out, state = in_pieces(q, k, v, state=None, cuts=cuts, **how)
    assert state.position.tolist() == [n, n]
    assert_same({"out": out, "kv": state.kv, "z": state.z}, {x: whole[x] for x in ("out", "kv", "z")})


@every_backend
@examples(10)
@given(
    options=FADING, lengths=st.lists(st.integers(0, 70), min_size=1, max_size=5), causal=st.booleans(),
    given_positions=st.booleans(),
)  # fmt: skip
def test_packed_sequences_give_what_each_gives_alone(
    backend: str, options: dict[str, Any], lengths: list[int], causal: bool, given_positions: bool
) -> None:
    n, bounds = sum(lengths), [0, *accumulate(lengths)]
    q, k, v = randoms(1, n, 4, 4, g=2, e=3)
    how = fading(1, n, **options) | {"causal": causal}
    packed = {"cu_seqlens": torch.tensor(bounds, dtype=torch.int32)}
    state = random_state(k, v, how | packed)
    how |= {"backend": backend, "positions": 40 + torch.arange(n) * 2 if given_positions else None}
    if not causal:
        how |= {"log_decay": None, "decay": None}
    together = everything(q, k, v, state, **packed, **how)

    def apart(q: Tensor, k: Tensor, v: Tensor, *, state: LinearAttentionState, **how: Any) -> Any:
        found = []
        for i, (low, high) in enumerate(pairwise(bounds)):
            more = how | part(how, low, high) | {"state": state.reorder(torch.tensor([i]))}
            found.append(linear_rope_attention(*(x[:, low:high] for x in (q, k, v)), **more))
        outs, states = zip(*found)
        return torch.cat(outs, 1), LinearAttentionState.cat(states)

    assert_same(together, everything(q, k, v, state, call=apart, **how), tolerance(how))


# Padding


PADDED: dict[str, Any] = {
    "causal": {},
    "fading": {"decay": torch.tensor([0.9])},
    "bidirectional": {"causal": False},
}


@every_backend
@pytest.mark.parametrize("options", PADDED.values(), ids=PADDED)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("lengths", [[70, 3, 1], [5]])
def test_with_positions_from_the_mask_padded_sequences_have_the_states_of_unpadded_ones(
    lengths: list[int], side: str, options: dict[str, Any], backend: str
) -> None:
    n, how = 80, {"rotary": Rotary(4), "backend": backend} | options
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
        alone, last = linear_rope_attention(*(x[own, mask[i]] for x in (q, k, v)), return_state=True, **how)
        after = linear_rope_attention(*(x[own] for x in token), state=last, **how)
        actual = {"out": out[own, mask[i]], "kv": state.kv[own], "z": state.z[own], "next": following[own]}
        assert_same(actual, {"out": alone, "kv": last.kv, "z": last.z, "next": after})


@pytest.mark.parametrize("backend", ["eager", NATIVE])
def test_70_000_tokens_in_a_row_give_what_their_pieces_give(backend: str) -> None:
    """More than 65,536: outputs, the last state and gradients, against ten pieces in float64."""
    n, d, how = 70_000, 8, {"rotary": Rotary(8), "return_state": True}
    q, k, v = randoms(1, n, 1, d, dtype=torch.float32)
    noise, weights, _ = randoms(1, n, 1, d, seed=1, dtype=torch.float32)
    gates = -noise[..., 0].abs() / 1000

    def results(dtype: torch.dtype, call: Any, **more: Any) -> list[Tensor]:
        *leaves, log_decay = (x.to(dtype).requires_grad_() for x in (q, k, v, gates))
        out, state = call(*leaves, log_decay=log_decay, **how, **more)
        loss = (out * weights.to(dtype)).sum() + state.kv.sum()
        return [out, state.kv, state.z, *torch.autograd.grad(loss, [*leaves, log_decay])]

    found = results(torch.float32, linear_rope_attention, backend=backend)
    exact = results(torch.float64, in_pieces, cuts=list(range(7_000, n, 7_000)), state=None, backend="eager")
    for x, y in zip(found, exact, strict=True):
        assert (x - y).abs().max() <= 128 * 2.0**-24 * y.abs().max()

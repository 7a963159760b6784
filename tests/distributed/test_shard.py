"""What a shard knows of its tokens, what it refuses, and that a group of one changes nothing."""

import re
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from linrope import LinearRoPEAttention, Rotary, linear_rope_attention, linear_rope_state
from linrope.distributed import Shard
from tests.oracle import randoms


@pytest.mark.parametrize("packed", [False, True])
def test_in_a_group_of_one_the_bits_are_those_without_a_shard(packed: bool) -> None:
    bounds = torch.tensor([0, 4, 4, 9]) if packed else None
    shard = Shard(lengths=[9], cu_seqlens=bounds)
    parts = [x.float() for x in randoms(1, 9, 2, 4)]
    expected, last = linear_rope_attention(*parts, rotary=Rotary(4), cu_seqlens=bounds, return_state=True)
    out, state = linear_rope_attention(*parts, rotary=Rotary(4), shard=shard, return_state=True)
    assert torch.equal(out, expected)
    assert shard.channel.collectives == 0
    if not packed:
        assert torch.equal(state.kv, last.kv)
        layer, x = LinearRoPEAttention(8, 2, short_conv=4, gate=True), torch.randn(1, 9, 8)
        assert torch.equal(layer(x, shard=shard), layer(x))


def test_targets_are_the_next_tokens_but_at_the_ends_of_documents() -> None:
    shard = Shard(lengths=[6], cu_seqlens=[0, 2, 2, 6])
    tokens = torch.arange(6)[None]
    assert shard.targets(tokens).tolist() == [[1, -100, 3, 4, 5, -100]]
    assert shard.positions().tolist() == [0, 1, 0, 1, 2, 3]
    assert tokens.tolist() == [[0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": [3, 4]}, "lengths: got [3, 4], expected 1"),
        ({"lengths": [-1]}, "lengths: got [-1], expected 1"),
        (
            {"lengths": [4], "cu_seqlens": [0, 3]},
            "cu_seqlens: got [0, 3], expected numbers that rise from 0 to",
        ),
        ({"lengths": [4], "cu_seqlens": [0, 3, 2, 4]}, "cu_seqlens: got [0, 3, 2, 4]"),
    ],
)
def test_a_shard_refuses_what_does_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Shard(**options)
    with pytest.raises(TypeError, match="group: got str"):
        Shard("cp", lengths=[4])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{"lengths": [10.7]}, {"lengths": [9], "cu_seqlens": torch.tensor([0, 2.5, 9])}]
)
def test_a_shard_refuses_numbers_that_are_not_integers(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=rf"^{[*options][-1]}: got \[.*\], expected integers$"):
        Shard(**options)


def test_calls_refuse_what_a_shard_already_has() -> None:
    q, k, v = randoms(1, 4, 2, 4)
    bounds = torch.tensor([0, 4])
    with pytest.raises(ValueError, match="cu_seqlens: got a tensor in a call with a shard; expected None"):
        linear_rope_attention(q, k, v, cu_seqlens=bounds, shard=Shard(lengths=[4]))
    with pytest.raises(TypeError, match=r"shard: got list, expected linrope\.distributed\.Shard"):
        linear_rope_attention(q, k, v, shard=[4])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="x: got 4 tokens, expected those of all ranks, 5"):
        Shard(lengths=[5]).take(q)
    with pytest.raises(ValueError, match="context: got a tensor in a call with a shard"):
        LinearRoPEAttention(8, 2)(torch.zeros(1, 4, 8), torch.zeros(1, 4, 8), shard=Shard(lengths=[4]))


def test_half_precision_in_a_copy_of_a_state_leaves_its_sums_wide() -> None:
    """As FSDP's mixed precision makes such a copy: of all fields, each tensor cast."""
    state = linear_rope_state(*torch.ones(2, 1, 5, 2, 4))
    cast = {
        field.name: x.bfloat16() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for field in fields(state)
        for x in [getattr(state, field.name)]
    }
    copy = replace(state, **cast)
    assert copy.kv is state.kv
    assert copy.z is state.z
    with pytest.raises(TypeError, match=r"state\.kv: got torch\.bfloat16"):
        replace(state, kv=state.kv.bfloat16())

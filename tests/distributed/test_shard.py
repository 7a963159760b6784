"""What a shard knows of its tokens, what it refuses, and that a group of one changes nothing."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.utils import _apply_to_tensors

from linrope import LinearRoPEAttention, Rotary, linear_rope_attention, linear_rope_state
from linrope.distributed import Shard
from linrope.distributed.fold import KNOWN
from tests.support.oracle import randoms


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


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"lengths": [3, 4]}, ValueError, r"^lengths: got \[3, 4\], expected 1"),
    ({"lengths": [-1]}, ValueError, r"^lengths: got \[-1\], expected 1"),
    ({"lengths": [10.7]}, TypeError, r"^lengths: got \[.*\], expected integers$"),
    ({"cu_seqlens": [0, 3]}, ValueError, r"cu_seqlens: got \[0, 3\], expected numbers that rise from 0 to"),
    ({"cu_seqlens": [0, 3, 2, 4]}, ValueError, r"cu_seqlens: got \[0, 3, 2, 4\]"),
    ({"cu_seqlens": torch.tensor([0, 2.5, 4])}, TypeError, r"^cu_seqlens: got \[.*\], expected integers$"),
    ({"group": "cp"}, TypeError, "group: got str"),
    ({"lengths": None}, TypeError, r"^lengths: got None, expected the number of tokens of each rank"),
]


@pytest.mark.parametrize(("options", "error", "message"), REFUSED)
def test_a_shard_refuses_what_does_not_fit(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Shard(**{"lengths": [4], **options})


@pytest.mark.parametrize("taps", [None, 4])
def test_one_process_refuses_a_shard_of_another_length_as_two_do(taps: int | None) -> None:
    layer, x = LinearRoPEAttention(8, 2, short_conv=taps), torch.randn(1, 5, 8)
    name = "k" if taps is None else "x"
    with pytest.raises(ValueError, match=f"^{name}: got 5 tokens on rank 0, expected its shard's 9$"):
        layer(x, shard=Shard(lengths=[9]))
    for call in (
        layer,
        lambda x, shard: linear_rope_attention(
            x[..., None, :], x[..., None, :], x[..., None, :], shard=shard
        ),
    ):
        with pytest.raises(TypeError, match=r"^shard: got int, expected linrope\.distributed\.Shard or None"):
            call(x, shard=9)


def test_options_that_states_cannot_be_folded_with_are_refused(monkeypatch) -> None:
    q, k, v = randoms(1, 4, 2, 4)
    monkeypatch.setattr("linrope.distributed.attend.KNOWN", [name for name in KNOWN if name != "write"])
    linear_rope_attention(q, k, v, shard=Shard(lengths=[4]))
    with pytest.raises(
        NotImplementedError, match="write: got a call with a shard, expected one without write"
    ):
        linear_rope_attention(q, k, v, write=torch.ones(1, 4, 2), shard=Shard(lengths=[4]))


def test_calls_refuse_what_a_shard_already_has() -> None:
    q, k, v = randoms(1, 4, 2, 4)
    shard = Shard(lengths=[4])
    with pytest.raises(ValueError, match="cu_seqlens: got a tensor in a call with a shard; expected None"):
        linear_rope_attention(q, k, v, cu_seqlens=torch.tensor([0, 4]), shard=shard)
    with pytest.raises(TypeError, match=r"shard: got list, expected linrope\.distributed\.Shard"):
        linear_rope_attention(q, k, v, shard=[4])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="x: got 4 tokens, expected those of all ranks, 5"):
        Shard(lengths=[5]).take(q)
    with pytest.raises(
        ValueError, match=r"context: got a tensor with a shard, .* expected a call without shard"
    ):
        LinearRoPEAttention(8, 2)(torch.zeros(1, 4, 8), torch.zeros(1, 4, 8), shard=shard)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mixed_precision_leaves_the_sums_of_a_state_wide(dtype: torch.dtype) -> None:
    """FSDP2 takes a dataclass apart, casts each tensor, and builds a new one."""
    state = linear_rope_state(*torch.ones(2, 1, 5, 2, 4))
    for copy in (state, state.clone()):
        cast = _apply_to_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, copy)
        assert cast.kv is copy.kv
        assert cast.z is copy.z
    with pytest.raises(TypeError, match=r"state\.kv: got torch\.float16"):
        replace(state, kv=state.kv.half(), z=state.z.half())

"""Several processes with a part of each sequence find what one process with all of them finds."""

import os
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from linrope import Rotary, linear_rope_attention, linear_rope_state
from linrope.distributed import Shard
from tests.distributed import cases
from tests.distributed.processes import Processes, on_each_rank
from tests.support.oracle import randoms

DTYPES = [(torch.float64, "eager"), (torch.float32, "auto")]
in_each_precision = pytest.mark.parametrize(("dtype", "backend"), DTYPES, ids=["float64", "float32"])


@in_each_precision
@on_each_rank
def test_every_option_gives_the_numbers_of_one_process(dtype: torch.dtype, backend: str) -> None:
    for names, cuts in ((cases.ALONE, cases.LENGTHS), (cases.PACKED, cases.PACKED_LENGTHS)):
        some = cuts[dist.get_world_size()]
        for i, name in enumerate(names):
            cases.compare(name, some[i % len(some)], dtype, backend, given=i % 2 == 0)


@pytest.mark.long
@in_each_precision
@pytest.mark.parametrize("name", cases.CASES)
@on_each_rank
def test_every_option_with_every_cut(name: str, dtype: torch.dtype, backend: str) -> None:
    cuts = cases.PACKED_LENGTHS if name in cases.PACKED else cases.LENGTHS
    for lengths in cuts[dist.get_world_size()]:
        for given in (False, True):
            cases.compare(name, lengths, dtype, backend, given)


def even(n: int) -> list[int]:
    """The lengths of equal shards, of n tokens each."""
    return [n] * dist.get_world_size()


@on_each_rank
def test_the_same_number_of_ranks_gives_the_same_bits_on_all_of_them() -> None:
    q, k, v = (x.float() for x in randoms(1, sum(even(40)), 4, 8, g=2))
    found = []
    for _ in range(2):
        shard = Shard(lengths=even(40))
        parts = [shard.take(x).clone().requires_grad_() for x in (q, k, v)]
        out, state = linear_rope_attention(*parts, rotary=Rotary(8), shard=shard, return_state=True)
        out.sum().backward()
        found.append([out.detach(), state.kv.detach(), *[x.grad for x in parts]])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    everywhere = [torch.empty_like(state.kv) for _ in range(shard.size)]
    dist.all_gather(everywhere, state.kv.detach())
    assert all(torch.equal(x, state.kv) for x in everywhere)


@on_each_rank
def test_traffic_does_not_grow_with_the_sequence() -> None:
    """Collectives and bytes sent of a forward and a backward pass."""
    found = []
    for n in (128, 1024):
        shard = Shard(lengths=even(n))
        q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, n, 8, 64))
        linear_rope_attention(q, k, v, shard=shard)  # the ranks compare what they were given, once
        before = shard.channel.collectives, shard.channel.bytes_sent
        linear_rope_attention(q, k, v, rotary=None, shard=shard).sum().backward()
        found.append((shard.channel.collectives - before[0], shard.channel.bytes_sent - before[1]))
    state = 8 * 64 * (64 * 4 + 8) + 8  # kv in float32, z in float64, the position
    sent = (shard.size - 1) * (state + state - 8)  # a position has no gradient
    assert found == [(2, sent)] * 2  # one collective forward, one backward


@on_each_rank
def test_with_erase_a_rank_sends_one_state_to_the_next_and_its_gradient_back() -> None:
    found = []
    for n in (128, 256):
        shard = Shard(lengths=even(n))
        q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, n, 4, 16))
        how = {"feature_map": None, "normalize": False, "erase": torch.full((1, n, 1), 0.01), "shard": shard}
        linear_rope_attention(q, k, v, **how)  # the ranks compare what they were given, once
        before = shard.channel.bytes_sent
        linear_rope_attention(q, k, v, **how).sum().backward()
        found.append(shard.channel.bytes_sent - before)
    sends, last = 4 * 16 * 16 * 4, shard.size - 1
    position = 8 * last
    assert found == [position + sends * ((shard.rank < last) + (shard.rank > 0))] * 2


@pytest.mark.parametrize("wanted", ["q", "k", "erase"])
@on_each_rank
def test_with_erase_all_ranks_join_the_backward_pass(wanted: str) -> None:
    """Also in one that computes the forward pass anew, for one gradient alone, and with a loss of one rank only."""
    n = sum(even(6))
    q, k, v = (x.requires_grad_() for x in randoms(1, n, 2, 4))
    erase = (0.2 * torch.rand(1, n, 2, generator=torch.Generator().manual_seed(1)).double()).requires_grad_()
    tokens = {"q": q, "k": k, "v": v, "erase": erase}
    shard = Shard(lengths=even(6))
    parts = {name: shard.take(x.detach()).requires_grad_() for name, x in tokens.items()}

    def attend(q: Tensor, k: Tensor, v: Tensor, erase: Tensor, shard: Shard | None = None) -> Tensor:
        return linear_rope_attention(q, k, v, erase=erase, feature_map="unit", normalize=False, shard=shard)

    out = checkpoint(attend, *parts.values(), shard=shard, use_reentrant=False)
    (found,) = torch.autograd.grad(out.square().sum() * (shard.rank == shard.size - 1), parts[wanted])
    last = attend(**tokens)[:, -6:]
    (expected,) = torch.autograd.grad(last.square().sum(), tokens[wanted])
    torch.testing.assert_close(found, shard.take(expected), rtol=0, atol=1e-12)


@on_each_rank
def test_what_overflows_in_later_tokens_does_not_reach_earlier_ranks() -> None:
    q, k, v = (x.float() for x in randoms(1, sum(even(8)), 2, 8))
    shard = Shard(lengths=even(8))
    expected = linear_rope_attention(*[shard.take(x) for x in (q, k, v)], shard=shard)
    v[:, -1] = torch.inf
    out = linear_rope_attention(*[shard.take(x) for x in (q, k, v)], shard=shard)
    if shard.rank < shard.size - 1:
        assert torch.equal(out, expected)
    else:
        assert not out[:, -1].isfinite().any()


@on_each_rank
def test_ranks_that_take_nothing_from_others_join_the_backward_pass() -> None:
    """Each rank has a document of its own; then only the first rank has a loss."""
    lengths = even(6)
    bounds = torch.tensor([0, *accumulate(lengths)])
    q, k, v = (x.requires_grad_() for x in randoms(1, sum(even(6)), 2, 4))
    shard = Shard(lengths=lengths, cu_seqlens=bounds)
    parts = [shard.take(x.detach()).requires_grad_() for x in (q, k, v)]
    linear_rope_attention(*parts, shard=shard).square().sum().backward()
    linear_rope_attention(q, k, v, cu_seqlens=bounds).square().sum().backward()
    for x, y in zip((q, k, v), parts, strict=True):
        torch.testing.assert_close(y.grad, shard.take(x.grad), rtol=0, atol=1e-12)

    shard = Shard(lengths=lengths)
    parts = [shard.take(x.detach()).requires_grad_() for x in (q, k, v)]
    out = linear_rope_attention(*parts, shard=shard)
    (out.square().sum() * (shard.rank == 0)).backward()
    assert shard.rank == 0 or all(not x.grad.any() for x in parts)


@on_each_rank
def test_half_precision_is_within_the_numerics_contract_as_one_process_is() -> None:
    exact = randoms(1, sum(even(50)), 4, 16, g=2)
    for dtype, unit in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)):
        q, k, v = (x.to(dtype) for x in exact)
        shard = Shard(lengths=even(50))
        out = linear_rope_attention(*[shard.take(x) for x in (q, k, v)], rotary=Rotary(16), shard=shard)
        wide = [x.double() for x in (q, k, v)]
        expected = linear_rope_attention(*wide, rotary=Rotary(16), backend="reference")
        size = linear_rope_attention(*wide[:2], wide[2].abs(), backend="reference")  # of M, without signs
        assert out.dtype == dtype
        error = (out.double() - shard.take(expected)).abs()
        assert bool((error <= 4 * unit * shard.take(size)).all())


HOW: dict[str, Any] = {"rotary": Rotary(4), "decay": torch.tensor([0.9, 0.99])}


@on_each_rank
@torch.no_grad()
def test_a_prefill_by_many_processes_is_decoded_from_by_one() -> None:
    n = sum(even(10)) + 3
    q, k, v = randoms(2, n + 1, 2, 4)
    shard = Shard(lengths=[*even(10)[1:], 13])
    parts = [shard.take(x[:, :n]) for x in (q, k, v)]
    _, state = linear_rope_attention(*parts, shard=shard, return_state=True, **HOW)
    step = linear_rope_attention(*[x[:, n:] for x in (q, k, v)], state=state, **HOW)
    assert state.position.tolist() == [n, n]
    torch.testing.assert_close(step, linear_rope_attention(q, k, v, **HOW)[:, n:], rtol=0, atol=1e-13)


@on_each_rank
def test_rows_of_a_pool_are_read_and_written_by_every_rank_as_by_one_process() -> None:
    """The call writes two of three rows; the third keeps its numbers."""
    n, slots = sum(even(5)), torch.tensor([2, 0])
    q, k, v = randoms(2, n, 2, 4)
    with torch.no_grad():
        first = linear_rope_state(*randoms(3, 6, 2, 4, seed=2)[1:], **HOW)
        one, many = first.clone(), first.clone()
        expected = linear_rope_attention(q, k, v, state=one.at(slots), **HOW)
        shard = Shard(lengths=[0, *even(5)[2:], 10])
        parts = [shard.take(x) for x in (q, k, v)]
        out = linear_rope_attention(*parts, state=many.at(slots), shard=shard, **HOW)
    found = {"out": out} | many.tensors()
    torch.testing.assert_close(found, {"out": shard.take(expected)} | one.tensors(), rtol=0, atol=1e-13)
    erase = {"erase": q.new_zeros(2, shard.length, 1), "feature_map": "unit", "normalize": False}
    with pytest.raises(ValueError, match="state: got rows of a pool with z"):
        linear_rope_attention(*parts, state=many.at(slots), shard=shard, **HOW, **erase)
    shard = Shard(lengths=even(5), cu_seqlens=[0, n, n])
    with pytest.raises(NotImplementedError, match="state: got rows of a pool with packed sequences"):
        linear_rope_attention(*[shard.take(x[:1]) for x in (q, k, v)], state=many.at(slots), shard=shard)


DISAGREEMENTS = {  # what the message names on both sides
    "lengths": ("lengths=[", "3]", "4]"),
    "documents": ("cu_seqlens=[0, 2,", "cu_seqlens=[0, 3,"),
    "heads": ("= (1, m, 2, 4)", "= (1, m, 1, 4)"),
    "dtype": ("float32", "float64"),
    "options": ("arguments ['k', 'v']", "arguments ['k', 'v', 'log_decay']"),
    "units": ("log_decay per unit: False", "log_decay per unit: True"),
    "gradients": ("gradients of []", "gradients of ['k']"),
    "an error of one rank": ("ValueError: k: got 2 tokens", "expected its shard's 3"),
    "a wrong argument of one rank": ("TypeError: k, v: got", "float64"),
    "positions of one rank": ("ValueError: positions: got shape (4,)", "expected (3,)"),
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
@on_each_rank
def test_ranks_that_disagree_are_told_so_everywhere(what: str) -> None:
    """The last rank is the one that disagrees."""
    size, last = dist.get_world_size(), dist.get_rank() == dist.get_world_size() - 1
    odd = last and what
    lengths = [*[3] * (size - 1), 4 if odd == "lengths" else 3]
    bounds = [0, 3 if last else 2, 3 * size] if what == "documents" else None
    tokens = 2 if odd == "an error of one rank" else lengths[dist.get_rank()]
    dtype, heads = torch.float64 if odd == "dtype" else torch.float32, 1 if odd == "heads" else 2
    q, k, v = (torch.zeros(1, tokens, heads, 4, dtype=dtype) for _ in range(3))
    options: dict[str, Tensor] = {"log_decay": torch.zeros(1, tokens, 1)} if odd == "options" else {}
    if what == "units":
        options = {"log_decay": torch.zeros(1, tokens, 2, 4) if last else torch.zeros(1, tokens, 2)}
    options |= {"positions": torch.arange(4)} if odd == "positions of one rank" else {}
    k.requires_grad_(odd == "gradients")
    v = v.double() if odd == "a wrong argument of one rank" else v
    with pytest.raises((TypeError, ValueError)) as error:
        linear_rope_attention(q, k, v, shard=Shard(lengths=lengths, cu_seqlens=bounds), **options)
    for part in ("rank 0", f"rank {size - 1}", *DISAGREEMENTS[what]):
        assert part in str(error.value), error.value


def one_rank_dies() -> None:
    """The last rank ends between the forward and the backward pass, while the others wait for it."""
    shard = Shard(lengths=even(4))
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 4, 2, 4))
    out = linear_rope_attention(q, k, v, shard=shard)
    if shard.rank == shard.size - 1:
        os._exit(3)
    out.sum().backward()


def test_when_a_rank_dies_the_others_say_what_they_waited_for(tmp_path) -> None:
    doomed = Processes(2, tmp_path)
    with pytest.raises(pytest.fail.Exception) as error:
        doomed.run(one_rank_dies)
    doomed.close()
    assert "rank 1: ended" in str(error.value)
    assert "shard: rank 0 of 2 could not exchange with the others" in str(error.value)

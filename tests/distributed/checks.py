"""What each rank of a group asserts about shards, beside the numbers; run by the tests."""

import os
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._composable import checkpoint
from torch.distributed.checkpoint import load as load_checkpoint
from torch.distributed.checkpoint import save as save_checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from linrope import LinearRoPEAttention, Rotary, linear_rope_attention, linear_rope_state
from linrope.distributed import Shard
from linrope.models import LanguageModel, LanguageModelConfig
from linrope.models.huggingface import LinRopeCache, LinRopeConfig, LinRopeForCausalLM
from tests.distributed.comparisons import close, gradients, perturbed
from tests.oracle import randoms


def even(n: int) -> list[int]:
    size = dist.get_world_size()
    return [n // size] * size


def repeats_bit_for_bit() -> None:
    """The same number of ranks gives the same bits."""
    n = 40 * dist.get_world_size()
    q, k, v = (x.float() for x in randoms(1, n, 4, 8, g=2))
    found = []
    for _ in range(2):
        shard = Shard(lengths=even(n))
        parts = [shard.take(x).clone().requires_grad_() for x in (q, k, v)]
        out, state = linear_rope_attention(*parts, rotary=Rotary(8), shard=shard, return_state=True)
        out.sum().backward()
        found.append([out.detach(), state.kv.detach(), *[x.grad for x in parts]])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    everywhere = [torch.empty_like(state.kv) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, state.kv.detach())
    assert all(torch.equal(x, state.kv) for x in everywhere)


def traffic(lengths: list[int]) -> list[tuple[int, int]]:
    """(collectives, bytes sent) of a forward and a backward pass, for so many tokens in all."""
    found = []
    for n in lengths:
        shard = Shard(lengths=even(n))
        q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, shard.length, 8, 64))
        linear_rope_attention(q, k, v, shard=shard)  # the ranks compare what they were given, once
        before = shard.channel.collectives, shard.channel.bytes_sent
        linear_rope_attention(q, k, v, rotary=None, shard=shard).sum().backward()
        after = shard.channel.collectives, shard.channel.bytes_sent
        found.append((after[0] - before[0], after[1] - before[1]))
    return found


def overflow_stays_behind() -> None:
    """What overflows in later tokens does not reach earlier ranks."""
    n = 8 * dist.get_world_size()
    q, k, v = (x.float() for x in randoms(1, n, 2, 8))
    shard = Shard(lengths=even(n))
    expected = linear_rope_attention(*[shard.take(x) for x in (q, k, v)], shard=shard)
    v[:, -1] = torch.inf
    out = linear_rope_attention(*[shard.take(x) for x in (q, k, v)], shard=shard)
    if shard.rank < shard.size - 1:
        assert torch.equal(out, expected)
    else:
        assert not out[:, -1].isfinite().any()


def separate_documents() -> None:
    """Ranks that take nothing from others join the backward pass: one document each; a loss on the first alone."""
    lengths = even(6 * dist.get_world_size())
    bounds = [0, *accumulate(lengths)]
    q, k, v = (x.requires_grad_() for x in randoms(1, bounds[-1], 2, 4))
    shard = Shard(lengths=lengths, cu_seqlens=torch.tensor(bounds))
    parts = [shard.take(x.detach()).requires_grad_() for x in (q, k, v)]
    out = linear_rope_attention(*parts, shard=shard)
    out.square().sum().backward()
    whole = linear_rope_attention(q, k, v, cu_seqlens=torch.tensor(bounds))
    whole.square().sum().backward()
    for x, y in zip((q, k, v), parts, strict=True):
        torch.testing.assert_close(y.grad, shard.take(x.grad), rtol=0, atol=1e-12)

    shard = Shard(lengths=lengths)
    parts = [shard.take(x.detach()).requires_grad_() for x in (q, k, v)]
    out = linear_rope_attention(*parts, shard=shard)
    (out.square().sum() * (shard.rank == 0)).backward()
    if shard.rank > 0:
        assert all(not x.grad.any() for x in parts)


def half_precision() -> None:
    """Within the numerics contract, as one process is."""
    n = 50 * dist.get_world_size()
    exact = randoms(1, n, 4, 16, g=2)
    for dtype, unit in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)):
        q, k, v = (x.to(dtype) for x in exact)
        shard = Shard(lengths=even(n))
        out = linear_rope_attention(*[shard.take(x) for x in (q, k, v)], rotary=Rotary(16), shard=shard)
        wide = [x.double() for x in (q, k, v)]
        expected = linear_rope_attention(*wide, rotary=Rotary(16), backend="reference")
        size = linear_rope_attention(*wide[:2], wide[2].abs(), backend="reference")  # of M, without signs
        assert out.dtype == dtype
        error = (out.double() - shard.take(expected)).abs()
        assert bool((error <= 4 * unit * shard.take(size)).all())


def prefill_then_decode() -> None:
    """A prefill by many processes is decoded from by one."""
    n = 10 * dist.get_world_size() + 3
    how: dict[str, Any] = {"rotary": Rotary(4), "decay": torch.tensor([0.9, 0.99])}
    q, k, v = randoms(2, n + 1, 2, 4)
    lengths = [10] * (dist.get_world_size() - 1) + [13]
    shard = Shard(lengths=lengths)
    with torch.no_grad():
        parts = [shard.take(x[:, :n]) for x in (q, k, v)]
        _, state = linear_rope_attention(*parts, shard=shard, return_state=True, **how)
        step = linear_rope_attention(*[x[:, n:] for x in (q, k, v)], state=state, **how)
        whole = linear_rope_attention(q, k, v, **how)
    assert state.position.tolist() == [n, n]
    torch.testing.assert_close(step, whole[:, n:], rtol=0, atol=1e-13)


def pool_of_states() -> None:
    """Two rows of a pool are read, and written by every rank as by one process; the third stays."""
    size = dist.get_world_size()
    how: dict[str, Any] = {"rotary": Rotary(4), "decay": torch.tensor([0.9, 0.99])}
    q, k, v = randoms(2, 5 * size, 2, 4)
    slots, lengths = torch.tensor([2, 0]), [0, *[5] * (size - 2), 10]
    with torch.no_grad():
        first = linear_rope_state(*randoms(3, 6, 2, 4, seed=2)[1:], **how)
        one, many = first.clone(), first.clone()
        expected = linear_rope_attention(q, k, v, state=one.at(slots), **how)
        shard = Shard(lengths=lengths)
        parts = [shard.take(x) for x in (q, k, v)]
        out = linear_rope_attention(*parts, state=many.at(slots), shard=shard, **how)
    torch.testing.assert_close(out, shard.take(expected), rtol=0, atol=1e-13)
    for name, x in one.tensors().items():
        torch.testing.assert_close(many.tensors()[name], x, rtol=0, atol=1e-13, msg=name)
    shard = Shard(lengths=even(5 * size), cu_seqlens=[0, 5 * size, 5 * size])
    with pytest.raises(NotImplementedError, match="state: got rows of a pool with packed sequences"):
        linear_rope_attention(*[shard.take(x[:1]) for x in (q, k, v)], state=many.at(slots), shard=shard)


DISAGREEMENTS = {  # what the message names on both sides
    "lengths": ("lengths=[", "3]", "4]"),
    "documents": ("cu_seqlens=[0, 2,", "cu_seqlens=[0, 3,"),
    "heads": ("= (1, m, 2, 4)", "= (1, m, 1, 4)"),
    "dtype": ("float32", "float64"),
    "options": ("arguments ['k', 'v']", "arguments ['k', 'v', 'log_decay']"),
    "gradients": ("gradients of []", "gradients of ['k']"),
    "an error of one rank": ("ValueError: k: got 2 tokens", "expected its shard's 3"),
    "a wrong argument of one rank": ("TypeError: k, v: got", "float64"),
    "positions of one rank": ("ValueError: positions: got shape (4,)", "expected (3,)"),
}


def disagree(what: str) -> str:
    """The message that this rank gets; the last rank is the odd one."""
    size, last = dist.get_world_size(), dist.get_rank() == dist.get_world_size() - 1
    bounds, dtype, heads, odd = None, torch.float32, 2, last and what
    lengths = [*[3] * (size - 1), 4 if odd == "lengths" else 3]
    if what == "documents":
        bounds = [0, 3 if last else 2, 3 * size]
    tokens = 2 if odd == "an error of one rank" else lengths[dist.get_rank()]
    dtype, heads = torch.float64 if odd == "dtype" else dtype, 1 if odd == "heads" else heads
    q, k, v = (torch.zeros(1, tokens, heads, 4, dtype=dtype) for _ in range(3))
    options: dict[str, Tensor] = {"log_decay": torch.zeros(1, tokens, 1)} if odd == "options" else {}
    options |= {"positions": torch.arange(4)} if odd == "positions of one rank" else {}
    k.requires_grad_(odd == "gradients")
    v = v.double() if odd == "a wrong argument of one rank" else v
    try:
        linear_rope_attention(q, k, v, shard=Shard(lengths=lengths, cu_seqlens=bounds), **options)
    except (TypeError, ValueError) as error:
        return str(error)
    raise AssertionError("expected an error on every rank")


LAYERS: dict[str, dict[str, Any]] = {
    "all gates": {
        "short_conv": 4, "forget_gate": True, "gate": True, "rotary": "selective", "out_norm": True,
        "num_kv_heads": 2, "qk_norm": True,
    },
    "learned map and decay": {"feature_map": "hedgehog", "decay": "learned", "short_conv": 3},
    "bidirectional": {"causal": False, "gate": True},
}  # fmt: skip


def layers(name: str) -> None:
    """y, the last state and the gradients of x and of all weights."""
    torch.manual_seed(0)
    size = dist.get_world_size()
    layer = perturbed(LinearRoPEAttention(16, 4, dtype=torch.float64, **LAYERS[name]))
    lengths = {2: [9, 2], 4: [1, 0, 2, 8]}[size]  # the convolution looks back over several ranks
    x, weight = torch.randn(2, 2, 11, 16, dtype=torch.float64)
    key_mask = torch.rand(2, 11) < 0.7
    with torch.no_grad():  # of the packed sequences; only some go on from one
        _, before = layer(torch.randn(4, 3, 16, dtype=torch.float64), return_state=True)
    for bounds in (None, [0, 3, 3, 10, 11]):
        rows = slice(None) if bounds is None else slice(1)
        mask = key_mask if bounds is None else None
        found = []
        for shard in (None, Shard(lengths=lengths, cu_seqlens=bounds)):
            take = (lambda x: x) if shard is None else shard.take
            own = take(x[rows]).clone().requires_grad_()
            how: dict[str, Any] = {"key_mask": None if mask is None else take(mask), "shard": shard}
            if shard is None and bounds is not None:
                how["cu_seqlens"] = torch.tensor(bounds)
            y, state = layer(own, state=before if bounds else None, return_state=True, **how)
            if mask is not None:  # what the convolution makes of a hidden query is any number
                y = y.masked_fill(~take(mask)[..., None], 0)
            loss = (y * take(weight[rows])).sum()
            if bounds is None:  # the last state is on all ranks, and counts once
                loss = loss + state.kv.square().sum() / (1 if shard is None else size)
                if state.conv is not None:
                    loss = loss + state.conv.square().sum() / (1 if shard is None else size)
            layer.zero_grad()
            loss.backward()
            last = [x for x in (state.kv, state.z, state.conv) if x is not None and bounds is None]
            shared = [] if shard is None else [dist.group.WORLD]
            found.append((y, own.grad, [*last, *gradients(layer, *shared)]))
        (y, dx, others), (own_y, own_dx, own_others) = found
        shard = Shard(lengths=lengths)
        close([own_y, own_dx, *own_others], [shard.take(y), shard.take(dx), *others], 1e-12)


def language_model(packed: bool) -> None:
    """Loss and gradients of all weights, labels across the borders; then states and a generated token."""
    torch.manual_seed(0)
    config = LanguageModelConfig(
        vocab_size=20, embed_dim=16, num_layers=2, num_heads=2, short_conv=4, forget_gate=True,
        positions="rope" if packed else "sinusoidal",
    )  # fmt: skip
    model = LanguageModel(config).double()
    lengths = {2: [8, 3], 4: [5, 0, 1, 5]}[dist.get_world_size()]
    bounds = [0, 2, 9, 11] if packed else None
    tokens = torch.randint(20, (1, 11))
    alone = Shard(dist.new_subgroups(1)[0], lengths=[11], cu_seqlens=bounds)
    found = []
    for shard in (alone, Shard(lengths=lengths, cu_seqlens=bounds)):
        model.zero_grad()
        logits, states = model(shard.take(tokens), shard=shard)
        loss = shard.mean_loss(logits, shard.targets(tokens))
        loss.backward()
        shared = [] if shard is alone else [dist.group.WORLD]
        found.append((loss.detach(), gradients(model, *shared), states))
    (loss, grads, states), (own_loss, own_grads, own_states) = found
    assert alone.channel.collectives == 0
    dist.all_reduce(own_loss)
    for a, b in zip([own_loss, *own_grads], [loss, *grads], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
    if not packed:
        a, b = (model(tokens[:, :1], states)[0] for states in (states, own_states))
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def hugging_face() -> None:
    torch.manual_seed(0)
    config = LinRopeConfig(
        vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    model = LinRopeForCausalLM(config).double()
    lengths = {2: [8, 3], 4: [5, 0, 1, 5]}[dist.get_world_size()]
    shard, tokens = Shard(lengths=lengths), torch.randint(20, (2, 11))
    expected = model(tokens, labels=tokens, use_cache=False)
    cache = LinRopeCache(config)
    out = model(shard.take(tokens), labels=shard.targets(tokens), shard=shard, past_key_values=cache)
    loss = out.loss.detach().clone()
    dist.all_reduce(loss)
    # transformers' is float32
    torch.testing.assert_close(loss, expected.loss.detach().double(), rtol=0, atol=1e-6)
    torch.testing.assert_close(out.logits, shard.take(expected.logits), rtol=0, atol=1e-13)
    step = model(tokens[:, :1], past_key_values=cache).logits
    whole = model(torch.cat((tokens, tokens[:, :1]), 1), use_cache=False).logits[:, -1:]
    assert cache.get_seq_length() == 12
    torch.testing.assert_close(step, whole, rtol=0, atol=1e-13)
    out.loss.backward()


def small_model(**options: Any) -> LanguageModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "embed_dim": 16, "num_layers": 2, "num_heads": 2, "short_conv": 4}
    gates = {"forget_gate": True, "decay": "learned", "rotary": "selective"}
    return LanguageModel(LanguageModelConfig(**sizes, **gates, **options))


def two_pieces(model: Any, tokens: Tensor) -> Tensor:
    """The loss of two pieces, whose gradients go through the states between them."""
    logits, states = model(tokens[:, :6])
    assert all(x.kv.dtype == torch.float32 and x.z.dtype == torch.float64 for x in states)
    more, _ = model(tokens[:, 6:-1], states)
    logits = torch.cat((logits, more), 1).float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def data_parallel(way: str) -> None:
    """A row of the batch on each rank; the averaged gradients are those of one process with all rows."""
    rank, size = dist.get_rank(), dist.get_world_size()
    reference = small_model()
    tokens = torch.randint(20, (size, 13))
    expected = two_pieces(reference, tokens)
    expected.backward()
    model: Any = small_model()
    half = way == "FSDP in bfloat16"
    if way == "DDP":
        model = DistributedDataParallel(model)
    else:
        mesh = dist.init_device_mesh("cpu", (size,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.bfloat16)
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh, **({"mp_policy": policy} if half else {}))
    loss = two_pieces(model, tokens[rank : rank + 1])
    loss.backward()
    mean = loss.detach() / size
    dist.all_reduce(mean)
    torch.testing.assert_close(mean, expected.detach(), rtol=0, atol=2e-2 if half else 1e-6)
    for (name, p), q in zip(reference.named_parameters(), model.parameters(), strict=True):
        grad = q.grad.full_tensor() if hasattr(q.grad, "full_tensor") else q.grad
        largest = float(p.grad.abs().max())
        atol = (0.2 if half else 1e-5) * max(largest, 1e-3)
        torch.testing.assert_close(grad, p.grad, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def sharded_sequence_in_shared_weights() -> None:
    """Sequences in shards and weights in shards over the same ranks, with checkpointed activations."""
    size = dist.get_world_size()
    tokens = torch.randint(20, (1, 6 * size), generator=torch.Generator().manual_seed(2))
    shard = Shard(lengths=even(6 * size))
    found = []
    for wrapped in (False, True):
        model: Any = small_model()
        if wrapped:
            for block in model.blocks:
                checkpoint(block)
            for part in (*model.blocks, model):
                fully_shard(part, mesh=dist.init_device_mesh("cpu", (size,)))
        logits, _ = model(shard.take(tokens), shard=shard, return_states=False)
        (shard.mean_loss(logits, shard.targets(tokens)) * (size if wrapped else 1)).backward()
        found.append(gradients(model, *([] if wrapped else [dist.group.WORLD])))
    close(found[1], found[0], 1e-6)


def mesh_of_two_dimensions() -> None:
    """Rows over "dp", sequences over "cp": the whole mesh is given, and its "cp" is taken."""
    size = dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "cp"))
    q, k, v = randoms(size // 2, 10, 2, 4)
    shard = Shard(mesh, lengths=[7, 3])
    row = slice(mesh.get_local_rank("dp"), mesh.get_local_rank("dp") + 1)
    out = linear_rope_attention(*[shard.take(x)[row] for x in (q, k, v)], shard=shard)
    expected = shard.take(linear_rope_attention(q, k, v))[row]
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)


def reshards(folder: str) -> None:
    """A distributed checkpoint of half of the processes is read by all, and theirs by half of them again."""
    rank, size = dist.get_rank(), dist.get_world_size()
    few = dist.new_group(list(range(size // 2)))
    everyone = dist.group.WORLD
    for i, (writers, readers) in enumerate(((few, everyone), (everyone, few))):
        path = f"{folder}/{i}-{size}"
        if dist.get_rank(writers) >= 0:
            model = _shared(writers)
            save_checkpoint(model.state_dict(), checkpoint_id=path, process_group=writers)
        dist.barrier()
        if dist.get_rank(readers) >= 0:
            model = _shared(readers)
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
            found = model.state_dict()
            load_checkpoint(found, checkpoint_id=path, process_group=readers)
            model.load_state_dict(found)
            for p, q in zip(model.parameters(), small_model().parameters(), strict=True):
                assert torch.equal(p.full_tensor(), q), rank
        dist.barrier()


def _shared(group: Any) -> Any:
    model: Any = small_model()
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    return model


def one_rank_dies() -> None:
    """Between the forward and the backward pass; where the others wait, they are told so."""
    shard = Shard(lengths=even(4 * dist.get_world_size()))
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 4, 2, 4))
    out = linear_rope_attention(q, k, v, shard=shard)
    if shard.rank == shard.size - 1:
        os._exit(3)
    out.sum().backward()

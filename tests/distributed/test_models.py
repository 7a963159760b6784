"""The layer and the models on shards: one process's outputs, losses and gradients of all weights."""

from itertools import product
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

from linrope import LinearRoPEAttention, linear_rope_attention
from linrope.distributed import Shard
from linrope.models import LanguageModel, LanguageModelConfig
from linrope.models.huggingface import LinRopeCache, LinRopeConfig, LinRopeForCausalLM
from tests.distributed.comparisons import close, gradients, perturbed
from tests.distributed.processes import on_each_rank
from tests.support.oracle import randoms

LAYERS: dict[str, dict[str, Any]] = {
    "all gates": {
        "short_conv": 4, "forget_gate": True, "gate": True, "rotary": "selective", "out_norm": True,
        "num_kv_heads": 2, "qk_norm": True,
    },
    "learned map and decay": {"feature_map": "hedgehog", "decay": "learned", "short_conv": 3},
    "kimi delta attention": {
        "forget_gate": {"per": "feature", "rank": 3}, "erase_gate": "tied", "feature_map": "unit", "normalize": False,
        "short_conv": 3, "rotary": {"rotary_dim": 2},
    },
    "bidirectional": {"causal": False, "gate": True},
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
@on_each_rank
def test_a_layer_gives_the_numbers_of_one_process(name: str) -> None:
    """y, the last state and the gradients of x and of all weights."""
    torch.manual_seed(0)
    size = dist.get_world_size()
    layer = perturbed(LinearRoPEAttention(16, 4, dtype=torch.float64, **LAYERS[name]))
    lengths = {2: [9, 2], 4: [1, 0, 2, 8]}[size]  # the convolution looks back over several ranks
    x, weight = torch.randn(2, 2, 11, 16, dtype=torch.float64)
    key_mask = torch.rand(2, 11) < 0.7
    with (
        torch.no_grad()
    ):  # the states of four packed sequences; the calls without packing start without a state
        _, before = layer(torch.randn(4, 3, 16, dtype=torch.float64), return_state=True)
    for bounds in (None, [0, 3, 3, 10, 11]):
        rows = slice(None) if bounds is None else slice(1)
        found = []
        for shard in (None, Shard(lengths=lengths, cu_seqlens=bounds)):
            take = (lambda x: x) if shard is None else shard.take
            own = take(x[rows]).clone().requires_grad_()
            how: dict[str, Any] = {"shard": shard, "state": before if bounds else None}
            if shard is None and bounds is not None:
                how["cu_seqlens"] = torch.tensor(bounds)
            if bounds is None:
                how["key_mask"] = take(key_mask)
            y, state = layer(own, return_state=True, **how)
            if bounds is None:  # what the convolution makes of a hidden query is any number
                y = y.masked_fill(~how["key_mask"][..., None], 0)
            loss = (y * take(weight[rows])).sum()
            last = [] if bounds else [x for x in (state.sums.kv, state.sums.z, state.conv) if x is not None]
            for part in (x for x in last if x is not state.sums.z):  # they are on all ranks, and count once
                loss = loss + part.square().sum() / (1 if shard is None else size)
            layer.zero_grad()
            loss.backward()
            shared = [] if shard is None else [dist.group.WORLD]
            found.append((y, own.grad, [*last, *gradients(layer, *shared)]))
        (y, dx, others), (own_y, own_dx, own_others) = found
        shard = Shard(lengths=lengths)
        close([own_y, own_dx, *own_others], [shard.take(y), shard.take(dx), *others], 1e-12)


def lengths_of_11() -> list[int]:
    return {2: [8, 3], 4: [5, 0, 1, 5]}[dist.get_world_size()]


@pytest.mark.parametrize("packed", [False, True], ids=["one sequence", "packed"])
@on_each_rank
def test_a_language_model_has_the_loss_and_gradients_of_one_process(packed: bool) -> None:
    """Labels may lie on the next rank. The states, and a token generated from them, agree too."""
    torch.manual_seed(0)
    config = LanguageModelConfig(
        vocab_size=20, embed_dim=16, num_layers=2, num_heads=2, short_conv=4, forget_gate=True,
    )  # fmt: skip
    model = LanguageModel(config).double()
    bounds = [0, 2, 9, 11] if packed else None
    tokens = torch.randint(20, (1, 11))
    alone = Shard(dist.new_subgroups(1)[0], lengths=[11], cu_seqlens=bounds)
    found = []
    for shard in (alone, Shard(lengths=lengths_of_11(), cu_seqlens=bounds)):
        model.zero_grad()
        logits, states = model(shard.take(tokens), shard=shard)
        loss = shard.mean_loss(logits, shard.targets(tokens))
        loss.backward()
        shared = [] if shard is alone else [dist.group.WORLD]
        found.append((loss.detach(), gradients(model, *shared), states))
    (loss, grads, states), (own_loss, own_grads, own_states) = found
    assert alone.channel.collectives == 0
    dist.all_reduce(own_loss)
    torch.testing.assert_close([own_loss, *own_grads], [loss, *grads], rtol=0, atol=1e-13)
    if not packed:
        a, b = (model(tokens[:, :1], states)[0] for states in (states, own_states))
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


@on_each_rank
def test_a_transformers_model_has_the_loss_of_one_process_and_decodes_after_it() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LinRopeConfig(vocab_size=20, **sizes)
    model = LinRopeForCausalLM(config).double()
    shard, tokens = Shard(lengths=lengths_of_11()), torch.randint(20, (2, 11))
    expected = model(tokens, labels=tokens, use_cache=False)
    cache = LinRopeCache(config)
    out = model(shard.take(tokens), labels=shard.targets(tokens), shard=shard, cache=cache)
    loss = out.loss.detach().clone()
    dist.all_reduce(loss)
    # transformers' is float32
    torch.testing.assert_close(loss, expected.loss.detach().double(), rtol=0, atol=1e-6)
    step = model(tokens[:, :1], cache=cache).logits
    whole = model(torch.cat((tokens, tokens[:, :1]), 1), use_cache=False).logits[:, -1:]
    assert cache.get_seq_length() == 12
    torch.testing.assert_close((out.logits, step), (shard.take(expected.logits), whole), rtol=0, atol=1e-13)
    out.loss.backward()


def small_model() -> LanguageModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "embed_dim": 16, "num_layers": 2, "num_heads": 2, "short_conv": 4}
    gates = {"forget_gate": True, "decay": "learned", "rotary": "selective"}
    return LanguageModel(LanguageModelConfig(**sizes, **gates))


def shared_weights(model: Any, mesh: DeviceMesh, **policy: Any) -> Any:
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, **policy)
    return model


def two_pieces(model: Any, tokens: Tensor) -> Tensor:
    """The loss of two pieces, whose gradients go through the states between them."""
    logits, states = model(tokens[:, :6])
    assert all(x.sums.kv.dtype == torch.float32 and x.sums.z.dtype == torch.float64 for x in states)
    more, _ = model(tokens[:, 6:-1], states)
    logits = torch.cat((logits, more), 1).float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize("way", ["DDP", "FSDP", "FSDP in bfloat16"])
@on_each_rank
def test_data_parallel_gradients_are_those_of_one_process_with_states_in_the_arguments(way: str) -> None:
    """A row of the batch on each rank; the averaged gradients are those of one process with all rows."""
    rank, size = dist.get_rank(), dist.get_world_size()
    reference = small_model()
    tokens = torch.randint(20, (size, 13))
    expected = two_pieces(reference, tokens)
    expected.backward()
    half = way == "FSDP in bfloat16"
    if way == "DDP":
        model: Any = DistributedDataParallel(small_model())
    else:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.bfloat16)
        mesh = dist.init_device_mesh("cpu", (size,))
        model = shared_weights(small_model(), mesh, **({"mp_policy": policy} if half else {}))
    loss = two_pieces(model, tokens[rank : rank + 1])
    loss.backward()
    mean = loss.detach() / size
    dist.all_reduce(mean)
    torch.testing.assert_close(mean, expected.detach(), rtol=0, atol=2e-2 if half else 1e-6)
    for (name, p), grad in zip(reference.named_parameters(), gradients(model), strict=True):
        atol = (0.2 if half else 1e-5) * max(float(p.grad.abs().max()), 1e-3)
        torch.testing.assert_close(grad, p.grad, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@on_each_rank
def test_shards_of_sequences_and_of_weights_and_checkpointed_activations_go_together() -> None:
    size = dist.get_world_size()
    tokens = torch.randint(20, (1, 6 * size), generator=torch.Generator().manual_seed(2))
    shard = Shard(lengths=[6] * size)
    found = []
    for wrapped in (False, True):
        model: Any = small_model()
        if wrapped:
            for block in model.blocks:
                checkpoint(block)
            shared_weights(model, dist.init_device_mesh("cpu", (size,)))
        logits, _ = model(shard.take(tokens), shard=shard, return_states=False)
        (shard.mean_loss(logits, shard.targets(tokens)) * (size if wrapped else 1)).backward()
        found.append(gradients(model, *([] if wrapped else [dist.group.WORLD])))
    close(found[1], found[0], 1e-6)


@on_each_rank
def test_a_mesh_of_two_dimensions_gives_its_cp() -> None:
    """Rows or heads are split over "dp" and sequences over "cp". A Shard of the whole mesh takes its dimension "cp"."""
    size = dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "cp"))
    shard, at = Shard(mesh, lengths=[7, 3]), mesh.get_local_rank("dp")
    for name, of_heads in product((None, "erase"), (False, True)):
        inputs = dict(zip("qkv", randoms(2, 10, 2, 4), strict=True))
        how: dict[str, Any] = {"feature_map": "unit", "normalize": False}
        if name is not None:
            inputs[name] = inputs["k"].square().mean(-1) / 20
        found = []
        for own in (None, shard):
            leaves = {x: y.clone().requires_grad_() for x, y in inputs.items()}
            parts = {x: here(y, own, at, size // 2, of_heads) for x, y in leaves.items()}
            out = linear_rope_attention(**parts, **how, shard=own)
            grads = torch.autograd.grad(out.square().sum(), leaves.values())
            out = here(out, shard if own is None else None, 0, 1, of_heads)
            found.append([out, *[here(x, shard, at, size // 2, of_heads) for x in grads]])
        torch.testing.assert_close(*found, rtol=0, atol=1e-13)


def here(x: Tensor, shard: Shard | None, index: int, parts: int, of_heads: bool) -> Tensor:
    """The part of x (b, n, heads, ..) of this process: some of its rows or heads, and of its tokens if in a shard."""
    x = x.tensor_split(parts, 2 if of_heads else 0)[index]
    return x if shard is None else shard.take(x)


@on_each_rank
def test_a_checkpoint_is_read_by_more_and_by_fewer_processes(tmp_path) -> None:
    """First half of the processes write and all read; then all write and half of them read."""
    few, everyone = dist.new_group(list(range(dist.get_world_size() // 2))), dist.group.WORLD
    for i, (writers, readers) in enumerate(((few, everyone), (everyone, few))):
        path = tmp_path / str(i)
        if dist.get_rank(writers) >= 0:
            model = shared_weights(small_model(), DeviceMesh.from_group(writers, "cpu"))
            save_checkpoint(model.state_dict(), checkpoint_id=path, process_group=writers)
        dist.barrier()
        if dist.get_rank(readers) >= 0:
            model = shared_weights(small_model(), DeviceMesh.from_group(readers, "cpu"))
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
            found = model.state_dict()
            load_checkpoint(found, checkpoint_id=path, process_group=readers)
            model.load_state_dict(found)
            for p, q in zip(model.parameters(), small_model().parameters(), strict=True):
                assert torch.equal(p.full_tensor(), q)
        dist.barrier()

"""Processes with some of the heads each find what one process with all of them finds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers.distributed.configuration_utils import DistributedConfig

from linrope import LinearRoPEAttention, Rotary
from linrope.distributed import Shard
from linrope.models import LanguageModel, LanguageModelConfig
from linrope.models.huggingface import LinRopeConfig, LinRopeForCausalLM
from linrope.models.tensor_parallel import split_heads
from tests.distributed.comparisons import close, gradients, perturbed
from tests.distributed.processes import on_each_rank

LAYERS: dict[str, dict[str, Any]] = {
    "all gates": {
        "short_conv": 4, "forget_gate": True, "gate": True, "rotary": "selective", "out_norm": True,
        "qk_norm": True, "bias": True, "decay": "learned",
    },
    "learned map and theta per head": {
        "feature_map": {"name": "t2r", "num_features": 4}, "decay": "spread",
        "rotary": Rotary(4, theta=torch.tensor([[1.0, 0.1], [0.5, 0.2], [0.3, 0.03], [2.0, 0.7]])),
    },
    "steps per head beside a theta for each": {
        "rotary": {"name": "selective", "rank": 3, "base": 100.0}, "short_conv": 3, "num_heads": 4,
    },
    "kimi delta attention": {
        "forget_gate": {"per": "feature", "rank": 3}, "erase_gate": "tied", "feature_map": "unit", "normalize": False,
        "short_conv": 3, "rotary": {"rotary_dim": 2},
    },
    "bidirectional": {"causal": False, "gate": True},
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
@on_each_rank
def test_a_layer_with_shared_heads_gives_the_numbers_of_one_process(name: str) -> None:
    """The heads are split over all processes, and over two of them."""
    for cp in {1, dist.get_world_size() // 2}:
        layer(name, cp)


def layer(name: str, cp: int) -> None:
    """Compares y, the state and the gradients of x and all weights with one process's."""
    torch.manual_seed(0)
    tp = dist.get_world_size() // cp
    mesh = dist.init_device_mesh("cpu", (cp, tp), mesh_dim_names=("cp", "tp"))
    options = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 4, "dtype": torch.float64} | LAYERS[name]
    one = perturbed(LinearRoPEAttention(16, **options))
    whole = {key: x.clone() for key, x in one.state_dict().items() if isinstance(x, Tensor)}
    shard = Shard(mesh, lengths=[11] if cp == 1 else [4, 7])
    data, weight = torch.randn(2, 2, 11, 16, dtype=torch.float64)
    x, x_own = data.clone().requires_grad_(), shard.take(data).clone().requires_grad_()
    y, state = one(x, return_state=True)
    (y * weight).sum().backward()
    expected = gradients(one)

    torch.manual_seed(dist.get_rank())
    many = LinearRoPEAttention(16, **options)  # has the first rank's weights afterwards
    if mesh.get_local_rank("tp") == 0:
        many.load_state_dict(one.state_dict())
    split_heads(many, mesh["tp"])
    y_own, state_own = many(x_own, return_state=True, shard=shard)
    (y_own * shard.take(weight)).sum().backward()
    own = state.sums.kv.chunk(tp, 1)[mesh.get_local_rank("tp")]
    assert x.grad is not None
    close([y_own, x_own.grad, state_own.sums.kv], [shard.take(y), shard.take(x.grad), own], 1e-13)
    close(gradients(many, mesh.get_group("cp")), expected, 1e-13)
    gathered = get_model_state_dict(many, options=StateDictOptions(full_state_dict=True))
    assert all(torch.equal(gathered[key], x) for key, x in whole.items())
    assert f"of {tp}" in repr(many)


@on_each_rank
def test_rows_sequences_and_heads_are_shared_together() -> None:
    for arrangement in {2: [(1, 1, 2)], 4: [(1, 2, 2), (2, 1, 2)]}[dist.get_world_size()]:
        language_model(*arrangement)


def language_model(dp: int, cp: int, tp: int) -> None:
    """Loss and gradients of all weights: rows over dp with FSDP, sequences over cp, heads over tp."""
    torch.manual_seed(0)
    config = LanguageModelConfig(vocab_size=20, embed_dim=16, num_layers=2, num_heads=4, forget_gate=True)
    one = perturbed(LanguageModel(config).double())
    mesh = dist.init_device_mesh("cpu", (dp, cp, tp), mesh_dim_names=("dp", "cp", "tp"))
    tokens = torch.randint(20, (2, 12))
    rows = tokens.chunk(dp)[mesh.get_local_rank("dp")]
    alone, shard = Shard(dist.new_subgroups(1)[0], lengths=[12]), Shard(mesh, lengths=[12 // cp] * cp)
    expected = alone.mean_loss(one(tokens, shard=alone)[0], alone.targets(tokens))
    expected.backward()
    grads = gradients(one)
    one.zero_grad()
    many: Any = split_heads(one, mesh["tp"])
    if dp > 1:
        for part in (*many.blocks, many):
            fully_shard(part, mesh=mesh["dp"])
    logits, _ = many(shard.take(rows), shard=shard, return_states=False)
    loss = shard.mean_loss(logits, shard.targets(rows))
    loss.backward()
    total = loss.detach() / dp
    for group in (mesh.get_group("dp"), mesh.get_group("cp")):
        dist.all_reduce(total, group=group)
    torch.testing.assert_close(total, expected.detach(), rtol=0, atol=1e-13)
    close(gradients(many, mesh.get_group("cp")), grads, 1e-13)


class OtherRotary(Rotary):
    """A rotation with code of its own."""


SIZES: dict[str, Any] = {"embed_dim": 16, "num_layers": 1, "num_heads": 4}
REFUSED: dict[str, Callable[[], nn.Module]] = {
    r"num_kv_heads=1: expected a multiple of the \d processes": lambda: LinearRoPEAttention(16, 4, num_kv_heads=1),
    "rotary: got a Bilinear, which cannot be split by heads":
        lambda: LinearRoPEAttention(16, 4, rotary=nn.Bilinear(1, 1, 1)),
    "rotary: got a OtherRotary with a theta per head, which cannot be split":
        lambda: LinearRoPEAttention(16, 4, rotary=OtherRotary.whole_model(4, 4)),
    "hidden_dim=33: expected a multiple": lambda: LanguageModel(LanguageModelConfig(**SIZES, hidden_dim=33)),
    "attention='softmax': expected 'linear'":
        lambda: LanguageModel(LanguageModelConfig(**SIZES, attention="softmax")),
    "module: got Linear, expected LinearRoPEAttention or LanguageModel": lambda: nn.Linear(2, 2),
}  # fmt: skip


@on_each_rank
def test_what_cannot_be_shared_is_refused_with_the_reason() -> None:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for message, make in REFUSED.items():
        kind = TypeError if message.startswith("module") else ValueError
        with pytest.raises(kind, match=message):
            split_heads(make(), mesh)
    shared = split_heads(LinearRoPEAttention(16, 4), mesh)
    with pytest.raises(ValueError, match="got SplitHeads that is split already"):
        split_heads(shared, mesh)
    with pytest.raises(RuntimeError, match=r"reset_parameters: .* expected a call before split_heads"):
        shared.reset_parameters()
    layer: Any = split_heads(LinearRoPEAttention(16, 4), mesh)
    layer._readers[list(layer._readers)[-1]] = None  # calling it fails, after the other parameters
    with pytest.raises(TypeError):
        layer(torch.zeros(1, 3, 16))
    assert all(isinstance(x, DTensor) for x in layer.parameters())
    split = split_heads(LanguageModel(LanguageModelConfig(**SIZES)), mesh)
    with pytest.raises(ValueError, match=r"weights: got a DTensor for blocks\.0\..*expected whole tensors"):
        split.save("no folder is made")  # type: ignore[operator]
    assert not Path("no folder is made").exists()


@on_each_rank
def test_transformers_shares_a_model_as_it_loads_it(tmp_path) -> None:
    """transformers splits the model by its own plan. Logits, gradients, tokens and saved weights are compared."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    config = LinRopeConfig(
        vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=4, attention_bias=True, forget_gate=True, short_conv=4, decay="learned",
        feature_map="hedgehog",
    )  # fmt: skip
    one = perturbed(LinRopeForCausalLM(config).double())
    if rank == 0:
        one.save_pretrained(tmp_path)
    dist.barrier()
    how: dict[str, Any] = {"dtype": torch.float64, "distributed_config": DistributedConfig(tp_size=size)}
    many = LinRopeForCausalLM.from_pretrained(tmp_path, **how)
    tokens = torch.randint(20, (2, 7))
    logits, logits_own = (model(tokens, use_cache=False).logits for model in (one, many))
    for x in (logits, logits_own):
        x.square().sum().backward()
    close([logits_own, *gradients(many)], [logits, *gradients(one)], 1e-13)
    expected, found = (model.eval().generate(tokens, max_new_tokens=3) for model in (one, many))
    assert torch.equal(found, expected)
    many.save_pretrained(tmp_path / "again")
    dist.barrier()
    again = LinRopeForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float64).state_dict()
    assert all(torch.equal(again[key], x) for key, x in one.state_dict().items() if isinstance(x, Tensor))

"""Under torch.compile a shard gives the numbers that it gives without."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend

from linrope import LinearRoPEAttention
from linrope.distributed import Shard
from linrope.models import LanguageModel, LanguageModelConfig
from tests.distributed.comparisons import gradients, perturbed

pytestmark = pytest.mark.long

# Lengths of the two ranks' parts. The first call compiles for one length, the second for any, the third not at all.
LENGTHS = ([8, 3], [5, 6], [4, 7])


def layer() -> None:
    """y, the last state and the gradients of x and all weights; without graph breaks a shard is refused."""
    torch.manual_seed(0)
    options = {"short_conv": 4, "forget_gate": True, "gate": True, "rotary": "selective"}
    one = perturbed(LinearRoPEAttention(8, 2, dtype=torch.float64, **options))
    data = torch.randn(2, 11, 8, dtype=torch.float64)

    def run(called: nn.Module, shard: Shard) -> list[Tensor]:
        x = shard.take(data).clone().requires_grad_()
        y, state = called(x, shard=shard, return_state=True)
        one.zero_grad()
        (y.square().sum() + state.sums.kv.sum()).backward()
        return [y, state.sums.kv, state.sums.z, x.grad, *gradients(one)]

    _compare(one, run)
    with pytest.raises(Unsupported):
        torch.compile(one, backend="aot_eager", fullgraph=True)(data, shard=Shard(lengths=LENGTHS[0]))
    torch._dynamo.reset()


def language_model() -> None:
    """Loss and gradients of all weights, of packed sequences."""
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(vocab_size=20, embed_dim=8, num_layers=1, num_heads=2)).double()
    tokens = torch.randint(20, (1, 11))

    def run(called: nn.Module, shard: Shard) -> list[Tensor]:
        model.zero_grad()
        logits, _ = called(shard.take(tokens), shard=shard)
        loss = shard.mean_loss(logits, shard.targets(tokens))
        loss.backward()
        return [loss, *gradients(model)]

    _compare(model, run, cu_seqlens=[0, 2, 9, 11])


def _compare(module: nn.Module, run: Any, **packed: Any) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter)
    graphs = []
    for lengths in LENGTHS:
        expected, found = (run(called, Shard(lengths=lengths, **packed)) for called in (module, compiled))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
        graphs.append(counter.frame_count)
    assert graphs[0] > 1, "expected what is around the collectives to be compiled"
    assert graphs[2] == graphs[1], "expected no graph for each length"
    torch._dynamo.reset()


@pytest.mark.parametrize("what", [layer, language_model])
def test_compiled_calls_with_a_shard_have_equal_numbers(processes, what: Callable[[], None]) -> None:
    if processes.size > 2:
        pytest.skip("each process compiles for itself: two show what four do")
    processes.run(what)

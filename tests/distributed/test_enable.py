"""transformers' models on linrope's kernels, with rows shared out by DDP."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from linrope.backends import native
from linrope.integrations import transformers as linrope_transformers
from tests.distributed.processes import on_each_rank
from tests.support.families import model, relative, tokens

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not())),
]


@pytest.mark.parametrize("family", ["mamba2", "qwen3_5"])
@on_each_rank
def test_processes_have_the_gradients_of_one(family: str) -> None:
    net, rows = model(family).train(), tokens(4, 30)

    def gradients(module: nn.Module, ids: Tensor) -> dict[str, Tensor]:
        net.zero_grad()
        module(ids, labels=ids, use_cache=False).loss.backward()
        return {name: x.grad.clone() for name, x in net.named_parameters() if x.grad is not None}

    with linrope_transformers.enable(family):
        assert linrope_transformers.replaced(net)
        expected = gradients(net, rows)
        shared = nn.parallel.DistributedDataParallel(net)
        got = gradients(shared, rows.chunk(dist.get_world_size())[dist.get_rank()])
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(got[name], x) or relative(got[name], x) < 2e-5, name

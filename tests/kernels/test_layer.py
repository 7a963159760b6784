"""A layer whose every part is a Triton kernel, as on a GPU: against plain PyTorch in float64, and its launches."""

from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from linrope import LinearRoPEAttention
from tests.ops.cases import numbers, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]
BLOCKS: dict[str, dict[str, Any]] = {
    "default": {},
    "gated delta rule, gates per feature": {
        "feature_map": "unit",
        "normalize": False,
        "forget_gate": {"per": "feature"},
        "write_gate": "independent",
        "erase_gate": "independent",
    },
    "grouped, independent gates": {
        "num_kv_heads": 1,
        "skip": None,
        "write_gate": "independent",
        "gate": "before",
        "out_norm": "all",
    },
}


@pytest.fixture(autouse=True)
def _kernels_for_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, too, auto takes the Triton kernels, but for float64."""
    for name in ("convolution", "gates", "norm"):
        module = import_module(f"linrope.ops.{name}")

        def choose(backend: str, tensors: Any, *more: Any, of: Any = module.choose) -> Any:
            wide = any(x is not None and x.dtype == torch.float64 for x in tensors)
            return of("eager" if wide else "triton" if backend == "auto" else backend, tensors, *more)

        monkeypatch.setattr(module, "choose", choose)


def results(layer: LinearRoPEAttention, x: Tensor, **how: Any) -> list[Tensor]:
    x = x.requires_grad_()
    y = layer(x, **how)
    return [
        y.detach(),
        *torch.autograd.grad(y, (x, *layer.parameters()), numbers(*y.shape, seed=9).to(y.dtype)),
    ]


@pytest.mark.parametrize("options", BLOCKS.values(), ids=BLOCKS)
def test_the_block_is_its_definition_with_all_gradients(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    make = partial(LinearRoPEAttention.block, 32, 2, **options)
    layer, exact = make(backend="triton"), make(backend="eager", dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    x = numbers(1, 20, 32)
    for actual, expected in zip(results(layer, x), results(exact, x.double()), strict=True):
        assert relative_error(actual, expected) < 2e-5


def test_packed_sequences_and_pieces_are_the_whole() -> None:
    torch.manual_seed(0)
    layer, x = LinearRoPEAttention.block(32, 2, backend="triton"), numbers(1, 40, 32)
    with torch.no_grad():
        first, state = layer(x[:, :25], return_state=True)
        second = layer(x[:, 25:], state=state)
        packed = layer(x, cu_seqlens=torch.tensor([0, 25, 40]))
        whole, alone = layer(x), layer(x[:, 25:])
    assert relative_error(torch.cat((first, second), 1), whole.double()) < 1e-5
    assert relative_error(packed, torch.cat((first, alone), 1).double()) < 1e-5

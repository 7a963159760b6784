"""Models without zeros, the gradients of all their weights, and how near two processes' numbers have to be."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def perturbed(module: Any) -> Any:
    for weight in module.parameters():  # what starts at zero has no gradients
        weight.data += 0.1 * torch.randn_like(weight)
    return module


def gradients(module: nn.Module, *groups: dist.ProcessGroup) -> list[Tensor]:
    """Whole ones, added up over the groups."""
    found = []
    for parameter in module.parameters():
        grad = parameter.grad
        assert grad is not None
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()
        for group in groups:
            dist.all_reduce(whole, group=group)
        found.append(whole)
    return found


def close(found: Sequence[Tensor], expected: Sequence[Tensor], unit: float) -> None:
    """Equal up to so much of each tensor's largest entry, or of 1."""
    for a, b in zip(found, expected, strict=True):
        size = float(b.detach().abs().max()) if b.numel() else 0.0
        own = unit if b.dtype == torch.float64 else 1e-6  # a learned map's weights are float32
        torch.testing.assert_close(a, b, rtol=0, atol=own * max(1.0, size))

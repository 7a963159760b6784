"""The task on images, and the encoder that solves it."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.study.tasks import TEST_SEED, Batch, Task, share_right
from linrope import LinearRoPEAttention, Rotary
from linrope.layer.softmax_attention import SoftmaxAttention
from linrope.models.language_model import SwiGLU


@dataclass(frozen=True)
class Images(Task):
    """In which of eight directions a disc lies from a square, on noise; trained at 32 x 32 pixels.

    No single patch tells, nor do all patches without their positions. Measured at 32 x 32 and at 64 x 64
    pixels, with shapes of the same size.
    """

    vocab_size: int = 8  # directions
    length: int = 64  # patches
    steps: int = 150
    rows: int = 64
    test_rows: int = 1000
    patch: int = 4
    pixels: tuple[int, ...] = (32, 64)

    def make(self, rows: int, pixels: int, generator: torch.Generator) -> Batch:
        """Images (b, 3, pixels, pixels) and the direction of each (b,)."""
        # (image, shape, (y, x))
        centers = torch.randint(4, pixels - 4, (8 * rows + 200, 2, 2), generator=generator)
        down, right = (centers[:, 1] - centers[:, 0]).double().unbind(-1)
        eighths = torch.atan2(down, right) / (math.pi / 4)
        # The shapes do not touch, and the direction is not one between two.
        clear = (torch.hypot(down, right) >= 10) & ((eighths - eighths.round()).abs() < 0.35)
        centers, labels = centers[clear][:rows], (eighths[clear][:rows].round() % 8).long()
        radii = torch.randint(3, 5, (rows, 2, 1, 1), generator=generator)
        colors = torch.rand(rows, 2, 3, 1, 1, generator=generator) + 0.5
        at = torch.arange(pixels)
        y = (at[:, None] - centers[..., 0, None, None]).abs()
        x = (at - centers[..., 1, None, None]).abs()
        square, disc = torch.maximum(y, x)[:, 0] <= radii[:, 0], (y**2 + x**2)[:, 1] <= radii[:, 1] ** 2
        images = 0.1 * torch.randn(rows, 3, pixels, pixels, generator=generator)
        return images + square[:, None] * colors[:, 0] + disc[:, None] * colors[:, 1], labels

    def batch(self, seed: int, step: int) -> Batch:
        return self.make(self.rows, self.pixels[0], self.generator(seed, step))

    def measure(self, model: nn.Module) -> dict[str, Any]:
        generator = self.generator(TEST_SEED, 0)
        return {
            f"{pixels} pixels": share_right(model, self.make(self.test_rows, pixels, generator))
            for pixels in self.pixels
        }

    def floor(self) -> dict[str, float]:
        return {f"{pixels} pixels": 1 / self.vocab_size for pixels in self.pixels}

    def ceiling(self) -> dict[str, float]:
        return {f"{pixels} pixels": 1.0 for pixels in self.pixels}


def make_attention(task: Images, options: dict[str, Any]) -> nn.Module:
    """Attention in both directions, of the options of a language model's layer."""
    if options.get("attention") == "softmax":
        return SoftmaxAttention(task.dim, task.heads, causal=False)
    shared: dict[str, Any] = {"rotary": "interleaved", "out_norm": True, "gate": True, "causal": False}
    return LinearRoPEAttention(task.dim, task.heads, **(shared | options))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and inside a residual connection."""

    def __init__(self, attention: nn.Module, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(dim, eps=1e-6), attention
        self.norm2, self.feed_forward = nn.RMSNorm(dim, eps=1e-6), SwiGLU(dim, hidden_dim)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), positions=positions)
        y: Tensor = x + self.feed_forward(self.norm2(x))
        return y


class Encoder(nn.Module):
    """images (b, 3, height, width) -> logits (b, classes), by the mean over the patches."""

    def __init__(self, task: Images, options: dict[str, Any], hidden_dim: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, task.dim, task.patch, task.patch)
        self.blocks = nn.ModuleList(
            Block(make_attention(task, options), task.dim, hidden_dim) for _ in range(task.layers)
        )
        rotary = getattr(self.blocks[0].attention, "rotary", None)
        self.axial = isinstance(rotary, Rotary) and rotary.axes is not None
        self.norm, self.head = nn.RMSNorm(task.dim, eps=1e-6), nn.Linear(task.dim, task.vocab_size)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images)
        rows, columns = (torch.arange(size, device=x.device) for size in x.shape[2:])
        x = x.flatten(2).transpose(1, 2)
        order = torch.arange(x.shape[1], device=x.device)
        positions = torch.cartesian_prod(rows, columns) if self.axial else order
        for block in self.blocks:
            x = block(x, positions)
        y: Tensor = self.head(self.norm(x).mean(1))
        return y

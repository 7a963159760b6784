"""A vision encoder in one file: bidirectional linear attention with a rotation on the grid of patches.

Each image holds a square and a disc of random sizes, colors and places. The question is whether the disc lies
right of the square, below it, left of it, or above it. A patch alone cannot tell, and neither can all patches
without their places. So the same encoder without the rotation can only guess, and is right one time in four.

    python docs/examples/vision.py
"""

import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linrope import LinearRoPEAttention

SIZE, PATCH = 32, 4  # pixels
CLASSES = ("right", "below", "left", "above")
GRID = {"axes": 2, "base": 10.0}  # pairs turn by 1 .. 0.18 rad per patch


def make_images(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """images (count, 3, SIZE, SIZE) and the class of each (count,)."""
    centers = torch.randint(4, SIZE - 4, (8 * count + 100, 2, 2), generator=generator)  # (.., shape, (y, x))
    down, right = (centers[:, 1] - centers[:, 0]).unbind(-1)
    clear = torch.maximum(down.abs(), right.abs()) >= 10  # the shapes do not touch,
    clear &= (down.abs() - right.abs()).abs() >= 3  # nor do they lie on a diagonal
    centers, down, right = centers[clear][:count], down[clear][:count], right[clear][:count]
    labels = torch.where(right.abs() > down.abs(), (right < 0) * 2, (down < 0) * 2 + 1)

    radii = torch.randint(3, 5, (count, 2, 1, 1), generator=generator)
    colors = torch.rand(count, 2, 3, 1, 1, generator=generator) + 0.5
    at = torch.arange(SIZE)
    y, x = (at[:, None] - centers[..., 0, None, None]).abs(), (at - centers[..., 1, None, None]).abs()
    square = torch.maximum(y, x)[:, 0] <= radii[:, 0]
    disc = (y**2 + x**2)[:, 1] <= radii[:, 1] ** 2
    images = 0.1 * torch.randn(count, 3, SIZE, SIZE, generator=generator)
    return images + square[:, None] * colors[:, 0] + disc[:, None] * colors[:, 1], labels


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, rotary: dict | None) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attention = LinearRoPEAttention(dim, heads, causal=False, rotary=rotary, out_norm=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor, positions: Tensor | None) -> Tensor:
        x = x + self.attention(self.norm1(x), positions=positions)
        return x + self.mlp(self.norm2(x))


class Encoder(nn.Module):
    """images (b, 3, height, width) -> logits (b, classes)"""

    def __init__(self, rotary: dict | None, dim: int = 64, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, dim, PATCH, PATCH)
        self.blocks = nn.ModuleList(Block(dim, heads, rotary) for _ in range(depth))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, len(CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images)  # (b, dim, rows, columns)
        rows, columns = (torch.arange(length, device=x.device) for length in x.shape[2:])
        places = torch.cartesian_prod(rows, columns)  # (rows * columns, 2)
        x = x.flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x, None if block.attention.rotary is None else places)
        return self.head(self.norm(x).mean(1))


def train(rotary: dict | None, steps: int, batch_size: int = 64) -> Encoder:
    torch.manual_seed(0)
    model, generator = Encoder(rotary), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(steps):
        images, labels = make_images(batch_size, generator)
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: Encoder, count: int = 2000) -> float:
    images, labels = make_images(count, torch.Generator().manual_seed(2))
    return (model(images).argmax(-1) == labels).double().mean().item()


def main(steps: int = 400) -> None:
    torch.set_num_threads(1)  # the tensors are small: more threads mostly wait for each other
    for name, rotary in (("rotation on the grid", GRID), ("no rotation", None)):
        start = time.perf_counter()
        right = accuracy(train(rotary, steps))
        print(f"{name}: {right:.1%} of held-out images right, after {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()

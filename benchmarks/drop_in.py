"""Trains a small GPT with softmax attention, with linear_rope_attention in its place, and with a forget gate beside it.

    python benchmarks/drop_in.py [--steps 300] [--seeds 3]

It prints the bits per byte on held-out files of Python's standard library. docs/use_it.md quotes them.
"""

import argparse
import math
from collections.abc import Callable
from statistics import mean

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linrope import Rotary, linear_rope_attention
from linrope.layer.selective import spread
from linrope.models.training import Corpus

DIM, HEADS, LAYERS, ROW = 128, 4, 3, 256
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def softmax(q: Tensor, k: Tensor, v: Tensor, _: Tensor | None) -> Tensor:
    rotary = Rotary(DIM // HEADS)
    positions = torch.arange(q.shape[1])
    q, k, v = (x.transpose(1, 2) for x in (rotary(q, positions), rotary(k, positions), v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def linear(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None) -> Tensor:
    return linear_rope_attention(q, k, v, rotary=Rotary(DIM // HEADS), log_decay=log_decay)


class Block(nn.Module):
    def __init__(self, attend: Attend, gated: bool) -> None:
        super().__init__()
        self.attend = attend
        self.norm, self.qkv, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.gate = nn.Linear(DIM, HEADS) if gated else None
        if self.gate is not None:
            self.gate.bias.data = spread(HEADS, longest=ROW).logit().float()
        self.mlp = nn.Sequential(
            nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = self.qkv(y).unflatten(-1, (3, HEADS, -1)).unbind(2)
        log_decay = None if self.gate is None else F.logsigmoid(self.gate(y))
        x = x + self.out(self.attend(q, k, v, log_decay).flatten(2))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, attend: Attend, gated: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, DIM)
        self.blocks = nn.Sequential(*(Block(attend, gated) for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 256))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.embed(tokens)))
        return logits


MODELS: dict[str, tuple[Attend, bool]] = {
    "softmax attention": (softmax, False),
    "linear_rope_attention": (linear, False),
    "with a forget gate": (linear, True),
}


def rows(tokens: Tensor, starts: Tensor) -> Tensor:
    return tokens[starts[:, None] + torch.arange(ROW + 1)].long()


def loss(model: Model, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()) / math.log(2)


def bits(attend: Attend, gated: bool, corpus: Corpus, steps: int, seed: int) -> float:
    """The bits per byte on the held-out text after training."""
    torch.manual_seed(seed)
    model, train, held_out = Model(attend, gated), corpus.train.tokens, corpus.held_out.tokens
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        loss(model, rows(train, torch.randint(len(train) - ROW, (8,)))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    with torch.no_grad():
        starts = torch.linspace(0, len(held_out) - ROW - 1, 128, dtype=torch.float64).long()
        return mean(float(loss(model, rows(held_out, part))) for part in starts.split(16))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    corpus = Corpus.load()
    for name, (attend, gated) in MODELS.items():
        found = [bits(attend, gated, corpus, options.steps, seed) for seed in range(options.seeds)]
        print(f"{name}: {mean(found):.2f} ± {(max(found) - min(found)) / 2:.2f} bits per byte", flush=True)


if __name__ == "__main__":
    main()

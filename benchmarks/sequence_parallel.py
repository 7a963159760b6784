"""What sequences in shards cost: measured between processes, and calculated for many GPUs.

    torchrun --nproc-per-node 2 benchmarks/sequence_parallel.py    measures here, with gloo on CPUs
    python benchmarks/sequence_parallel.py                         prints the table of docs/distributed.md

Measured are the bytes that a process hands to the others, which must not grow with the sequence and must be
those of the calculation, and the time of a shard in a group over that of the same shard alone.
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from linrope import LinearRoPEAttention, linear_rope_attention
from linrope.distributed import Shard

HEADS, DIM = 8, 64  # of the measurement, and of docs/distributed.md's bytes per state


def state_bytes(heads: int, features: int, values: int) -> int:
    """kv in float32, z in float64, one position: what a rank sends for each row of a batch."""
    return heads * features * (4 * values + 8) + 8


@dataclass(frozen=True)
class Model:
    """Sizes of a language model with short convolutions of 4 taps."""

    layers: int = 32
    embed_dim: int = 4096
    heads: int = 32

    @property
    def parameters(self) -> float:
        """4 projections and the gate of attention, 3 of a SwiGLU of 8/3."""
        return self.layers * (5 + 8) * self.embed_dim**2

    @property
    def state(self) -> int:
        dim = self.embed_dim // self.heads
        return state_bytes(self.heads, dim, dim)


def calculate(model: Model, tokens: int, gpus: int, flops: float, bandwidth: float) -> dict[str, float]:
    """Of one step on one sequence over all GPUs, in bfloat16 with checkpointed blocks.

    flops and bandwidth (bytes/s) are what a GPU reaches, not what is written on it.
    """
    own = -(-tokens // gpus)
    gathered = gpus * model.state
    halo = 3 * 3 * model.embed_dim * 2 * gpus
    received = 2 * (gathered + halo) + gathered + halo  # forward, recomputed forward, backward
    return {
        "tokens per GPU": own,
        # One input per block, the blow-up inside one block (about 34 d per token), logits apart.
        "activations, GB": (model.layers + 34) * own * model.embed_dim * 2 / 1e9,
        # bfloat16 weights and gradients, float32 master weights and two moments, over all GPUs.
        "weights, GB": 16 * model.parameters / gpus / 1e9 + 2 * 2 * model.parameters / model.layers / 1e9,
        "gathered states of a block, GB": 2 * gathered / 1e9,
        "sent and received per block and step, GB": received / 1e9,
        "compute, s": 8 * model.parameters * own / flops,
        "exchange, s": model.layers * received / bandwidth,
    }


def print_calculation() -> None:
    model = Model()
    size = f"{model.parameters / 1e9:.1f} billion parameters"
    print(f"{size}, {model.state / 1e6:.2f} MB of state per layer and rank")
    for tokens in (1_000_000, 100_000_000):
        for gpus in (8, 64, 1024):
            found = calculate(model, tokens, gpus, flops=400e12, bandwidth=40e9)
            print(f"\n{tokens:,} tokens, {gpus} GPUs")
            for name, x in found.items():
                print(f"  {name:44} {x:12,.3f}" if x < 1e4 else f"  {name:44} {x:12,.0f}")


def timed(run: Callable[[], object], repeats: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) / repeats


def ratio(many: Callable[[], object], alone: Callable[[], object], rounds: int = 7) -> float:
    """The median of time in the group over time alone; the two take turns."""
    timed(many, 2), timed(alone, 2)
    return statistics.median(timed(many, 1) / timed(alone, 1) for _ in range(rounds))


def measure() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    for total in (4096, 65536):
        shard = Shard(lengths=[total // size] * size)
        q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, shard.length, HEADS, DIM))
        linear_rope_attention(q, k, v, shard=shard)  # the ranks compare what they have, with gradients
        with torch.no_grad():
            linear_rope_attention(q, k, v, shard=shard)  # and without
        before, state = shard.channel.bytes_sent, state_bytes(HEADS, DIM, DIM)
        with torch.no_grad():
            linear_rope_attention(q, k, v, shard=shard)
        forward = shard.channel.bytes_sent - before
        linear_rope_attention(q, k, v, shard=shard).sum().backward()
        both = shard.channel.bytes_sent - before - forward
        assert forward == (size - 1) * state
        assert both == (size - 1) * (2 * state - 8)

        def forward_pass(own: Shard | None, q: Tensor = q, k: Tensor = k, v: Tensor = v) -> None:
            with torch.no_grad():
                linear_rope_attention(q, k, v, shard=own)

        def both_passes(own: Shard | None, q: Tensor = q, k: Tensor = k, v: Tensor = v) -> None:
            linear_rope_attention(q, k, v, shard=own).sum().backward()

        layer = LinearRoPEAttention(HEADS * DIM, HEADS, gate=True)
        x = torch.randn(1, shard.length, HEADS * DIM, requires_grad=True)

        def layer_passes(own: Shard | None, layer: nn.Module = layer, x: Tensor = x) -> None:
            layer(x, shard=own).sum().backward()

        passes = (forward_pass, both_passes, layer_passes)
        found = [ratio(partial(f, shard), partial(f, None)) for f in passes]
        if rank == 0:
            print(
                f"{total} tokens on {size} processes: a rank sends {forward:,} bytes forward and "
                f"{both - forward:,} backward; time over the shard alone: operation forward {found[0]:.2f}, "
                f"with backward {found[1]:.2f}, layer with backward {found[2]:.2f}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    measure() if "RANK" in os.environ else print_calculation()

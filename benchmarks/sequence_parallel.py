"""The cost of sequences in shards, calculated for many GPUs.

    python benchmarks/sequence_parallel.py

``linrope bench --distributed`` measures on CPUs, and checks the bytes that a process sends.
"""

from dataclasses import dataclass

from benchmarks.bench.scaling import state_bytes


@dataclass(frozen=True)
class Model:
    """Sizes of a language model with short convolutions of 4 taps."""

    layers: int = 32
    embed_dim: int = 4096
    heads: int = 32

    @property
    def parameters(self) -> float:
        """4 projections and the gate of attention, and 3 projections of a SwiGLU of width 8/3."""
        return self.layers * (5 + 8) * self.embed_dim**2

    @property
    def state(self) -> int:
        dim = self.embed_dim // self.heads
        return state_bytes(self.heads, dim, dim)


def calculate(model: Model, tokens: int, gpus: int, flops: float, bandwidth: float) -> dict[str, float]:
    """The costs of one step on one sequence over all GPUs, in bfloat16 with checkpointed blocks.

    flops and bandwidth (bytes/s) are what a GPU reaches in practice, not its data sheet's.
    """
    local_tokens = -(-tokens // gpus)
    gathered = gpus * model.state
    halo = 3 * 3 * model.embed_dim * 2 * gpus
    received = 2 * (gathered + halo) + gathered + halo  # forward, recomputed forward, backward
    return {
        "tokens per GPU": local_tokens,
        # The input of each block, and the activations inside one block (about 34 d per token); without
        # logits.
        "activations, GB": (model.layers + 34) * local_tokens * model.embed_dim * 2 / 1e9,
        # bfloat16 weights and gradients, float32 master weights and two moments, over all GPUs.
        "weights, GB": 16 * model.parameters / gpus / 1e9 + 2 * 2 * model.parameters / model.layers / 1e9,
        "gathered states of a block, GB": 2 * gathered / 1e9,
        "sent and received per block and step, GB": received / 1e9,
        "compute, s": 8 * model.parameters * local_tokens / flops,
        "exchange, s": model.layers * received / bandwidth,
    }


def overhead(dim: int, chunk: int) -> tuple[float, float]:
    """The arithmetic of a shard in a group relative to the same shard alone: forward, and with backward.

    Per token and head, with as many features as values: a product with the state, or the update of the state,
    takes 2 dim^2 operations. A product with the keys of the chunk, half of which are visible, takes chunk
    dim. A group adds the state of the shard's keys, and in the backward pass dk and dv from the gradient of
    that state.
    """
    state, tile = 2 * dim**2, chunk * dim
    forward = 2 * state + 2 * tile  # S phi and S += psi v^T; scores, and their product with v
    # dphi, S again, its gradient, dpsi and dv; scores and their gradients, and dphi, dpsi and dv from them.
    backward = 5 * state + 5 * tile
    return 1 + state / forward, 1 + 3 * state / (forward + backward)


def print_calculation() -> None:
    for dim, chunk in ((64, 32), (128, 32), (128, 128)):
        forward, both = overhead(dim, chunk)
        print(f"heads of {dim}, chunks of {chunk}: {forward:.2f} of a shard alone, with backward {both:.2f}")
    model = Model()
    size = f"{model.parameters / 1e9:.1f} billion parameters"
    print(f"{size}, {model.state / 1e6:.2f} MB of state per layer and rank")
    for tokens in (1_000_000, 100_000_000):
        for gpus in (8, 64, 1024):
            costs = calculate(model, tokens, gpus, flops=400e12, bandwidth=40e9)
            print(f"\n{tokens:,} tokens, {gpus} GPUs")
            for name, x in costs.items():
                print(f"  {name:44} {x:12,.3f}" if x < 1e4 else f"  {name:44} {x:12,.0f}")


if __name__ == "__main__":
    print_calculation()

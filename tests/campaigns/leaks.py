"""Constant memory: many decoding steps, calls and training steps, and what the process holds after each part.

``python -m tests.campaigns.leaks --decoding 100000 --training 10000``
"""

import gc
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from linrope import Rotary, linear_rope_attention
from linrope.backends import native
from linrope.models import LanguageModel, LanguageModelConfig
from linrope.models.training import Corpus, Trainer, TrainingConfig
from tests.campaigns.command import numbers

ALLOWED = 2 * 2**20  # bytes that may come between the first part and the last: the allocator's own ways
PARTS = 10


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def decode(backend: str, *, donated: bool) -> Callable[[int], None]:
    """Steps of one stream; every thousandth starts anew."""
    q, k, v = torch.randn(3, 1, 1, 2, 16)
    gate = -torch.rand(1, 1, 2)
    rotary, state = Rotary(16), None

    @torch.no_grad()
    def steps(count: int) -> None:
        nonlocal state
        for i in range(count):
            given = None if state is None or i % 1000 == 0 else state.donate() if donated else state
            _, state = linear_rope_attention(
                q, k, v, rotary=rotary, log_decay=gate, state=given, return_state=True, backend=backend
            )

    return steps


def generate() -> Callable[[int], None]:
    """A model's steps, with gates, rotation by the data and a convolution."""
    sizes = {"vocab_size": 16, "embed_dim": 16, "num_layers": 1, "num_heads": 2, "short_conv": 3}
    config = LanguageModelConfig(**sizes, forget_gate=True, rotary="selective")
    model, token, states = LanguageModel(config).eval(), torch.zeros(1, 1, dtype=torch.int64), None

    @torch.inference_mode()
    def steps(count: int) -> None:
        nonlocal states
        for _ in range(count):
            _, states = model(token, states)

    return steps


def train(folder: Path) -> Callable[[int], None]:
    text = folder / "text.txt"
    text.write_text("To be, or not to be, that is the question. " * 50)
    config = LanguageModelConfig(embed_dim=8, num_layers=1, num_heads=2, hidden_dim=8)
    training = TrainingConfig(steps=10**9, batch_size=1, sequence_length=16, pieces=2)
    trainer = Trainer(LanguageModel(config), Corpus.load(text), training)

    def steps(count: int) -> None:
        for _ in range(count):
            trainer.train_step()

    return steps


def watch(name: str, steps: Callable[[int], None], count: int) -> int:
    """Bytes by which the process grew from the first tenth of the steps on."""
    part = max(1, count // PARTS)
    steps(part)
    first = resident()
    for _ in range(PARTS - 1):
        steps(part)
    grown = resident() - first
    print(f"{name}: {part * PARTS} steps, {grown / 2**10:+.0f} KiB", flush=True)
    assert grown <= ALLOWED, f"{name}: the process grew by {grown} bytes"
    return grown


def run(decoding: int, training: int) -> None:
    for backend in ("eager",) if native.why_not() else ("native", "eager"):
        few = decoding // (10 if backend == "eager" else 1)
        watch(f"decoding, {backend}, states given away", decode(backend, donated=True), few)
        watch(f"decoding, {backend}, new states", decode(backend, donated=False), few)
    watch("decoding, a model", generate(), decoding // 10)
    with tempfile.TemporaryDirectory() as folder:
        watch("training", train(Path(folder)), training)


if __name__ == "__main__":
    run(**numbers(__doc__, decoding=100_000, training=10_000))

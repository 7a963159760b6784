"""Requests to an Engine whose tokens a test compares."""

from dataclasses import dataclass, field
from typing import Any

from linrope.decode.engine import Engine
from linrope.decode.request import Generation

# Of a tiny model whose tokens are bytes
SIZES = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "initializer_range": 0.3,
}  # fmt: skip


@dataclass(eq=False)
class Recorded(Generation):
    """Keeps all generated tokens."""

    tokens: list[int] = field(default_factory=list)

    def take(self, token: int, ends: bool = False) -> str:
        self.tokens.append(token)
        return super().take(token, ends)


def finish(engine: Engine, generations: list[Any]) -> None:
    """Submits these, and makes steps until all have ended."""
    assert all(engine.submit(x) for x in generations)
    while engine.running or engine.waiting:
        engine.step()

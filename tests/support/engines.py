"""Requests to an Engine whose tokens a test compares."""

from dataclasses import dataclass, field
from typing import Any

from linrope.decode.engine import Engine
from linrope.decode.request import Generation


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

"""State tracking as Mamba-3 measures it (arXiv 2603.15569), on the tasks of Grazzi et al. (arXiv 2411.12537).

They ask for one answer, at the end of a row. Here a row asks wherever it has a value, so that it is many rows in one.
"""

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import nn

from benchmarks.study.tasks import TEST_SEED, Batch, Task, answers_right
from linrope.models.training.batch import NO_TARGET

PLUS, MINUS, TIMES = 5, 6, 7  # behind the digits 0 to 4
OPEN, CLOSE, EQUALS = 7, 8, 9  # brackets know no products


@dataclass(frozen=True)
class Tracking(Task):
    """The value of the tokens so far, modulo a number.

    Training rows grow from ``length`` to ``longest`` tokens, and batches keep their number of tokens.
    "scaled accuracy": 0 for guessing and 1 for a perfect solver, on the values of ``tested`` tokens.
    "beyond training": the same on the values of more than ``longest`` tokens.
    """

    modulus: int = 2
    length: int = 8
    longest: int = 160
    rows: int = 40
    steps: int = 12_000
    test_rows: int = 256
    tested: tuple[int, int] = (40, 256)

    learning_rates = (1e-3, 3e-3)

    def rate_task(self) -> Task:
        return self.shortened(Arithmetic("track-arithmetic"))

    @property
    def longest_half_life(self) -> int:
        return self.tested[1]

    def make(self, rows: int, lengths: tuple[int, int], generator: torch.Generator) -> Batch:
        """Rows as long as the second of lengths; where a row has an end of its own, at least as long as the first."""
        raise NotImplementedError

    def batch(self, seed: int, step: int) -> Batch:
        grown = min(1.0, step / (0.9 * self.steps))
        length = int(self.length * (self.longest / self.length) ** grown)
        return self.make(max(1, self.tokens // length), (3, length), self.generator(seed, step))

    def test_batch(self) -> Batch:
        return self.make(self.test_rows, self.tested, self.generator(TEST_SEED, 0))

    def measure(self, model: nn.Module) -> dict[str, Any]:
        right = answers_right(model, self.test_batch())
        tokens = {"scaled accuracy": self.tested[0], "beyond training": self.longest + 1}
        shares = {name: right[:, least - 1 :].nanmean().item() for name, least in tokens.items()}
        return {name: (self.modulus * share - 1) / (self.modulus - 1) for name, share in shares.items()}

    def floor(self) -> dict[str, float]:
        return {"scaled accuracy": 0.0, "beyond training": 0.0}

    def ceiling(self) -> dict[str, float]:
        return {"scaled accuracy": 1.0, "beyond training": 1.0}


@dataclass(frozen=True)
class Parity(Tracking):
    """After each bit the sum of all so far, modulo 2."""

    vocab_size: int = 2
    steps: int = 3000

    def make(self, rows: int, lengths: tuple[int, int], generator: torch.Generator) -> Batch:
        bits = torch.randint(2, (rows, lengths[1]), generator=generator)
        return bits, bits.cumsum(1) % 2


@dataclass(frozen=True)
class Arithmetic(Tracking):
    """Digits with +, - or * between them. After each digit the value so far, products first, modulo 5."""

    vocab_size: int = 8
    modulus: int = 5

    def make(self, rows: int, lengths: tuple[int, int], generator: torch.Generator) -> Batch:
        tokens = torch.randint(5, (rows, lengths[1]), generator=generator)
        tokens[:, 1::2] = torch.randint(PLUS, TIMES + 1, tokens[:, 1::2].shape, generator=generator)
        targets = torch.full_like(tokens, NO_TARGET)
        total, product = torch.zeros(rows, dtype=torch.int64), tokens[:, 0]
        targets[:, 0] = product
        for at in range(2, lengths[1], 2):
            sign, digit = tokens[:, at - 1], tokens[:, at]
            times = sign == TIMES
            total = torch.where(times, total, total + product)
            product = torch.where(times, product * digit, torch.where(sign == MINUS, -digit, digit)) % 5
            targets[:, at] = (total + product) % 5
        return tokens, targets


@dataclass(frozen=True)
class Brackets(Tracking):
    """An expression of nested brackets with + or - in each. After each token the value so far, modulo 5.

    A test asks at "=" alone. The rest of the row repeats it.
    """

    vocab_size: int = 10
    layers: int = 3
    steps: int = 8000
    modulus: int = 5

    def test_batch(self) -> Batch:
        inputs, targets = super().test_batch()
        return inputs, targets.masked_fill(inputs != EQUALS, NO_TARGET)

    def make(self, rows: int, lengths: tuple[int, int], generator: torch.Generator) -> Batch:
        random = Random(int(torch.randint(2**62, (), generator=generator)))
        inputs = torch.full((rows, lengths[1]), EQUALS)
        targets = torch.full_like(inputs, NO_TARGET)
        for row_inputs, row_targets in zip(inputs, targets):
            row = [
                (token, value % 5) for token, value in _expression(random.randint(*lengths) - 1, 1, 0, random)
            ]
            row.append((EQUALS, row[-1][1]))
            row_inputs[: len(row)], row_targets[: len(row)] = torch.tensor(row).T
        return inputs, targets


def _expression(length: int, sign: int, before: int, random: Random) -> list[tuple[int, int]]:
    """An expression of ``length`` tokens, each with the value so far: ``before`` and sign times the expression's."""
    if length == 1:
        digit = random.randrange(5)
        return [(digit, before + sign * digit)]
    if length == 2:
        return [(MINUS, before), *_expression(1, -sign, before, random)]
    if length < 5:
        inner = _expression(length - 2, sign, before, random)
    else:
        left = random.randrange(1, length - 3)
        inner = _expression(left, sign, before, random)
        value, operator = inner[-1][1], random.choice((PLUS, MINUS))
        right = _expression(length - left - 3, sign if operator == PLUS else -sign, value, random)
        inner += [(operator, value), *right]
    return [(OPEN, before), *inner, (CLOSE, inner[-1][1])]

"""State tracking as Mamba-3 measures it (arXiv 2603.15569), on the tasks of Grazzi et al. (arXiv 2411.12537).

They ask for one answer, at the end of a row. Here a row asks wherever it has a value, so that it is many rows in one.
"""

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.study.tasks import TEST_SEED, Batch, Task, answers_right
from linrope.models.training.batch import NO_TARGET

PLUS, MINUS, TIMES = 5, 6, 7  # behind the digits 0 to 4
OPEN, CLOSE, EQUALS = 7, 8, 9  # brackets know no products


@dataclass(frozen=True)
class Tracking(Task):
    """The value of the tokens so far, modulo a number. Rows of at most ``length`` tokens train.

    "scaled accuracy": 0 for guessing and 1 for a perfect solver, on the values of ``tested`` tokens.
    """

    modulus: int = 2
    length: int = 40
    rows: int = 8
    steps: int = 20_000
    test_rows: int = 256
    tested: tuple[int, int] = (40, 256)

    learning_rates = (1e-3, 3e-3)

    @property
    def longest_half_life(self) -> int:
        return self.tested[1]

    def make(self, rows: int, lengths: tuple[int, int], generator: torch.Generator) -> Batch:
        """Rows as long as the second of lengths; where a row has an end of its own, at least as long as the first."""
        raise NotImplementedError

    def counts(self, inputs: Tensor) -> Tensor:
        """Which answers of test rows count."""
        return torch.arange(inputs.shape[1]) >= self.tested[0] - 1

    def batch(self, seed: int, step: int) -> Batch:
        return self.make(self.rows, (3, self.length), self.generator(seed, step))

    def measure(self, model: nn.Module) -> dict[str, Any]:
        inputs, targets = self.make(self.test_rows, self.tested, self.generator(TEST_SEED, 0))
        targets = targets.masked_fill(~self.counts(inputs), NO_TARGET)
        accuracy = answers_right(model, (inputs, targets)).nanmean().item()
        return {"scaled accuracy": (self.modulus * accuracy - 1) / (self.modulus - 1)}

    def floor(self) -> dict[str, float]:
        return {"scaled accuracy": 0.0}

    def ceiling(self) -> dict[str, float]:
        return {"scaled accuracy": 1.0}


@dataclass(frozen=True)
class Parity(Tracking):
    """After each bit the sum of all so far, modulo 2."""

    vocab_size: int = 2
    steps: int = 5000

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
    """An expression of nested brackets with + or - in each, modulo 5. At "=" its value, at ")" that of the bracket.

    Only the answer at "=" counts in a test. The rest of the row repeats "=".
    """

    vocab_size: int = 10
    modulus: int = 5

    def counts(self, inputs: Tensor) -> Tensor:
        return inputs == EQUALS

    def make(self, rows: int, lengths: tuple[int, int], generator: torch.Generator) -> Batch:
        random = Random(int(torch.randint(2**62, (), generator=generator)))
        inputs = torch.full((rows, lengths[1]), EQUALS)
        targets = torch.full_like(inputs, NO_TARGET)
        for row_inputs, row_targets in zip(inputs, targets):
            tokens, answers = list[int](), dict[int, int]()
            value = _expression(random.randint(*lengths) - 1, random, tokens, answers)
            answers[len(tokens)] = value
            row_inputs[: len(tokens)] = torch.tensor(tokens)
            row_targets[list(answers)] = torch.tensor(list(answers.values()))
        return inputs, targets


def _expression(length: int, random: Random, tokens: list[int], answers: dict[int, int]) -> int:
    """Appends an expression of ``length`` tokens to tokens and its brackets' values to answers. Returns its value."""
    bracket = length > 2
    tokens += [OPEN] * bracket
    if length < 5:  # a digit, also with a sign, also in brackets
        negative, digit = length % 2 == 0, random.randrange(5)
        tokens += [MINUS] * negative + [digit]
        value = -digit if negative else digit
    else:
        left = random.randrange(1, length - 3)
        value = _expression(left, random, tokens, answers)
        sign = random.choice((PLUS, MINUS))
        tokens.append(sign)
        right = _expression(length - left - 3, random, tokens, answers)
        value += right if sign == PLUS else -right
    value %= 5
    if bracket:
        answers[len(tokens)] = value
        tokens.append(CLOSE)
    return value

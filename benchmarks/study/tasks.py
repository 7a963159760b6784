"""The interface that every task implements, and two tasks on generated tokens: recall and copying."""

from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linrope.models.training.batch import NO_TARGET

Batch = tuple[Tensor, Tensor]  # inputs (b, n); targets (b, n), NO_TARGET where nothing is asked
Self = TypeVar("Self", bound="Task")
TEST_SEED = 10**9  # no run's seed comes near it: test rows are the same for all, and never trained on


@dataclass(frozen=True)
class Task:
    """Sizes, batches that depend on (seed, step) alone, and what is measured after training."""

    name: str
    vocab_size: int = 256
    length: int = 256  # tokens of a training row
    heads: int = 4
    head_dim: int = 16
    layers: int = 2
    steps: int = 600
    rows: int = 32  # of a batch
    test_rows: int = 128

    # No field, which would be part of the settings by which runs are known
    learning_rates = (1e-3, 3e-3, 1e-2)

    @property
    def dim(self) -> int:
        return self.heads * self.head_dim

    @property
    def longest_half_life(self) -> int:
        """The longest half-life with which a decay starts."""
        return self.length

    @property
    def hidden_dim(self) -> int:
        """The width of softmax-rope's feed-forward networks. All models get as many parameters as softmax-rope has."""
        return 3 * self.dim

    @property
    def tokens(self) -> int:
        """The approximate number for one step."""
        return self.rows * self.length

    def settings(self) -> dict[str, Any]:
        return asdict(self)

    def scaled(self: Self, scale: float) -> Self:
        """scale times the steps, and about scale times the parameters; below 1 fewer test rows too."""
        head_dim = max(min(8, self.head_dim), 4 * round(self.head_dim * scale**0.5 / 4))
        test_rows = max(2, round(self.test_rows * min(1.0, scale)))
        steps = max(2, round(self.steps * scale))
        return replace(self, head_dim=head_dim, steps=steps, test_rows=test_rows)

    def rate_task(self) -> "Task":
        """The task on which the learning rates of this one are chosen."""
        return self

    def shortened(self, plain: Self) -> Self:
        """The task that this one is with more steps, at the scale of this one."""
        steps = round(self.steps * plain.steps / type(self)(self.name).steps)
        return replace(plain, head_dim=self.head_dim, steps=steps, test_rows=self.test_rows)

    def generator(self, seed: int, step: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed * 1_000_003 + step)

    def batch(self, seed: int, step: int) -> Batch:
        raise NotImplementedError

    def solved(self, model: nn.Module, step: int) -> bool:
        """Whether training may end before its last step."""
        return False

    def measure(self, model: nn.Module) -> dict[str, Any]:
        """Numbers by name, and lists of numbers, which tables leave out."""
        raise NotImplementedError

    def floor(self) -> dict[str, float]:
        """What guessing gets."""
        raise NotImplementedError

    def ceiling(self) -> dict[str, float]:
        """What a perfect solver gets."""
        raise NotImplementedError


@torch.no_grad()
def answers(model: nn.Module, inputs: Tensor, rows: int = 32) -> Tensor:
    """The likeliest tokens (b, n), on the CPU."""
    device = next(model.parameters()).device
    return torch.cat([model(part.to(device)).argmax(-1).cpu() for part in inputs.split(rows)])


def answers_right(model: nn.Module, batch: Batch) -> Tensor:
    """1.0 or 0.0 where something is asked, NaN elsewhere, (b, n) float32."""
    inputs, targets = batch
    return (answers(model, inputs) == targets).float().masked_fill(targets == NO_TARGET, torch.nan)


def share_right(model: nn.Module, batch: Batch) -> float:
    return answers_right(model, batch).nanmean().item()


@dataclass(frozen=True)
class Recall(Task):
    """MQAR (Arora et al. 2023, arXiv 2312.04927): pairs, then each key once more, which asks for its value.

        k1 v1 k2 v2 ..  0 0 k2 0 0 0 k1 ..

    Keys are of the lower half of the vocabulary, values of the upper, each at most once; a key comes again
    after a gap drawn from a power law, with the exponent of Zoology's published settings, and 0 between them.
    """

    vocab_size: int = 16
    length: int = 24
    steps: int = 500
    rows: int = 64
    trained_pairs: tuple[int, ...] = (2, 4, 6)  # one step after the other
    tested_pairs: tuple[int, ...] = (2, 4, 6)
    power: float = 0.01

    def make(self, pairs: int, rows: int, generator: torch.Generator) -> Batch:
        half, first, length = self.vocab_size // 2, 2 * pairs, max(self.length, 4 * pairs)
        keys = torch.rand(rows, half - 1, generator=generator).argsort(1)[:, :pairs] + 1
        values = torch.rand(rows, half, generator=generator).argsort(1)[:, :pairs] + half
        inputs = torch.zeros(rows, length, dtype=torch.int64)
        inputs[:, :first:2], inputs[:, 1:first:2] = keys, values
        space = (length - first) // 2
        weights = torch.arange(1, space + 1, dtype=torch.float32) ** (self.power - 1)
        at = first + 2 * torch.multinomial(weights.expand(rows, -1), pairs, generator=generator)
        targets = torch.full_like(inputs, NO_TARGET)
        return inputs.scatter(1, at, keys), targets.scatter(1, at, values)

    def batch(self, seed: int, step: int) -> Batch:
        pairs = self.trained_pairs[step % len(self.trained_pairs)]
        return self.make(pairs, self.rows, self.generator(seed, step))

    def measure(self, model: nn.Module) -> dict[str, Any]:
        generator = self.generator(TEST_SEED, 0)
        return {
            f"{pairs} pairs": share_right(model, self.make(pairs, self.test_rows, generator))
            for pairs in self.tested_pairs
        }

    def floor(self) -> dict[str, float]:
        return {f"{pairs} pairs": 2 / self.vocab_size for pairs in self.tested_pairs}

    def ceiling(self) -> dict[str, float]:
        return {f"{pairs} pairs": 1.0 for pairs in self.tested_pairs}


@dataclass(frozen=True)
class Copying(Task):
    """A string, a mark, the string again: of 8 to ``length`` symbols, measured at 1, 2 and 4 times that."""

    vocab_size: int = 17  # 16 symbols and the mark
    length: int = 20
    shortest: int = 8
    times: tuple[int, ...] = (1, 2, 4)

    @property
    def tokens(self) -> int:
        return self.rows * (self.length + self.shortest)  # twice the mean length

    def make(self, rows: int, length: int, generator: torch.Generator) -> Batch:
        text = torch.randint(self.vocab_size - 1, (rows, length), generator=generator)
        inputs = torch.cat((F.pad(text, (0, 1), value=self.vocab_size - 1), text[:, :-1]), 1)
        return inputs, F.pad(text, (length, 0), value=NO_TARGET)

    def batch(self, seed: int, step: int) -> Batch:
        generator = self.generator(seed, step)
        length = int(torch.randint(self.shortest, self.length + 1, (), generator=generator))
        return self.make(self.rows, length, generator)

    def measure(self, model: nn.Module) -> dict[str, Any]:
        generator = self.generator(TEST_SEED, 0)
        return {
            f"{t}x": share_right(model, self.make(self.test_rows, t * self.length, generator))
            for t in self.times
        }

    def floor(self) -> dict[str, float]:
        return {f"{t}x": 1 / (self.vocab_size - 1) for t in self.times}

    def ceiling(self) -> dict[str, float]:
        return {f"{t}x": 1.0 for t in self.times}


@dataclass(frozen=True)
class LongCopying(Copying):
    """copying with three times the steps, whose learning rates it takes."""

    steps: int = 1800

    def rate_task(self) -> Copying:
        return self.shortened(Copying("copying"))

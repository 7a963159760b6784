"""MAD: six tasks on made-up tokens (Poli et al. 2024, arXiv 2403.17844), in the settings of athms/mad-lab."""

from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.study.tasks import TEST_SEED, Batch, Task, answers
from linrope.models.training.batch import NO_TARGET


@dataclass(frozen=True)
class Mad(Task):
    """A training set of ``train_rows`` that is read again and again, and the mean accuracy over all symbols.

    "accuracy" is the mean over batches of 128 rows of the mean over the symbols that are right or guessed there.
    """

    vocab_size: int = 16
    length: int = 128
    heads: int = 8
    rows: int = 8
    steps: int = 4000
    train_rows: int = 12800
    test_rows: int = 1280

    learning_rates = (1e-3, 3e-3)

    def rate_task(self) -> Task:
        return self.shortened(FuzzyRecall("mad-fuzzy-recall"))

    def make(self, rows: int, generator: torch.Generator, training: bool) -> Batch:
        """Inputs and targets. A training row may ask for more than a test row."""
        raise NotImplementedError

    def batch(self, seed: int, step: int) -> Batch:
        inputs, targets = _training_set(self, seed)
        first = step * self.rows
        order = torch.cat(
            [
                torch.randperm(self.train_rows, generator=self.generator(seed, epoch))
                for epoch in range(first // self.train_rows, (first + self.rows - 1) // self.train_rows + 1)
            ]
        )
        chosen = order[first % self.train_rows :][: self.rows]
        return inputs[chosen], targets[chosen]

    def solved(self, model: nn.Module, step: int) -> bool:
        """Whether 0.999 of the answers are right, as in MAD, but on rows that serve nothing else."""
        return step % 200 == 0 and self._accuracy(model, 256, 1) >= 0.999

    def measure(self, model: nn.Module) -> dict[str, Any]:
        return {"accuracy": self._accuracy(model, self.test_rows, 0)}

    def _accuracy(self, model: nn.Module, rows: int, number: int) -> float:
        inputs, targets = self.make(rows, self.generator(TEST_SEED, number), False)
        found = []
        for given, wanted in zip(answers(model, inputs).split(128), targets.split(128)):
            asked = wanted != NO_TARGET
            found.append(_accuracy_by_symbol(given[asked], wanted[asked]))
        return sum(found) / len(found)

    def ceiling(self) -> dict[str, float]:
        return {"accuracy": 1.0}


def _accuracy_by_symbol(given: Tensor, wanted: Tensor) -> float:
    """Mean over the symbols that are wanted or given of the share of the wanted that is given."""
    size = int(max(given.max(), wanted.max())) + 1
    wanted_times = wanted.bincount(minlength=size)
    right = wanted[given == wanted].bincount(minlength=size)
    occurs = (wanted_times + given.bincount(minlength=size)) > 0
    return (right / wanted_times.clamp(min=1))[occurs].mean().item()


@lru_cache(maxsize=2)
def _training_set(task: Mad, seed: int) -> Batch:
    return task.make(task.train_rows, task.generator(seed, 10**6), True)


def _as_trained(inputs: Tensor, asked: Tensor, training: bool) -> Batch:
    """The next symbol everywhere in training, and where ``asked`` in a test."""
    targets = inputs if training else inputs.masked_fill(~asked, NO_TARGET)
    return inputs[:, :-1], targets[:, 1:]


@dataclass(frozen=True)
class InContextRecall(Mad):
    """Keys and values in turn; a key that was there before has the value of then.

    A pair is noise, two symbols of a vocabulary of their own, with probability ``noise``.
    """

    noise: float = 0.0
    noise_symbols: int = 0

    def make(self, rows: int, generator: torch.Generator, training: bool) -> Batch:
        pairs, known = self.length // 2, (self.vocab_size - self.noise_symbols) // 2
        values = torch.randint(known, 2 * known, (rows, known), generator=generator)
        keys = torch.randint(known, (rows, pairs), generator=generator)
        noisy = torch.rand(rows, pairs, generator=generator) < self.noise
        noisy[torch.arange(rows), torch.randint(pairs - 1, (rows,), generator=generator)] = False
        noisy[:, -1] = False
        shown = torch.nn.functional.one_hot(keys[:, :-1], known).masked_fill(noisy[:, :-1, None], 0)
        keys[:, -1] = torch.multinomial(shown.amax(1).float(), 1, generator=generator)[:, 0]
        again = ((keys[:, :, None] == keys[:, None]) & ~noisy[:, None]).tril(-1).any(-1) & ~noisy
        inputs = torch.stack((keys, values.gather(1, keys)), -1)
        if self.noise:
            others = torch.randint(2 * known, self.vocab_size, inputs.shape, generator=generator)
            inputs = torch.where(noisy[..., None], others, inputs)
        asked = torch.stack((torch.zeros_like(again), again), -1)
        return _as_trained(inputs.flatten(1), asked.flatten(1), training)

    def floor(self) -> dict[str, float]:
        return {"accuracy": 2 / (self.vocab_size - self.noise_symbols)}


@dataclass(frozen=True)
class FuzzyRecall(Mad):
    """The same with keys and values of one to ``longest`` symbols; a test has the longest keys only."""

    rows: int = 4
    longest: int = 3

    def make(self, rows: int, generator: torch.Generator, training: bool) -> Batch:
        random = Random(int(torch.randint(2**62, (), generator=generator)))
        made = [self._row(random, training) for _ in range(rows)]
        inputs = torch.tensor([symbols for symbols, _ in made])
        return _as_trained(inputs, torch.tensor([asked for _, asked in made]), training)

    def _row(self, random: Random, training: bool) -> tuple[list[int], list[bool]]:
        symbols = self.vocab_size - 1  # the last one fills rows up
        half, longest = symbols // 2, self.longest

        def key() -> tuple[int, ...]:
            return tuple(random.sample(range(half), random.randint(1, longest) if training else longest))

        def value() -> tuple[int, ...]:
            return tuple(random.sample(range(half, symbols), random.randint(1, longest)))

        last_key, last_value = key(), value()
        size, values = len(last_key) + len(last_value), {last_key: last_value}
        at, shown = random.randrange(self.length - 2 * size), False
        row: list[int] = []
        asked: list[bool] = []
        seen = set()
        while len(row) < self.length - size - 2 * longest:
            pair = last_key if len(row) >= at and not shown else key()
            shown = shown or pair == last_key
            found = values.setdefault(pair, ()) or value()
            values[pair] = found
            row += [*pair, *found]
            asked += [False] * len(pair) + [pair in seen] * len(found)
            seen.add(pair)
        row += [*last_key, *last_value]
        asked += [False] * len(last_key) + [True] * len(last_value)
        fill = self.length + 1 - len(row)
        return [symbols] * fill + row, [False] * fill + asked

    def floor(self) -> dict[str, float]:
        return {"accuracy": 1 / (self.vocab_size - 1 - (self.vocab_size - 1) // 2)}


@dataclass(frozen=True)
class SelectiveCopying(Mad):
    """Symbols with blanks between them, a mark, and then, over blanks, the symbols in their order."""

    length: int = 256
    rows: int = 4
    copied: int = 16

    def make(self, rows: int, generator: torch.Generator, training: bool) -> Batch:
        mark, blank = self.vocab_size - 1, self.vocab_size - 2
        text = torch.randint(blank, (rows, self.copied), generator=generator)
        # Each blank comes before one of the symbols.
        before = torch.randint(self.copied, (rows, self.length - 2 * self.copied - 1), generator=generator)
        order = torch.arange(self.copied)
        at = order + (before[:, :, None] <= order).sum(1)
        inputs = torch.full((rows, self.length), blank).scatter(1, at, text)
        inputs[:, -self.copied - 1] = mark
        targets = torch.full_like(inputs, NO_TARGET)
        targets[:, -self.copied :] = text
        return inputs, targets

    def floor(self) -> dict[str, float]:
        return {"accuracy": 1 / (self.vocab_size - 2)}


@dataclass(frozen=True)
class Compression(Mad):
    """Symbols and a mark. What the model knows at the mark must tell each of them, by its position."""

    length: int = 32
    rows: int = 32
    steps: int = 2000

    def make(self, rows: int, generator: torch.Generator, training: bool) -> Batch:
        inputs = torch.randint(self.vocab_size - 1, (rows, self.length), generator=generator)
        inputs[:, -1] = self.vocab_size - 1
        return inputs, inputs

    def floor(self) -> dict[str, float]:
        return {"accuracy": 1 / self.vocab_size}


@dataclass(frozen=True)
class Memorization(Mad):
    """Keys, each before a mark at which its value is asked for; the values are the same in all rows."""

    vocab_size: int = 256
    length: int = 32
    rows: int = 128
    steps: int = 400
    train_rows: int = 256

    def make(self, rows: int, generator: torch.Generator, training: bool) -> Batch:
        known = (self.vocab_size - 1) // 2
        values = torch.randperm(self.vocab_size - 1 - known, generator=self.generator(0, 0)) + known
        inputs = torch.full((rows, self.length), self.vocab_size - 1)
        inputs[:, ::2] = keys = torch.randint(known, (rows, self.length // 2), generator=generator)
        targets = torch.full_like(inputs, NO_TARGET)
        targets[:, 1::2] = values[keys]
        return inputs, targets

    def floor(self) -> dict[str, float]:
        return {"accuracy": 2 / self.vocab_size}


class Decoder(nn.Module):
    """MAD's network behind a model: the last token's output (b, dim) -> the logits of all tokens (b, n, vocab)."""

    def __init__(self, dim: int, length: int, vocab_size: int) -> None:
        super().__init__()
        half = dim // 2
        angles = torch.arange(length)[:, None] * 10000 ** (-torch.arange(half) / (half - 1))
        self.register_buffer("positions", torch.cat((angles.sin(), angles.cos()), 1), persistent=False)
        hidden = [nn.RMSNorm(dim), nn.Linear(dim, dim), nn.GELU()]
        self.layers = nn.Sequential(
            *hidden,
            nn.RMSNorm(dim),
            nn.Linear(dim, dim),
            nn.GELU(),
            nn.RMSNorm(dim),
            nn.Linear(dim, vocab_size),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x[:, None] + self.positions)
        return y

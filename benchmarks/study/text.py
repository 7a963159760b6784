"""The tasks on bytes of Python's standard library: language, and recall across thousands of bytes."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.study.tasks import TEST_SEED, Batch, Task, share_right
from linrope.models.training import Corpus, Text
from linrope.models.training.batch import NO_TARGET, row_starts


@lru_cache(maxsize=1)
def corpus() -> Corpus:
    return Corpus.load()


@dataclass(frozen=True)
class Language(Task):
    """The next byte. Bits per byte of held-out files, within the trained length and by position beyond it.

    Test rows of ``times`` the trained length n lie inside one file each. Each of their bytes is predicted
    twice: with all before it in the row, and with what stands before it in its window of n bytes. "bits" is
    the mean of the second. "8x - 1x" is by how much the first differs from the second on the same bytes,
    those at 4 n to 8 n of the row: under 0 where a longer context helps, over 0 where the model gets lost.
    """

    heads: int = 6
    layers: int = 4
    steps: int = 600
    rows: int = 4
    test_rows: int = 64
    times: int = 8

    def batch(self, seed: int, step: int) -> Batch:
        text = corpus().train
        starts = row_starts(text, step * self.rows, self.rows, self.length, seed)
        tokens = rows_at(text.tokens, starts, self.length)
        return tokens[:, :-1], tokens[:, 1:]

    def measure(self, model: nn.Module) -> dict[str, Any]:
        n = self.length
        rows = _inside_documents(corpus().held_out, self.test_rows, self.times * n)
        whole = bits_of(model, rows)
        windows = rows[:, :-1].reshape(-1, n), rows[:, 1:].reshape(-1, n)
        alone = bits_of(model, torch.cat((windows[0], windows[1][:, -1:]), 1)).view(whole.shape)
        found: dict[str, Any] = {"bits": alone.mean().item()}
        for t in _doublings(self.times):
            part = slice(t * n // 2, t * n)
            found[f"{t}x - 1x"] = (whole - alone)[:, part].mean().item()
        found["by position"] = whole.mean(0).view(-1, n // 8).mean(-1).tolist()
        found["by position, 1x"] = alone.mean(0).view(-1, n // 8).mean(-1).tolist()
        return found

    def floor(self) -> dict[str, float]:
        return {"bits": bits_by_frequency(corpus().train.tokens, corpus().held_out.tokens, self.vocab_size)}

    def ceiling(self) -> dict[str, float]:
        return {}  # the entropy of this text is unknown


@dataclass(frozen=True)
class EqualTime(Language):
    """language with more steps: as many of the default block as take about the CPU time of 600 of Mamba-2.

    It takes the learning rates of language.
    """

    steps: int = 950

    def rate_task(self) -> Language:
        return self.shortened(Language("language"))


@dataclass(frozen=True)
class Larger(Language):
    """language with seven times the parameters and rows of four times the length."""

    heads: int = 8
    head_dim: int = 32
    length: int = 1024
    steps: int = 300
    test_rows: int = 16


@dataclass(frozen=True)
class Doubled(Larger):
    """language-long with twice the steps. It takes the learning rates of language-long."""

    steps: int = 600

    def rate_task(self) -> Language:
        return self.shortened(Larger("language-long"))


def rows_at(tokens: Tensor, starts: Tensor, length: int) -> Tensor:
    """The rows (b, length + 1) that begin at starts (b,), int64."""
    return tokens[starts[:, None] + torch.arange(length + 1, device=tokens.device)].long()


def bits_by_frequency(train: Tensor, held_out: Tensor, vocab_size: int) -> float:
    """Bits per token of held_out for a model that knows how often each token occurs in train, and nothing else."""
    known, asked = (tokens.long().bincount(minlength=vocab_size).double() for tokens in (train, held_out))
    known = (known + 1) / (known + 1).sum()
    return -(asked / asked.sum() * known.log2()).sum().item()


def _doublings(last: int) -> list[int]:
    return [2**i for i in range(1, last.bit_length())]


def _inside_documents(text: Text, rows: int, length: int) -> Tensor:
    """At most so many rows of length + 1 tokens, spread evenly over those that lie inside one document."""
    starts = [
        start + i * length
        for start, size in zip(text.starts.tolist(), text.sizes().tolist())
        for i in range((size - 1) // length)
    ]
    chosen = torch.tensor(starts)[torch.linspace(0, len(starts) - 1, min(rows, len(starts))).long()]
    return rows_at(text.tokens, chosen, length)


@torch.no_grad()
def bits_of(model: nn.Module, rows: Tensor, tokens: int = 16_384) -> Tensor:
    """Bits of each token of rows (b, n + 1) but the first, (b, n)."""
    device = next(model.parameters()).device
    parts = []
    for part in rows.split(max(1, tokens // rows.shape[1])):
        logits = model(part[:, :-1].to(device)).float().transpose(1, 2)
        parts.append(F.cross_entropy(logits, part[:, 1:].to(device), reduction="none").cpu() / math.log(2))
    return torch.cat(parts)


@dataclass(frozen=True)
class Distant(Task):
    """Recall across text: key and value bytes, so many bytes of source code, the keys again in another order.

    Keys and values are bytes that do not occur in the text between them (its bytes from 128 on are replaced by
    127). A step reads rows of one distance, and the distances take turns. The near ones come more often: they
    teach what the far ones ask.
    """

    length: int = 4096  # the farthest distance trained at
    steps: int = 800
    rows: int = 1  # of the farthest distance
    most: int = 2048  # tokens of a step of any other
    test_rows: int = 32
    pairs: int = 4
    values: int = 8
    distances: tuple[int, ...] = (8, 32, 8, 128, 8, 32, 1024, 8, 32, 4096)
    tested: tuple[int, ...] = (256, 1024, 4096, 8192)
    first_key: int = 128
    first_value: int = 136

    def make(self, text: Text, distance: int, rows: int, generator: torch.Generator) -> Batch:
        keys = torch.rand(rows, self.first_value - self.first_key, generator=generator).argsort(1)
        keys = keys[:, : self.pairs] + self.first_key
        values = torch.randint(self.values, keys.shape, generator=generator) + self.first_value
        starts = torch.randint(len(text) - distance, (rows, 1), generator=generator)
        between = text.tokens[starts + torch.arange(distance)].long().clamp(max=self.first_key - 1)
        order = torch.rand(keys.shape, generator=generator).argsort(1)
        pairs = torch.stack((keys, values), -1).flatten(1)
        inputs = torch.cat((pairs, between, keys.gather(1, order)), 1)
        asked = values.gather(1, order)
        return inputs, F.pad(asked, (inputs.shape[1] - self.pairs, 0), value=NO_TARGET)

    def batch(self, seed: int, step: int) -> Batch:
        distance = self.distances[step % len(self.distances)]
        return self.make(corpus().train, distance, self._rows(distance), self.generator(seed, step))

    def _rows(self, distance: int) -> int:
        return max(self.rows, self.most // (distance + 3 * self.pairs))

    @property
    def tokens(self) -> int:
        return sum(self._rows(n) * (n + 3 * self.pairs) for n in self.distances) // len(self.distances)

    def measure(self, model: nn.Module) -> dict[str, Any]:
        generator = self.generator(TEST_SEED, 0)
        batches = [self.make(corpus().held_out, n, self.test_rows, generator) for n in self.tested]
        return {f"{n:,} bytes": share_right(model, batch) for n, batch in zip(self.tested, batches)}

    def floor(self) -> dict[str, float]:
        return {f"{n:,} bytes": 1 / self.values for n in self.tested}

    def ceiling(self) -> dict[str, float]:
        return {f"{n:,} bytes": 1.0 for n in self.tested}

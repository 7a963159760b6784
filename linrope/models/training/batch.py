"""The tokens of a step: rows of the text, packed so that no state crosses a document."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from linrope.models.training.corpus import Text

NO_TARGET = -100  # as in cross_entropy


@dataclass(frozen=True)
class Batch:
    """b rows of consecutive tokens; a row may hold parts of several documents."""

    tokens: Tensor  # (b, n) int64
    targets: Tensor  # (b, n) int64: the next token; NO_TARGET at the end of a document
    begins: Tensor  # (b, n) bool: whether a document begins here
    starts: Tensor  # (b,): where in the text each row starts

    @classmethod
    def read(cls, text: Text, starts: Tensor, length: int) -> "Batch":
        """Reads rows of ``length`` tokens, which begin at the tokens ``starts`` of the text."""
        indices = starts[:, None] + torch.arange(length + 1, device=starts.device)
        document = torch.searchsorted(text.starts, indices, right=True) - 1
        begins, tokens = text.starts[document] == indices, text.tokens[indices].long()
        targets = tokens[:, 1:].masked_fill(begins[:, 1:], NO_TARGET)
        return cls(tokens[:, :-1], targets, begins[:, :-1], starts)

    def to(self, device: torch.device) -> "Batch":
        moved = (x.to(device) for x in (self.tokens, self.targets, self.begins, self.starts))
        return Batch(*moved)

    def cut(self, pieces: int) -> Iterator["Batch"]:
        """Cuts the rows into pieces of about equal length, first piece first."""
        parts = (x.tensor_split(pieces, 1) for x in (self.tokens, self.targets, self.begins))
        starts = self.starts
        for tokens, targets, begins in zip(*parts, strict=True):
            yield Batch(tokens, targets, begins, starts)
            starts = starts + tokens.shape[1]

    def sequences(self) -> tuple[Tensor, Tensor]:
        """cu_seqlens (s + 1,) of the rows packed one after another, and the sequence (b, n) of each token.

        A new sequence begins with each row and with each document.
        """
        first = self.begins.clone()
        first[:, 0] = True
        sequence = (first.flatten().cumsum(0) - 1).view(first.shape)
        return F.pad(first.flatten().nonzero()[:, 0], (0, 1), value=first.numel()), sequence


def row_starts(text: Text, first: int, count: int, length: int, seed: int) -> Tensor:
    """(count,): the index of the first token of each of the rows first .. first + count - 1.

    Rows are numbered through all epochs. An epoch has every row once. Each epoch has another order and cuts the text at
    other places.
    """
    per_epoch = len(_epoch(len(text), length, seed, 0))
    return torch.stack(
        [_epoch(len(text), length, seed, i // per_epoch)[i % per_epoch] for i in range(first, first + count)]
    )


def evenly_spaced_rows(text: Text, rows: int, length: int) -> Tensor:
    """The index of the first token of each row: at most ``rows``, spread evenly over the text without overlap."""
    rows = min(rows, (len(text) - 1) // length)
    return torch.arange(rows, device="cpu") * (len(text) - 1 - length) // max(1, rows - 1)


@lru_cache(maxsize=4)
def _epoch(size: int, length: int, seed: int, epoch: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    slack = min(length, size - length)  # room for the first row's start; each row requires one token after it
    start = torch.randint(slack, (), generator=generator, device="cpu")
    return start + length * torch.randperm((size - slack) // length, generator=generator, device="cpu")

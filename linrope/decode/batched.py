"""The serving model of hybrids and of softmax attention: one call decodes sequences of different lengths."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from linrope.decode.separate import Separate, integers
from linrope.decode.with_cache import longest_text, same_logits

_FAR = 1023  # tokens: longer than the windows that models have without a layer of that kind in their caches


class Rows(Protocol):
    """How the states of a model become rows of tensors, and how it decodes from them.

    A fixed tensor has the same shape after any number of tokens: (1, ..). A growing one has a column for each token:
    (1, heads, tokens, size).
    """

    def split(self, states: Any) -> tuple[list[Tensor], list[Tensor], int]:
        """The fixed and the growing tensors of a sequence's states, and the number of its tokens."""

    def view(self, fixed: list[Tensor], growing: list[Tensor]) -> Any:
        """States of b sequences, which ``decode`` reads and overwrites.

        They lie in these tensors: the fixed ones (b, ..), the growing ones (b, heads, columns, size).
        """

    def decode(self, view: Any, tokens: Tensor, lengths: Tensor, columns: int) -> Tensor:
        """Reads a token (b, 1) of each row; returns the logits (b, vocab_size).

        lengths (b,): the column that each row's token takes. The rows then have up to ``columns`` columns.
        """


class Batch:
    """The states of sequences that are decoded together: row i of each tensor is the i-th sequence's.

    The tensors have as many rows and columns as there are sequences and as the longest one has tokens, or up to four
    times as many. Columns beyond a sequence's length are finite and hidden from it.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.slots: list[int] = []
        self.lengths: list[int] = []
        self.fixed: list[Tensor] = []
        self.growing: list[Tensor] = []
        self.view: Any = None  # made anew only after a change: linrope keeps something by its tensors

    def add(self, slot: int, fixed: list[Tensor], growing: list[Tensor], length: int) -> None:
        """Copies a sequence's tensors into the next row."""
        row = len(self.slots)
        if not self.slots:
            self.fixed, self.growing = ([x[:0] for x in xs] for xs in (fixed, growing))
        try:
            self._fit(row + 1, max([length, *self.lengths]) + 1)
        except Exception:  # no memory
            self._free_if_idle()
            raise
        for pool, x in zip(self.fixed, fixed, strict=True):
            pool[row] = x[0]
        for pool, x in zip(self.growing, growing, strict=True):
            pool[row, :, :length] = x[0, :, :length]
            pool[row, :, length:] = 0  # NaN of a sequence that has left would pass through a weight of 0
        self.slots.append(slot)
        self.lengths.append(length)
        self.view = None

    def tensors(self, slot: int) -> tuple[list[Tensor], list[Tensor], int]:
        """A copy of a sequence's fixed and growing tensors, and its length."""
        row = self.slots.index(slot)
        length = self.lengths[row]
        fixed = [x[row : row + 1].clone() for x in self.fixed]
        return fixed, [x[row : row + 1, :, :length].clone() for x in self.growing], length

    def remove(self, slot: int) -> None:
        """Removes a sequence. The last row moves into its place."""
        row, last = self.slots.index(slot), len(self.slots) - 1
        if row != last:
            for x in (*self.fixed, *self.growing):
                x[row] = x[last]
        for numbers in (self.slots, self.lengths):
            numbers[row] = numbers[last]
            numbers.pop()
        self.view = None
        self._free_if_idle()
        if self.slots:
            with suppress(Exception):  # no memory for the smaller tensors: the larger ones stay
                self._fit(len(self.slots), max(self.lengths) + 1)

    def decode(self, tokens: Tensor) -> Tensor:
        """Reads a token (b, 1) of each sequence; returns the logits (b, vocab_size)."""
        b, columns = len(self.slots), max(self.lengths) + 1
        self._fit(b, columns)
        if self.view is None:
            self.view = self.rows.view([x[:b] for x in self.fixed], [x[:b] for x in self.growing])
        lengths = torch.tensor(self.lengths, device=tokens.device)
        logits = self.rows.decode(self.view, tokens, lengths, columns)
        self.lengths = [n + 1 for n in self.lengths]
        return logits

    def _free_if_idle(self) -> None:
        if not self.slots:
            self.fixed, self.growing = [], []

    def _fit(self, rows: int, columns: int) -> None:
        """Replaces tensors that are too small, or more than four times as large as these sizes in one of them."""
        for tensors, wanted in ((self.fixed, {0: rows}), (self.growing, {0: rows, 2: columns})):
            for i, x in enumerate(tensors):
                sizes = [*x.shape]
                for axis, n in wanted.items():
                    if not n <= x.shape[axis] <= 4 * n:
                        sizes[axis] = 1 << (n - 1).bit_length()
                if sizes != [*x.shape]:
                    self.view = None  # it would keep the former tensor
                    tensors[i] = x.new_zeros(sizes)
                    common = tuple(slice(min(pair)) for pair in zip(x.shape, sizes, strict=True))
                    tensors[i][common] = x[common]


class Batched(Separate):
    """Each prompt is read by itself; a sequence that is being decoded has a row in a batch.

    A row takes the memory of the longest one in its batch. Sequences of up to 511, 4095, 32767 tokens and so on
    therefore have batches of their own.
    """

    def __init__(self, model: Any, rows: Rows) -> None:
        super().__init__(model)
        self.rows = rows
        self.batches: dict[int, Batch] = {}  # by the number of octal digits of their lengths
        self.batch_of: dict[int, Batch] = {}  # by slot

    def decode(self, slots: list[int], tokens: list[list[int]]) -> Tensor:
        logits: dict[int, Tensor] = {}
        for slot, token in zip(slots, tokens, strict=True):
            if slot not in self.batch_of and self.kept[slot] is None:  # a prompt of one token
                logits[slot] = self.read([slot], [token], [0])
            else:
                try:
                    self.place(slot)
                except Exception as error:  # no memory
                    self.fail([slot], error)
        token_of = dict(zip(slots, tokens, strict=True))
        for batch in [x for x in self.batches.values() if x.slots]:
            try:
                found = batch.decode(integers(self.model, [token_of[slot] for slot in batch.slots]))
            except Exception as error:  # the rows may be half written
                self.fail(batch.slots, error)
            else:
                logits |= dict(zip(batch.slots, found.split(1), strict=True))
        rows = [logits[slot] for slot in slots if slot not in self.failed]
        return torch.cat(rows) if rows else torch.empty(0)

    def place(self, slot: int) -> None:
        """Moves a sequence into the batch of its length."""
        before = self.batch_of.get(slot)
        if before is None:
            fixed, growing, length = self.rows.split(self.kept[slot])
        else:
            growing, length = before.growing, before.lengths[before.slots.index(slot)]
        digits = (max(length, 511).bit_length() + 2) // 3 if growing else 0
        batch = self.batches.setdefault(digits, Batch(self.rows))
        if before is None:
            batch.add(slot, fixed, growing, length)
        elif batch is not before:
            batch.add(slot, *before.tensors(slot))
            before.remove(slot)
        self.batch_of[slot], self.kept[slot] = batch, None

    def leave(self, slot: int) -> None:
        super().leave(slot)
        if batch := self.batch_of.pop(slot, None):
            batch.remove(slot)


@torch.no_grad()
def batched(model: Any, rows: Callable[[Any, Any], Rows]) -> Separate:
    """Batched if the model allows it, else Separate with the reason.

    rows: makes the rows of a model and the states of a sequence; raises ValueError if its states cannot be rows.
    """
    try:
        _, states = model(integers(model, [[0, 1, 2]]), None, logits_to_keep=1)
        made = rows(model, states)
        reason = _why_not(model, made)
    except Exception as error:  # also one of the model, which some other kind of call may raise
        reason = str(error) if isinstance(error, ValueError) else repr(error)
    return Separate(model, reason) if reason else Batched(model, made)


def _why_not(model: Any, rows: Rows) -> str | None:
    """Compares sequences that are decoded together with each of them alone.

    A third one, far longer, shows whether the model hides the columns beyond a sequence's end, and whether it measures
    distances from there.
    """
    batch, prompts, text = Batch(rows), ([3, 1, 4], [1, 5, 2, 6, 5, 3]), [5, 7]
    expected = []
    for slot, prompt in enumerate(prompts):
        _, states = model(integers(model, [prompt]), None, logits_to_keep=1)
        batch.add(slot, *rows.split(states))
        for token in text:
            logits, states = model(integers(model, [[token]]), states, logits_to_keep=1)
            expected.append(logits[0, -1])
    fixed, growing, _ = rows.split(states)
    longest = longest_text(model)
    far = _FAR if longest is None else min(_FAR, longest - len(text))
    batch.add(2, fixed, [x.new_zeros(*x.shape[:2], far, x.shape[3]) for x in growing], far)
    found = torch.stack([batch.decode(integers(model, [[token]] * 3))[:2] for token in text], 1).flatten(0, 1)
    alone = torch.stack(expected)
    if not same_logits(model, found, alone):
        return "sequences that are decoded together get other logits than alone"
    return None

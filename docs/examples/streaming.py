"""Continuous batching on a pool of states: sequences join, leave and are forked between decoding steps.

A small byte-level model learns a nursery rhyme, which takes a few seconds. Then it is served. Each block
allocates one pool of states, and a sequence is a row of each pool. A row has the same size after ten bytes as
after ten million, so there is nothing to page. The last lines assert that each sequence gets the text that it
gets alone.

    python docs/examples/streaming.py
"""

from dataclasses import dataclass
from itertools import chain

import torch
from torch.nn import functional as F

from linrope.models import LanguageModel, LanguageModelConfig, generate

RHYME = (
    "For want of a nail the shoe was lost. For want of a shoe the horse was lost. "
    "For want of a horse the rider was lost. For want of a rider the battle was lost. "
    "For want of a battle the kingdom was lost. And all for the want of a horseshoe nail. "
)


def train(steps: int) -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(
        LanguageModelConfig(
            embed_dim=64, num_layers=2, num_heads=2, forget_gate={"longest": 96}, short_conv=4
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    text = torch.tensor(list((RHYME * 3).encode()))
    for _ in range(steps):
        starts = torch.randint(len(text) - 97, (8, 1))
        windows = text[starts + torch.arange(97)]
        logits, _ = model(windows[:, :-1], return_states=False)
        F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval().requires_grad_(False)


@dataclass
class Sequence:
    text: list[int]
    given: int  # so many of its tokens are not the model's
    read: int = 0  # how many its states have seen


def to_text(tokens: list[int]) -> str:
    return bytes(tokens).decode(errors="replace")


class Server:
    """Runs sequences together, each in its own slot; slots are rows of the states."""

    def __init__(self, model: LanguageModel, slots: int) -> None:
        self.model = model
        _, self.empty = model(torch.zeros(1, 0, dtype=torch.int64))  # a state per block, of no tokens
        self.pool = [state.reorder(torch.zeros(slots, dtype=torch.int64)) for state in self.empty]
        self.free = list(range(slots))
        self.running: dict[int, Sequence] = {}

    def join(self, prompt: str) -> int:
        """Returns the slot of a new sequence, whose prompt the next step reads."""
        slot = self.free.pop()
        for state, empty in zip(self.pool, self.empty, strict=True):
            state.at(torch.tensor([slot])).write(empty)
        self.running[slot] = Sequence(list(prompt.encode()), len(prompt.encode()))
        return slot

    def fork(self, slot: int, text: str) -> int:
        """Returns the slot of a copy that continues with `text`, without reading the earlier tokens again."""
        copy, old = self.free.pop(), self.running[slot]
        for state in self.pool:
            state.at(torch.tensor([copy])).write(state.at(torch.tensor([slot])).rows())
        tokens = [*old.text, *text.encode()]
        self.running[copy] = Sequence(tokens, len(tokens), old.read)
        return copy

    def leave(self, slot: int) -> Sequence:
        self.free.append(slot)
        return self.running.pop(slot)

    def step(self) -> None:
        """Reads the new bytes of all sequences in one call, and appends to each its likeliest next byte."""
        slots, sequences = torch.tensor(list(self.running)), list(self.running.values())
        new = [sequence.text[sequence.read :] for sequence in sequences]
        ends = torch.tensor([len(tokens) for tokens in new]).cumsum(0)
        rows = [state.at(slots) for state in self.pool]  # read and written in place
        if len(new) == ends[-1]:  # one token of each, in rows
            logits, _ = self.model(torch.tensor(new), rows, return_states=False)
            last = logits[:, -1]
        else:  # prompts of any lengths and single next tokens, packed one after another
            tokens = torch.tensor([list(chain(*new))])
            options = {"cu_seqlens": F.pad(ends, (1, 0)), "logits_to_keep": ends - 1}
            logits, _ = self.model(tokens, rows, return_states=False, **options)
            last = logits[0]
        for sequence, token in zip(sequences, last.argmax(-1).tolist(), strict=True):
            sequence.read = len(sequence.text)
            sequence.text.append(token)


def alone(model: LanguageModel, sequence: Sequence) -> list[int]:
    """The text that a sequence gets if it runs alone."""
    given = sequence.text[: sequence.given]
    tokens = generate(model, torch.tensor([given]), len(sequence.text) - len(given), temperature=0)
    return given + [int(token) for token in tokens]


def main(steps: int = 150) -> None:
    torch.set_num_threads(1)  # the tensors are small: more threads mostly wait for each other
    model = train(steps)
    server, done = Server(model, slots=4), []
    first, second = server.join("For want of a nail"), server.join("And all for")
    for step in range(60):
        if step == 10:
            server.join("the battle was lost. For")
        if step == 20:
            server.fork(first, "Or a shoe")
        if step == 40:
            done.append(server.leave(second))
            server.join("For want of a r")  # in the freed slot
        server.step()
    done += [server.leave(slot) for slot in list(server.running)]
    for sequence in done:
        assert sequence.text == alone(model, sequence)
        given, made = sequence.text[: sequence.given], sequence.text[sequence.given :]
        print(f"{to_text(given)!r}\n    {to_text(made)!r}")
    print(f"{len(done)} sequences in {len(server.free)} slots, each with the bytes that it has alone")


if __name__ == "__main__":
    main()

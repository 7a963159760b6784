"""Batched streaming generation, with states that are joined, saved, restored, forked and reordered.

A small byte-level model learns a nursery rhyme, which takes some seconds. Then it is served. All that a
sequence leaves behind is one state per block, of the same size after ten bytes as after ten million.

    python docs/examples/streaming.py
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from linrope import LinearAttentionState
from linrope.models import LanguageModel, LanguageModelConfig

RHYME = (
    "For want of a nail the shoe was lost. For want of a shoe the horse was lost. "
    "For want of a horse the rider was lost. For want of a rider the battle was lost. "
    "For want of a battle the kingdom was lost. And all for the want of a horseshoe nail. "
)


def to_tokens(texts: list[str]) -> Tensor:
    return torch.tensor([list(text.encode()) for text in texts])


def to_text(tokens: Tensor) -> str:
    return bytes(tokens.tolist()).decode(errors="replace")


def train(steps: int) -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(embed_dim=64, num_layers=2, num_heads=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    text = to_tokens([RHYME * 3])[0]
    for _ in range(steps):
        starts = torch.randint(len(text) - 97, (8, 1))
        windows = text[starts + torch.arange(97)]
        logits, _ = model(windows[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval().requires_grad_(False)


@dataclass
class Batch:
    """Sequences that run together: bytes still to be read, and the states after those before."""

    model: LanguageModel
    tokens: Tensor  # (b, n)
    states: list[LinearAttentionState]  # one per block

    @classmethod
    def begin(cls, model: LanguageModel, prompts: list[str]) -> "Batch":
        """Prompts of any lengths, each read alone."""
        batches = []
        for prompt in prompts:
            tokens = to_tokens([prompt])
            batches.append(cls(model, tokens[:, -1:], model(tokens[:, :-1])[1]))
        return cls.join(batches)

    @classmethod
    def join(cls, batches: list["Batch"]) -> "Batch":
        """One batch, each sequence at its own position: new ones may join those that run."""
        states = []
        for block in zip(*(batch.states for batch in batches)):
            kv, z, position = (torch.cat([getattr(s, x) for s in block]) for x in ("kv", "z", "position"))
            states.append(LinearAttentionState(kv, z, position, block[0].identity))
        return cls(batches[0].model, torch.cat([batch.tokens for batch in batches]), states)

    def read(self) -> Tensor:
        """Logits (b, vocab) of the next bytes."""
        logits, self.states = self.model(self.tokens, self.states)
        return logits[:, -1]

    def stream(self, count: int) -> Iterator[Tensor]:
        """Yields the likeliest next bytes (b,), as soon as they are there."""
        for _ in range(count):
            self.tokens = self.read().argmax(-1, keepdim=True)
            yield self.tokens[:, 0]

    def pick(self, index: Tensor) -> "Batch":
        """The sequences of that index (b',), copied: it repeats, drops and reorders them."""
        return Batch(self.model, self.tokens[index], [state.reorder(index) for state in self.states])

    def save(self, folder: Path) -> None:
        save_file({"tokens": self.tokens}, folder / "tokens.safetensors")
        for i, state in enumerate(self.states):
            state.save(folder / f"block_{i}.safetensors")

    @classmethod
    def load(cls, model: LanguageModel, folder: Path) -> "Batch":
        paths = [folder / f"block_{i}.safetensors" for i in range(len(model.blocks))]
        tokens = load_file(folder / "tokens.safetensors")["tokens"]
        return cls(model, tokens, [LinearAttentionState.load(path) for path in paths])


def fork(batch: Batch, sequence: int, texts: list[str]) -> Batch:
    """That sequence goes on in several ways, with one of the texts, of equal lengths, in each."""
    forks = batch.pick(torch.full((len(texts),), sequence))
    forks.tokens = torch.cat((forks.tokens, to_tokens(texts)), 1)
    return forks


def search(beams: Batch, width: int, length: int) -> tuple[Tensor, Tensor]:
    """From a batch of one, used up: the continuations (width, length) and their log-probabilities."""
    scores, found = torch.zeros(1), torch.zeros(1, 0, dtype=torch.int64)
    for _ in range(length):
        ahead = scores[:, None] + beams.read().log_softmax(-1)  # (beams, vocab)
        scores, best = ahead.flatten().topk(width)
        beam, token = best // ahead.shape[1], best % ahead.shape[1]
        beams = beams.pick(beam)
        beams.tokens = token[:, None]
        found = torch.cat((found[beam], beams.tokens), 1)
    return found, scores


def main(steps: int = 150) -> None:
    torch.set_num_threads(1)  # the tensors are small: more threads mostly wait for each other
    model = train(steps)

    print("A batch of three, byte by byte; the first one:")
    batch = Batch.begin(model, ["For want of a nail", "And all for", "the battle was lost. For"])
    for tokens in batch.stream(20):
        print(to_text(tokens[:1]), end="", flush=True)
    print(f"\nPositions: {batch.states[0].position.tolist()}")

    with tempfile.TemporaryDirectory() as folder:
        batch.save(Path(folder))
        restored = Batch.load(model, Path(folder))
    here, there = (torch.stack(list(x.stream(30)), 1) for x in (batch, restored))
    print(f"\nSaved and restored, it goes on with the same bytes: {torch.equal(here, there)}")
    print("\n".join(map(to_text, there)))

    print("\nOne sequence, forked:")
    forks = fork(Batch.begin(model, ["For want of a "]), 0, ["shoe", "nail"])
    print("\n".join(map(to_text, torch.stack(list(forks.stream(24)), 1))))

    print("\nBeams, with their log-probabilities:")
    for tokens, score in zip(*search(Batch.begin(model, ["the "]), width=3, length=20)):
        print(f"{score:6.2f}  {to_text(tokens)}")


if __name__ == "__main__":
    main()

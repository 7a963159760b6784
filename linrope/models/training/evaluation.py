"""Bits per byte by position: does a model use long contexts, and does it extrapolate?"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linrope.models.training.corpus import Text
from linrope.models.training.progress import OnPiece, piece_counter


@torch.no_grad()
def bits_by_position(
    model: nn.Module,
    text: Text,
    length: int,
    *,
    sequences: int = 64,
    batch_size: int = 8,
    piece: int = 512,
    on_piece: OnPiece | None = None,
) -> list[dict[str, float]]:
    """Bits per byte of tokens at positions 0 .. length - 1, in bins that grow by a factor of sqrt(2).

    All bins come from the same sequences, each from inside one document. The model reads them in pieces, each
    piece from the state of the one before. With linear attention the memory does not depend on the length.

    Args:
        model: the model to measure: a LanguageModel, or another module that maps tokens (b, n) and states to
            logits and new states.
        text: the text to read.
        length: the length of a sequence, in tokens.
        sequences: the largest number of sequences; they are spread evenly over the text.
        batch_size: the number of sequences in a batch.
        piece: the number of tokens in a piece.
        on_piece: called with the number of pieces read and the number of all, before the first piece and after each.

    Returns:
        For each bin: start, end, bits_per_byte, sequences (their number), and error, the standard error of the
            mean over the sequences (0 for a single sequence).

    Raises:
        ValueError: no document is longer than length.

    >>> from linrope.models import LanguageModel, LanguageModelConfig
    >>> from linrope.models.training import Corpus, bits_by_position
    >>> model = LanguageModel(LanguageModelConfig(embed_dim=32, num_layers=1, num_heads=2))
    >>> rows = bits_by_position(model, Corpus.from_texts(["to be or not", "to be"]).train, 4)
    >>> [(row["start"], row["end"]) for row in rows]
    [(0, 1), (1, 2), (2, 3), (3, 4)]
    """
    starts = _starts(text, length)
    if len(starts) > sequences:
        starts = starts[torch.linspace(0, len(starts) - 1, sequences, device="cpu").round().long()]
    edges = torch.tensor(sorted({0, length, *(round(2 ** (i / 2)) for i in range(64))}), device="cpu")
    edges = edges[edges <= length]
    parts = starts.split(batch_size)
    count_piece = piece_counter(on_piece, len(parts) * -(-length // piece))
    count_piece()
    sums = torch.cat([_sums(model, text, part, edges, piece, count_piece) for part in parts])
    bits = sums / edges.diff() / math.log(2) / text.bytes_per_token
    error = bits.std(0) / len(bits) ** 0.5 if len(bits) > 1 else torch.zeros_like(bits[0])
    columns = (edges[:-1], edges[1:], bits.mean(0), error)
    names = ("start", "end", "bits_per_byte", "error")
    return [
        {**dict(zip(names, row, strict=True)), "sequences": len(bits)}
        for row in zip(*(c.tolist() for c in columns), strict=True)
    ]


def _starts(text: Text, length: int) -> Tensor:
    """The index of the first token of each row: all adjacent rows of length + 1 tokens inside one document."""
    if not 1 <= length < text.longest:
        raise ValueError(
            f"length={length}: expected at least 1, less than the longest document, {text.longest} tokens"
        )
    counts = (text.sizes() - 1).div(length, rounding_mode="floor").clamp(min=0)
    document = torch.repeat_interleave(counts)
    first = counts.cumsum(0) - counts
    return text.starts[document] + length * (torch.arange(len(document), device="cpu") - first[document])


def _sums(
    model: nn.Module, text: Text, starts: Tensor, edges: Tensor, piece: int, count_piece: Callable[[], None]
) -> Tensor:
    """Losses in nats, summed over each bin: (b, bins) float64."""
    device = next(model.parameters()).device
    length = int(edges[-1])
    sums = torch.zeros(len(starts), len(edges) - 1, dtype=torch.float64, device="cpu")
    states: Any = None
    for begin in range(0, length, piece):
        positions = torch.arange(begin, min(begin + piece, length) + 1, device="cpu")
        tokens = text.tokens[starts[:, None] + positions].long().to(device)
        logits, states = model(tokens[:, :-1], states)
        losses = F.cross_entropy(logits.transpose(1, 2).float(), tokens[:, 1:], reduction="none")
        bins = torch.searchsorted(edges, positions[:-1], right=True) - 1
        sums.index_add_(1, bins, losses.double().cpu())
        count_piece()
    return sums

import math
from typing import Any

import pytest
import torch

from linrope.models import LanguageModel, LanguageModelConfig
from linrope.models.training import Corpus, bits_by_position


def tiny(**options: Any) -> LanguageModelConfig:
    return LanguageModelConfig(**({"embed_dim": 32, "num_layers": 2, "num_heads": 2} | options))


TINY = tiny()


@pytest.fixture
def corpus() -> Corpus:
    """One text in thirty is long."""
    return Corpus.from_texts([f"text {i}: the quick brown fox. " * (2 if i % 30 else 12) for i in range(90)])


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_pieces_give_what_whole_sequences_give(attention: str, corpus: Corpus) -> None:
    torch.manual_seed(0)
    model = LanguageModel(tiny(attention=attention)).double()
    calls: list[tuple[int, int]] = []
    rows = bits_by_position(
        model, corpus.train, 100, piece=33, batch_size=2, on_piece=lambda *x: calls.append(x)
    )
    text, length = corpus.train, 100

    losses, ends = [], [*text.starts[1:].tolist(), len(text)]
    for start, end in zip(text.starts.tolist(), ends, strict=True):
        for begin in range(start, end - length, length):
            tokens = text.tokens[begin : begin + length + 1].long().to(model.embed.weight.device)
            with torch.no_grad():
                logits = model(tokens[None, :-1])[0][0]
            losses.append(-logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0].cpu() / math.log(2))
    assert 3 < len(losses) <= 64
    pieces = 4 * -(-len(losses) // 2)
    assert calls == [(done, pieces) for done in range(pieces + 1)]
    expected = torch.stack(losses)
    assert [row["start"] for row in rows] == [0, *(row["end"] for row in rows[:-1])]
    assert rows[-1]["end"] == length
    assert [row["end"] for row in rows[:8]] == [1, 2, 3, 4, 6, 8, 11, 16]
    for row in rows:
        part = expected[:, int(row["start"]) : int(row["end"])].mean(1)
        assert row["bits_per_byte"] == pytest.approx(float(part.mean()), rel=1e-6)
        assert row["error"] == pytest.approx(float(part.std()) / len(losses) ** 0.5, rel=1e-4)
        assert row["sequences"] == len(losses)


def test_some_of_the_sequences_will_do(corpus: Corpus) -> None:
    rows = bits_by_position(LanguageModel(TINY), corpus.train, 20, sequences=5)
    assert {row["sequences"] for row in rows} == {5}
    (row,) = bits_by_position(LanguageModel(TINY), corpus.train, 1, sequences=1)
    assert (row["start"], row["end"], row["error"]) == (0, 1, 0)


@pytest.mark.parametrize("length", [0, 1000])
def test_a_length_that_no_document_has_is_refused(length: int, corpus: Corpus) -> None:
    with pytest.raises(ValueError, match=rf"length={length}: .* longest document, \d+ tokens"):
        bits_by_position(LanguageModel(TINY), corpus.train, length)

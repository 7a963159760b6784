"""benchmarks/drop_in.py: all of its models learn, and see no later token."""

import pytest
import torch

from benchmarks import drop_in
from linrope.models.training import Corpus


@pytest.mark.parametrize("name", drop_in.MODELS)
def test_a_model_of_the_comparison(name: str, monkeypatch) -> None:
    monkeypatch.setattr(drop_in, "ROW", 16)
    corpus = Corpus.from_texts([f"A rose is a rose is a rose, {i} times. " * 40 for i in range(40)])
    assert drop_in.bits(*drop_in.MODELS[name], corpus, steps=20, seed=0) < 6.0
    model, tokens = drop_in.Model(*drop_in.MODELS[name]), torch.randint(256, (1, 20))
    changed = tokens.clone()
    changed[:, 10:] = 0
    torch.testing.assert_close(model(tokens)[:, :10], model(changed)[:, :10], rtol=1e-4, atol=1e-4)

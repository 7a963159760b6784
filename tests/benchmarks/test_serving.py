"""The phases that benchmarks/serving.py times."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from linrope.models import LanguageModel, LanguageModelConfig

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.get_default_device().type != "cpu", reason="the examples run on the CPU")
def test_decoding_starts_when_all_prompts_are_read(monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    serving = importlib.import_module("serving")
    sizes = {"embed_dim": 16, "num_heads": 1, "num_layers": 1}
    models = {
        "linrope": LanguageModel(LanguageModelConfig(**sizes)),
        "delta rule": LanguageModel(LanguageModelConfig(**sizes, erase_gate="independent")),
        "softmax": LanguageModel(LanguageModelConfig(**sizes, attention="softmax")),
    }
    for side in serving.SIDES:
        engine = serving.make(side, models, clients=40, longest=30)
        decode, counts = engine._decode, []
        engine._decode = lambda x, decode=decode, counts=counts: (counts.append(len(x)), decode(x))[1]
        seconds = serving.run(engine, [[120] * 24] * 40, count=3)
        assert counts == [40, 40], side
        assert min(seconds.values()) > 0

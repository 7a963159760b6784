"""Helpers for the tests of the commands: options, small models, a tokenizer, and the files of a run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from linrope.models import LanguageModel, LanguageModelConfig
from linrope.models.training import checkpoints

SMALL = "--embed-dim 32 --layers 1 --heads 2 --batch-size 2 --sequence-length 32"


def tiny_model(vocab_size: int = 256) -> LanguageModel:
    return LanguageModel(LanguageModelConfig(vocab_size, embed_dim=16, num_layers=1, num_heads=2))


def word_tokenizer(text: Path, **special: str) -> Any:
    """A tokenizer of the text's words, and of special tokens such as eos_token."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    names = ["?", *dict.fromkeys(re.findall(r"\w+|[^\w\s]", text.read_text())), *special.values()]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({x: i for i, x in enumerate(names)}, unk_token="?")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?", **special)


def last_config(out: Path) -> dict[str, Any]:
    """config.json of the last checkpoint."""
    return json.loads((checkpoints(out)[-1] / "config.json").read_text())


def metrics(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]

"""Prints text as it is generated."""

import codecs
import sys
from typing import Any

import torch

from linrope.models import LanguageModel, generate
from linrope.models.training.optional import need


def stream(model: LanguageModel, tokenizer: Any, prompt: str, count: int, **sampling: Any) -> None:
    """Prints tokens as they are generated; bytes that are not UTF-8 show as replacement characters."""
    device = model.embed.weight.device
    if tokenizer is not None:
        tokens = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)], device=device)
        streamer = need("transformers", "linrope[huggingface]").TextStreamer(tokenizer)
        streamer.put(tokens.cpu())
        for token in generate(model, tokens, count, **sampling):
            streamer.put(token.cpu())
        streamer.end()
        return
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    tokens = torch.tensor([list(prompt.encode())], device=device)
    sys.stdout.write(prompt)
    for token in generate(model, tokens, count, **sampling):
        sys.stdout.write(decoder.decode(bytes([int(token)])))
        sys.stdout.flush()
    sys.stdout.write(decoder.decode(b"", final=True) + "\n")

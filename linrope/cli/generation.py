"""Prints text as it is generated."""

import codecs
import sys
from typing import Any

import torch
from torch import Tensor, nn

from linrope.common.argument_checks import check_sizes
from linrope.common.optional import need
from linrope.decode import generate
from linrope.decode.sampling import LOWEST_TEMPERATURE, check_sampling
from linrope.decode.text import encode
from linrope.models import LanguageModel


class _Bytes:
    """Prints bytes as UTF-8, with replacement characters for those that are not UTF-8.

    It has the methods of transformers' streamers.
    """

    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def put(self, tokens: Tensor) -> None:
        sys.stdout.write(self.decoder.decode(bytes(tokens.flatten().tolist())))
        sys.stdout.flush()

    def end(self) -> None:
        sys.stdout.write(self.decoder.decode(b"", final=True) + "\n")


def stream(
    model: nn.Module,
    tokenizer: Any,
    prompt: str,
    count: int,
    *,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int | None,
) -> None:
    """Prints the prompt and then tokens as they are generated, up to count of them or the end of the text.

    Args:
        model: a LanguageModel, or a causal model of transformers.
        tokenizer: of transformers, or None: tokens are bytes.
        prompt: the text to continue.
        count: the largest number of tokens.
        temperature, top_k, top_p, seed: as in ``linrope.models.generate``.
    """
    sampling: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    check_sizes(0, max_new_tokens=count)
    check_sampling(**sampling, seed=seed)
    special = not isinstance(model, LanguageModel)
    tokens = torch.tensor(
        [encode(tokenizer, prompt, special=special)], device=next(model.parameters()).device
    )
    if not tokens.numel():
        raise ValueError(f"--prompt={prompt!r}: the tokenizer makes no token of it, expected at least one")
    printer: Any = _Bytes()
    if tokenizer is not None:
        make = need("transformers", "linrope[huggingface]").TextStreamer
        printer = make(tokenizer, skip_special_tokens=True)
    if isinstance(model, LanguageModel):
        end = None if tokenizer is None else tokenizer.eos_token_id
        printer.put(tokens.cpu())
        for token in generate(model, tokens, count, seed=seed, **sampling):
            if int(token) == end:
                break
            printer.put(token.cpu())
        printer.end()
    elif not count:
        printer.put(tokens.cpu())
        printer.end()
    else:
        _stream_pretrained(model, tokens, printer, count, seed, sampling)


def _stream_pretrained(
    model: Any, tokens: Tensor, printer: Any, count: int, seed: int | None, sampling: dict[str, Any]
) -> None:
    """transformers' generate(), which puts the prompt and each token into the printer."""
    if seed is not None:
        torch.manual_seed(seed)
    if sampling["temperature"] == 0:
        sampling = {"temperature": None, "top_k": None, "top_p": None}
    else:
        temperature = max(sampling["temperature"], LOWEST_TEMPERATURE)
        sampling = sampling | {"temperature": temperature, "do_sample": True, "top_k": sampling["top_k"] or 0}
    model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=count,
        use_cache=True,  # Trainer sets it to False in a config
        streamer=printer,
        **{"do_sample": False, **sampling},
    )

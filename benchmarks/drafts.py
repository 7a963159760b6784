"""Times generate() with drafts, of prompt lookup and of a small draft model, beside greedy search.

The models have random weights, but the text is Python code: a processor of logits raises the text's next token above
all others. So the costs are the model's, and which drafts of prompt lookup are right is a property of the text. The
text that repeats is the prompt once more, with a name changed; the other one goes on where the prompt ends. The model
has 12 layers of 1024; the draft model has 4 of 256, and 70% of its tokens are made right. The sides take turns, and the
figures are minima of one thread's CPU time.

    python benchmarks/drafts.py [--layers 12] [--tokens 96] [--rounds 3] [--dtype bfloat16] [--out FILE]
"""

import argparse
import difflib
import inspect
import random
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from benchmarks.measuring import save
from linrope.integrations import transformers as linrope_transformers
from linrope.models.huggingface import LinRopeCache, LinRopeConfig, LinRopeForCausalLM

VOCABULARY, PROMPT, DRAFTED, RIGHT = 32_000, 1_000, 4, 0.7
MODELS = ("qwen3_5", "linrope")


def text(repeats: bool, count: int) -> Tensor:
    """(1, PROMPT + count) tokens of Python's difflib: words with the space before them, spaces and signs."""
    source, method = map(inspect.getsource, (difflib, difflib.SequenceMatcher.find_longest_match))
    end = source.index(method) + len(method)
    before, after = (re.findall(r" ?\w+|\s+|[^\w\s]", x) for x in (source[:end], source[end:]))
    if repeats:
        after = [x.replace("besti", "best_in_a") for x in before[100 - PROMPT :]]
    numbers = {word: i for i, word in enumerate(dict.fromkeys(before + after), 3)}
    return torch.tensor([[numbers[x] for x in before[-PROMPT:] + after[:count]]])


def make(name: str, layers: int, width: int, dtype: torch.dtype) -> Any:
    """A model with the proportions of Qwen3.5 0.8B, or of a LinRope model of its width."""
    torch.manual_seed(0)
    heads = max(1, width // 64)
    if name == "linrope":
        config: Any = LinRopeConfig(
            vocab_size=VOCABULARY, hidden_size=width, intermediate_size=width * 11 // 4, num_hidden_layers=layers,
            num_attention_heads=heads,
        )  # fmt: skip
        return LinRopeForCausalLM(config).to(dtype).eval()
    config = transformers.Qwen3_5TextConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=width * 7 // 2, num_hidden_layers=layers,
        num_attention_heads=max(1, heads // 2), num_key_value_heads=max(1, heads // 8), head_dim=256,
        linear_num_key_heads=heads, linear_num_value_heads=heads, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.Qwen3_5ForCausalLM(config).to(dtype).eval()


class Forced(transformers.LogitsProcessor):
    """Raises the logit of the text's next token; while the draft model runs, of a wrong one at times."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens, self.drafting = tokens[0].tolist(), False
        draw = random.Random(0)
        self.right = [draw.random() < RIGHT for _ in self.tokens]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        at = min(input_ids.shape[1], len(self.tokens) - 1)
        token = self.tokens[at] if self.right[at] or not self.drafting else 0
        return scores.index_add(1, torch.tensor([token]), scores.new_full((1, 1), 1e4))


@contextmanager
def counted_crops(counts: list[tuple[bool, float]], layers: int) -> Iterator[None]:
    """Appends (whether the cache is the model's, which has this many layers; the seconds) for each crop of a cache."""
    kinds = transformers.Cache, LinRopeCache
    methods = [kind.crop for kind in kinds]

    def timed(crop: Any) -> Any:
        def call(self: Any, tokens_to_remove: int) -> None:
            start = time.thread_time()
            crop(self, tokens_to_remove)
            if type(self).crop is call:  # not a call by the subclass
                counts.append((len(self.layers) == layers, time.thread_time() - start))

        return call

    for kind, crop in zip(kinds, methods, strict=True):
        kind.crop = timed(crop)
    try:
        yield
    finally:
        for kind, crop in zip(kinds, methods, strict=True):
            kind.crop = crop


def measure(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    dtype = getattr(torch, options.dtype)
    model, draft = make(name, options.layers, 1024, dtype), make(name, 4, 256, dtype)
    draft.generation_config.update(
        num_assistant_tokens=DRAFTED,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0,
    )
    rows = []
    for repeats in (True, False):
        tokens = text(repeats, options.tokens)
        forced = Forced(tokens)
        generate = draft.generate

        def drafting(*arguments: Any, generate: Any = generate, forced: Forced = forced, **given: Any) -> Any:
            forced.drafting = True
            try:
                return generate(*arguments, **given)
            finally:
                forced.drafting = False

        draft.generate = drafting
        sides: dict[str, dict[str, Any]] = {
            "greedy": {},
            "prompt lookup": {"prompt_lookup_num_tokens": 2 * DRAFTED, "max_matching_ngram_size": 8},
            "draft model": {"assistant_model": draft},
        }

        def seconds(
            count: int, given: dict[str, Any], tokens: Tensor = tokens, forced: Forced = forced
        ) -> float:
            start = time.thread_time()
            out = model.generate(
                tokens[:, :PROMPT], max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0,
                logits_processor=[forced], **given,
            )  # fmt: skip
            assert torch.equal(out, tokens[:, : PROMPT + count])
            return time.thread_time() - start

        least: dict[str, float] = dict.fromkeys([*sides, "prompt"], float("inf"))
        crops: dict[str, list[tuple[bool, float]]] = {}  # by side, what its fastest round counted
        for _ in range(options.rounds):
            least["prompt"] = min(least["prompt"], seconds(1, {}))
            for side, given in sides.items():
                counted: list[tuple[bool, float]] = []
                with counted_crops(counted, options.layers):
                    spent = seconds(options.tokens, given)
                if spent < least[side]:
                    least[side], crops[side] = spent, counted
        draft.generate = generate
        for side, given in sides.items():
            spent = least[side] - least["prompt"]
            rows.append(
                {
                    "model": name, "text": "repeats" if repeats else "goes on", "side": side,
                    "tokens_per_second": (options.tokens - 1) / spent,
                    "times_greedy": (least["greedy"] - least["prompt"]) / spent,
                    "tokens_per_call": options.tokens / sum(of_model for of_model, _ in crops[side]) if given else 1,
                    "crop_share": sum(x for of_model, x in crops[side] if of_model) / spent,
                }
            )  # fmt: skip
            print(
                {key: round(x, 3) if isinstance(x, float) else x for key, x in rows[-1].items()}, flush=True
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=12, help="of the model, a multiple of 4")
    parser.add_argument("--tokens", type=int, default=96, help="tokens to generate")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--out", type=Path, help="a JSON file")
    options = parser.parse_args()
    if options.layers == 4:
        parser.error("--layers: got 4, expected more, by which the model is told from the draft model")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    linrope_transformers.enable("qwen3_5")
    rows = [row for name in options.models for row in measure(name, options)]
    if options.out:
        settings = {name: getattr(options, name) for name in ("layers", "tokens", "rounds", "dtype")}
        save(options.out, settings | {"rows": rows})


if __name__ == "__main__":
    main()

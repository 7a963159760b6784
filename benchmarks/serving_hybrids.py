"""Times linrope.decode.Engine with a hybrid of transformers beside that model's own generate().

    python benchmarks/serving_hybrids.py [--layers 4] [--requests 16] [--tokens 64] [--dtype bfloat16] [--out FILE]

The model has the layers of Qwen3.5 0.8B, random weights and 32,000 tokens, and runs on linrope's kernels on all sides.
Requests come all at once. Their prompts have 20 to 2,000 tokens. generate() reads them one after the other, or all in
one batch with padding; the engine batches them continuously. A first token's time counts from the arrival. Then 50
requests begin with the same 2,000 tokens, which the engine reads once or for each request. One thread, CPU time,
minima of the rounds; memory is what the peak of the process grows by.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models

from benchmarks.drafts import VOCABULARY, make
from benchmarks.measuring import peak_memory, save
from linrope.decode import Engine, Generation
from linrope.integrations import transformers as linrope_transformers

PREFIX, SHARING, AFTER_PREFIX = 2_000, 50, 16


class FirstTokens(transformers.LogitsProcessor):
    """Notes when the first logits come."""

    def __init__(self) -> None:
        self.at: float | None = None

    def __call__(self, _: Any, scores: torch.Tensor) -> torch.Tensor:
        self.at = self.at or time.thread_time()
        return scores


def by_generate(model: Any, prompts: list[list[int]], count: int, together: bool) -> dict[str, Any]:
    start, firsts, texts = time.thread_time(), [], []
    for group in [prompts] if together else [[prompt] for prompt in prompts]:
        longest, noted = max(map(len, group)), FirstTokens()
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in group])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in group])
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0,
            logits_processor=[noted],
        )  # fmt: skip
        texts += out[:, longest:].tolist()
        assert noted.at is not None
        firsts += [noted.at - start] * len(group)
    return {"seconds": time.thread_time() - start, "first": firsts, "tokens": texts}


def by_engine(engine: Engine, prompts: list[list[int]], count: int, prefix: int = 0) -> dict[str, Any]:
    requests = [Generation([*x], max_tokens=count, temperature=0, prefix=prefix) for x in prompts]
    texts = dict.fromkeys(requests, "")
    start, first = time.thread_time(), {}
    assert all(engine.submit(request) for request in requests)
    while engine.running or engine.waiting:
        for request, text in engine.step():
            assert not isinstance(text, Exception), text
            texts[request] += text or ""
        first |= {x: time.thread_time() - start for x in requests if x.generated and x not in first}
    tokens = [[int(word[1:]) for word in text.split()] for text in texts.values()]
    return {"seconds": time.thread_time() - start, "first": [*first.values()], "tokens": tokens}


def row(side: str, results: list[tuple[dict[str, Any], int]], expected: list[list[int]]) -> dict[str, Any]:
    runs, memory = [result for result, _ in results], max(grown for _, grown in results)
    best = min(runs, key=lambda x: x["seconds"])
    pairs = [
        pair
        for run in runs
        for a, b in zip(run["tokens"], expected, strict=True)
        for pair in zip(a, b, strict=True)
    ]
    return {
        "side": side,
        "seconds": best["seconds"],
        "tokens_per_second": sum(map(len, expected)) / best["seconds"],
        "first_token_median": statistics.median(best["first"]),
        "first_token_longest": max(best["first"]),
        "bytes": memory,
        "tokens_as_alone": sum(a == b for a, b in pairs) / len(pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=4, help="a multiple of 4")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="tokens that each request gets")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--out", type=Path, help="a JSON file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    transformers.logging.set_verbosity_error()
    linrope_transformers.enable("qwen3_5")
    model = make("qwen3_5", options.layers, 1024, getattr(torch, options.dtype))
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    draw = torch.Generator().manual_seed(0)
    lengths = torch.logspace(1.301, 3.301, options.requests).long()[
        torch.randperm(options.requests, generator=draw)
    ]
    prompts = [torch.randint(VOCABULARY, (int(n),), generator=draw).tolist() for n in lengths]
    shared = torch.randint(VOCABULARY, (PREFIX,), generator=draw).tolist()
    sharing = [shared + torch.randint(VOCABULARY, (20,), generator=draw).tolist() for _ in range(SHARING)]

    def engine(slots: int) -> Engine:
        return Engine(model, slots, queue=SHARING, budget=512, tokenizer=tokenizer)

    sides: dict[str, Callable[[], dict[str, Any]]] = {
        "`generate()`, one after the other": lambda: by_generate(model, prompts, options.tokens, False),
        "`generate()`, a padded batch": lambda: by_generate(model, prompts, options.tokens, True),
        "`Engine`": lambda: by_engine(engine(options.requests), prompts, options.tokens),
    }
    rows = measure(sides, options.rounds)
    prefixes: dict[str, Callable[[], dict[str, Any]]] = {
        "`Engine`, 50 requests with one prefix, each reads it": lambda: by_engine(
            engine(options.requests), sharing, AFTER_PREFIX
        ),
        "`Engine`, 50 requests with `prefix=2000`": lambda: by_engine(
            engine(options.requests), sharing, AFTER_PREFIX, PREFIX
        ),
    }
    rows += measure(prefixes, 1)
    if options.out:
        settings = {
            name: getattr(options, name) for name in ("layers", "requests", "tokens", "rounds", "dtype")
        }
        save(options.out, settings | {"rows": rows})


def measure(sides: dict[str, Callable[[], dict[str, Any]]], rounds: int) -> list[dict[str, Any]]:
    """A row for each side; they take turns. The first one's tokens are those that the others should give."""
    results: dict[str, list[tuple[dict[str, Any], int]]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, run in sides.items():
            found: dict[str, Any] = {}
            grown = peak_memory(lambda run=run, found=found: found.update(run()))  # type: ignore[misc]
            results[side].append((found, grown or 0))
    expected = next(iter(results.values()))[0][0]["tokens"]
    rows = [row(side, found, expected) for side, found in results.items()]
    for x in rows:
        print({name: round(y, 4) if isinstance(y, float) else y for name, y in x.items()}, flush=True)
    return rows


if __name__ == "__main__":
    main()

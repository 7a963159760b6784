"""Threads, forked and spawned processes, and a DataLoader's workers: each gives the bits of one call alone.

``python -m tests.campaigns.concurrency --count 400``
"""

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from linrope import LinearRoPEAttention, Rotary, feature_maps, linear_rope_attention
from linrope.backends import native
from linrope.models import LanguageModel, LanguageModelConfig
from tests.campaigns.command import numbers
from tests.campaigns.draw import Configuration
from tests.support.oracle import everything

THREADS = 8
FAST = ("eager",) if native.why_not() else ("eager", "native")
DTYPES = ["float32", "bfloat16", "float16"]


def one(index: int, seed: int = 0) -> list[Tensor]:
    """All results of a random configuration, state and gradients too, in each backend."""
    config = Configuration(seed, index, DTYPES, 60)
    found: list[Tensor] = []
    first, second = config.piece(0), config.piece(1)
    for backend in ("reference", *FAST):
        if (config.rotary is not None and config.rotary.xpos is not None) or not config.computed_by(backend):
            continue
        state = None
        if config.has_state:
            with torch.no_grad():
                _, state = linear_rope_attention(*first.qkv, return_state=True, backend=backend, **first.how)
        found += everything(*second.qkv, state, backend=backend, **second.how).values()
    return found


class Shared:
    """One layer, one model, one map and one rotation that all threads use."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layer = LinearRoPEAttention(16, 2, feature_map="favor+", forget_gate=True, rotary="selective")
        config = LanguageModelConfig(vocab_size=32, embed_dim=16, num_layers=1, num_heads=2, short_conv=3)
        self.model = LanguageModel(config).eval()
        self.map, self.rotary = feature_maps.make("hedgehog", 8), Rotary(16)

    @torch.no_grad()
    def use(self, index: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(index)
        q, k, v = torch.randn(3, 1, 20, 2, 8, generator=generator)
        out, state = linear_rope_attention(
            q, k, v, feature_map=self.map, rotary=self.rotary, return_state=True
        )
        tokens = torch.randint(0, 32, (1, 9), generator=generator)
        logits, states = self.model(tokens)
        step = self.model(tokens[:, :1], states)[0]
        y = self.layer(torch.randn(1, 9, 16, generator=generator))
        return [out, state.kv, logits, step, y]


def same(found: list[list[Tensor]], expected: list[list[Tensor]], what: str) -> None:
    for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        alike = len(mine) == len(theirs) and all(_equal(x, y) for x, y in zip(mine, theirs, strict=True))
        assert alike, f"{what}: {index} has other bits than alone"


def _equal(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.nan_to_num(0.5), y.nan_to_num(0.5))


def threads(count: int) -> None:
    shared = Shared()
    alone = [one(index) for index in range(count)], [shared.use(index) for index in range(count)]
    with ThreadPoolExecutor(THREADS) as pool:
        same(list(pool.map(one, range(count))), alone[0], "8 threads")
        same(list(pool.map(shared.use, range(count))), alone[1], "8 threads that share a model")


def _in_child(count: int, results: Any) -> None:
    torch.set_num_threads(1)
    wide = ([x.float() if x.dtype == torch.bfloat16 else x for x in one(i)] for i in range(count))
    results.put([[x.numpy() for x in each] for each in wide])


def children(count: int) -> None:
    expected = [one(index) for index in range(count)]
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        results = context.Queue()
        child = context.Process(target=_in_child, args=(count, results))
        child.start()
        found = [[torch.from_numpy(x) for x in result] for result in results.get(timeout=120)]
        child.join(60)
        assert child.exitcode == 0, f"{method}: exit status {child.exitcode}"
        found = [
            [x.to(y.dtype) for x, y in zip(mine, theirs, strict=True)]
            for mine, theirs in zip(found, expected, strict=True)
        ]
        same(found, expected, f"a process by {method}")


class Outputs(Dataset[Tensor]):
    """What a worker of a DataLoader may compute: an example is an output of a layer."""

    def __init__(self, count: int) -> None:
        torch.manual_seed(1)
        self.count, self.layer = count, LinearRoPEAttention(16, 2, decay="spread").eval()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        with torch.no_grad():
            return self.layer(torch.randn(1, 30, 16, generator=generator))[0]


def loaders(count: int) -> None:
    data = Outputs(count)
    expected = [[data[index]] for index in range(count)]
    for method in ("fork", "spawn"):
        loader = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context=method)
        same([[x] for x in loader], expected, f"a DataLoader's workers by {method}")


def run(count: int, *, spawns: bool = True) -> None:
    threads(count)
    print(f"{THREADS} threads: {count} configurations with the bits of one alone", flush=True)
    if spawns:
        children(min(count, 40))
        loaders(min(count, 40))
        print("fork, spawn, and workers of a DataLoader by both: the bits of one alone", flush=True)


if __name__ == "__main__":
    run(**numbers(__doc__, count=400))

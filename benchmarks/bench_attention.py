"""Times linrope against softmax attention, both with RoPE: ``pytest benchmarks/bench_attention.py``."""

from functools import partial

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from linrope.cli.bench.cases import AttentionCase


@pytest.mark.parametrize("n", [256, 1024, 4096, 16384])
@pytest.mark.parametrize("mode", ["forward", "training"])
@pytest.mark.parametrize("side", ["linrope", "softmax"])
def bench_attention(benchmark: BenchmarkFixture, side: str, mode: str, n: int) -> None:
    case = AttentionCase(n)
    case.check() if side == "linrope" else case.check_softmax()
    benchmark.group = f"{mode}, N = {n}"
    benchmark.pedantic(partial(getattr(case, mode), getattr(case, side)), rounds=5, warmup_rounds=1)

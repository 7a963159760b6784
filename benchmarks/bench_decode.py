"""Times a decoding step, a state against a key/value cache: ``pytest benchmarks/bench_decode.py``."""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from linrope.cli.bench.cases import DecodeCase


@pytest.mark.parametrize("position", [1024, 16384, 1048576])
@pytest.mark.parametrize("side", ["linrope", "softmax"])
def bench_decode(benchmark: BenchmarkFixture, side: str, position: int) -> None:
    case = DecodeCase(position)
    case.check()
    if side == "softmax":
        case.fill_cache()
        case.check_softmax()
    benchmark.group = f"position {position}"
    benchmark.pedantic(getattr(case, side), rounds=20, iterations=5, warmup_rounds=1)

"""The list of steps, in order of worth."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from subprocess import getoutput

import torch
import triton

from benchmarks.gpu import commands, curves, delta, host, models, operation, others, tiles
from benchmarks.gpu.machine import Machine, Row
from benchmarks.measuring import machine as description


@dataclass(frozen=True)
class Step:
    """A step yields rows, each of which is kept as soon as it is there.

    seconds: what it is expected to take on an H100. limit: after it the step is stopped. ahead: whether the rehearsal
    on a GPU runs it.
    """

    run: Callable[[Machine], Iterator[Row]]
    tells: str
    seconds: int
    limit: int
    ahead: bool = True


def machine(on: Machine) -> Iterator[Row]:
    row = description(on.device) | {"triton": triton.__version__, "cuda": torch.version.cuda}
    if on.on_gpu:
        row["driver"] = getoutput("nvidia-smi --query-gpu=driver_version --format=csv,noheader")
    row["copy"] = on.copy_rate()
    size = on.sizes(8192, 64)
    a, b, out = torch.randn(3, size, size, device=on.device, dtype=torch.bfloat16)
    product = on.timed(lambda: torch.mm(a, b, out=out))
    yield row | {"product": product | {"rate": 2e3 * size**3 / product["median_ms"], "unit": "flop/s"}}


STEPS = {
    "machine": Step(machine, "versions, the best rates of a copy and of a matrix product", 8, 40),
    "tests": Step(commands.tests, "all tests that run on a GPU", 230, 330, ahead=False),
    "host": Step(host.host, "the host time of a call, with and without launches", 10, 40),
    "gates": Step(operation.gates, "forget gates: errors, times", 55, 110),
    "block": Step(models.block, "the default block: errors, launches, times, decoding", 20, 50),
    "model": Step(models.model, "a model of default blocks beside softmax attention", 40, 80),
    "generate": Step(
        models.generate, "greedy decoding by linrope and by transformers, also in a graph", 25, 60
    ),
    "delta": Step(delta.delta, "the delta rule and a decay per unit: errors, times, decoding", 90, 180),
    "train": Step(commands.train, "linrope train, stopped and resumed", 30, 70),
    "check": Step(commands.check, "linrope check", 40, 75),
    "compiled": Step(models.compiled, "torch.compile of a layer and of a model", 90, 150),
    "graphs": Step(models.graphs, "CUDA graphs of training steps, also packed", 20, 55),
    "parallel": Step(commands.parallel, "two processes share a sequence", 20, 50),
    "long": Step(operation.long, "131,072 and 1,048,576 tokens", 20, 60),
    "packed": Step(operation.packed, "4,096 short sequences, packed and padded", 8, 40),
    "bandwidth": Step(operation.bandwidth, "the operation beside a copy", 40, 80),
    "softmax": Step(operation.softmax, "the operation beside softmax attention", 40, 80),
    "decode": Step(operation.decode, "decoding steps beside a copy", 15, 40),
    "fla": Step(others.fla, "equation 19 by flash-linear-attention", 30, 60, ahead=False),
    "fla-delta": Step(
        others.fla_delta, "the delta rules beside flash-linear-attention's", 60, 110, ahead=False
    ),
    "others": Step(
        others.others, "forget gates by flash-linear-attention and by mamba-ssm", 40, 80, ahead=False
    ),
    "tiles": Step(tiles.tiles, "kernels with other tiles than those of the table", 270, 420, ahead=False),
    "curves": Step(
        curves.curves, "training curves of the default block, softmax attention and Gated DeltaNet", 580, 660
    ),
}

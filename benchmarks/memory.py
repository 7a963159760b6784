"""Measures the memory that the default block takes per token: to train, to read without gradients, and both in pieces.

    python benchmarks/memory.py [--widths 64 256 1024] [--write benchmarks/results/memory-2026-11-28.json]

A figure is a slope: the peak of one length less that of half the length, divided by their difference. Each peak is that
of a process of its own, in which the call is the first large one. Linux only.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.measuring import peak_memory, save
from linrope.models import LanguageModel, LanguageModelConfig

# For each width of the blocks, the longer of the two lengths at which peaks are measured
LENGTH = {64: 32768, 256: 8192, 1024: 4096}
PIECE = 1024
CALLS = ("training", "reading")


def peak(width: int, blocks: int, length: int, piece: int, call: str) -> int:
    """The peak memory of this process while it reads a row of vectors in pieces, beyond that of the blocks."""
    sizes = LanguageModelConfig(
        vocab_size=1, embed_dim=width, num_layers=blocks, num_heads=max(1, width // 64)
    )
    model = LanguageModel(sizes).blocks
    training = call == "training"
    run(model, 64, 64, training)  # what a process allocates once, the gradients of the weights too
    found = peak_memory(lambda: run(model, length, piece, training))
    if found is None:
        raise RuntimeError("the peak memory of a process is known on Linux only")
    return found


def run(blocks: nn.ModuleList, length: int, piece: int, training: bool) -> None:
    """Reads a row of random vectors, with gradients inside each piece if it trains."""
    states: list[Any] = [None] * len(blocks)
    with torch.set_grad_enabled(training):
        for _ in range(length // piece):
            x = torch.randn(1, piece, blocks[0].feed_forward_norm.weight.numel())
            for index, block in enumerate(blocks):
                x, states[index] = block(x, states[index], None, None, piece < length)
            if training:
                x.sum().backward()
                states = [None if state is None else state.detach() for state in states]


def measured(width: int, blocks: int, length: int, piece: int, call: str) -> int:
    """peak, in a process of its own."""
    arguments = [str(x) for x in (width, blocks, length, piece, call)]
    command = [sys.executable, __file__, "--peak", *arguments]
    return int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def per_token(width: int, blocks: int, call: str) -> float:
    length = LENGTH[width]
    longer, shorter = (measured(width, blocks, n, n, call) for n in (length, length // 2))
    return (longer - shorter) / (length - length // 2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--widths", nargs="+", type=int, default=list(LENGTH), choices=list(LENGTH))
    parser.add_argument("--write", type=Path)
    parser.add_argument("--peak", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        width, blocks, length, piece = map(int, options.peak[:4])
        print(peak(width, blocks, length, piece, options.peak[4]))
        return
    rows = []
    for width in options.widths:
        row: dict[str, Any] = {"width": width, "length": LENGTH[width]}
        for call in CALLS:
            one, three = (per_token(width, blocks, call) for blocks in (1, 3))
            row[call] = {"first": one, "further": (three - one) / 2}
            row[call]["pieces"] = measured(width, 3, LENGTH[width], PIECE, call)
        print(json.dumps(row), flush=True)
        rows.append(row)
    if options.write:
        save(options.write, {"piece": PIECE, "rows": rows})


if __name__ == "__main__":
    main()

"""Counts the GPU launches of a layer's forward and backward pass without a GPU.

    PYTHONPATH=.:kernels python benchmarks/launches.py

Layers are on the meta device. Kernel launches are recorded rather than started, and PyTorch's operations are
counted where they are dispatched. Views and allocations launch nothing. Each operation counts as one launch,
although some take more (a sum over a few long rows, a split-k product). The second call is counted, because the first
one copies constants to the device.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from linrope_kernels import launch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from linrope import LinearRoPEAttention, backends
from linrope.backends import triton as backend
from linrope.common import private_names

FREE = {
    "_unsafe_view",
    "promote_types",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
    "lift_fresh",
}
SHAPES = {"many heads": (8, 2048, 64), "few heads": (1, 65_536, 8), "short": (8, 512, 16)}
LAYERS: dict[str, Callable[..., LinearRoPEAttention]] = {
    "plain": LinearRoPEAttention,
    "gates": partial(LinearRoPEAttention, forget_gate=True),
    "gates, selective": partial(LinearRoPEAttention, forget_gate=True, rotary="selective"),
    "gates, convolution, norm": partial(
        LinearRoPEAttention, forget_gate=True, short_conv=4, out_norm=True, gate=True
    ),
    "default block": LinearRoPEAttention.block,
    "block, gated delta rule": partial(
        LinearRoPEAttention.block, erase_gate="tied", feature_map="unit", normalize=False, skip=None
    ),
}


class Counted(TorchDispatchMode):
    """Counts PyTorch's operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        aliases = [x.alias_info for x in func._schema.returns]
        if name not in FREE and not any(x is not None and not x.is_write for x in aliases):
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def recorded() -> Iterator[Counter[str]]:
    """Records the names of the kernels that would start on a GPU of an H100's size."""
    names: Counter[str] = Counter()

    def getitem(kernel: Any, grid: tuple[int, ...]) -> Any:
        return lambda *_, **__: names.update([kernel.__name__.removesuffix("_kernel")])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "__getitem__", getitem)
        patch.setattr(launch, "_device", lambda x: launch._Device(90, 132))
        for name in ("why_not", "why_not_on"):
            patch.setattr(backend, name, lambda *_: None)
        patch.setitem(backends._AUTO, "meta", backends._AUTO["cuda"])
        patch.setattr(
            private_names, "_len_torch_dispatch_stack", lambda: 0
        )  # so that Counted does not change what runs
        yield names


def count(
    shape: tuple[int, int, int], make: Callable[..., LinearRoPEAttention]
) -> dict[str, dict[str, Counter[str]]]:
    """The kernel launches and PyTorch's operations of each pass."""
    b, n, h = shape
    layer = make(64 * h, h, backend="triton", device="meta", dtype=torch.bfloat16)
    x = torch.empty(b, n, 64 * h, device="meta", dtype=torch.bfloat16, requires_grad=True)
    counts = {}
    with recorded() as kernels, Counted() as operations:
        for _ in range(2):
            kernels.clear(), operations.names.clear()
            y = layer(x)
        counts["forward"] = {"kernels": Counter(kernels), "operations": Counter(operations.names)}
        kernels.clear(), operations.names.clear()
        torch.autograd.grad(y, (x, *layer.parameters()), torch.empty_like(y), allow_unused=True)
        counts["backward"] = {"kernels": Counter(kernels), "operations": Counter(operations.names)}
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--names", action="store_true", help="also print the names")
    options = parser.parse_args()
    for shape_name, shape in SHAPES.items():
        for name, make in LAYERS.items():
            counts = count(shape, make)
            if options.json:
                print(json.dumps({"name": shape_name, "shape": shape, "layer": name} | counts))
                continue
            sums = [
                f"{p} {each['kernels'].total()} + {each['operations'].total()}" for p, each in counts.items()
            ]
            print(f"{shape_name:<10} {name:<25} {', '.join(sums)}")
            if options.names:
                for p, each in counts.items():
                    print(f"    {p}: {dict(each['kernels'])} {dict(each['operations'].most_common())}")


if __name__ == "__main__":
    main()

"""Prints the host times of a call with whatever linrope is on the path: ``in_turn`` of host.py runs it."""

import json
import sys
import time

import torch

from linrope import Rotary, linear_rope_attention


def main(device: str) -> None:
    dtype, sizes = (torch.bfloat16, (8, 512, 16, 64)) if device == "cuda" else (torch.float16, (1, 20, 1, 16))
    q, k, v = (x.requires_grad_() for x in torch.randn(3, *sizes, device=device, dtype=dtype))
    rotary, ones = Rotary(sizes[3]), torch.ones(sizes, device=device, dtype=dtype)

    def forward() -> torch.Tensor:
        return linear_rope_attention(q, k, v, rotary=rotary, backend="triton")

    def training() -> None:
        torch.autograd.grad(forward(), (q, k, v), ones)

    found = {}
    for name, run in (("forward us", torch.no_grad()(forward)), ("training us", training)):
        for calls in (3, 200) if device == "cuda" else (1, 1):
            begun = time.perf_counter()
            for _ in range(calls):
                run()
            found[name] = 1e6 * (time.perf_counter() - begun) / calls
            if device == "cuda":
                torch.cuda.synchronize()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])

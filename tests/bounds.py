"""The numerics contract of docs/numerics.md as numbers, for all tests that compare with the equation."""

import torch
from torch import Tensor

BOUNDS = {torch.float32: 16 * 2.0**-24, torch.bfloat16: 4 * 2.0**-8, torch.float16: 4 * 2.0**-11}


def error_in_bounds(out: Tensor, oracle: Tensor, size: Tensor) -> float:
    """The largest |out - oracle| as a part of what the contract allows; 0 where there are no numbers."""
    info = torch.finfo(out.dtype)
    underflow = info.smallest_normal * info.eps  # numbers near 0 have no relative precision
    allowed = BOUNDS[out.dtype] * size + underflow
    return float(((out.double() - oracle).abs() / allowed).max()) if out.numel() else 0.0


def cancelling(sizes: dict[str, Tensor]) -> Tensor:
    """About how large the sums are whose difference is log_decay's gradient, in a loss of weights about 1.

    sizes: of the terms of out, kv and z; or these results themselves, if their terms do not cancel.
    """
    return sum(sizes[name].abs().sum(-1).max() for name in ("out", "z")) + sizes["kv"].abs().sum((2, 3)).max()

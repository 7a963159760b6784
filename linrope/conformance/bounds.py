"""The numerics contract of docs/numerics.md as numbers, for ``linrope check`` and for the tests.

A bound of an output or a state is in units of the size of its terms; a bound of a gradient is in units of the error
that "reference" has in the same dtype.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from linrope import LinearAttentionState, linear_rope_attention
from linrope.recurrence.call import TOKEN_INPUTS

BOUNDS = {torch.float32: 16 * 2.0**-24, torch.bfloat16: 4 * 2.0**-8, torch.float16: 4 * 2.0**-11}
# The error of a product on AMX: kernels/cpu/amx.h splits a float32 number into two bfloat16 numbers.
ON_TILES = 2.0**-16
DATA = TOKEN_INPUTS  # inputs besides q, k and v that have gradients
BESIDE = 8  # additional calls, with slightly changed q, k and v
# A gradient's error may be FACTOR times the error of "reference" plus SHARE times the gradient's largest entry.
FACTOR = 3
SHARE = 1e-5


def error_in_bounds(out: Tensor, oracle: Tensor, size: Tensor) -> float:
    """The largest |out - oracle| divided by the error that the contract allows; 0 for empty tensors."""
    info = torch.finfo(out.dtype)
    underflow = info.smallest_normal * info.eps  # numbers near 0 have no relative precision
    allowed = BOUNDS[out.dtype] * size + underflow
    return float(((out.double() - oracle).abs() / allowed).max()) if out.numel() else 0.0


def bound_of_sums(backend: str, dtype: torch.dtype, instruction_set: str | None) -> float:
    """How far kv and z may be off in a call whose inputs have that dtype, in units of the size of their terms.

    The sums are float32. "triton" rounds the factors of their terms to the inputs' digits, and AMX to 16 bits.
    """
    if backend == "triton":
        return max(BOUNDS[dtype], 16 * BOUNDS[torch.float32])
    on_tiles = backend == "native" and dtype.itemsize == 2 and instruction_set == "amx"
    return max(BOUNDS[torch.float32], ON_TILES * on_tiles)


def cancelling(sizes: Mapping[str, Tensor]) -> Tensor:
    """The approximate size of the two sums whose difference "triton" takes for log_decay's gradient.

    It is right for a loss with weights near 1.

    sizes: of the terms of out, kv and z; or these results themselves, if their terms do not cancel.
    """
    rows = sizes["out"].abs().sum(-1).max() + sizes["z"].abs().sum(-1).max()
    return rows + sizes["kv"].abs().sum((2, 3)).max()


def everything(
    q: Tensor, k: Tensor, v: Tensor, state: LinearAttentionState | None = None, *,
    call: Callable[..., Any] = linear_rope_attention, **how: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """Output, last state, and the gradients of all inputs through all of them."""
    data = {name: how.pop(name) for name in DATA if how.get(name) is not None}
    leaves = {"dq": q, "dk": k, "dv": v, **{f"d{name}": x for name, x in data.items()}}
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    how |= {name: leaves[f"d{name}"] for name in data}
    if state is not None:
        state = replace(state, kv=state.kv.detach().requires_grad_(), z=state.z.detach().requires_grad_())
        leaves |= {"dkv": state.kv, "dz": state.z}
    out, last = call(leaves["dq"], leaves["dk"], leaves["dv"], state=state, return_state=True, **how)
    results = {"out": out, "kv": last.kv, "z": last.z}
    integers = {} if last.angle is None else {"angle": last.angle}
    loss, generator = torch.zeros((), dtype=torch.float64), torch.Generator().manual_seed(5)
    for x in results.values():
        weight = torch.randn(x.shape, generator=generator, dtype=torch.float64, device="cpu")
        loss = loss + (x.double() * weight.bfloat16().to(x.device)).sum()  # of few digits: exact anywhere
    grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    found = {name: x.detach() for name, x in results.items()} | dict(zip(leaves, grads, strict=True))
    return found | integers


class Yardstick:
    """The error that the contract allows in a backend's gradients of one call.

    The error of "reference" in one call may be small by luck. If a backend exceeds the limit, its error is compared
    with the largest one in nine calls: this call, and eight more with q, k and v changed by up to 1%.

    Args:
        errors: Gives the errors of "reference" by the gradient's name, in the call whose q, k and v went
            through the function that it gets. The flag is True where the largest of several runs is wanted.
    """

    def __init__(self, errors: Callable[[Callable[[Tensor], Tensor], bool], dict[str, float]]) -> None:
        self._errors = errors
        self.errors = errors(lambda x: x, False)

    @cached_property
    def beside(self) -> dict[str, float]:
        """The largest errors of all these calls."""
        generator = torch.Generator().manual_seed(0)
        worst = self._errors(lambda x: x, True)
        for _ in range(BESIDE):
            errors = self._errors(lambda x: moved(x, generator, 0.01), False)
            worst = {name: max(x, errors[name]) for name, x in worst.items()}
        return worst

    def ratio(self, name: str, error: float, largest: float, besides: float = 0.0) -> float:
        """The error divided by the allowed error, to which ``besides`` is added."""
        found = 0.0
        for errors in ("errors", "beside"):
            reference = getattr(self, errors)[name]
            if not reference < float("inf"):  # float16 overflows
                return 0.0
            found = error / (FACTOR * reference + SHARE * largest + besides + 1e-37)
            if found <= 1:
                break
        return found


def moved(x: Tensor, generator: torch.Generator, most: float) -> Tensor:
    """x with each entry changed at random by up to ``most`` times itself."""
    by = most * (2 * torch.rand(x.shape, generator=generator, dtype=torch.float64, device="cpu") - 1)
    return x * (1 + by).to(x)


def largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0

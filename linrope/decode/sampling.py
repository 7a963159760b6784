"""Sampling for ``generate`` and ``Engine``: the checks of its arguments, and which tokens may be drawn."""

import math

from torch import Tensor

from linrope.common.argument_checks import check_sizes

LOWEST_TEMPERATURE = 1e-30  # logits divided by less leave the range of float32


def check_sampling(
    temperature: float, top_k: int | None = None, top_p: float | None = None, seed: int | None = None
) -> None:
    """Raises ValueError for an argument that is out of range."""
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature}: expected at least 0, and finite")
    check_sizes(top_k=top_k)
    if top_p is not None and not 0 <= top_p <= 1:
        raise ValueError(f"top_p={top_p}: expected 0 to 1")
    if seed is not None and not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed={seed}: expected an integer of 64 bits")


def likeliest_first(
    logits: Tensor,
    temperature: float | Tensor,
    top_p: float | Tensor | None,
    top_k: int | None = None,
    stable: bool = False,
) -> tuple[Tensor, Tensor]:
    """The tokens by their probability, and these probabilities up to a factor; 0: not to be drawn.

    Args:
        logits: (b, vocab_size).
        temperature: a number, or (b, 1), of at least LOWEST_TEMPERATURE.
        top_p: a number, (b, 1), or None: all tokens may be drawn.
        top_k: as in ``generate``.
        stable: equally likely tokens keep their order, which takes longer on a CPU.
    """
    order = (logits / temperature).sort(dim=-1, descending=True, stable=stable)
    p = order.values.softmax(-1)
    if top_k is not None:
        p[:, top_k:].zero_()
    if top_p is not None:  # keeps the likeliest token, and others if the likelier ones do not add up to p
        p[:, 1:].masked_fill_((p.cumsum(-1) - p >= top_p)[:, 1:], 0)
    return order.indices, p

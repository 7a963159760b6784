"""Exponentials as features from 0 to 1 and a log_scale, so that they stay in float32's range."""

import torch
from torch import Tensor

from linrope.feature_maps.base import widen

LARGEST = 1e38  # bound of |log_scale|: the difference of two is finite in float32


def exponential(logits: Tensor, shared: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """e^(logits + shared) as features from 0 to 1 and their log_scale; arguments as for ``centre``.

    >>> from linrope.feature_maps.log_scale import exponential
    >>> features, log_scale = exponential(torch.tensor([[500.0, 499.0]]))
    >>> features, log_scale
    (tensor([[1.0000, 0.3679]]), tensor([500.], dtype=torch.float64))
    """
    centred, log_scale = centre(logits, shared)
    return centred.exp_(), log_scale


def centre(logits: Tensor, shared: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Splits logits into a part <= 0 and a log_scale: e^log_scale e^centred = e^(logits + shared).

        log_scale = max_f logits + shared,   centred = logits - max_f logits

    logits (..., f); shared float64 (..., 1), or None for 0 -> centred (..., f) in float32 or wider,
    log_scale (...) float64. log_scale is a constant to the gradient; centred carries the gradients of
    logits and shared. log_scale is always finite: for a token without finite logits it is +-1e38, or 0 if
    the maximum is NaN. The features of such a token are 0 or NaN; other tokens are not affected.
    """
    logits = widen(logits)
    top = _finite(logits.detach().amax(-1, keepdim=True))
    if shared is None:
        return logits - top, top.double().squeeze(-1)
    constant = shared.detach()
    # shared - constant is 0 and carries the gradient. The sum with the maximum is formed in float64: a key's
    # weight is e^log_scale, and rounding a log_scale of 150 to float32 would change it by 1e-5.
    return logits - (top - (shared - constant).to(top.dtype)), _finite(top + constant).squeeze(-1)


def at_most_0(x: Tensor) -> Tensor:
    """Clamps x so that its exponential is at most 1. The slope at 0 is 1, where clamp(max=0) may have 0."""
    return x.clamp(max=torch.finfo(x.dtype).tiny)


def _finite(x: Tensor) -> Tensor:
    return x.nan_to_num(0).clamp(-LARGEST, LARGEST)

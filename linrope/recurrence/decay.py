"""Combines decay, gates and masks into one log_decay per token, and prepares angle_steps and their gradient."""

from functools import lru_cache
from math import log

import torch
from torch import Tensor

from linrope.recurrence.packing import Tokens, at_first, previous, sums_of_sequences
from linrope.recurrence.state import LinearAttentionState

MIN_LOG_DECAY = -1e4  # e^-10000 is 0 in every dtype, yet sums of such numbers are finite


def distances(tokens: Tokens, m: int) -> Tensor:
    """(b or 1, m) int64: each token's distance in positions from the token before it, or from the state's last."""
    if tokens.positions.shape[1] == 1 and m != 1:
        return tokens.start.new_ones(1, 1).expand(1, m)
    return tokens.positions - previous(tokens.positions, tokens.start - 1, tokens.bounds)


def log_decay_of_tokens(
    decay: Tensor | None,
    log_decay: Tensor | None,
    key_mask: Tensor | None,
    tokens: Tokens,
    m: int,
    clamps: bool = True,
) -> Tensor | None:
    """(b or 1, m, g or 1), with units (.., units): the gates plus log(decay) times the distance.

    Hidden tokens' gates are 0. clamps: False leaves gates below MIN_LOG_DECAY to the backend.
    """
    if log_decay is not None:
        log_decay = zero_hidden(log_decay, key_mask)
        log_decay = clamp_gates(log_decay) if clamps else widen_gates(log_decay)
    if decay is None:
        return log_decay
    fixed = distances(tokens, m)[..., None] * decay.double().log()
    fixed = fixed.clamp(min=MIN_LOG_DECAY)
    return fixed if log_decay is None else log_decay + _like(fixed, log_decay)


def log_decay_of_step(decay: Tensor | None, log_decay: Tensor | None) -> Tensor | None:
    """log_decay of one more token, (b or 1, 1, g or 1), with units (.., units), for a kernel that checks that it is
    at most 0.
    """
    if decay is None:
        return widen_gates(log_decay)
    return add_gates(_log_of_decay(tuple(decay.tolist())), log_decay)


def widen_gates(log_decay: Tensor | None) -> Tensor | None:
    """The gates in float32 or float64, which kernels take."""
    return log_decay if log_decay is None or log_decay.dtype.itemsize > 2 else log_decay.float()


def add_gates(fixed: Tensor, log_decay: Tensor | None) -> Tensor:
    """The fixed log decay (1, 1, g) of one more token plus its gates.

    Gates above 0 are returned as they are: the kernel refuses them, and would not see them in the sum.
    """
    if log_decay is None:
        return fixed
    return log_decay if float(log_decay.max()) > 0 else clamp_gates(log_decay) + _like(fixed, log_decay)


def _like(fixed: Tensor, log_decay: Tensor) -> Tensor:
    """The log decay per head (b or 1, m, g) with an axis for the units, if log_decay has one."""
    return fixed[..., None] if log_decay.ndim == 4 else fixed


@lru_cache(256)
def _log_of_decay(decay: tuple[float, ...]) -> Tensor:
    """(1, 1, g) float64. Raises ValueError for numbers outside of (0, 1]."""
    if not all(0 < x <= 1 for x in decay):
        raise ValueError(f"decay: got {list(decay)}, expected numbers in (0, 1]")
    return torch.tensor([[[max(log(x), MIN_LOG_DECAY) for x in decay]]], dtype=torch.float64, device="cpu")


def check_gates(log_decay: Tensor) -> bool:
    """Raises if a number is above 0. True if some are to be clamped; log_decay has values to read."""
    if not log_decay.numel():
        return False
    low, high = map(float, log_decay.detach().aminmax())
    if high > 0:
        raise ValueError(f"log_decay: got up to {high:.3g}, expected numbers <= 0")
    return not low >= MIN_LOG_DECAY  # a NaN is unknown


def clamp_gates(gates: Tensor) -> Tensor:
    """The gates in float32 or wider, at least MIN_LOG_DECAY."""
    return gates.to(torch.promote_types(gates.dtype, torch.float32)).clamp(min=MIN_LOG_DECAY)


def through_clamp(gradient: Tensor, gates: Tensor) -> Tensor:
    """The gradient of ``gates``, from that of ``clamp_gates(gates)``."""
    return gradient.where(gates.to(torch.promote_types(gates.dtype, torch.float32)) >= MIN_LOG_DECAY, 0)


def steps_of_tokens(
    angle_steps: Tensor | None, key_mask: Tensor | None, state: LinearAttentionState | None, tokens: Tokens
) -> Tensor | None:
    """angle_steps (b or 1, n, g or 1, pairs), 0 for hidden tokens.

    Each sequence's first step includes the state's angle_gradient_path.
    """
    if angle_steps is None:
        return None
    steps = zero_hidden(angle_steps, key_mask)
    if state is not None and state.angle_gradient_path is not None and steps.shape[1]:
        steps = steps + at_first(state.angle_gradient_path, steps.shape[1], tokens.bounds).to(steps.dtype)
    return steps


def gradient_path(steps: Tensor, state: LinearAttentionState | None, tokens: Tokens) -> Tensor | None:
    """The next state's angle_gradient_path: zeros (s, g or 1, pairs) that pass gradients to all steps so far."""
    if not steps.requires_grad or not torch.is_grad_enabled():
        return None
    total = sums_of_sequences(steps.double(), tokens.bounds)
    # The first step of a sequence with tokens includes the state's path. Sequences without tokens get it here.
    if state is not None and state.angle_gradient_path is not None:
        if tokens.bounds is not None:
            total = total + state.angle_gradient_path.where(tokens.bounds.diff().eq(0)[:, None, None], 0)
        elif steps.shape[1] == 0:
            total = total + state.angle_gradient_path
    return total - total.detach()


def zero_hidden(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """x (b or 1, m, ..) with 0 where the mask hides a token."""
    return x if key_mask is None else x.masked_fill(~key_mask.view(*key_mask.shape, *[1] * (x.ndim - 2)), 0)

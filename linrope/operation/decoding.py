"""A decoding loop from its second step on: what its steps have in common is checked and resolved once.

A step's kernel takes some microseconds, and Python, which checks and resolves every argument, three times as
many. So a step in the memory of a state that was given away leaves what it found on the next state. Where the
step after has the same objects for options, it goes straight to the kernel, which checks the token's tensors
itself; where anything differs, it is a call like any other.
"""

from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from linrope.backends import native
from linrope.backends.call import Call, transformed
from linrope.sequence.state import LinearAttentionState


class Steps(NamedTuple):
    """What the steps of a loop share."""

    options: tuple[object, ...]  # the caller's: all but the token's tensors and the state
    decay: Tensor | None
    numbers: list[float] | None  # decay's, when log_decay was made of them: torch does not count all writes
    gated: bool  # whether each token brings log_decay
    turned: bool  # and angle_steps
    resolved: native.Resolved


def steps_like(call: Call, options: tuple[object, ...], decay: Tensor | None, *, gated: bool) -> Steps | None:
    """After a step by the native backend, in place and without given positions or mask.

    None: the next one needs what this one did (its decay depends on the token).
    """
    if torch.is_grad_enabled() or (decay is not None and gated):
        return None
    numbers = None if decay is None else decay.tolist()
    return Steps(options, decay, numbers, gated, call.angle_steps is not None, native.resolved(call))


def follow(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    angle_steps: Tensor | None,
    state: LinearAttentionState,
    *,
    options: tuple[object, ...],
) -> Tensor | None:
    """out, with the next state in the given one's memory; None: no such step, and nothing was written."""
    steps: Steps | None = getattr(state, "steps", None)
    if steps is None or not state.donated or not all(map(is_, options, steps.options)):
        return None
    if steps.gated != (log_decay is not None) or steps.turned != (angle_steps is not None):
        return None
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return None
    if transformed() or forward_ad._current_level >= 0:
        return None
    if steps.decay is not None and steps.decay.tolist() != steps.numbers:
        return None
    try:
        return native.follow(steps.resolved, state, (q, k, v), log_decay, angle_steps)
    except (RuntimeError, TypeError):  # the kernel's checks; the ordinary call says what is wrong
        return None

"""A decoding step of the operation alone, prepared once for all tokens of a loop."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from linrope.backends import library, native
from linrope.common.writable import check_writable
from linrope.feature_maps import FeatureMap
from linrope.operation.plan import plan_of
from linrope.recurrence.call import INPUTS, Call
from linrope.recurrence.decay import add_gates, log_decay_of_step, widen_gates
from linrope.recurrence.identities import WITHOUT_Z
from linrope.recurrence.state import LinearAttentionState
from linrope.rotation.rotary import Rotary


class AttentionStep:
    """Runs ``linear_rope_attention`` on one token of each sequence, and overwrites the state in place.

    ``prepare_attention`` makes it, and says what it is for. ``state`` is the state after the last token.
    """

    def __init__(self, state: LinearAttentionState, step: native.Step, decay: Tensor | None) -> None:
        self.state = state
        self._fixed = log_decay_of_step(decay, None)  # (1, 1, g)
        memory = {
            "kv": state.kv,
            "z": None if state.identity.endswith(WITHOUT_Z) else state.z,
            "angle": state.angle,
            "positions": state.position.unsqueeze(1),
        }
        self._run = library.Prepared("step", step.shared | memory, INPUTS)
        self._written = [x for x in memory.values() if x is not None]

    @torch.no_grad()
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        log_decay: Tensor | None = None,
        angle_steps: Tensor | None = None,
        write: Tensor | None = None,
        erase: Tensor | None = None,
    ) -> Tensor:
        """q (b, 1, h, d), k (b, 1, g, d), v (b, 1, g, e) -> out (b, 1, h, e). Overwrites the state with the next one.

        log_decay, angle_steps, write and erase are as in ``linear_rope_attention``. A state that calls with erase have
        made takes erase in every step, and no other state does. The kernel checks all arguments before it writes
        anything, and raises TypeError, ValueError or RuntimeError.
        """
        log_decay = widen_gates(log_decay) if self._fixed is None else add_gates(self._fixed, log_decay)
        out: Tensor = self._run(q, k, v, log_decay, angle_steps, write, erase)
        increment_version(self._written)  # autograd does not see what kernels write
        return out


def prepare_attention(
    state: LinearAttentionState,
    *,
    feature_map: str | FeatureMap | None = "elu+1",
    rotary: Rotary | None = None,
    normalize: bool = True,
    decay: Tensor | None = None,
    eps: float = 1e-6,
    eps_mode: str = "clamp",
) -> AttentionStep:
    """Prepares decoding steps of ``linear_rope_attention`` that go straight to the kernel, on a CPU without gradients.

        out = step(q, k, v)     is     out, state = linear_rope_attention(q, k, v, state=state, ..)

    The options and the state are checked here, once, and a step checks its own tensors. Every step overwrites the
    state given here, which other calls must not donate meanwhile. decay is read here: prepare a new step when it has
    changed. If earlier calls passed angle_steps, steps have to pass them too.

    Args:
        state: the state after the last token, without slots. Steps of a state without z take erase.
        feature_map: a map of single numbers, by name or as an object, or None. Others take ordinary calls.
        rotary: as in the calls that made the state.
        normalize: as in ``linear_rope_attention``, as are the others.
        decay: one factor per key/value head.
        eps: lower bound of the normalizer.
        eps_mode: "clamp" or "add".

    Raises:
        TypeError, ValueError: as in ``linear_rope_attention``; or only an ordinary call can take the step.
        RuntimeError: the backend "native" cannot run here. The message has the reason.

    >>> from linrope.backends import library, native
    >>> from linrope.decode import prepare_attention
    >>> q, k, v = torch.randn(3, 1, 5, 2, 4)
    >>> expected, (_, state) = linear_rope_attention(q, k, v), linear_rope_attention(
    ...     q[:, :4], k[:, :4], v[:, :4], return_state=True)
    >>> if native.why_not() is None:
    ...     step = prepare_attention(state)
    ...     torch.testing.assert_close(step(q[:, 4:], k[:, 4:], v[:, 4:]), expected[:, 4:])
    """
    if not isinstance(state, LinearAttentionState):
        raise TypeError(f"state: got {type(state).__name__}, expected LinearAttentionState")
    if state.slots is not None:
        raise ValueError("state: got rows of a pool, expected a state without slots")
    b, g, f, e = state.kv.shape
    token: dict[str, Any] = {"q": state.kv.new_zeros(b, 1, g, f), "k": state.kv.new_zeros(b, 1, g, f)}
    if state.identity.endswith(WITHOUT_Z):
        token["erase"] = state.kv.new_zeros(1, 1, 1)
    if state.angle is not None:
        token["angle_steps"] = state.kv.new_zeros(1, 1, 1, state.angle.shape[2])
    call = Call(
        **token,
        v=state.kv.new_zeros(b, 1, g, e),
        feature_map=feature_map,
        rotary=rotary,
        normalize=normalize,
        decay=decay,
        eps=eps,
        eps_mode=eps_mode,
        backend="native",
        state=state,
        return_state=True,
    )
    plan = plan_of(call)
    if plan.step is None:
        raise ValueError(
            "a prepared step is impossible here: expected a feature map that the kernels apply, and no rotation with "
            "axes or an attention factor; use linear_rope_attention with state.donate()"
        )
    check_writable(state.written())
    if not native.fits_in_place(state):
        raise ValueError("state: got tensors that are not contiguous, expected a clone()")
    return AttentionStep(state, plan.step, decay)

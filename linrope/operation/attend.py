"""Answers a call: its plan, q and k as features, a backend, the next state."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from linrope import backends
from linrope.backends import native
from linrope.backends.steady import Steady, covers
from linrope.common.writable import check_writable
from linrope.operation import checks, head_first, positions
from linrope.operation.features import map_features
from linrope.operation.plan import Plan, next_identity, plan_of
from linrope.recurrence.call import Call, Sums, needs_gradients
from linrope.recurrence.decay import (
    check_gates,
    distances,
    gradient_path,
    log_decay_of_step,
    log_decay_of_tokens,
    steps_of_tokens,
    zero_hidden,
)
from linrope.recurrence.packing import Tokens
from linrope.recurrence.stabilizer import Stabilized, stabilize
from linrope.recurrence.state import LinearAttentionState

# Computes a call that a backend gets. Its first argument is that backend's ``attend``.
Computation = Callable[..., tuple[Tensor, Sums | None]]


def attend(call: Call, through: Computation | None = None) -> tuple[Tensor, LinearAttentionState | None]:
    """Returns out and the state after the last key. The state is None if the call makes none.

    through: a function that calls the backend, perhaps several times; None: it is called once.
    """
    try:
        plan = plan_of(call)
        if plan.warning is not None:
            warnings.warn(plan.warning, stacklevel=3)
        if plan.step is not None and through is None and not needs_gradients(call, call.state):
            state = call.state
            assert state is not None
            in_place = state.donated or state.slots is not None
            if not in_place or (
                native.fits_in_place(state) and (call.angle_steps is None or _angle_fits(call))
            ):
                return _step(call, plan, state, in_place)
        clamps = False  # True: some gates may be too low for the kernels
        direct = plan.direct if through is None else None
        if direct is not None:
            clamps = call.log_decay is not None and check_gates(call.log_decay)
        else:
            checks.check_values(call)
            identity, tokens = _identity(call, plan), plan.tokens or positions.resolve(call)
    except ValueError as error:
        if head_first.suspected(call):
            raise ValueError(f"{error}; {head_first.HINT}") from None
        raise
    if direct is None:
        return _attend(call, plan, identity, tokens, through)
    return _direct(call, plan, direct, clamps)


def _direct(
    call: Call, plan: Plan, direct: Steady, clamps: bool
) -> tuple[Tensor, LinearAttentionState | None]:
    """A call without a state whose tensors go to the kernels as they are, apart from gates out of range."""
    out, sums = direct(call, clamps)
    if sums is None:
        return out, None
    assert plan.identity is not None
    assert plan.tokens is not None
    position = positions.next_positions(call, plan.tokens)
    return out, LinearAttentionState(sums.kv, sums.z, position, plan.identity)


def _identity(call: Call, plan: Plan) -> str:
    """The identity of the next state, or "" without one. Raises ValueError if the call's own state has another."""
    if plan.identity is not None or (call.state is None and not call.return_state):
        return plan.identity or ""
    return next_identity(call, plan.named_map or call.feature_map)


def _step(
    call: Call, plan: Plan, state: LinearAttentionState, in_place: bool
) -> tuple[Tensor, LinearAttentionState | None]:
    """One more token of each sequence. The kernel checks its numbers before it writes any."""
    assert plan.step is not None
    assert plan.identity is not None
    try:
        log_decay = log_decay_of_step(call.decay, call.log_decay)
        out, sums, position = plan.step(call, log_decay, state, in_place)
    except RuntimeError:  # the checks of all calls name what is wrong
        checks.check_values(call)
        positions.resolve(call)
        raise
    if in_place:
        if position is not state.position:
            state._write_unchecked({"position": position})
        return out, state._replace_unchecked(donated=False, identity=plan.identity)
    if not call.return_state:
        return out, None
    return out, state._replace_unchecked(
        **sums._asdict(),
        position=position,
        slots=None,
        identity=plan.identity,
        donated=False,
        angle_gradient_path=None,
    )


def _attend(
    call: Call, plan: Plan, identity: str, tokens: Tokens, through: Computation | None
) -> tuple[Tensor, LinearAttentionState | None]:
    """Any call: q and k become features, a backend computes out and the sums, and these the next state."""
    known = "positions" in plan.resolved
    prepared = BackendCall(call.changed(**plan.resolved)) if known else _prepare(call, plan, tokens)
    resolved, state, stabilized = prepared.call, prepared.state, prepared.stabilized
    in_place = _writes_in_place(resolved)
    resolved.return_state = call.return_state or in_place
    if plan.backend is None:
        plan.backend = backends.choose(call.backend, resolved, state)
    constant = plan.steady and plan.identity is not None and positions.are_constant(tokens)
    if constant and plan.backend is native and covers(resolved):
        plan.tokens, plan.direct = tokens, Steady(resolved)
        if through is None:
            return _direct(call, plan, plan.direct, clamps=True)
    if not plan.backend.TAKES_VALUE_GROUPS:
        resolved = resolved.expanded()
    compute = plan.backend.attend if through is None else partial(through, plan.backend.attend)
    out, sums = compute(resolved, state)
    if out.dtype != call.v.dtype:  # expanded values may be wider
        out = out.to(call.v.dtype)
    if stabilized is not None and prepared.q_scale is not None and not call.normalize:
        out = _rescaled(out, prepared.q_scale, stabilized, resolved.group)
    if sums is None:
        return out, None
    tensors = {
        "position": positions.next_positions(call, tokens),
        "log_scale": None if stabilized is None else stabilized.last_maximum,
        "angle_gradient_path": None
        if resolved.angle_steps is None
        else gradient_path(resolved.angle_steps, call.state, tokens),
    }
    if call.state is not None and in_place:
        return out, _overwritten(call.state, sums, identity, **tensors)
    return out, LinearAttentionState(**sums._asdict(), identity=identity, **tensors)  # type: ignore[arg-type]


class BackendCall(NamedTuple):
    """The call that a backend gets, and the state that it continues from."""

    call: Call
    state: LinearAttentionState | None = None
    stabilized: Stabilized | None = None
    q_scale: Tensor | None = None


def _prepare(call: Call, plan: Plan, tokens: Tokens) -> BackendCall:
    """Maps q and k, apart from an elementwise map, and brings gates and steps into the form that backends take."""
    features = map_features(call, plan, tokens)
    k, state, stabilized = features.k, call.state, None
    # The first call of a plan does not know its backend yet.
    clamps = features.k_scale is not None or plan.backend is None or not plan.backend.CLAMPS_GATES
    log_decay = log_decay_of_tokens(call.decay, call.log_decay, call.key_mask, tokens, k.shape[1], clamps)
    angle_steps = steps_of_tokens(call.angle_steps, call.key_mask, state, tokens)
    if features.k_scale is not None:
        stabilized = stabilize(
            call, tokens, k, features.k_scale, log_decay, plan.resolved["feature_map"] == "exp"
        )
        k, log_decay, state = stabilized.k, stabilized.log_decay, stabilized.state
    fixed = plan.resolved | {
        "positions": tokens.positions,
        "key_positions": tokens.key_positions,
        "distances": None if plan.resolved["xpos_log_decay"] is None else distances(tokens, k.shape[1]),
    }
    erase = None if call.erase is None else zero_hidden(call.erase, call.key_mask)
    same = log_decay is call.log_decay and erase is call.erase
    if plan.steady and same and positions.are_constant(tokens):
        plan.tokens, plan.resolved = tokens, fixed
    resolved = call.changed(
        q=features.q,
        k=k,
        log_decay=log_decay,
        decay=None,
        angle_steps=angle_steps,
        erase=erase,
        **fixed,
    )
    return BackendCall(resolved, state, stabilized, features.q_scale)


def _rescaled(out: Tensor, q_scale: Tensor, stabilized: Stabilized, group: int) -> Tensor:
    """out with the scales that were split off the features. The normalizer would have cancelled them."""
    scale = q_scale + stabilized.maximum.repeat_interleave(group, 2)
    return (out * scale.exp().to(torch.promote_types(out.dtype, torch.float32))[..., None]).to(out.dtype)


def _overwritten(
    state: LinearAttentionState, sums: Sums, identity: str, **tensors: Tensor | None
) -> LinearAttentionState:
    """The next state, in the memory of a donated state or of a pool's rows."""
    state._write_unchecked(sums._asdict() | tensors)
    return state._replace_unchecked(donated=False, identity=identity)


def _writes_in_place(call: Call) -> bool:
    """True if the next state overwrites the incoming one: the call selects rows of a pool, or it is one token.

    Raises if the incoming state's memory is not writable.
    """
    state = call.state
    if state is None or not (state.slots is not None or (state.donated and call.k.shape[1] == 1)):
        return False
    if needs_gradients(call, state):
        if state.slots is not None:
            raise RuntimeError("state: got rows of a pool in a call with gradients, expected torch.no_grad()")
        return False
    check_writable(state.written())
    return call.angle_steps is None or _angle_fits(call)


def _angle_fits(call: Call) -> bool:
    """True if the state's tensor of angles can hold the new ones. It may have one row for all heads."""
    assert call.angle_steps is not None
    angle = None if call.state is None else call.state.angle
    return angle is not None and angle.shape[1] >= call.angle_steps.shape[2]

"""Answers a request: checks it, maps q and k to features, calls a backend, builds the next state."""

import torch
from torch import Tensor

from linrope import backends
from linrope.common.writable import check_writable
from linrope.feature_maps import FeatureMap
from linrope.operation import checks, head_first, positions
from linrope.operation.decoding import loop_after
from linrope.operation.features import map_features, scale_and_rotate
from linrope.operation.request import Request
from linrope.recurrence.call import Call, needs_gradients, repeat_heads
from linrope.recurrence.decay import Tokens, distances, gradient_path, log_decay_of_tokens, steps_of_tokens
from linrope.recurrence.identities import WITHOUT_Z
from linrope.recurrence.stabilizer import stabilize
from linrope.recurrence.state import LinearAttentionState
from linrope.rotation.rotary import Rotary


def attend(request: Request) -> tuple[Tensor, LinearAttentionState | None]:
    """Returns out and the state after the last key. The state is None if the call makes none."""
    q, k, rotary, state = request.q, request.k, request.rotary, request.state
    fmap, identity, tokens = _checked(request)
    log_decay = log_decay_of_tokens(request.decay, request.log_decay, request.key_mask, tokens, k.shape[1])
    angle_steps = steps_of_tokens(request.angle_steps, request.key_mask, state, tokens)
    if (xpos_log_decay := None if rotary is None else rotary.xpos_log_decay) is not None:
        xpos_log_decay = xpos_log_decay.to(k.device)
    if request.rope_order == "before" and rotary is not None and rotary.heads > k.shape[2]:
        q, k = repeat_heads(request.v, q, k)  # every value head has its own theta
    q, k, rotary = scale_and_rotate(q, k, fmap, rotary, request.rope_order, tokens)
    q, k, backend_map, q_scale, k_scale = map_features(q, k, fmap, request.key_mask, tokens)
    stabilized = None
    if k_scale is not None:
        # The running maximum of the scales decays by log_decay, which each value head has of its own.
        q, k, q_scale, k_scale = repeat_heads(request.v, q, k, q_scale, k_scale)
        stabilized = stabilize(
            k=k,
            log_scale=k_scale,
            log_decay=log_decay,
            state=state,
            tokens=tokens,
            key_mask=request.key_mask,
            causal=request.causal,
            backend_applies_exp=backend_map == "exp",
        )
        k, log_decay, state = stabilized.k, stabilized.log_decay, stabilized.state
    call = Call(
        q=q,
        k=k,
        v=request.v,
        log_decay=log_decay,
        angle_steps=angle_steps,
        write=request.write,
        positions=tokens.positions,
        key_positions=tokens.key_positions,
        theta_turns=None if rotary is None else rotary.turns_per_position(k.device),
        xpos_log_decay=xpos_log_decay,
        distances=None if xpos_log_decay is None else distances(tokens, k.shape[1]),
        key_mask=request.key_mask,
        cu_seqlens=request.cu_seqlens,
        feature_map=backend_map,
        layout="interleaved" if request.rotary is None else request.rotary.layout,
        causal=request.causal,
        normalize=request.normalize,
        eps=float(request.eps),
        eps_mode=request.eps_mode,
        want_state=request.return_state or _may_write(request.state, k),
    )
    backend = backends.choose(request.backend, call, state)
    if not backend.TAKES_VALUE_GROUPS:
        call = call.expanded()
    in_place = _writes_in_place(request.state, call)
    out, sums = backend.attend(call, state)
    if out.dtype != request.v.dtype:  # expanded values may be wider
        out = out.to(request.v.dtype)
    if stabilized is not None and q_scale is not None and not request.normalize:
        # The normalizer would cancel the scales that were split off the features. Without it they are put back.
        scale = q_scale + stabilized.maximum.repeat_interleave(call.group, 2)
        out = (out * scale.exp().to(torch.promote_types(out.dtype, torch.float32))[..., None]).to(out.dtype)
    if sums is None:
        return out, None
    new = {
        "kv": sums.kv,
        "z": sums.z,
        "angle": sums.angle,
        "log_scale": None if stabilized is None else stabilized.last_maximum,
        "angle_gradient_path": None if angle_steps is None else gradient_path(angle_steps, state, tokens),
        "position": positions.next_positions(request, tokens),
    }
    if request.state is not None and in_place:
        request.state._write_unchecked(new)
        return out, request.state._replace_unchecked(donated=False, loop=loop_after(request, call, backend))
    return out, LinearAttentionState(identity=identity, **new)  # type: ignore[arg-type]


def _checked(request: Request) -> tuple[FeatureMap | None, str, Tokens]:
    """The feature map, the identity of the next state, and the positions. Raises if the request does not fit."""
    state, identity = request.state, ""
    try:
        fmap = checks.check(request)
        if state is not None or request.return_state:
            identity = identity_of(fmap, request.rotary, request.rope_order)
        if state is not None:
            checks.check_state(request, fmap, identity)
            identity += WITHOUT_Z if state.identity.endswith(WITHOUT_Z) else ""
        head_first.warn_of_many_heads(request)
        return fmap, identity, positions.resolve(request)
    except ValueError as error:
        if head_first.suspected(request):
            raise ValueError(f"{error}; {head_first.HINT}") from None
        raise


def identity_of(fmap: FeatureMap | None, rotary: Rotary | None, rope_order: str) -> str:
    """The identity stored in a state. A call with another map or rotation rejects the state."""
    order = " before" if rope_order == "before" else ""
    return f"{'features' if fmap is None else fmap.identity}; {rotary and rotary.identity}{order}"


def _may_write(state: LinearAttentionState | None, k: Tensor) -> bool:
    """True if a call may overwrite the state: it selects rows of a pool, or it is donated and the call has one key."""
    return state is not None and (state.slots is not None or (state.donated and k.shape[1] == 1))


def _writes_in_place(state: LinearAttentionState | None, call: Call) -> bool:
    """True if the next state overwrites the incoming one. Raises if the incoming state's memory is not writable."""
    if state is None or not _may_write(state, call.k):
        return False
    if torch.is_grad_enabled() and needs_gradients(call, state):
        if state.slots is not None:
            raise RuntimeError("state: got rows of a pool in a call with gradients, expected torch.no_grad()")
        return False
    check_writable({name: x for name, x in state.tensors().items() if name != "angle_gradient_path"})
    if call.angle_steps is None:
        return True
    # The next angle fits only if the incoming state has an angle, with a row for every head.
    return state.angle is not None and state.angle.shape[1] >= call.angle_steps.shape[2]

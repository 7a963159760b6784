"""What a call does: check the request, map q and k to features, attend, return the next state."""

import torch
from torch import Tensor

from linrope import backends
from linrope.backends.call import Call, needs_gradients
from linrope.common.writing import check_writable
from linrope.feature_maps import FeatureMap
from linrope.operation import checks, positions
from linrope.operation.decoding import loop_after
from linrope.operation.features import map_features, rotate_before
from linrope.operation.request import Request
from linrope.rotation.rotary import Rotary
from linrope.sequence.decay import distances, log_decay_of_tokens, slope_of_angle, steps_of_tokens
from linrope.sequence.stabilizer import stabilize
from linrope.sequence.state import LinearAttentionState


def attend(request: Request) -> tuple[Tensor, LinearAttentionState | None]:
    """out, and the last state if it is wanted."""
    q, k, rotary, state = request.q, request.k, request.rotary, request.state
    fmap = checks.check(request)
    identity = ""
    if state is not None or request.return_state:
        identity = identity_of(fmap, rotary, request.rope_order)
    if state is not None:
        checks.check_state(request, fmap, identity)
    tokens = positions.resolve(request)
    log_decay = log_decay_of_tokens(request.decay, request.log_decay, request.key_mask, tokens, k.shape[1])
    angle_steps = steps_of_tokens(request.angle_steps, request.key_mask, state, tokens)
    xpos = None if rotary is None or rotary.fade is None else rotary.fade.to(k.device)
    q, k, rotary = rotate_before(q, k, fmap, rotary, request.rope_order, tokens)
    q, k, name, q_scale, k_scale = map_features(q, k, fmap, request.key_mask, tokens)
    stable = None
    if k_scale is not None:
        stable = stabilize(
            k=k,
            log_scale=k_scale,
            log_decay=log_decay,
            state=state,
            tokens=tokens,
            key_mask=request.key_mask,
            causal=request.causal,
            exponential=name == "exp",
        )
        k, log_decay, state = stable.k, stable.log_decay, stable.state
    call = Call(
        q=q,
        k=k,
        v=request.v,
        log_decay=log_decay,
        angle_steps=angle_steps,
        positions=tokens.positions,
        key_positions=tokens.key_positions,
        theta=None if rotary is None else rotary.turns(k.device),
        xpos_log_decay=xpos,
        distances=None if xpos is None else distances(tokens, k.shape[1]),
        key_mask=request.key_mask,
        cu_seqlens=request.cu_seqlens,
        feature_map=name,
        layout="interleaved" if request.rotary is None else request.rotary.layout,
        causal=request.causal,
        normalize=request.normalize,
        eps=request.eps,
        eps_mode=request.eps_mode,
        want_state=request.return_state or _may_write(request.state, k),
    )
    backend = backends.choose(request.backend, call, state)
    in_place = _writes_in_place(request.state, call)
    out, sums = backend.attend(call, state)
    if stable is not None and q_scale is not None and not request.normalize:
        scale = q_scale + stable.at_tokens.repeat_interleave(call.group, 2)
        out = (out * scale.exp().to(torch.promote_types(out.dtype, torch.float32))[..., None]).to(out.dtype)
    if sums is None:
        return out, None
    new = {
        "kv": sums.kv,
        "z": sums.z,
        "angle": sums.angle,
        "log_scale": None if stable is None else stable.last,
        "angle_slope": None if angle_steps is None else slope_of_angle(angle_steps, state, tokens),
        "position": positions.after(request, tokens).expand(call.sequences),
    }
    if request.state is not None and in_place:
        request.state._put(new)
        return out, request.state._marked(donated=False, loop=loop_after(request, call, backend))
    new["position"] = new["position"].clone()  # type: ignore[union-attr]
    return out, LinearAttentionState(identity=identity, **new)  # type: ignore[arg-type]


def identity_of(fmap: FeatureMap | None, rotary: Rotary | None, rope_order: str) -> str:
    """The identity stored in a state. A call with another map or rotation rejects the state."""
    before = " before" if rope_order == "before" else ""
    return f"{'features' if fmap is None else fmap.identity}; {rotary and rotary.identity}{before}"


def _may_write(state: LinearAttentionState | None, k: Tensor) -> bool:
    """Whether a call without gradients writes to the state: to a pool's rows, or to one donated for a token."""
    return state is not None and (state.slots is not None or (state.donated and k.shape[1] == 1))


def _writes_in_place(state: LinearAttentionState | None, call: Call) -> bool:
    """Whether the next state goes into the memory of the given one. Raises if that memory is not writable."""
    if state is None or not _may_write(state, call.k):
        return False
    if torch.is_grad_enabled() and needs_gradients(call, state):
        if state.slots is not None:
            raise RuntimeError("state: got rows of a pool in a call with gradients, expected torch.no_grad()")
        return False
    check_writable({name: x for name, x in state.tensors().items() if name != "angle_slope"})
    if call.angle_steps is None:
        return True
    # Otherwise the old state has no `angle` buffer to write into.
    return state.angle is not None and state.angle.shape[1] >= call.angle_steps.shape[2]

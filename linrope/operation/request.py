"""What a call does: check and resolve what the caller gave, map features, attend, hand over the state."""

from typing import NamedTuple

import torch
from torch import Tensor

from linrope import backends
from linrope.backends.call import Call, Sums, needs_gradients
from linrope.common.names import check_name
from linrope.common.writing import check_writable
from linrope.feature_maps import FeatureMap
from linrope.operation import checks, decoding
from linrope.operation.features import map_features, rotate_before
from linrope.rotation.rotary import Rotary
from linrope.sequence.decay import (
    Tokens,
    distances,
    log_decay_of_tokens,
    slope_of_angle,
    stabilize,
    steps_of_tokens,
)
from linrope.sequence.packing import rising_bounds
from linrope.sequence.state import LinearAttentionState

ORDERS = ("after", "before")
EPS_MODES = ("clamp", "add")


class Request(NamedTuple):
    """What the caller gave."""

    q: Tensor | None  # None: the state alone is asked for
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    angle_steps: Tensor | None
    state: LinearAttentionState | None
    feature_map: str | FeatureMap | None  # from here on: what the steps of a decoding loop have in common
    rotary: Rotary | None
    causal: bool
    normalize: bool
    decay: Tensor | None
    positions: Tensor | None
    key_positions: Tensor | None
    key_mask: Tensor | None
    cu_seqlens: Tensor | None
    return_state: bool
    eps: float
    eps_mode: str
    rope_order: str
    backend: str


OPTIONS = Request._fields.index("feature_map")


def attend(request: Request) -> tuple[Tensor, LinearAttentionState | None]:
    """out, and the last state where it is wanted."""
    q, k, v, rotary, state = request.q, request.k, request.v, request.rotary, request.state
    fmap = check(request)
    identity = (
        "" if state is None and not request.return_state else identity_of(fmap, rotary, request.rope_order)
    )
    sequences = k.shape[0] if request.cu_seqlens is None else len(request.cu_seqlens) - 1
    if state is not None:
        f = k.shape[3] if fmap is None else fmap.feature_dim
        checks.check_state(state, (sequences, k.shape[2], f, v.shape[3]), identity, k.device)
        if state.angle is not None and request.angle_steps is None:
            raise ValueError(
                "angle_steps: got None, expected those of this piece, as the state was made with some"
            )
        if request.angle_steps is not None:
            checks.check_angle(state, request.angle_steps)
    tokens = _resolve_tokens(request, sequences)
    log_decay = log_decay_of_tokens(request.decay, request.log_decay, request.key_mask, tokens, k.shape[1])
    angle_steps = steps_of_tokens(request.angle_steps, request.key_mask, state, tokens)
    fade = None if rotary is None or rotary.fade is None else rotary.fade.to(k.device)
    q, k, rotary = rotate_before(q, k, fmap, rotary, request.rope_order, tokens)
    q, k, name, q_scale, k_scale = map_features(q, k, fmap, request.key_mask, tokens)
    stable = None
    if k_scale is not None:
        stable = stabilize(
            k, k_scale, log_decay, state, tokens,
            key_mask=request.key_mask, causal=request.causal, exponential=name == "exp",
        )  # fmt: skip
        k, log_decay, state = stable.k, stable.log_decay, stable.state
    call = Call(
        q, k, v, log_decay, angle_steps, None if rotary is None else rotary.turns(k.device), tokens.positions,
        tokens.key_positions, fade, None if fade is None else distances(tokens, k.shape[1]), request.key_mask,
        request.cu_seqlens, "interleaved" if request.rotary is None else request.rotary.layout, name,
        request.causal, request.normalize, request.eps, request.eps_mode,
        request.return_state or _may_write(request.state, k),
    )  # fmt: skip
    backend = backends.choose(request.backend, call, state)
    in_place = _checked_memory(request.state, call)
    out, sums = backend.attend(call, state)
    if stable is not None and q_scale is not None and not request.normalize:
        scale = q_scale + stable.at_tokens.repeat_interleave(call.group, 2)
        out = (out * scale.exp().to(torch.promote_types(out.dtype, torch.float32))[..., None]).to(out.dtype)
    if sums is None:
        return out, None
    last = None if stable is None else stable.last
    slope = None if angle_steps is None else slope_of_angle(angle_steps, state, tokens)
    after = _next_state(
        call, sums, request, tokens, identity, in_place=in_place, log_scale=last, angle_slope=slope
    )
    if backend is backends.native and _starts_a_loop(request, call):
        after.__dict__["steps"] = decoding.steps_like(
            call, request[OPTIONS:], request.decay, gated=request.log_decay is not None
        )
    return out, after


def _starts_a_loop(request: Request, call: Call) -> bool:
    """Whether this was a step in place that the kernel did alone, from what the caller gave and the state."""
    given = request.positions, request.key_positions, request.key_mask, request.cu_seqlens
    return (
        request.state is not None
        and request.state.donated
        and request.state.slots is None
        and call.k.shape[1] == 1
        and call.causal
        and call.q is request.q
        and call.k is request.k
        and all(x is None for x in given)
    )


def check(request: Request) -> FeatureMap | None:
    """Raises where arguments do not fit; returns the map, None where q and k are features."""
    q, k, v, rotary, causal = request.q, request.k, request.v, request.rotary, request.causal
    checks.check_tensors(q, k, v, causal)
    if not 0 < request.eps < torch.inf:
        raise ValueError(f"eps={request.eps}: expected a positive finite number")
    check_name("eps_mode", request.eps_mode, EPS_MODES)
    check_name("rope_order", request.rope_order, ORDERS)
    b, m, g, d = k.shape
    n, device = m if q is None else q.shape[1], k.device
    before = request.rope_order == "before"
    checks.check_mask(request.key_mask, b, m, device)
    checks.check_decay(request.decay, g, causal, device)
    checks.check_log_decay(request.log_decay, k, causal)
    checks.check_packing(request.cu_seqlens, b, n, m, device)
    fmap = checks.resolve_map(request.feature_map, d)
    if request.normalize and fmap is not None and not fmap.positive:
        raise ValueError(
            f"feature_map={request.feature_map!r}: its features are signed, so the normalizer can vanish; "
            "expected normalize=False or a positive map"
        )
    f = d if fmap is None else fmap.feature_dim
    checks.check_rotary(rotary, d if before else f, g, causal, before)
    checks.check_angle_steps(request.angle_steps, k, n, d if before else f, rotary)
    if before and request.angle_steps is not None:
        raise ValueError("rope_order='before': got angle_steps, which turn features; expected 'after'")
    if request.key_positions is not None and (_fades_by_position(request) or request.log_decay is not None):
        raise ValueError(
            "key_positions: got them beside fading keys (decay, log_decay or xpos), expected None"
        )
    positional = fmap is not None and fmap.positional
    if rotary is not None and rotary.axes is not None and (request.decay is not None or positional):
        name = f"feature_map={request.feature_map}" if positional else "decay"
        raise ValueError(f"{name}: got a rotation with axes={rotary.axes}, expected one with axes=None")
    return fmap


def identity_of(fmap: FeatureMap | None, rotary: Rotary | None, rope_order: str) -> str:
    """Of a state: those of other features or another rotation are refused."""
    before = " before" if rope_order == "before" else ""
    return f"{'features' if fmap is None else fmap.identity}; {rotary and rotary.identity}{before}"


def _resolve_tokens(request: Request, sequences: int) -> Tokens:
    q, k, rotary, state = request.q, request.k, request.rotary, request.state
    b, m, _, _ = k.shape
    n = m if q is None else q.shape[1]
    if state is None:
        start = torch.zeros(
            1 if request.cu_seqlens is None else sequences, dtype=torch.int64, device=k.device
        )
    else:
        start = state.position if state.slots is None else state.position[state.slots]
    bounds = rising_bounds(request.cu_seqlens, n)
    axes = None if rotary is None else rotary.axes
    resolved = checks.resolve_positions(
        request.positions, request.key_positions, start, b, n, m, axes, bounds
    )
    if request.positions is not None and _fades_by_position(request):
        checks.check_order(resolved[0], start, bounds)
    return Tokens(bounds, start, *resolved)


def _fades_by_position(request: Request) -> bool:
    return request.decay is not None or (request.rotary is not None and request.rotary.xpos is not None)


def _next_state(
    call: Call,
    sums: Sums,
    request: Request,
    tokens: Tokens,
    identity: str,
    *,
    in_place: bool,
    **more: Tensor | None,
) -> LinearAttentionState:
    """The state after the call: a new one, or the given one where it was given away or is a pool's rows."""
    state, m = request.state, call.k.shape[1]
    by_default = request.positions is None or (call.q is not None and m != call.q.shape[1])
    on_a_grid = request.rotary is not None and request.rotary.axes is not None  # there a state counts tokens
    counted = on_a_grid or (request.key_positions is None and by_default)
    if state is None or not in_place:
        position = checks.next_position(tokens, m, counted).expand(call.sequences).clone()
        return LinearAttentionState(sums.kv, sums.z, position, identity, sums.angle, **more)  # type: ignore[arg-type]
    position = checks.next_position(tokens, m, counted).expand(call.sequences)
    state._put({"kv": sums.kv, "z": sums.z, "angle": sums.angle, **more, "position": position})
    return state._marked(False)


def _may_write(state: LinearAttentionState | None, k: Tensor) -> bool:
    """Whether a call without gradients writes to the state: a pool's rows, or one given away for a token."""
    return state is not None and (state.slots is not None or (state.donated and k.shape[1] == 1))


def _checked_memory(state: LinearAttentionState | None, call: Call) -> bool:
    """Whether the next state goes into the given one's memory, which is then fit for it.

    Raises before anything is written.
    """
    if state is None or not _may_write(state, call.k):
        return False
    if torch.is_grad_enabled() and needs_gradients(call, state):
        if state.slots is not None:
            raise RuntimeError("state: got rows of a pool in a call with gradients, expected torch.no_grad()")
        return False
    check_writable({name: x for name, x in state.tensors().items() if name != "angle_slope"})
    if call.angle_steps is None:
        return True
    # Otherwise the old state has no memory for the sum of the steps.
    return state.angle is not None and state.angle.shape[1] >= call.angle_steps.shape[2]

"""The operation: check and resolve the arguments, map features, attend, hand over the state."""

from typing import Literal, NamedTuple, TypedDict, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from linrope import arguments, backends
from linrope.backends.call import Call, Sums
from linrope.decay import Tokens, distances, log_decay_of_tokens, slope_of_angle, stabilize, steps_of_tokens
from linrope.distributed.attend import Operation, Started, attend_shard, begin_shard
from linrope.distributed.shard import Shard
from linrope.feature_maps import FeatureMap
from linrope.features import map_features, rotate_before
from linrope.names import check_name
from linrope.packing import rising_bounds
from linrope.rotary import Rotary
from linrope.state import LinearAttentionState

ORDERS = ("after", "before")
EPS_MODES = ("clamp", "add")


class Options(TypedDict, total=False):
    """The keyword arguments of linear_rope_attention, but return_state and shard, for type checkers."""

    feature_map: str | FeatureMap | None
    rotary: Rotary | None
    causal: bool
    normalize: bool
    decay: Tensor | None
    log_decay: Tensor | None
    angle_steps: Tensor | None
    positions: Tensor | None
    key_positions: Tensor | None
    key_mask: Tensor | None
    cu_seqlens: Tensor | None
    state: LinearAttentionState | None
    eps: float
    eps_mode: str
    rope_order: str
    backend: str


@overload
def linear_rope_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_state: Literal[False] = ...,
    shard: Shard | Started | None = ...,
    **options: Unpack[Options],
) -> Tensor: ...
@overload
def linear_rope_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_state: Literal[True],
    shard: Shard | Started | None = ...,
    **options: Unpack[Options],
) -> tuple[Tensor, LinearAttentionState]: ...
@overload
def linear_rope_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_state: bool,
    shard: Shard | Started | None = ...,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, LinearAttentionState]: ...
def linear_rope_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str | FeatureMap | None = "elu+1",
    rotary: Rotary | None = None,
    causal: bool = True,
    normalize: bool = True,
    decay: Tensor | None = None,
    log_decay: Tensor | None = None,
    angle_steps: Tensor | None = None,
    positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: LinearAttentionState | None = None,
    return_state: bool = False,
    eps: float = 1e-6,
    eps_mode: str = "clamp",
    rope_order: str = "after",
    backend: str = "auto",
    shard: Shard | Started | None = None,
) -> Tensor | tuple[Tensor, LinearAttentionState]:
    """Linear attention with rotary position embedding on the feature maps.

        num_i = sum_j e^(L_i - L_j) <R(Theta_i) phi(q_i), R(Theta_j) psi(k_j)> v_j
        den_i = sum_j e^(L_i - L_j) <phi(q_i), psi(k_j)>
        out_i = num_i / max(den_i, eps)

        Theta_i = p_i theta + sum_(t<=i) omega_t      angles, one per pair of features
        L_i     = p_i log gamma + sum_(t<=i) a_t      log decay, one per key/value head

    The sums run over j <= i (causal) or over all keys; a query that sees no key gets 0. Training,
    prefill and decoding are this one call: feeding a sequence in pieces, each with the state of the
    one before, gives what one call gives.

    Args:
        q: (b, n, h, d) queries; float64, float32, bfloat16 or float16.
        k: (b, m, g, d) keys; query head i reads key/value head i // (h/g).
        v: (b, m, g, e) values.
        feature_map: name or FeatureMap for phi and psi; None: q and k are features already.
        rotary: the rotation R by positions, theta; None: plain linear attention (eq. 18).
        causal: whether query i sees only the keys j <= i of this call (and all of the state).
        normalize: False: the numerator alone.
        decay: gamma in (0, 1], (g,): one per key/value head; None: 1. Causal attention only; positions must
            then not fall.
        log_decay: a <= 0, (b or 1, n, g or 1): the log of what is kept of all before token t when it comes; t
            itself does not fade (forget gates). Causal attention only; below -10^4 as -10^4: nothing is kept.
        angle_steps: omega, (b or 1, n, g or 1, pairs), radians by which token t advances the rotation,
            beside what positions give; the first 2 pairs features turn, in rotary's layout (interleaved
            without one).
        positions: integers (n,) or (b, n), 0 .. 2^31 - 1; with a rotation of several axes (.., axes).
            Default: 0, 1, .., or on from the state. For padded batches (left or right):
            ``(key_mask.cumsum(1) - 1).clamp(min=0)``.
        key_positions: the same for keys, (m,) or (b, m). Default: positions if m == n, else 0, 1, ..,
            or on from the state.
        key_mask: bool (b, m), True = attend. A hidden token neither fades nor turns what follows: its
            log_decay and angle_steps count as 0.
        cu_seqlens: int32 or int64 (s + 1,): sequence i of s packed ones (b == 1) is the tokens
            cu_seqlens[i] .. cu_seqlens[i + 1] - 1. Default positions restart at each; the state has s
            sequences. On a GPU its numbers are not checked, and never lead out of bounds.
        state: to go on from; rows of a pool (``state.at(slots)``) are read and written in place.
        return_state: whether to return (out, state).
        eps: lower bound of the normalizer; with maps that return a log_scale, relative to the largest key.
        eps_mode: "clamp", or "add": out_i = num_i / (den_i + eps), as other codes have it.
        rope_order: "after", eq. 19; "before" rotates q and k and not their features, as pretrained
            softmax models have it. With maps other than the identity scores are then no functions of
            the relative position.
        backend: "auto", "reference" (quadratic, in the inputs' dtype), "eager" (chunked), "native" (fused,
            for CPUs) or "triton" (fused, for GPUs). "auto" takes native on a CPU and triton on a GPU where
            they support the call, else eager.
        shard: a ``linrope.distributed.Shard``: the tokens are this rank's part of each sequence, and all
            ranks make this call. cu_seqlens are then the shard's; a state is given to every rank, the same
            one, and every rank returns that of all tokens (of packed sequences: a local document's each).

    Returns:
        out (b, n, h, e) in v's dtype, or (out, state). But for reference, sums are in float32 or wider.

    Raises:
        TypeError: dtypes differ or are not floating; positions or cu_seqlens are not integers.
        ValueError: shapes, devices, positions, decays, steps, mask, packing, state or a name do not fit; a
            signed feature map with normalize=True.
        RuntimeError: the backend cannot run this call.

    Source: RoFormer eq. 19 (arXiv 2104.09864); decay as in RetNet (arXiv 2307.08621); gates and steps as in
    Mamba-2 (arXiv 2405.21060) and Selective RoPE (arXiv 2511.17388).

    >>> q, k, v = torch.randn(3, 1, 1000, 8, 64)
    >>> rotary = Rotary(64)
    >>> out = linear_rope_attention(q, k, v, rotary=rotary)
    >>> a, b = [x[:, :900] for x in (q, k, v)], [x[:, 900:] for x in (q, k, v)]
    >>> head, state = linear_rope_attention(*a, rotary=rotary, return_state=True)
    >>> tail = linear_rope_attention(*b, rotary=rotary, state=state)
    >>> torch.testing.assert_close(torch.cat((head, tail), 1), out)
    >>> packed = linear_rope_attention(q, k, v, rotary=rotary, cu_seqlens=torch.tensor([0, 900, 1000]))
    >>> torch.testing.assert_close(packed[:, :900], head)
    """
    request = _Request(
        q, k, v, feature_map, rotary, causal, normalize, decay, log_decay, angle_steps, positions,
        key_positions,
        key_mask, cu_seqlens, state, return_state, eps, eps_mode, rope_order, backend,
    )  # fmt: skip
    out, last = _attend(request) if shard is None else attend_shard(request, shard, _operation())
    return (out, last) if return_state and last is not None else out


def linear_rope_state(
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str | FeatureMap | None = "elu+1",
    rotary: Rotary | None = None,
    decay: Tensor | None = None,
    log_decay: Tensor | None = None,
    angle_steps: Tensor | None = None,
    positions: Tensor | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: LinearAttentionState | None = None,
    backend: str = "auto",
) -> LinearAttentionState:
    """The last state of ``linear_rope_attention``, without the outputs and for a fraction of their cost.

        kv = sum_j e^(L - L_j) R(Theta_j) psi(k_j) v_j^T      z = sum_j e^(L - L_j) psi(k_j)

    Arguments, errors and source as there; without keys, an empty state.

    >>> q, k, v = torch.randn(3, 1, 100, 8, 64)
    >>> _, state = linear_rope_attention(q, k, v, return_state=True)
    >>> torch.testing.assert_close(linear_rope_state(k, v).kv, state.kv)
    """
    request = _Request(
        None, k, v, feature_map, rotary, True, False, decay, log_decay, angle_steps, positions, None,
        key_mask, cu_seqlens, state, True, 1e-6, "clamp", "after", backend,
    )  # fmt: skip
    last = _attend(request)[1]
    assert last is not None
    return last


def send_state(k: Tensor, v: Tensor, shard: Shard, /, **options: Unpack[Options]) -> Started:
    """Begins a call on a shard: sends the state of its keys, and is given to the call as ``shard`` with q.

    What is computed in between does not wait for the other ranks. Options as in ``linear_rope_attention``.
    """
    defaults: dict[str, object] = dict.fromkeys(_Request._fields) | {
        "feature_map": "elu+1", "causal": True, "rope_order": "after", "backend": "auto", "eps": 1e-6,
        "eps_mode": "clamp",
    }  # fmt: skip
    request = _Request(**{**defaults, **options, "k": k, "v": v})  # type: ignore[arg-type]
    return begin_shard(request, shard, _operation())


class _Request(NamedTuple):
    """What the caller gave."""

    q: Tensor | None  # None: the state alone is asked for
    k: Tensor
    v: Tensor
    feature_map: str | FeatureMap | None
    rotary: Rotary | None
    causal: bool
    normalize: bool
    decay: Tensor | None
    log_decay: Tensor | None
    angle_steps: Tensor | None
    positions: Tensor | None
    key_positions: Tensor | None
    key_mask: Tensor | None
    cu_seqlens: Tensor | None
    state: LinearAttentionState | None
    return_state: bool
    eps: float
    eps_mode: str
    rope_order: str
    backend: str


def _attend(request: _Request) -> tuple[Tensor, LinearAttentionState | None]:
    """out, and the last state where it is wanted."""
    q, k, v, rotary, state = request.q, request.k, request.v, request.rotary, request.state
    fmap = _check(request)
    identity = (
        "" if state is None and not request.return_state else _identity(fmap, rotary, request.rope_order)
    )
    sequences = k.shape[0] if request.cu_seqlens is None else len(request.cu_seqlens) - 1
    if state is not None:
        f = k.shape[3] if fmap is None else fmap.feature_dim
        arguments.check_state(state, (sequences, k.shape[2], f, v.shape[3]), identity, k.device)
        if state.angle is not None and request.angle_steps is None:
            raise ValueError(
                "angle_steps: got None, expected those of this piece, as the state was made with some"
            )
    tokens = _resolve_tokens(request, sequences)
    log_decay = log_decay_of_tokens(request.decay, request.log_decay, request.key_mask, tokens, k.shape[1])
    angle_steps = steps_of_tokens(request.angle_steps, request.key_mask, state, tokens)
    fade = None if rotary is None or rotary.fade is None else rotary.fade.to(k.device)
    q, k, rotary = rotate_before(q, k, rotary, request.rope_order, tokens)
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
        request.return_state or _in_place(request.state, k),
    )  # fmt: skip
    out, sums = backends.choose(request.backend, call, state).attend(call, state)
    if stable is not None and q_scale is not None and not request.normalize:
        scale = q_scale + stable.at_tokens.repeat_interleave(call.group, 2)
        out = (out * scale.exp().to(torch.promote_types(out.dtype, torch.float32))[..., None]).to(out.dtype)
    if sums is None:
        return out, None
    last = None if stable is None else stable.last
    slope = None if angle_steps is None else slope_of_angle(angle_steps, state, tokens)
    return out, _next_state(call, sums, request, tokens, identity, log_scale=last, angle_slope=slope)


def _check(request: _Request) -> FeatureMap | None:
    """Raises where arguments do not fit; returns the map, None where q and k are features."""
    q, k, v, rotary, causal = request.q, request.k, request.v, request.rotary, request.causal
    arguments.check_tensors(q, k, v, causal)
    if not 0 < request.eps < torch.inf:
        raise ValueError(f"eps={request.eps}: expected a positive finite number")
    check_name("eps_mode", request.eps_mode, EPS_MODES)
    check_name("rope_order", request.rope_order, ORDERS)
    b, m, g, d = k.shape
    n, device = m if q is None else q.shape[1], k.device
    before = request.rope_order == "before"
    arguments.check_mask(request.key_mask, b, m, device)
    arguments.check_decay(request.decay, g, causal, device)
    arguments.check_log_decay(request.log_decay, k, causal)
    arguments.check_packing(request.cu_seqlens, b, n, m, device)
    fmap = arguments.resolve_map(request.feature_map, d)
    if request.normalize and fmap is not None and not fmap.positive:
        raise ValueError(
            f"feature_map={request.feature_map!r}: its features are signed, so the normalizer can vanish; "
            "expected normalize=False or a positive map"
        )
    f = d if fmap is None else fmap.feature_dim
    arguments.check_rotary(rotary, d if before else f, g, causal, before)
    arguments.check_angle_steps(request.angle_steps, k, n, d if before else f, rotary)
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


def _operation() -> Operation:
    return Operation(_check, _attend, _identity)


def _identity(fmap: FeatureMap | None, rotary: Rotary | None, rope_order: str) -> str:
    """Of a state: those of other features or another rotation are refused."""
    before = " before" if rope_order == "before" else ""
    return f"{'features' if fmap is None else fmap.identity}; {rotary and rotary.identity}{before}"


def _resolve_tokens(request: _Request, sequences: int) -> Tokens:
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
    resolved = arguments.resolve_positions(
        request.positions, request.key_positions, start, b, n, m, axes, bounds
    )
    if request.positions is not None and _fades_by_position(request):
        arguments.check_order(resolved[0], start, bounds)
    return Tokens(bounds, start, *resolved)


def _fades_by_position(request: _Request) -> bool:
    return request.decay is not None or (request.rotary is not None and request.rotary.xpos is not None)


def _next_state(
    call: Call, sums: Sums, request: _Request, tokens: Tokens, identity: str, **more: Tensor | None
) -> LinearAttentionState:
    """The state after the call: a new one, or the given one where it was given away or is a pool's rows."""
    state, m = request.state, call.k.shape[1]
    by_default = request.positions is None or (call.q is not None and m != call.q.shape[1])
    on_a_grid = request.rotary is not None and request.rotary.axes is not None  # there a state counts tokens
    counted = on_a_grid or (request.key_positions is None and by_default)
    if state is None or not _in_place(state, call.k) or (state.slots is None and sums.kv.requires_grad):
        position = arguments.next_position(tokens, m, counted).expand(call.sequences).clone()
        return LinearAttentionState(sums.kv, sums.z, position, identity, sums.angle, **more)  # type: ignore[arg-type]
    if sums.kv.requires_grad:
        raise RuntimeError("state: got rows of a pool in a call with gradients, expected torch.no_grad()")
    state.write({"kv": sums.kv, "z": sums.z, "angle": sums.angle, **more})
    if state.slots is None and counted:
        state.position.add_(m)
    else:
        state.write({"position": arguments.next_position(tokens, m, counted).expand(call.sequences)})
    return state._marked(False)


def _in_place(state: LinearAttentionState | None, k: Tensor) -> bool:
    """Whether the next state goes into the given one's memory."""
    return state is not None and (state.slots is not None or (state.donated and k.shape[1] == 1))

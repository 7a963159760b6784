"""The trapezoidal rule of Mamba-3: a token's key and value enter the sums twice, at the token and at the next one.

b batch, n tokens, h query heads, g key/value heads, d head dim, f features, e values, s sequences.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from linrope.feature_maps import FeatureMap
from linrope.feature_maps.base import widen
from linrope.layer.selective import SigmoidGate
from linrope.layer.state import LayerState, next_state
from linrope.operation import checks
from linrope.operation.functional import linear_rope_attention
from linrope.operation.options import Options
from linrope.operation.plan import identity_of
from linrope.operation.positions import first_positions, resolve_positions
from linrope.recurrence.call import repeat_heads
from linrope.recurrence.decay import MIN_LOG_DECAY, clamp_gates, zero_hidden
from linrope.recurrence.identities import same_identity
from linrope.recurrence.packing import at_last, owners, per_token, previous, rising_bounds
from linrope.recurrence.state import LinearAttentionState
from linrope.rotation.angles import cos_sin
from linrope.rotation.rotary import Rotary, rotate, spell_out


class TrapezoidGate(SigmoidGate):
    """Computes from each token how its write factor is divided between its own key and the key before it.

        lambda = sigmoid(W x + b)

    It maps x (b, n, embed_dim) to lambda (b, n, num_heads), the share of the token's own key, in float32 or wider. W
    starts small and b at 0, so lambda starts near 1/2, the trapezoidal rule. With lambda = 1 (Euler's rule) a layer
    computes what it computes without the gate.

    Args:
        embed_dim: size of x.
        num_heads: g.

    Source: Mamba-3, arXiv 2603.15569.

    >>> from linrope.layer.trapezoid import TrapezoidGate
    >>> TrapezoidGate(16, 2)(torch.zeros(1, 1, 16))
    tensor([[[0.5000, 0.5000]]], grad_fn=<SigmoidBackward0>)
    """


def attend_by_options(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    share: Tensor,
    state: LayerState | None,
    return_state: bool,
    options: Options,
) -> tuple[Tensor, LinearAttentionState | None, Tensor | None]:
    """``trapezoidal_attention`` with a layer's options: out, and the sums and the last token after the call."""
    if options["normalize"]:
        raise TypeError(
            "trapezoid=True: got float16 values, whose numerator may overflow; expected bfloat16, a wider dtype, "
            "or normalize=False"
        )
    implied = ("causal", "normalize", "erase", "key_positions", "rope_order", "state")
    others: dict[str, Any] = {name: y for name, y in options.items() if name not in implied}
    result = trapezoidal_attention(q, k, v, share=share, state=state, return_state=return_state, **others)
    if isinstance(result, Tensor):
        return result, None, None
    out, after = result
    return out, after.sums, after.last_token


def trapezoidal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    share: Tensor,
    write: Tensor | None = None,
    feature_map: str | FeatureMap | None = None,
    rotary: Rotary | None = None,
    decay: Tensor | None = None,
    log_decay: Tensor | None = None,
    angle_steps: Tensor | None = None,
    positions: Tensor | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: LayerState | None = None,
    return_state: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, LayerState]:
    """Causal linear attention, without a normalizer, whose sums follow the exponential-trapezoidal rule of Mamba-3.

        S_t   = e^(a_t) (S_(t-1) + (1 - lambda_t) w_t K_(t-1) v_(t-1)^T) + lambda_t w_t K_t v_t^T
        out_t = S_t^T R(Theta_t) phi(q_t)                        K_t = R(Theta_t) psi(k_t)

    In Mamba-3 w = dt and a = dt A, so its alpha is e^a, its beta (1 - lambda) dt e^a, and its gamma lambda dt. The
    function computes the same sums by one call of ``linear_rope_attention`` on keys that are shifted by a token, to
    which it adds each token's own term:

        T_t   = e^(a_t) (T_(t-1) + (lambda_(t-1) w_(t-1) + (1 - lambda_t) w_t) K_(t-1) v_(t-1)^T)
        out_t = T_t^T R(Theta_t) phi(q_t) + lambda_t w_t <phi(q_t), psi(k_t)> v_t

    No output depends on a later token, bit for bit. A state holds T in its sums, and in ``last_token`` the key and the
    value that the next token needs.

    Args:
        q: (b, n, h, d) queries.
        k: (b, n, g, d) keys; query head i reads key/value head i // (h/g).
        v: (b, n, g, e) values. As in ``linear_rope_attention`` they may have more heads than k; g counts those of v.
        share: lambda, (b, n, g), from 0 to 1.
        write: w, (b, n, g); None: 1.
        feature_map: phi and psi; None: q and k already are features. Signed maps are allowed. The map must not depend
            on positions nor return a log_scale.
        rotary: R and its frequencies, without axes, xpos and attention factor.
        decay: as in ``linear_rope_attention``.
        log_decay: a, (b or 1, n, g or 1).
        angle_steps: (b or 1, n, g or 1, pairs), the radians by which token t advances the rotation.
        positions: integers (n,) or (b, n).
        key_mask: bool (b, n). Hidden tokens add nothing to the sums: the token before the next visible one is the
            last visible one. Rotation and decay count the positions of hidden tokens.
        cu_seqlens: the bounds of packed sequences.
        state: the state to continue from, which this function made.
        return_state: True: return (out, state).
        backend: a backend's name, or "auto".

    Returns:
        out (b, n, h, e) in v's dtype, or (out, state).

    Raises:
        TypeError, ValueError, RuntimeError: as in ``linear_rope_attention``; also if share or write have another shape,
            the map or the rotation is one of those excluded above, or the state was made without the trapezoidal rule.

    Source: Mamba-3, arXiv 2603.15569, section 3.1.

    >>> from linrope.layer.trapezoid import trapezoidal_attention
    >>> q, k, v = torch.randn(3, 1, 10, 2, 4)
    >>> share, log_decay = torch.rand(1, 10, 2), -torch.rand(1, 10, 2)
    >>> out = trapezoidal_attention(q, k, v, share=share, log_decay=log_decay)
    >>> euler = trapezoidal_attention(q, k, v, share=torch.ones(1, 10, 2), log_decay=log_decay)
    >>> plain = linear_rope_attention(q, k, v, feature_map=None, normalize=False, log_decay=log_decay)
    >>> torch.testing.assert_close(euler, plain)
    """
    checks.check_tensors(q, k, v, causal=True)
    q, k = repeat_heads(v, q, k)
    (b, n, g, d), device = k.shape, k.device
    checks.check_mask(key_mask, b, n, device)
    checks.check_packing(cu_seqlens, b, n, n, device)
    fmap = checks.resolve_map(feature_map, d)
    check_map_and_rotation(fmap, rotary)
    f = d if fmap is None else fmap.feature_dim
    checks.check_rotary(rotary, f, g, causal=True, rotates_before_map=False)
    checks.check_decay(decay, g, True, device)
    checks.check_log_decay(log_decay, k, True)
    checks.check_angle_steps(angle_steps, k, n, f, rotary)
    for name, x in (("share", share), ("write", write)):
        if x is not None and x.shape != (b, n, g):
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected (b, n, g) = {(b, n, g)}")
    sequences, bounds = b if cu_seqlens is None else len(cu_seqlens) - 1, rising_bounds(cu_seqlens, n)
    identity = f"{identity_of(fmap, rotary, 'after')}; trapezoid"
    # (s, g, f + e + 2): each sequence's last token before this call
    incoming = _last_token_of(state, identity, (sequences, g, f + v.shape[3] + 2), k)

    write = torch.ones_like(share) if write is None else write
    k, v, share, write = (zero_hidden(x, key_mask) for x in (k, v, share, write))
    log_decay = None if log_decay is None else zero_hidden(log_decay, key_mask)
    angle_steps = None if angle_steps is None else zero_hidden(angle_steps, key_mask)
    key_weight, weight_for_previous_key = share * write, (1 - share) * write
    phi, psi = _features(fmap, q, k)
    token_positions = _positions(positions, state, k, bounds)
    before = _TokenBefore(incoming, f, key_mask, bounds)

    distance = token_positions - before.shift(token_positions, before.position)
    decay_factor = _decay_factor(decay, log_decay, distance)
    write_factor = decay_factor * (before.shift(key_weight, before.key_weight) + weight_for_previous_key)
    key, value = before.shift(psi, before.key), before.shift(v, before.value)
    key = _turned_back(key, rotary, angle_steps, distance)
    # Read the last token now: the call may overwrite the state, and with it the positions.
    last_token = before.last(psi, v, key_weight, token_positions)
    result = linear_rope_attention(
        phi,
        key,
        value.to(key.dtype),
        feature_map=None,
        rotary=rotary,
        normalize=False,
        decay=decay,
        log_decay=log_decay,
        angle_steps=angle_steps,
        write=write_factor,
        positions=positions,
        key_mask=key_mask,
        cu_seqlens=cu_seqlens,
        state=None if state is None else replace(state.sums, identity=identity_of(None, rotary, "after")),
        return_state=return_state,
        backend=backend,
    )
    out, sums = result if isinstance(result, tuple) else (result, None)
    dots = torch.einsum("bngrf,bngf->bngr", widen(phi).unflatten(2, (g, -1)), widen(psi))
    out = (out + ((dots * key_weight[..., None])[..., None] * v[:, :, :, None]).flatten(2, 3)).to(v.dtype)
    sums = None if sums is None else replace(sums, identity=identity)
    after = next_state(state, sums, last_token=last_token)
    return out if after is None else (out, after)


def check_map_and_rotation(fmap: FeatureMap | None, rotary: Any, name: str | None = None) -> None:
    """Raises ValueError for maps with a log_scale, rotations with axes, xpos or attention factor.

    name: the map in the message. Default: as it describes itself.
    """
    if fmap is not None and fmap.log_scaled:
        raise ValueError(
            f"feature_map={name or fmap}: its features have scales, which the trapezoidal rule does not support; "
            "expected another map, such as 'elu+1'"
        )
    if isinstance(rotary, Rotary) and not (
        rotary.axes is None and rotary.xpos is None and rotary.attention_factor == 1
    ):
        raise ValueError(
            f"rotary={rotary}: expected a rotation without axes, xpos and attention factor for the trapezoidal rule"
        )


def _last_token_of(state: LayerState | None, identity: str, shape: tuple[int, ...], k: Tensor) -> Tensor:
    """Each sequence's last token before this call, (s, g, f + e + 2). Zeros if there is none."""
    if state is None:
        return k.new_zeros(shape, dtype=torch.float64)
    if not isinstance(state, LayerState):
        raise TypeError(f"state: got {type(state).__name__}, expected LayerState")
    if not same_identity(state.identity, identity) or state.last_token is None:
        raise ValueError(f"state: made with {state.identity}; expected {identity}, as in this call")
    if state.last_token.device != k.device:
        raise ValueError(f"state: got device {state.last_token.device}, expected {k.device}")
    incoming = state.at_slots(state.last_token)
    if incoming.shape != shape:
        raise ValueError(f"state.last_token: got shape {tuple(incoming.shape)}, expected {shape}")
    return incoming


def _features(fmap: FeatureMap | None, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """phi(q) and psi(k), in one dtype."""
    if fmap is None:
        return q, k
    phi, psi = fmap(q, k)
    assert isinstance(phi, Tensor)
    assert isinstance(psi, Tensor)
    return phi, psi


def _positions(
    positions: Tensor | None, state: LayerState | None, k: Tensor, bounds: Tensor | None
) -> Tensor:
    """The position of each token, (b or 1, n) int64."""
    n, start = k.shape[1], None if state is None else first_positions(state.sums)
    tokens = resolve_positions(positions=positions, start=start, keys=k, num_queries=n, bounds=bounds)
    return spell_out(tokens.positions, n)


def _turned_back(key: Tensor, rotary: Rotary | None, angle_steps: Tensor | None, distance: Tensor) -> Tensor:
    """R(Theta_(t-1) - Theta_t) key: the key of each token's predecessor, rotated back by the angle between the two."""
    angles: Tensor | None = None
    if rotary is not None:
        theta = rotary.turns_per_position(key.device)[0].double() * (2 * math.pi / 2.0**64)  # (g or 1, pairs)
        angles = distance.double()[..., None, None] * theta
    if angle_steps is not None:
        angles = angle_steps.double() if angles is None else angles + angle_steps.double()
    if angles is None:
        return key
    cos, sin = cos_sin(angles, torch.promote_types(key.dtype, torch.float32))
    return rotate(key, cos, -sin, "interleaved" if rotary is None else rotary.layout)


def _decay_factor(decay: Tensor | None, log_decay: Tensor | None, distance: Tensor) -> Tensor:
    """e^a, (b or 1, n, g or 1): by how much all earlier sums decay when each token arrives."""
    factor = torch.ones_like(distance[..., None], dtype=torch.float32)
    if decay is not None:
        factor = (distance[..., None] * decay.double().log()).clamp(min=MIN_LOG_DECAY).exp()
    if log_decay is not None:
        factor = factor * clamp_gates(log_decay).exp()
    return factor


class _TokenBefore:
    """The token before each token: the last one of its sequence that key_mask does not hide.

    incoming (s, g, f + e + 2): each sequence's last token before this call. It holds the features of the key, the
    value, lambda w (the weight of the key) and the position.
    """

    def __init__(self, incoming: Tensor, f: int, key_mask: Tensor | None, bounds: Tensor | None) -> None:
        self.incoming, self.bounds = incoming, bounds
        self.key, self.value = incoming[..., :f], incoming[..., f:-2]
        self.key_weight, self.position = incoming[..., -2], incoming[:, 0, -1].long()
        self.latest: Tensor | None = None  # (b, n): the index of the last visible token so far, or -1
        if key_mask is not None:
            n = key_mask.shape[1]
            tokens = torch.arange(n, device=incoming.device)
            begin = 0 if bounds is None else bounds[owners(bounds, n)]
            latest = tokens.where(key_mask, -1).cummax(1).values if n else tokens.expand_as(key_mask)
            self.latest = latest.where(latest >= begin, -1)
            self.none = torch.full_like(self.position, -1)

    def shift(self, x: Tensor, incoming: Tensor) -> Tensor:
        """x (b or 1, n, ..) at the token before each token; incoming (s, ..) where this call has no such token."""
        incoming = incoming.to(x.dtype)
        if self.latest is None:
            if self.bounds is not None or torch.compiler.is_compiling() or x.shape[1] == 0:
                return previous(x, incoming, self.bounds)
            head = x[:, :-1]  # the same with one copy; its length would fix that of an exported graph
            return torch.cat((incoming[:, None], head.expand(len(incoming), *head.shape[1:])), 1)
        index = previous(self.latest, self.none, self.bounds)
        rows = torch.arange(len(index), device=x.device)[:, None]
        shifted = x.expand(len(index), *x.shape[1:])[rows, index.clamp(min=0)]
        in_call = (index >= 0).view(*index.shape, *[1] * (x.ndim - 2))
        return torch.where(in_call, shifted, per_token(incoming, x.shape[1], self.bounds))

    def last(self, psi: Tensor, v: Tensor, key_weight: Tensor, positions: Tensor) -> Tensor:
        """Each sequence's last token, (s, g, f + e + 2) float64, for the next call."""
        columns = psi, v, key_weight[..., None], positions[..., None, None].expand(*key_weight.shape, 1)
        incoming_columns = self.incoming.split([x.shape[-1] for x in columns], -1)
        ends = [self._at_end(x, incoming) for x, incoming in zip(columns, incoming_columns, strict=True)]
        return torch.cat([x.double() for x in ends], -1)

    def _at_end(self, x: Tensor, incoming: Tensor) -> Tensor:
        """x (b, n, ..) at the last visible token of each sequence, or incoming (s, ..) if this call has none."""
        if self.latest is None:
            return at_last(x, incoming, self.bounds)
        if x.shape[1] == 0:
            return incoming
        index = at_last(self.latest, self.none, self.bounds)
        rows = torch.arange(len(index), device=x.device) if self.bounds is None else torch.zeros_like(index)
        in_call = (index >= 0).view(-1, *[1] * (x.ndim - 2))
        return torch.where(in_call, x[rows, index.clamp(min=0)], incoming)

"""The equation in float64 with all of its options at once, sharing no code with the library.

Every backend, "reference" too, is compared with it. It also gives the sizes of the terms that the numerics
contract's bounds are made of. Of a Rotary it takes the frequencies and options, of a feature map that is an
object the features.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from linrope import LinearAttentionState, Rotary
from linrope.feature_maps import FeatureMap
from tests.support.oracle import DATA

NOTHING_KEPT = -1e4  # the least log_decay: less would keep nothing either
NO_KEYS = -1e30  # the log_scale of a state without keys
ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "elu+1": lambda x: torch.where(x > 0, x + 1, x.clamp(max=0).exp()),
    "relu": lambda x: x * (x > 0),
    "relu2": lambda x: x * x * (x > 0),
    "silu": lambda x: x / (1 + (-x).exp()),
}
Change = Callable[[Tensor], Tensor]
_OF_TOKENS = (*DATA, "key_mask", "positions", "key_positions")


@dataclass
class Sizes:
    """Of the terms that results are sums of: what a rounding error is measured by."""

    out: Tensor  # (b, n, h, e): M of docs/numerics.md, with the normalizer's own cancellation
    den: Tensor  # (b, n, h): the normalizer before eps
    kv: Tensor  # (s, g, f, e)
    z: Tensor  # (s, g, f)
    lost: float  # what sums that decay below float32's range come to in an output, in units of its roundoff
    exact: float = 0.0  # what a float64 result may be off by, in these units
    slack: int = 1  # of features that are rounded before the backend sees them


def _exact(x: Tensor) -> Tensor:
    return x


class Equation:
    """linear_rope_attention for float64 tensors; ``sizes`` are those of the last call.

    before: the sizes of the call that made the state. rounded: what happens to the operands of products
    (rotated features, scores, states) and to the output, as where a backend rounds them.
    """

    sizes: Sizes

    def __init__(self, before: Sizes | None = None, rounded: Change = _exact) -> None:
        self.before, self.rounded = before, rounded

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, state: LinearAttentionState | None = None,
        cu_seqlens: Tensor | None = None, return_state: bool = True, **how: Any,
    ) -> tuple[Tensor, LinearAttentionState]:  # fmt: skip
        q, k = (x.repeat_interleave(v.shape[2] // k.shape[2], 2) for x in (q, k))
        parts = [(slice(None), slice(None))]  # of a batch, of tokens
        if cu_seqlens is not None:
            ends = pairwise(cu_seqlens.tolist())
            parts = [(slice(i, i + 1), slice(*bounds)) for i, bounds in enumerate(ends)]
            plain = how.get("rotary") is None or how["rotary"].axes is None
            for name in ("positions", "key_positions"):
                if how.get(name) is not None and how[name].ndim == (1 if plain else 2):
                    how[name] = how[name][None]
        found = []
        for rows, tokens in parts:
            own = {
                name: x[:, tokens] if name in _OF_TOKENS and x is not None and cu_seqlens is not None else x
                for name, x in how.items()
            }
            first = None if state is None else state.reorder(torch.arange(len(state.kv))[rows])
            before = None if self.before is None else (self.before.kv[rows], self.before.z[rows])
            qkv = [x[:, tokens] for x in (q, k, v)]
            found.append(_attend(*qkv, first, before, self.rounded, **own))
        outs, states, sizes = zip(*found)
        tensors = {name: torch.cat([x.tensors()[name] for x in states]) for name in states[0].tensors()}
        dims = {"out": 1, "den": 1, "kv": 0, "z": 0}
        joined = {name: torch.cat([getattr(x, name) for x in sizes], dims[name]) for name in dims}
        self.sizes = Sizes(**joined, lost=sizes[0].lost)
        unused = sum(0 * how[name].sum() for name in DATA if how.get(name) is not None)
        return torch.cat(outs, 1) + unused, replace(states[0], **tensors)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, state: LinearAttentionState | None,
    before: tuple[Tensor, Tensor] | None, rounded: Change, *,
    feature_map: str | FeatureMap | None = "elu+1", rotary: Rotary | None = None, rope_order: str = "after",
    causal: bool = True, normalize: bool = True, eps: float = 1e-6, eps_mode: str = "clamp",
    positions: Tensor | None = None, key_positions: Tensor | None = None, decay: Tensor | None = None,
    log_decay: Tensor | None = None, angle_steps: Tensor | None = None, key_mask: Tensor | None = None,
    write: Tensor | None = None, erase: Tensor | None = None,
) -> tuple[Tensor, LinearAttentionState, Sizes]:  # fmt: skip
    (b, n, h, _), (_, m, g, _), e = q.shape, k.shape, v.shape[3]
    mask = torch.ones(b, m, dtype=torch.bool) if key_mask is None else key_mask
    hidden = ~mask[..., None, None]
    start = torch.zeros(b, dtype=torch.int64) if state is None else state.position
    axes = None if rotary is None else rotary.axes
    given, at_keys, distance = _places(positions, key_positions, start, n, m, axes)
    if rotary is not None:
        q, k = q * rotary.attention_factor, k * rotary.attention_factor
        if rope_order == "before":
            turns = [_turns_at(rotary, x) for x in (given, at_keys)]
            q, k = (_rotated(x, t, None, rotary.layout) for x, t in zip((q, k), turns))
            rotary = None
    (phi, q_scale), (psi, k_scale) = _features(feature_map, q, k.masked_fill(hidden, 0))
    psi, v = psi.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
    if write is not None:
        v = v * write[..., None].masked_fill(hidden, 0)
    if state is None:
        zeros = v.new_zeros(b, g, psi.shape[3], e)
        state = LinearAttentionState(zeros, zeros[..., 0], start, "")
    kv_size, z_size = before or (state.kv.detach().abs(), state.z.detach().abs())
    phi_hat, psi_hat, (phi_length, psi_length), angle = _turned(
        phi, psi, rotary, given, at_keys, angle_steps, hidden, state.angle
    )

    first = None if k_scale is None else state.log_scale
    by_feature = _log_decay(log_decay, decay, mask, distance, g)
    if by_feature.shape[-1] > 1:
        steps = 0 if angle_steps is None else angle_steps.shape[-1]
        pairs, layout = (steps, "interleaved") if rotary is None else (rotary.rotary_dim // 2, rotary.layout)
        by_feature = _of_features(by_feature, pairs, layout, psi.shape[3])
    # The largest of a head's features, and how much more the others decay, which alone has the gradient.
    a, beside = by_feature.amax(-1), None
    if by_feature.shape[-1] > 1:
        a = a.detach()
        beside = by_feature - a[..., None]
    w, w0, top = _weights(a, k_scale, first, mask, causal)
    far_den, far0_den = _beside(beside)
    if rotary is not None and rotary.xpos is not None:
        xpos = distance[:, :, None, None] * _xpos_log_decay(rotary)
        beside = xpos if beside is None else beside + xpos
    far, far0 = _beside(beside)

    ones, growth = torch.ones_like(v[..., :1]), None
    if erase is not None:
        strength = erase.expand(b, m, g).masked_fill(~mask[..., None], 0)
        v, growth = _erased(rounded(psi_hat), v, strength, by_feature, state.kv, kv_size)

    def numerator() -> Tensor:
        return _sum(rounded(phi_hat), rounded(psi_hat), v, rounded(state.kv), w, w0, far, far0, rounded)

    num = numerator()
    if rounded is not _exact:
        num = num + (numerator() - num).detach()  # the one that is differentiated is not rounded alike
    with torch.no_grad():
        size = _sum(phi_hat.abs(), psi_hat.abs(), v.abs(), kv_size, w, w0, far, far0)
        # Of one key and one pair the components' product may vanish, but not the rounding of cos and sin.
        pairs = _sum(phi_length / 2, psi_length / 2, v.abs(), kv_size / 2, w, w0, far, far0)
        size = torch.maximum(size, pairs)
        if growth is not None:
            size = _repeated(growth, h) * phi.square().sum(-1, keepdim=True).sqrt()
    den = _sum(rounded(phi), rounded(psi), ones, rounded(state.z)[..., None], w, w0, far_den, far0_den)
    if normalize:
        divisor = den + eps if eps_mode == "add" else den.clamp(min=eps)
        num = num / divisor
        with torch.no_grad():
            terms = _sum(phi.abs(), psi.abs(), ones, z_size[..., None], w, w0, far_den, far0_den)
            signed = terms > den.abs() * 1.001  # the normalizer cancels, which magnifies its rounding
            size = (size + num.abs() * terms * signed) / divisor.abs()
    else:
        factor = top.mT.repeat_interleave(h // g, 2)[..., None]
        factor = (factor if q_scale is None else factor + q_scale[..., None]).exp()
        num, size = num * factor, size * factor

    kv, z = state.kv, state.z
    if m:  # as the last token sees it
        ends, ends_den = (
            [None if x is None else x[:, :, -1] for x in both] for both in ((far, far0), (far_den, far0_den))
        )
        kv = _last(rounded(psi_hat), v, kv, w, w0, *ends)
        kv_size = _last(psi_length, v.abs(), kv_size, w, w0, *ends)
        z = _last(psi, ones, z[..., None], w, w0, *ends_den)[..., 0]
        z_size = _last(psi.abs(), ones, z_size[..., None], w, w0, *ends_den)[..., 0]
        if growth is not None:
            kv_size = growth[:, -1][:, :, None].expand_as(kv)
    if growth is not None:  # there is no z
        z, z_size = torch.zeros_like(z), torch.zeros_like(z_size)
    counted = axes is not None or m == 0 or (key_positions is None and (positions is None or m != n))
    position = start + m if counted else at_keys[:, -1] + 1
    scale = None
    if k_scale is not None:
        scale = (
            top[:, :, -1]
            if m
            else torch.full((b, g), NO_KEYS, dtype=torch.float64)
            if first is None
            else first
        )
    after = LinearAttentionState(kv, z, position, "", angle, scale)
    lost = 2.0**-126 * 2.0**24 / (eps if normalize else 1)
    sizes = Sizes(size.detach(), den.detach()[..., 0], kv_size.detach(), z_size.detach(), lost)
    return rounded(num), after, sizes


def _places(
    positions: Tensor | None, key_positions: Tensor | None, start: Tensor, n: int, m: int, axes: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Positions of queries (b, n) and keys (b, m), with axes (b, n, axes), and keys' distances (b, m)."""
    b = len(start)

    def spelled(given: Tensor | None, length: int) -> Tensor:
        if given is None:
            return start[:, None] + torch.arange(length)
        shape = (length,) if axes is None else (length, axes)
        rows = given if given.ndim > len(shape) else given[None]
        return rows.long().expand(b, *shape)

    given = spelled(positions, n)
    at_keys = given if key_positions is None and m == n else spelled(key_positions, m)
    if axes is not None or m == 0:
        return given, at_keys, at_keys.new_zeros(b, m)
    return given, at_keys, at_keys - torch.cat((start[:, None] - 1, at_keys[:, :-1]), 1)


def _features(fmap: str | FeatureMap | None, q: Tensor, k: Tensor) -> list[tuple[Tensor, Tensor | None]]:
    """phi and psi with their log_scales."""
    name = "identity" if fmap is None else fmap if isinstance(fmap, str) else fmap.elementwise
    if name in ELEMENTWISE:
        return [(ELEMENTWISE[name](x), None) for x in (q, k)]
    assert isinstance(fmap, FeatureMap), fmap
    both: list[Any] = [fmap.queries(q), fmap.keys(k)]
    return [(x[0], x[1].detach()) if fmap.log_scaled else (x, None) for x in both]


def _turned(
    phi: Tensor, psi: Tensor, rotary: Rotary | None, given: Tensor, at_keys: Tensor, steps: Tensor | None,
    hidden: Tensor, angle: Tensor | None,
) -> tuple[Tensor, Tensor, Sequence[Tensor], Tensor | None]:  # fmt: skip
    """R(Theta) phi, R(Theta) psi, the lengths of their pairs at each member, and the sum of all steps."""
    turns: list[Any] = [0, 0]
    if rotary is not None:
        turns = [_turns_at(rotary, x) for x in (given, at_keys)]
    slope = None
    if steps is not None:
        steps = steps.expand(len(hidden), *steps.shape[1:]).masked_fill(hidden, 0)
        sums = _turns(steps.detach()).cumsum(1)
        angle = sums.new_zeros(len(sums), *sums.shape[2:]) if angle is None else angle
        turns = [x + sums + angle[:, None] for x in turns]
        angle = angle + _turns(steps.detach()).sum(1)
        slope = steps.cumsum(1)
        slope = slope - slope.detach()
    if rotary is None and steps is None:
        return phi, psi, (phi.abs(), psi.abs()), angle
    layout, pairs = "interleaved" if rotary is None else rotary.layout, turns[0].shape[-1]
    lengths = []
    for x in (phi, psi):
        i, j = _members(pairs, layout)
        length = x.abs()
        length[..., i] = length[..., j] = (x[..., i].square() + x[..., j].square()).sqrt()
        lengths.append(length)
    hats = [_rotated(x, at, slope, layout) for x, at in zip((phi, psi), turns, strict=True)]
    return *hats, lengths, angle


def _turns(radians: Tensor) -> Tensor:
    """In 2^-64 turns, integers whose sums wrap as angles do; half a turn is -2^63."""
    turns = radians.double() * (1 / (2 * math.pi))
    parts = (turns - turns.round()) * 2.0**64
    return torch.where(parts == 2.0**63, -parts, parts).long()


def _turns_at(rotary: Rotary, positions: Tensor) -> Tensor:
    """(b, n) positions, with axes (b, n, axes), to angles (b, n, g or 1, pairs), sums over the axes."""
    theta, axes = rotary.theta.to(positions.device), rotary.axes or 1
    theta = theta.view(-1, axes, theta.shape[-1])  # (g or 1, axes, pairs)
    places = positions if rotary.axes is not None else positions[..., None]
    return sum(places[..., None, None, a] * _turns(theta[:, a]) for a in range(axes))


def _members(pairs: int, layout: str) -> tuple[slice, slice]:
    """The first and the second feature of all pairs."""
    if layout == "interleaved":
        return slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    return slice(0, pairs), slice(pairs, 2 * pairs)


def _rotated(x: Tensor, turns: Tensor, slope: Tensor | None, layout: str) -> Tensor:
    """RoFormer eq. 34, pair by pair; the features behind the pairs stay."""
    angles = turns.double() * (2 * math.pi / 2.0**64)
    cos, sin = angles.cos(), angles.sin()
    if slope is not None:  # integers have none
        cos, sin = cos - sin * slope, sin + cos * slope
    if cos.shape[2] > 1:
        cos, sin = (y.repeat_interleave(x.shape[2] // y.shape[2], 2) for y in (cos, sin))
    i, j = _members(turns.shape[-1], layout)
    hat = x.clone()
    hat[..., i], hat[..., j] = x[..., i] * cos - x[..., j] * sin, x[..., i] * sin + x[..., j] * cos
    return hat


def _xpos_log_decay(rotary: Rotary) -> Tensor:
    """(f,): log zeta_t per position, zeta_t = ((t / pairs + 0.4) / 1.4)^(1 / xpos), 0 behind the pairs."""
    pairs, log = rotary.rotary_dim // 2, torch.zeros(rotary.dim, dtype=torch.float64)
    zeta = (torch.arange(pairs, dtype=torch.float64) / pairs + 0.4) / 1.4
    for members in _members(pairs, rotary.layout):
        log[members] = zeta.log() / rotary.xpos
    return log


def _erased(
    psi: Tensor, v: Tensor, erase: Tensor, a: Tensor, kv: Tensor, size: Tensor
) -> tuple[Tensor, Tensor]:
    """What each token writes in place of v, token by token, and the bound of errors eta (b, m, g, e).

        P_t = e^(a_t) S_(t-1),   u_t = v_t - b_t P_t^T psi_t,   S_t = P_t + psi_t u_t^T
        eta_t = max(1, |1 - b_t |psi_t|^2|) e^(a_t) eta_(t-1) + |psi_t| (|v_t| + b_t |psi_t| |P_t|)

    |P_t| has the lengths of P_t's columns. |phi_t| eta_t is the M of docs/numerics.md. a (b, m, g, f or 1): eta decays
    by the largest of the features.
    """
    S, bound, written, bounds = kv, size.square().sum(2).sqrt(), [], []
    for t in range(psi.shape[1]):
        k, b, keeps = psi[:, t, :, :, None], erase[:, t, :, None], a[:, t].exp()
        P = keeps[..., None] * S
        u = v[:, t] - b * (k * P).sum(2)
        S = P + k * u[:, :, None]
        written.append(u)
        with torch.no_grad():
            squared = k.square().sum(2)
            growth = (1 - b * squared).abs().clamp(min=1) * keeps.amax(-1, keepdim=True)
            terms = v[:, t].abs() + b.abs() * squared.sqrt() * P.square().sum(2).sqrt()
            bound = growth * bound + squared.sqrt() * terms
            bounds.append(bound)
    if not written:
        return v, v.detach()
    return torch.stack(written, 1), torch.stack(bounds, 1)


def _repeated(x: Tensor, h: int) -> Tensor:
    """x (b, n, g, e) of each key/value head for its query heads."""
    return x.repeat_interleave(h // x.shape[2], 2)


def _log_decay(
    log_decay: Tensor | None, decay: Tensor | None, mask: Tensor, distance: Tensor, g: int
) -> Tensor:
    """a (b, m, g, 1 or units): the gates and the fixed decay of each token."""
    b, m = mask.shape
    a = torch.zeros(b, m, g, 1, dtype=torch.float64)
    if log_decay is not None:
        gates = log_decay if log_decay.ndim == 4 else log_decay[..., None]
        a = a + gates.clamp(min=NOTHING_KEPT).expand(b, m, g, -1).masked_fill(~mask[..., None, None], 0)
    if decay is not None:
        a = a + (distance[..., None] * decay.double().log()).clamp(min=NOTHING_KEPT)[..., None]
    return a


def _of_features(units: Tensor, pairs: int, layout: str, f: int) -> Tensor:
    """(.., f) from (.., units): a number for both members of each pair, then one for each feature behind them."""
    number = torch.empty(f, dtype=torch.int64)
    for members in _members(pairs, layout):
        number[members] = torch.arange(pairs)
    number[2 * pairs :] = torch.arange(pairs, units.shape[-1])
    return units[..., number]


def _beside(a: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """What is left, in each feature, of key j for query i (b, g, n, m, f), and of the state (b, g, n, f).

    a (b, m, g or 1, f). Each sum of logs is formed of its own tokens' logs.
    """
    if a is None:
        return None, None
    a = a.transpose(1, 2)
    later = torch.ones(a.shape[2], a.shape[2], dtype=torch.bool).tril(-1)
    return (a[:, :, :, None] * later[..., None]).cumsum(2).exp(), a.cumsum(2).exp()


def _weights(
    a: Tensor, log_scale: Tensor | None, first: Tensor | None, mask: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """What query i finds of key j (b, g, n or 1, m) and of the state (b, g, n or 1), in units of e^top.

        e^(L_i - L_j + s_j - top_i),   top_i = max_j L_i - L_j + s_j

    Each sum of logs is formed of its own tokens' logs, and not as a difference.
    """
    b, m, g = a.shape
    exponent, exponent0, sees = a.new_zeros(b, g, 1, m), a.new_zeros(b, g, 1), mask[:, None, None]
    if causal:
        a = a.mT
        # later[j, t]: token t comes after key j. later[i, j]: query i does not see key j.
        later = torch.ones(m, m, dtype=torch.bool).triu(1)
        exponent, exponent0 = (a[:, :, None] * later).cumsum(-1).mT, a.cumsum(-1)
        sees = sees & ~later
    exponent = exponent.masked_fill(~sees, -torch.inf)
    top = torch.zeros_like(exponent0)
    if log_scale is not None:
        exponent = exponent + log_scale.mT[:, :, None]
        exponent0 = exponent0 + (a.new_full((b, g), NO_KEYS) if first is None else first)[..., None]
        top = exponent0 if m == 0 else torch.maximum(exponent.amax(-1), exponent0)
        top = top.clamp(min=NO_KEYS).detach()
    return (exponent - top[..., None]).exp(), (exponent0 - top).exp(), top


def _sum(
    phi: Tensor, psi: Tensor, v: Tensor, kv: Tensor, w: Tensor, w0: Tensor, far: Tensor | None = None,
    far0: Tensor | None = None, rounded: Change = _exact,
) -> Tensor:  # fmt: skip
    """sum_j w_ij <phi_i, psi_j> v_j and the state's part: (b, n, h, e). far (b, g, n, m, f), far0 (b, g, n, f)."""
    phi = phi.unflatten(2, (psi.shape[2], -1))
    if far is None:
        scores = torch.einsum("bngrf,bmgf->bgrnm", phi, psi)
    else:
        scores = torch.einsum("bngrf,bmgf,bgnmf->bgrnm", phi, psi, far)
    new = torch.einsum("bgrnm,bmge->bngre", rounded(scores * w[:, :, None]), v)
    old = phi * w0.mT[..., None, None] * (1 if far0 is None else far0.transpose(1, 2)[:, :, :, None])
    return (new + torch.einsum("bngrf,bgfe->bngre", old, kv)).flatten(2, 3)


def _last(
    psi: Tensor, v: Tensor, kv: Tensor, w: Tensor, w0: Tensor, far: Tensor | None = None,
    far0: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """(b, g, f, e): all keys times values as the last token sees them. far (b, g, m, f), far0 (b, g, f)."""
    psi = psi * w[:, :, -1].mT[..., None] * (1 if far is None else far.transpose(1, 2))
    kv = kv * w0[:, :, -1, None, None] * (1 if far0 is None else far0[..., None])
    return kv + torch.einsum("bmgf,bmge->bgfe", psi, v)

"""Eq. 19 in chunks, in plain PyTorch: any device, any float dtype, O(N), no loop over chunks.

    1  cut every sequence into chunks of c tokens
    2  inside a chunk: scores <R phi_i, R psi_j> e^(D_i - D_j), j <= i, with D the sum of log decays from its start
    3  from chunk to chunk: the state S, which a chunk fades by e^(D_c) and adds its own keys to (``scan``)
    4  num_i = sum_j scores_ij v_j + e^(D_i) R phi_i S, and den_i likewise without rotation

The backward pass does the same with the gradient T of the state, from the last chunk to the first; it computes
everything anew from the inputs. Tensors are (t, g, r, c, ..): t chunk, g key/value head, r query head of it, c
position in the chunk.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linrope.backends import call as shared
from linrope.backends.call import Call, Gradients, Sums
from linrope.feature_maps import ELEMENTWISE
from linrope.names import readable
from linrope.rotary import rotate
from linrope.state import LinearAttentionState

READS_RESULTS = False
CHUNK = 64
AT_ONCE = 2**20  # numbers of k in one pass: heads beyond that take turns, and need no more memory
LONGEST_FADE = 60.0  # of xPos: how far e^x may go for its inverse within a chunk; float32 ends at 88


def supports(call: Call, state: LinearAttentionState | None) -> str | None:
    if call.fade is not None and call.distances is not None and readable(call.distances):
        cut = Cut.of(call.k, call.bounds)
        most = int(cut.take(call.distances).masked_fill(~cut.valid, 0)[:, 1:].sum(1).max())
        if most * -float(call.fade.min()) > LONGEST_FADE:
            return f"{most} positions in one chunk with this xpos: use backend='reference'"
    return None


def new_saved(call: Call) -> list[Tensor]:
    return []


class Cut(NamedTuple):
    """The chunks of all sequences, each of which has at least one; made without asking the device."""

    tokens: Tensor  # (t, c) int64: row of the token among all b n
    valid: Tensor  # (t, c): whether there is one; the last chunk of a sequence may be short
    owner: Tensor  # (t,): the chunk's sequence
    begins: Tensor  # (t,): whether it is its first
    last: Tensor  # (s,): the last chunk of each sequence

    @classmethod
    def of(cls, x: Tensor, bounds: Tensor | None) -> "Cut":
        """Of the tokens of x (b, n, ..)."""
        (b, n), device = x.shape[:2], x.device
        if bounds is None:
            bounds = torch.arange(b + 1, device=device) * n
        s = len(bounds) - 1
        c = min(CHUNK, 1 << max(b * n // s - 1, 0).bit_length())
        counts = ((bounds.diff() + c - 1) // c).clamp(min=1)
        ends = counts.cumsum(0)
        # As many as there are, or, as nobody knows how long packed sequences are, some more, which are empty.
        chunks = torch.arange(b * max(-(-n // c), 1) if s == b else n // c + s, device=device)
        owner = torch.searchsorted(ends, chunks, right=True).clamp_(max=s - 1)
        index = chunks - (ends - counts)[owner]
        tokens = (bounds[owner] + index * c)[:, None] + torch.arange(c, device=device)
        valid = tokens < torch.where(chunks < ends[-1], bounds[owner + 1], 0)[:, None]
        return cls(tokens.where(valid, 0), valid, owner, (index == 0) | (chunks >= ends[-1]), ends - 1)

    def take(self, x: Tensor) -> Tensor:
        """(t, c, ..) of x (b or 1, n, ..): of no token, any numbers."""
        if x.shape[:2].numel() == 0:
            return x.new_zeros(*self.tokens.shape, *x.shape[2:])
        return x.flatten(0, 1)[self.tokens if len(x) > 1 else self.tokens % x.shape[1]]

    def put(self, x: Tensor, like: Tensor) -> Tensor:
        """(b, n, g r, ..) of x (t, g, r, c, ..), with b and n like's."""
        rows = x.flatten(1, 2).transpose(1, 2)
        found = rows.new_empty(like.shape[0] * like.shape[1] + 1, *rows.shape[2:])  # the last: of no token
        found[self.tokens.where(self.valid, len(found) - 1)] = rows
        return found[:-1].unflatten(0, like.shape[:2])

    def reverse(self) -> "Cut":
        """The chunks from the last to the first; a sequence begins with its last one."""
        ends = torch.cat((self.begins[1:], self.begins.new_ones(1)))
        first = torch.cat((self.last.new_zeros(1), self.last[:-1] + 1))
        return Cut(*(x.flip(0) for x in (self.tokens, self.valid, self.owner, ends)), len(ends) - 1 - first)


def fade(x: Tensor, log: Tensor | None) -> Tensor:
    """x e^log, with the factor in two parts: rounding it once would add the same error at every chunk."""
    if log is None:
        return x
    factor = log.double().exp()
    high = factor.to(x.dtype)
    return torch.addcmul(x * high, x, (factor - high).to(x.dtype))


def scan(own: Tensor, log: Tensor | None, begins: Tensor) -> Tensor:
    """after_t = own_t + e^log_t after_(t-1), where t - 1 is of the same sequence: in pairs, pairs of pairs, ..

    own (t, ..), log like it with ones for missing axes, begins (t,).
    """
    if len(own) < 2:
        return own
    first, second, rest = slice(0, len(own) // 2 * 2, 2), slice(1, None, 2), slice(2, None, 2)

    def carried(after: Tensor, chunks: slice) -> Tensor:
        starts = begins[chunks].view(-1, *[1] * (own.ndim - 1))
        return fade(after, None if log is None else log[chunks]).masked_fill(starts, 0)

    both = None if log is None else log[first] + log[second]
    after = torch.empty_like(own)
    after[second] = scan(own[second] + carried(own[first], second), both, begins[first] | begins[second])
    after[:1] = own[:1]
    after[rest] = own[rest] + carried(after[1 : len(own) - 1 : 2], rest)
    return after


def around(own: Tensor, log: Tensor | None, cut: Cut, first: Tensor | None) -> tuple[Tensor, Tensor]:
    """The state before and after each chunk; first (s, ..): what comes before a sequence, None: 0."""
    starts = cut.begins.view(-1, *[1] * (own.ndim - 1))
    before = (
        torch.zeros_like(own) if first is None else first.to(own.dtype)[cut.owner].masked_fill(~starts, 0)
    )
    after = scan(own if first is None else own + fade(before, log), log, cut.begins)
    return torch.where(starts, before, after.roll(1, 0)), after


def around_reversed(own: Tensor, log: Tensor | None, cut: Cut, last: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradient of the state after and before each chunk; last (s, ..): of the last state."""
    after, before = around(own.flip(0), None if log is None else log.flip(0), cut.reverse(), last)
    return after.flip(0), before.flip(0)


class Decay:
    """Sums of log decay within each chunk, (t, g or 1, 1, c, 1), of xPos (t, 1, 1, c, f); float64."""

    def __init__(self, log: Tensor, cut: Cut) -> None:
        self.sums = log.double().masked_fill(~cut.valid[:, None, None, :, None], 0).cumsum(-2)
        self.total = self.sums[:, :, 0, -1:].mT  # (t, g or 1, 1 or f, 1), as S has its axes

    def queries(self, x: Tensor) -> Tensor:
        """x with what is left for each query of what came before the chunk."""
        return x * self.sums.exp().to(x.dtype)

    def keys(self, x: Tensor) -> Tensor:
        """x with what is left of each key at the last token."""
        return x * (self.sums[..., -1:, :] - self.sums).exp().to(x.dtype)

    def tile(self, scores: Tensor) -> Tensor:
        """scores with what is left of key j for query i."""
        return scores * (self.sums - self.sums.mT).clamp(max=0).exp().to(scores.dtype)


class Chunks:
    """A call by chunks: features, rotated features, decay, states."""

    def __init__(self, call: Call, sums: Sums | None) -> None:
        q, k = call.k[:, :0] if call.q is None else call.q, call.k
        self.call, self.function = call, ELEMENTWISE[call.feature_map]
        self.dtype = torch.promote_types(q.dtype, torch.float32) if sums is None else sums.kv.dtype
        self.keys = self.queries = Cut.of(k, call.bounds)
        if call.q is not None and not call.causal:
            self.queries = Cut.of(q, call.bounds)
        shown = self.keys.valid if call.key_mask is None else self.keys.valid & self.keys.take(call.key_mask)
        self.hidden = ~shown[:, None, None, :, None]
        self.q = self.take(q, self.queries, q.shape[2] // k.shape[2])
        self.k, self.v = (self.take(x, self.keys).masked_fill(self.hidden, 0) for x in (k, call.v))
        self.phi = self.function.value(self.q)
        self.psi = self.function.value(self.k).masked_fill(self.hidden, 0)
        angle = None if sums is None else sums.angle
        self.key_turn = self.query_turn = self.turn(angle, keys=True)
        if call.q is not None and (not call.causal or call.key_positions is not None):
            self.query_turn = self.turn(angle, keys=False)
        self.phi_hat, self.psi_hat = (
            self.turned(self.phi, self.query_turn),
            self.turned(self.psi, self.key_turn),
        )
        self.decay = self.pairs = self.kv_log = self.z_log = None
        if call.log_decay is not None:
            self.decay = Decay(self.keys.take(call.log_decay).transpose(1, 2)[:, :, None, :, None], self.keys)
            self.kv_log, self.z_log = self.decay.total, self.decay.total[..., 0]
        if call.fade is not None and call.distances is not None:
            log = self.keys.take(call.distances)[:, None, None, :, None] * call.fade
            self.first = log[
                :, :, 0, :1
            ].mT.clone()  # apart, since a long gap would cost the sums their digits
            log[..., 0, :] = 0
            self.pairs = Decay(log, self.keys)
            self.kv_log = self.first + self.pairs.total + (0 if self.kv_log is None else self.kv_log)
            self.phi_hat, self.psi_hat = self.lifted(self.phi_hat, 1), self.lifted(self.psi_hat, -1)

    def take(self, x: Tensor, cut: Cut, r: int = 1) -> Tensor:
        """(t, g, r, c, ..) of x (b, n, g r, ..), in the dtype of all sums."""
        return cut.take(x).transpose(1, 2).unflatten(1, (x.shape[2] // r, r)).to(self.dtype)

    def turn(self, angle: Tensor | None, *, keys: bool) -> list[Tensor] | None:
        """cos and sin of the angles, (t, g or 1, 1, c, pairs)."""
        found, cut = self.call.cos_sin(angle, self.dtype, keys=keys), self.keys if keys else self.queries
        return None if found is None else [cut.take(x).transpose(1, 2)[:, :, None] for x in found]

    def turned(self, x: Tensor, turn: list[Tensor] | None, way: int = 1) -> Tensor:
        return x if turn is None else rotate(x, turn[0], way * turn[1], self.call.layout)

    def lifted(self, x: Tensor, way: int) -> Tensor:
        """xPos from the chunk's first token to each, or its inverse."""
        return x if self.pairs is None else x * (way * self.pairs.sums).exp().to(x.dtype)

    def read(self, state: Tensor) -> Tensor:
        """xPos from the token before the chunk to its first."""
        return state if self.pairs is None else fade(state, self.first)

    def written(self, state: Tensor) -> Tensor:
        """xPos from the chunk's first token to its last."""
        return state if self.pairs is None else fade(state, self.pairs.total)

    def faded(self, x: Tensor, factor: str) -> Tensor:
        faded: Tensor = x if self.decay is None else getattr(self.decay, factor)(x)
        return faded

    def visible(self, scores: Tensor) -> Tensor:
        """scores (t, g, r, c, c) of the keys that a query sees, faded."""
        return self.faded(scores, "tile").tril()

    def states(self, sums: Sums | None) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """S (t, g, f, e) before and after each chunk, and z (t, g, f)."""
        own = self.written(self.faded(self.psi_hat, "keys")[:, :, 0].mT @ self.v[:, :, 0])
        own_z = self.faded(self.psi.double(), "keys")[:, :, 0].sum(-2)
        kv, z = (None, None) if sums is None else sums[:2]
        return around(own, self.kv_log, self.keys, kv), around(own_z, self.z_log, self.keys, z)

    def seen(self, states: tuple[Tensor, Tensor]) -> Tensor:
        """What the queries of each chunk read: the state before it or, bidirectional, that of all keys."""
        return states[0] if self.call.causal else states[1][self.keys.last][self.queries.owner]

    def normalizer(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """1 / den (t, g, r, c, 1), and whether den follows the features; z (t, g, f): what queries read."""
        den = product(self.faded(self.phi, "queries"), z[:, :, None, :, None].to(self.dtype))
        if self.call.causal:
            den = den + self.visible(product(self.phi, self.psi.mT)).sum(-1, keepdim=True)
        if self.call.eps_mode == "add":
            return 1 / (den + self.call.eps), torch.ones_like(den, dtype=torch.bool)
        return 1 / den.clamp(min=self.call.eps), den >= self.call.eps


def product(x: Tensor, y: Tensor) -> Tensor:
    """x (t, g, r, c, k) times y (t, g, 1, k, l)."""
    return (x.flatten(2, 3) @ y[:, :, 0]).unflatten(2, x.shape[2:4])


def transposed_product(scores: Tensor, x: Tensor) -> Tensor:
    """scores (t, g, r, c, k) transposed, times x (t, g, r, c, l), summed over r: (t, g, 1, k, l)."""
    return (scores.flatten(2, 3).mT @ x.flatten(2, 3))[:, :, None]


def forward(call: Call, sums: Sums | None, save: bool) -> shared.Results:
    outs, kvs, zs = zip(*[_forward(*part) for part in _by_heads(call, sums)], strict=True)
    out = None if call.q is None else torch.cat(outs, 2)
    return out, (torch.cat(kvs, 1), torch.cat(zs, 1)) if call.want_state else None, []


def backward(
    call: Call, sums: Sums | None, results: list[Tensor], g_out: Tensor | None, g_kv: Tensor | None,
    g_z: Tensor | None,
) -> Gradients:  # fmt: skip
    parts = [_backward(*part) for part in _by_heads(call, sums, g_out, g_kv, g_z)]
    dq, dk, dv, d_log, d_steps, d_kv, d_z = (
        None if x[0] is None else torch.cat(x, dim)  # type: ignore[arg-type]
        for x, dim in zip(zip(*parts, strict=True), (2, 2, 2, 2, 2, 1, 1), strict=True)
    )
    assert dk is not None and dv is not None
    d_log = None if d_log is None or call.log_decay is None else shared.summed_to(d_log, call.log_decay)
    d_steps = (
        None if d_steps is None or call.angle_steps is None else shared.summed_to(d_steps, call.angle_steps)
    )
    return Gradients(dq, dk, dv, d_log, d_steps, d_kv, d_z)


def _by_heads(call: Call, sums: Sums | None, *gradients: Tensor | None) -> Iterator[Any]:
    """The call, its sums and gradients (of out, kv, z) for some key/value heads after the other."""
    g, r = call.k.shape[2], call.group
    size = max(1, min(g, AT_ONCE * g // max(call.k.numel(), 1)))

    def part(x: Tensor | None, dim: int, heads: slice) -> Tensor | None:
        return x if x is None or x.shape[dim] == 1 else x.narrow(dim, heads.start, heads.stop - heads.start)

    for low in range(0, g, size):
        heads, queries = slice(low, min(low + size, g)), slice(low * r, min(low + size, g) * r)
        named = {name: part(getattr(call, name), 2, heads) for name in ("k", "v", "log_decay", "angle_steps")}
        own = call._replace(q=part(call.q, 2, queries), theta=part(call.theta, 1, heads), **named)  # type: ignore[arg-type]
        own_sums = None if sums is None else Sums(*(part(x, 1, heads) for x in sums))  # type: ignore[arg-type]
        dims = ((2, queries), (1, heads), (1, heads))
        yield own, own_sums, *(part(x, *where) for x, where in zip(gradients, dims))


def _forward(call: Call, sums: Sums | None) -> tuple[Tensor | None, Tensor, Tensor]:
    """out (b, n, h, e) and the last kv and z."""
    x = Chunks(call, sums)
    kv, z = x.states(sums)
    last = kv[1][x.keys.last], z[1][x.keys.last].to(torch.float64 if sums is None else sums.z.dtype)
    if call.q is None:
        return None, *last
    num = product(x.faded(x.phi_hat, "queries"), x.read(x.seen(kv))[:, :, None])
    if call.causal:
        num += product(x.visible(product(x.phi_hat, x.psi_hat.mT)), x.v)
    if call.normalize:
        num *= x.normalizer(x.seen(z))[0]
    return x.queries.put(num.to(call.v.dtype), call.q), *last


def _backward(
    call: Call, sums: Sums | None, g_out: Tensor | None, g_kv: Tensor | None, g_z: Tensor | None
) -> Gradients:
    """With the gradient g of out, gb = g / den, delta = -<gb, out> where den follows the features:

    dphi^_i = sum_j (gb_i v_j) e^(D_i - D_j) psi^_j + e^(D_i) S gb_i       dphi_i = R^T dphi^_i + delta_i z_i
    dpsi^_j = sum_i (gb_i v_j) e^(D_i - D_j) phi^_i + e^(D_c - D_j) T v_j  dpsi_j = R^T dpsi^_j + w_j
    dv_j    = sum_i e^(D_i - D_j) <phi^_i, psi^_j> gb_i + e^(D_c - D_j) T^T psi^_j
    T       = gradient of S: a chunk fades it by e^(D_c) and adds e^(D_i) phi^_i gb_i^T; w is that of z
    da_t     = sum_(i>=t) <phi_i, dphi_i> - <psi_i, dpsi_i> + <S, T> + <z, w>: i, S, z, T, w to the chunk's end
    domega_t = sum_(i>=t) <J phi^_i, dphi^_i> + <J psi^_i, dpsi^_i>, J a quarter turn: i to the sequence's end
    """
    x = Chunks(call, sums)
    kv, z = x.states(sums)
    phi_read, seen, z_seen = x.faded(x.phi_hat, "queries"), x.read(x.seen(kv))[:, :, None], x.seen(z)
    gb, delta = x.v.new_zeros(*x.phi.shape[:-1], x.v.shape[-1]), torch.zeros_like(x.phi[..., :1])
    if g_out is not None:
        gb = x.take(g_out, x.queries, call.group).masked_fill(~x.queries.valid[:, None, None, :, None], 0)
    if call.normalize:
        inverse, follows = x.normalizer(z_seen)
        gb = gb * inverse
    d_phi_hat = x.faded(product(gb, seen.mT), "queries")
    if call.causal:
        d_scores = x.visible(product(gb, x.v.mT))
        d_phi_hat += product(d_scores, x.psi_hat)
    if call.normalize:
        delta = (-(x.phi_hat * d_phi_hat).sum(-1, keepdim=True) * inverse).masked_fill(~follows, 0)
    d_phi = x.turned(x.lifted(d_phi_hat, 1), x.query_turn, -1)
    d_phi += x.faded(delta, "queries") * z_seen[:, :, None, None].to(x.dtype)

    own, own_z = transposed_product(phi_read, gb), (x.faded(x.phi, "queries") * delta).double().sum((2, 3))
    t_after, t_before = around_reversed(x.read(own[:, :, 0]), x.kv_log, x.queries, g_kv)
    w_after, w_before = around_reversed(own_z, x.z_log, x.queries, g_z)
    at_first = x.queries.reverse().last
    d_kv, d_z = t_before.flip(0)[at_first], w_before.flip(0)[at_first]
    if not call.causal:
        t_after, w_after = d_kv[x.keys.owner], d_z[x.keys.owner]
    wanted = x.written(t_after)[:, :, None]
    d_psi_hat, d_v = (x.faded(product(y, z), "keys") for y, z in ((x.v, wanted.mT), (x.psi_hat, wanted)))
    d_psi = x.faded(w_after[:, :, None, None].to(x.dtype).expand_as(x.psi), "keys")
    if call.causal:
        weights = x.visible(delta.expand(*delta.shape[:-1], delta.shape[-2]))
        d_phi += product(weights, x.psi)
        d_psi = d_psi + transposed_product(weights, x.phi)
        d_psi_hat += transposed_product(d_scores, x.phi_hat)
        d_v += transposed_product(x.visible(product(x.phi_hat, x.psi_hat.mT)), gb)
    d_psi = d_psi + x.turned(x.lifted(d_psi_hat, -1), x.key_turn, -1)

    d_log = d_steps = None
    if call.log_decay is not None:
        change = ((x.phi * d_phi).sum((2, 4)) - (x.psi * d_psi).sum((2, 4))).double()
        later = (kv[1] * t_after).sum((2, 3)) + (z[1] * w_after).sum(2)
        d_log = later[..., None] + change.flip(-1).cumsum(-1).flip(-1)
        d_log = x.keys.put(d_log[:, :, None], call.k)
    if call.angle_steps is not None:
        change = _quarter_turned(x.phi_hat, d_phi_hat, call) + _quarter_turned(x.psi_hat, d_psi_hat, call)
        change = change.masked_fill(~x.keys.valid[:, None, :, None], 0).double()
        later, _ = around_reversed(change.sum(2), None, x.keys, None)
        d_steps = x.keys.put((later[:, :, None] + change.flip(2).cumsum(2).flip(2))[:, :, None], call.k)
    d_q = d_phi * x.function.slope(x.q, x.phi)
    d_k = (d_psi * x.function.slope(x.k, x.psi)).masked_fill(x.hidden, 0)
    return Gradients(
        None if call.q is None else x.queries.put(d_q.to(call.q.dtype), call.q),
        x.keys.put(d_k.to(call.k.dtype), call.k),
        x.keys.put(d_v.masked_fill(x.hidden, 0).to(call.v.dtype), call.v),
        d_log, d_steps, *((None, None) if sums is None else (d_kv.to(sums.kv.dtype), d_z.to(sums.z.dtype))),
    )  # fmt: skip


def _quarter_turned(x: Tensor, y: Tensor, call: Call) -> Tensor:
    """<J x, y> of each pair that turns, summed over r: (t, g, c, pairs)."""
    width, zero = 2 * call.pairs, x.new_zeros(call.pairs)
    pairs = (rotate(x[..., :width], zero, zero + 1, call.layout) * y[..., :width]).sum(2)
    return pairs.unflatten(-1, (-1, 2)).sum(-1) if call.layout == "interleaved" else sum(pairs.chunk(2, -1))  # type: ignore[return-value]


attend = partial(shared.attend, "eager")

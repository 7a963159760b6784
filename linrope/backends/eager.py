"""Eq. 19 in chunks, in plain PyTorch: any device, any float dtype, O(N), no loop over chunks.

    1  cut every sequence into chunks of c tokens
    2  inside a chunk: scores <R phi_i, R psi_j> e^(D_i - D_j), j <= i, with D the sum of log decays from its start
    3  from chunk to chunk: the state S, which a chunk fades by e^(D_c) and adds its own keys to (``scan``)
    4  num_i = sum_j scores_ij v_j + e^(D_i) R phi_i S, and den_i likewise without rotation

The backward pass does the same with the gradient T of the state, from the last chunk to the first. It computes
everything anew from the inputs. Tensors are (t, g, r, c, ..): t chunk, g key/value head, r query head of it, c
position in the chunk.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from linrope.backends import call as shared
from linrope.backends.call import Call, Gradients, Sums
from linrope.feature_maps import ELEMENTWISE
from linrope.names import readable
from linrope.packing import owners
from linrope.rotary import rotate
from linrope.state import LinearAttentionState

READS_RESULTS = False
CHUNK = 64
AT_ONCE = 2**21  # numbers of k in one pass: heads beyond that go one group after the other, in the same memory
LONGEST_FADE = 60.0  # of xPos: how far e^x may go for the inverse within a chunk; float32 ends at 88


def supports(call: Call, state: LinearAttentionState | None) -> str | None:
    if call.fade is not None and call.distances is not None and readable(call.distances):
        gap = int(call.distances[:, 1:].max()) if call.distances.shape[1] > 1 else 0
        if gap * -float(call.fade.min()) > LONGEST_FADE / 2:
            return f"positions with gaps of {gap} and this xpos: use backend='reference'"
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
        average = b * n // max(s, 1)
        c = min(CHUNK, 1 << max(average - 1, 0).bit_length())
        counts = ((bounds.diff() + c - 1) // c).clamp(min=1)
        ends = counts.cumsum(0)
        # At least as many as there are, if nobody knows how long packed sequences are; the rest is empty.
        chunks = torch.arange(b * max(-(-n // c), 1) if s == b else n // c + s, device=device)
        owner = torch.searchsorted(ends, chunks, right=True).clamp_(max=max(s - 1, 0))
        index = chunks - (ends - counts)[owner]
        tokens = (bounds[owner] + index * c)[:, None] + torch.arange(c, device=device)
        valid = tokens < torch.where(chunks < ends[-1], bounds[owner + 1], 0)[:, None]
        return cls(tokens.where(valid, 0), valid, owner, (index == 0) | (chunks >= ends[-1]), ends - 1)

    def take(self, x: Tensor) -> Tensor:
        """(t, c, ..) of x (b or 1, n, ..): of no token, any numbers."""
        if x.shape[:2].numel() == 0:
            return x.new_zeros(*self.tokens.shape, *x.shape[2:])
        return x.flatten(0, 1)[self.tokens if len(x) > 1 else self.tokens % x.shape[1]]

    def put(self, x: Tensor, into: Tensor, heads: slice) -> None:
        """Writes x (t, g, r, c, ..) to the rows of into (b n + 1, g r, ..), whose last is for no token."""
        into[self.tokens.where(self.valid, len(into) - 1), heads] = x.flatten(1, 2).transpose(1, 2).to(into.dtype)

    @property
    def first(self) -> Tensor:
        """(s,): the first chunk of each sequence."""
        return torch.cat((self.last.new_zeros(1), self.last[:-1] + 1))[: len(self.last)]

    @property
    def ends(self) -> Tensor:
        """(t,): whether a chunk is the last of its sequence."""
        return torch.cat((self.begins[1:], self.begins.new_ones(1)))


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
    pairs = len(own) // 2
    first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)

    def carried(after: Tensor, chunks: slice) -> Tensor:
        starts = begins[chunks].view(-1, *[1] * (own.ndim - 1))
        return fade(after, None if log is None else log[chunks]).masked_fill(starts, 0)

    both = None if log is None else log[first] + log[second]
    found = scan(own[second] + carried(own[first], second), both, begins[first] | begins[second])
    after = torch.empty_like(own)
    after[second] = found
    rest = slice(2, len(own), 2)
    after[:1], after[rest] = own[:1], own[rest]
    after[rest] += carried(found[: len(after[rest])], rest)
    return after


def around(own: Tensor, log: Tensor | None, begins: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
    """The state before and after each chunk; first (t, ..): what comes before a sequence, None: 0."""
    starts = begins.view(-1, *[1] * (own.ndim - 1))
    before = torch.zeros_like(own) if first is None else first.to(own.dtype).masked_fill(~starts, 0)
    after = scan(own if first is None else own + fade(before, log), log, begins)
    return torch.where(starts, before, after.roll(1, 0)), after


class Decay(NamedTuple):
    """Sums of log decay within each chunk, (t, g or 1, 1, c, 1), of xPos (.., c, f), float64."""

    sums: Tensor  # from the token before the chunk to each
    total: Tensor  # to the last, (.., 1, 1) or (.., 1, f)

    @classmethod
    def of(cls, log: Tensor, cut: Cut) -> "Decay":
        sums = log.double().masked_fill(~cut.valid[:, None, None, :, None], 0).cumsum(-2)
        return cls(sums, sums[..., -1:, :])

    def queries(self, like: Tensor) -> Tensor:
        """What is left for each query of what came before the chunk."""
        return self.sums.exp().to(like.dtype)

    def keys(self, like: Tensor) -> Tensor:
        """What is left of each key at the last token."""
        return (self.total - self.sums).exp().to(like.dtype)

    def tile(self, like: Tensor) -> Tensor:
        """(.., c, c): what is left of key j for query i."""
        return (self.sums - self.sums.mT).clamp(max=0).exp().to(like.dtype)


class Part:
    """Some key/value heads of a call, by chunk: features, rotated features, decay."""

    def __init__(self, call: Call, sums: Sums | None, heads: slice) -> None:
        q, k, v = call.k[:, :0] if call.q is None else call.q, call.k, call.v
        self.call, self.heads, r = call, heads, call.group
        self.query_heads = slice(heads.start * r, heads.stop * r)
        self.dtype = torch.promote_types(q.dtype, torch.float32) if sums is None else sums.kv.dtype
        same = call.q is None or (call.causal and call.key_positions is None)
        self.key_cut = Cut.of(k, call.bounds)
        self.query_cut = self.key_cut if call.q is None or call.causal else Cut.of(q, call.bounds)
        visible = self.key_cut.valid
        if call.key_mask is not None:
            visible = visible & self.key_cut.take(call.key_mask)
        self.hidden = ~visible[:, None, None, :, None]
        self.function = ELEMENTWISE[call.feature_map]
        self.q_in = self.take(q[:, :, self.query_heads], self.query_cut, r)
        self.k_in = self.take(k[:, :, heads], self.key_cut).masked_fill_(self.hidden, 0)
        self.v = self.take(v[:, :, heads], self.key_cut).masked_fill_(self.hidden, 0)
        self.phi = self.function.value(self.q_in, None, None)
        self.psi = self.function.value(self.k_in, None, None).masked_fill(self.hidden, 0)

        angle = None if sums is None else sums.angle
        self.q_table = self.k_table = self.table(angle, keys=True)
        if not same:
            self.q_table = self.table(angle, keys=False)
        self.phi_hat = self.turned(self.phi, self.q_table)
        self.psi_hat = self.turned(self.psi, self.k_table)

        self.decay = None
        if call.log_decay is not None:
            log = self.key_cut.take(call.log_decay[:, :, heads] if call.log_decay.shape[2] > 1 else call.log_decay)
            self.decay = Decay.of(log.transpose(1, 2)[:, :, None, :, None], self.key_cut)
        self.pair_decay = None
        if call.fade is not None and call.distances is not None:
            log = self.key_cut.take(call.distances)[:, None, None, :, None] * call.fade
            self.pair_decay = Decay.of(log, self.key_cut)
            self.lift = self.pair_decay.sums - self.pair_decay.sums[..., :1, :]  # from the chunk's first token on
            self.phi_hat = self.phi_hat * self.lift.exp().to(self.dtype)
            self.psi_hat = self.psi_hat * (-self.lift).exp().to(self.dtype)

    def take(self, x: Tensor, cut: Cut, r: int = 1) -> Tensor:
        """(t, g, r, c, ..) of x (b, n, g r, ..), in the pass' dtype."""
        return cut.take(x).transpose(1, 2).unflatten(1, (x.shape[2] // r, r)).to(self.dtype)

    def table(self, angle: Tensor | None, *, keys: bool) -> tuple[Tensor, Tensor] | None:
        """cos and sin of the angles, (t, g or 1, 1, c, pairs)."""
        found = self.call.cos_sin(angle, self.dtype, keys=keys)
        if found is None:
            return None
        cos, sin = (x if x.shape[2] == 1 else x[:, :, self.heads] for x in found)
        cut = self.key_cut if keys else self.query_cut
        return cut.take(cos).transpose(1, 2)[:, :, None], cut.take(sin).transpose(1, 2)[:, :, None]

    def turned(self, x: Tensor, table: tuple[Tensor, Tensor] | None, *, back: bool = False) -> Tensor:
        if table is None:
            return x
        cos, sin = table
        return rotate(x, cos, -sin if back else sin, self.call.layout)

    def unrotated(self, x: Tensor, table: tuple[Tensor, Tensor] | None, *, lift: int) -> Tensor:
        """The gradient of features from that of rotated ones; lift: 1 of queries, -1 of keys."""
        if self.pair_decay is not None:
            x = x * (lift * self.lift).exp().to(x.dtype)
        return self.turned(x, table, back=True)

    def slope(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function.slope(x, y, torch.empty_like(y))

    def times(self, x: Tensor, factor: str) -> Tensor:
        """x (t, g, r, c, ..) with one of Decay's factors for each query or key."""
        return x if self.decay is None else x * getattr(self.decay, factor)(x)

    def visible(self, scores: Tensor) -> Tensor:
        """Scores (t, g, r, c, c) of keys that a query sees, faded."""
        return scores.tril() if self.decay is None else (scores * self.decay.tile(scores)).tril()

    def pair_fade(self, state: Tensor, *, write: bool) -> Tensor:
        """xPos between the chunk's first token and the token before it (which reads), or its last (writes)."""
        if self.pair_decay is None:
            return state
        first = self.pair_decay.sums[..., :1, :]
        log = self.pair_decay.total - first if write else first
        return fade(state, log[:, :, 0].mT)

    def logs(self) -> tuple[Tensor | None, Tensor | None]:
        """log of how a chunk fades S (t, g or 1, 1 or f, 1) and z (t, g or 1, 1)."""
        own = None if self.decay is None else self.decay.total[:, :, 0]
        pairs = None if self.pair_decay is None else self.pair_decay.total[:, :, 0].mT
        both = own if pairs is None else pairs if own is None else own + pairs
        return both, None if own is None else own[..., 0]

    def states(self, sums: Sums | None) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """S (t, g, f, e) before and after each chunk, and z (t, g, f)."""
        kv_first = z_first = None
        if sums is not None:
            kv_first, z_first = (x[:, self.heads][self.key_cut.owner] for x in (sums.kv, sums.z))
        psi_hat, psi, v = self.times(self.psi_hat, "keys")[:, :, 0], self.times(self.psi.double(), "keys"), self.v[:, :, 0]
        kv_log, z_log = self.logs()
        own = self.pair_fade(psi_hat.mT @ v, write=True)
        kv = around(own, kv_log, self.key_cut.begins, kv_first)
        return kv, around(psi[:, :, 0].sum(-2), z_log, self.key_cut.begins, z_first)


def product(x: Tensor, y: Tensor) -> Tensor:
    """x (t, g, r, c, k) times y (t, g, 1, k, l)."""
    return (x.flatten(2, 3) @ y[:, :, 0]).unflatten(2, x.shape[2:4])


def normalizer(part: Part, z_seen: Tensor, phi_seen: Tensor) -> tuple[Tensor, Tensor]:
    """1 / den (t, g, r, c, 1), and whether it follows the features; z_seen (t, g, f): what phi_seen reads."""
    den = product(phi_seen, z_seen[:, :, None, :, None].to(part.dtype))
    if part.call.causal:
        den = den + part.visible(product(part.phi, part.psi.mT)).sum(-1, keepdim=True)
    if part.call.eps_mode == "add":
        return 1 / (den + part.call.eps), torch.ones_like(den, dtype=torch.bool)
    return 1 / den.clamp(min=part.call.eps), den >= part.call.eps


def head_groups(call: Call) -> Iterator[slice]:
    g = call.k.shape[2]
    size = max(1, min(g, AT_ONCE * g // max(call.k.numel(), 1)))
    return (slice(low, min(low + size, g)) for low in range(0, g, size))


def _seen(part: Part, states: tuple[Tensor, Tensor]) -> Tensor:
    """The state that the queries of each chunk read: the one before it or, bidirectional, that of all keys."""
    before, after = states
    return before if part.call.causal else after[part.key_cut.last][part.query_cut.owner]


def forward(call: Call, sums: Sums | None, save: bool) -> tuple[Tensor | None, tuple[Tensor, Tensor] | None, list[Tensor]]:
    """out (b, n, h, e), the last kv and z where they are wanted, and nothing to save."""
    out, lasts = None, []
    if call.q is not None:
        b, n, h, _ = call.q.shape
        out = call.v.new_empty(b * n + 1, h, call.v.shape[3])
    for heads in head_groups(call):
        part = Part(call, sums, heads)
        kv, z = part.states(sums)
        lasts.append((kv[1][part.key_cut.last], z[1][part.key_cut.last]))
        if out is None:
            continue
        num = product(part.times(part.phi_hat, "queries"), part.pair_fade(_seen(part, kv), write=False)[:, :, None])
        if call.causal:
            num += product(part.visible(product(part.phi_hat, part.psi_hat.mT)), part.v)
        if call.normalize:
            num *= normalizer(part, _seen(part, z), part.times(part.phi, "queries"))[0]
        part.query_cut.put(num, out, part.query_heads)
    if out is not None:
        out = out[:-1].view(b, n, h, call.v.shape[3])
    if not call.want_state:
        return out, None, []
    kvs, zs = (torch.cat(x, 1) for x in zip(*lasts))
    return out, (kvs.contiguous(), zs if sums is None else zs.to(sums.z.dtype)), []


def backward(
    call: Call, sums: Sums | None, results: list[Tensor], g_out: Tensor | None, g_kv: Tensor | None, g_z: Tensor | None
) -> Gradients:
    """With the gradient g of out, gb = g / den, delta = -<gb, out> where den follows the features:

        dphi^_i = sum_j (gb_i v_j) e^(D_i - D_j) psi^_j + e^(D_i) S gb_i      dphi_i = R^T dphi^_i + delta_i z_i
        dpsi^_j = sum_i (gb_i v_j) e^(D_i - D_j) phi^_i + e^(D_c - D_j) T v_j    dpsi_j = R^T dpsi^_j + w_j
        dv_j    = sum_i e^(D_i - D_j) <phi^_i, psi^_j> gb_i + e^(D_c - D_j) T^T psi^_j
        T       = gradient of S: each chunk fades it by e^(D_c) and adds sum_i e^(D_i) phi^_i gb_i^T; w so with delta_i phi_i

        da_t     = sum_(i >= t) <phi_i, dphi_i> - <psi_i, dpsi_i> + <S, T> + <z, w>     i to the chunk's end; states after it
        domega_t = sum_(i >= t) <J phi^_i, dphi^_i> + <J psi^_i, dpsi^_i>               J: a quarter turn
    """
    tensors = [call.k[:, :0] if call.q is None else call.q, call.k, call.v]
    rows = [x.new_empty(x.shape[0] * x.shape[1] + 1, *x.shape[2:]) for x in tensors]
    b, m, g, _ = call.k.shape
    d_log = None if call.log_decay is None else call.k.new_zeros(b * m + 1, g, dtype=torch.float64)
    d_angle = None if call.angle_steps is None else call.k.new_zeros(b * m + 1, g, call.pairs, dtype=torch.float64)
    firsts = []
    for heads in head_groups(call):
        part = Part(call, sums, heads)
        found = _gradients(part, sums, g_out, g_kv, g_z)
        if call.q is not None:
            part.query_cut.put(found.phi * part.slope(part.q_in, part.phi), rows[0], part.query_heads)
        psi = (found.psi * part.slope(part.k_in, part.psi)).masked_fill(part.hidden, 0)
        part.key_cut.put(psi, rows[1], heads)
        part.key_cut.put(found.v.masked_fill(part.hidden, 0), rows[2], heads)
        if d_log is not None and found.log_decay is not None:
            part.key_cut.put(found.log_decay[:, :, None], d_log, heads)
        if d_angle is not None and found.angles is not None:
            part.key_cut.put(found.angles[:, :, None], d_angle, heads)
        firsts.append((found.kv, found.z))
    dq, dk, dv = (x[:-1].view(like.shape) for x, like in zip(rows, tensors))
    first = (None, None) if sums is None else tuple(torch.cat(x, 1).to(y.dtype) for x, y in zip(zip(*firsts), sums))
    return Gradients(
        None if call.q is None else dq, dk, dv,
        None if call.log_decay is None or d_log is None else shared.summed_to(d_log[:-1].view(b, m, g), call.log_decay),
        None if call.angle_steps is None or d_angle is None else shared.summed_to(d_angle[:-1].view(b, m, g, call.pairs), call.angle_steps),
        *first,
    )  # fmt: skip


class _Gradients(NamedTuple):
    phi: Tensor  # (t, g, r, c, f), before the map's slope, like the next
    psi: Tensor  # (t, g, 1, c, f)
    v: Tensor  # (t, g, 1, c, e)
    log_decay: Tensor | None  # (t, g, c)
    angles: Tensor | None  # (t, g, c, pairs): of angle_steps
    kv: Tensor  # (s, g, f, e)
    z: Tensor  # (s, g, f)


def _gradients(part: Part, sums: Sums | None, g_out: Tensor | None, g_kv: Tensor | None, g_z: Tensor | None) -> _Gradients:
    call, keys, queries = part.call, part.key_cut, part.query_cut
    kv, z = part.states(sums)
    seen, z_seen = part.pair_fade(_seen(part, kv), write=False)[:, :, None], _seen(part, z)
    gb = part.phi.new_zeros(*part.phi.shape[:-1], call.v.shape[3])
    if g_out is not None:
        gb = part.take(g_out[:, :, part.query_heads], queries, call.group)
        gb = gb.masked_fill(~queries.valid[:, None, None, :, None], 0)
    delta = torch.zeros_like(gb[..., :1])
    if call.normalize:
        inverse, follows = normalizer(part, z_seen, part.times(part.phi, "queries"))
        gb = gb * inverse

    d_phi_hat = part.times(product(gb, seen.mT), "queries")
    if call.causal:
        d_scores = part.visible(product(gb, part.v.mT))
        d_phi_hat += product(d_scores, part.psi_hat)
    if call.normalize:
        delta = (-(part.phi_hat * d_phi_hat).sum(-1, keepdim=True) * inverse).masked_fill(~follows, 0)
    d_phi = part.unrotated(d_phi_hat, part.q_table, lift=1)
    d_phi += part.times(delta, "queries") * z_seen[:, :, None, None].to(part.dtype)
    weights = part.visible(delta.expand(*delta.shape[:-1], delta.shape[-2])) if call.causal else None
    if weights is not None:
        d_phi += product(weights, part.psi)

    own = part.times(part.phi_hat, "queries").flatten(2, 3).mT @ gb.flatten(2, 3)
    own_z = (part.times(part.phi, "queries") * delta).double().sum((2, 3))
    after, before = around_reversed(part.pair_fade(own, write=False), part.logs()[0], queries, g_kv, part.heads)
    z_after, z_before = around_reversed(own_z, part.logs()[1], queries, g_z, part.heads)
    d_kv, d_z = before[queries.first], z_before[queries.first]
    if not call.causal:
        after, z_after = d_kv[keys.owner], d_z[keys.owner]

    wanted = part.pair_fade(after, write=True)[:, :, None]
    d_psi_hat, d_v = (part.times(product(x, y), "keys") for x, y in ((part.v, wanted.mT), (part.psi_hat, wanted)))
    d_psi = part.times(z_after[:, :, None, None].to(part.dtype).expand_as(part.psi), "keys")
    if weights is not None:
        d_psi_hat += transposed_product(d_scores, part.phi_hat)
        d_v += transposed_product(part.visible(product(part.phi_hat, part.psi_hat.mT)), gb)
        d_psi = d_psi + transposed_product(weights, part.phi)
    d_psi = d_psi + part.unrotated(d_psi_hat, part.k_table, lift=-1)

    d_log = d_angles = None
    if call.log_decay is not None:
        change = (part.phi * d_phi).sum((2, 4)) - (part.psi * d_psi).sum((2, 4))
        later = (kv[1] * after).sum((2, 3)) + (z[1] * z_after).sum(2)
        d_log = later[..., None] + change.double().flip(-1).cumsum(-1).flip(-1)
    if call.angle_steps is not None:
        change = quarter_turns(part.phi_hat, d_phi_hat, call).sum(2) + quarter_turns(part.psi_hat, d_psi_hat, call).sum(2)
        change = change.masked_fill(~keys.valid[:, None, :, None], 0).double()
        later, _ = around_reversed(change.sum(2), None, keys, None, part.heads)
        d_angles = later[:, :, None] + change.flip(2).cumsum(2).flip(2)
    return _Gradients(d_phi, d_psi, d_v, d_log, d_angles, d_kv, d_z)


def around_reversed(
    own: Tensor, log: Tensor | None, cut: Cut, last: Tensor | None, heads: slice
) -> tuple[Tensor, Tensor]:
    """The gradient of the state after and before each chunk; last (s, g, ..): of the last state."""
    first = None if last is None else last[:, heads][cut.owner].flip(0)
    log = None if log is None else log.flip(0)
    after, before = around(own.flip(0), log, cut.ends.flip(0), first)
    return after.flip(0), before.flip(0)


def transposed_product(scores: Tensor, x: Tensor) -> Tensor:
    """scores (t, g, r, c, c) transposed, times x (t, g, r, c, k), summed over r: (t, g, 1, c, k)."""
    return (scores.flatten(2, 3).mT @ x.flatten(2, 3))[:, :, None]


def quarter_turns(x: Tensor, y: Tensor, call: Call) -> Tensor:
    """<J x, y> of each pair that turns, J a quarter turn: (.., pairs)."""
    x, y = x[..., : 2 * call.pairs], y[..., : 2 * call.pairs]
    if call.layout == "interleaved":
        return x[..., 0::2] * y[..., 1::2] - x[..., 1::2] * y[..., 0::2]
    (x1, x2), (y1, y2) = x.chunk(2, -1), y.chunk(2, -1)
    return x1 * y2 - x2 * y1


attend = partial(shared.attend, "eager")

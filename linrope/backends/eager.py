"""Equation 19 in chunks, in plain PyTorch: any device, any floating dtype, O(N), no loop over chunks.

    1  cut every sequence into chunks of c tokens
    2  inside a chunk: scores <R phi_i, R psi_j> e^(D_i - D_j), j <= i, D the sum of log decays from its start
    3  from chunk to chunk: the state S, decayed by e^(D_c), plus the keys of the chunk (``linrope.recurrence.chunks``)
    4  num_i = sum_j scores_ij v_j + e^(D_i) R phi_i S, and den_i likewise without rotation

The backward pass does the same with the gradient T of the state, from the last chunk to the first. It recomputes
everything from the inputs. Tensors are (t, g, r, c, ..): t chunk, g key/value head, r its query head,
c position in the chunk.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from linrope.backends import bridge
from linrope.common.tracing import values_readable
from linrope.feature_maps import ELEMENTWISE
from linrope.recurrence.call import Call, Gradients, ResultGradients, Results, Sums, summed_to
from linrope.recurrence.chunks import Cut, decay_by, gradients_around, states_around
from linrope.recurrence.state import LinearAttentionState
from linrope.rotation.rotary import rotate

MAPS = ELEMENTWISE
TAKES_VALUE_GROUPS = False
# Elements of k in one pass. A larger call runs a few heads at a time, which bounds the memory.
MAX_K_PER_PASS = 2**20
MOST_TERMS = 64  # of a sum that a matrix library forms from front to back
MAX_XPOS_EXPONENT = 60.0  # for the inverse of xPos within a chunk; e^88 overflows float32


def why_not() -> str | None:
    return None


def why_not_call(call: Call, state: LinearAttentionState | None) -> str | None:
    distances, log_decay = call.distances, call.xpos_log_decay
    if distances is not None and log_decay is not None and values_readable(distances) and len(call.k):
        cut = Cut.of(call.k, call.bounds)
        longest = int(cut.take(distances).masked_fill(~cut.valid, 0)[:, 1:].sum(1).max())
        if longest * -float(log_decay.min()) > MAX_XPOS_EXPONENT:
            return (
                f"xpos: the tokens of one chunk span {longest} positions, over which the fastest pair decays to less "
                "than e^-60; use backend='reference'"
            )
    return None


def new_saved(call: Call) -> list[Tensor]:
    return []


def reads_results(call: Call) -> bool:
    return False


class Decay:
    """Log decay summed within each chunk, (t, g or 1, 1, c, 1), or that of xPos, (t, 1, 1, c, f); float64."""

    def __init__(self, log: Tensor, cut: Cut) -> None:
        self.sums = log.double().masked_fill(~cut.valid[:, None, None, :, None], 0).cumsum(-2)
        self.total = self.sums[:, :, 0, -1:].mT  # (t, g or 1, 1 or f, 1), with the axes of S

    def decay_to_query(self, x: Tensor) -> Tensor:
        """x_i e^(D_i): decayed since the chunk's start."""
        return x * self.sums.exp().to(x.dtype)

    def decay_to_end(self, x: Tensor) -> Tensor:
        """x_j e^(D_c - D_j): decayed to the chunk's last token."""
        return x * (self.sums[..., -1:, :] - self.sums).exp().to(x.dtype)

    def decay_scores(self, scores: Tensor) -> Tensor:
        """scores_ij e^(D_i - D_j)."""
        return scores * (self.sums - self.sums.mT).clamp(max=0).exp().to(scores.dtype)


class Chunks:
    """A call cut into chunks: its features, rotated features, decay and states."""

    def __init__(self, call: Call, sums: Sums | None) -> None:
        q, k = call.k[:, :0] if call.q is None else call.q, call.k
        self.call, self.function = call, MAPS[call.feature_map]
        self.dtype = torch.promote_types(q.dtype, torch.float32 if sums is None else sums.kv.dtype)
        self.key_cut = self.query_cut = Cut.of(k, call.bounds)
        if call.q is not None and not call.causal:
            self.query_cut = Cut.of(q, call.bounds)
        visible = self.key_cut.valid
        if call.key_mask is not None:
            visible = visible & self.key_cut.take(call.key_mask)
        self.hidden = ~visible[:, None, None, :, None]
        self.q = self.take(q, self.query_cut, q.shape[2] // k.shape[2])
        if self.query_cut.tokens.numel() > q.shape[:2].numel():
            # Padding repeats the very first token. A NaN there would reach the gradients of other sequences.
            self.q.masked_fill_(~self.query_cut.valid[:, None, None, :, None], 0)
        self.k, self.v = (self.take(x, self.key_cut).masked_fill(self.hidden, 0) for x in (k, call.v))
        self.phi = self.function.value(self.q)
        self.psi = self.function.value(self.k).masked_fill(self.hidden, 0)
        angle = None if sums is None else sums.angle
        self.key_cos_sin = self.query_cos_sin = self.cos_sin(angle, keys=True)
        if call.q is not None and (not call.causal or call.key_positions is not None):
            self.query_cos_sin = self.cos_sin(angle, keys=False)
        self.phi_hat = self.rotated(self.phi, self.query_cos_sin)
        self.psi_hat = self.rotated(self.psi, self.key_cos_sin)
        self.decay = self.xpos = self.kv_log = self.z_log = None
        if call.log_decay is not None:
            log = self.key_cut.take(call.log_decay).transpose(1, 2)[:, :, None, :, None]
            self.decay = Decay(log, self.key_cut)
            self.kv_log, self.z_log = self.decay.total, self.decay.total[..., 0]
        if call.xpos_log_decay is not None and call.distances is not None:
            distances = self.key_cut.take(call.distances).masked_fill(~self.key_cut.valid, 0)
            log = distances[:, None, None, :, None] * call.xpos_log_decay
            # The first token's decay is kept out of the chunk's sums: it may span a long gap before the chunk, and such
            # a large number would cost the sums their digits.
            self.xpos_first = log[:, :, 0, :1].mT.clone()
            log[..., 0, :] = 0
            self.xpos = Decay(log, self.key_cut)
            self.kv_log = self.xpos_first + self.xpos.total + (0 if self.kv_log is None else self.kv_log)
            self.phi_hat = self.xpos_within_chunk(self.phi_hat, 1)
            self.psi_hat = self.xpos_within_chunk(self.psi_hat, -1)

    def take(self, x: Tensor, cut: Cut, r: int = 1) -> Tensor:
        """x (b, n, g r, ..) by chunk, (t, g, r, c, ..), in the dtype of all sums."""
        by_chunk: Tensor = cut.take(x).transpose(1, 2).unflatten(1, (x.shape[2] // r, r))
        return by_chunk.to(self.dtype)

    def cos_sin(self, angle: Tensor | None, *, keys: bool) -> list[Tensor] | None:
        """cos and sin of the angles by chunk, (t, g or 1, 1, c, pairs)."""
        cut = self.key_cut if keys else self.query_cut
        cos_sin = self.call.cos_sin(angle, self.dtype, keys=keys)
        return None if cos_sin is None else [cut.take(x).transpose(1, 2)[:, :, None] for x in cos_sin]

    def rotated(self, x: Tensor, cos_sin: list[Tensor] | None, sign: int = 1) -> Tensor:
        """x rotated by its angles, or by their negatives with sign -1."""
        return x if cos_sin is None else rotate(x, cos_sin[0], sign * cos_sin[1], self.call.layout)

    def xpos_within_chunk(self, x: Tensor, sign: int) -> Tensor:
        """Decay of xPos from the chunk's first token to each token, or its inverse with sign -1."""
        return x if self.xpos is None else x * (sign * self.xpos.sums).exp().to(x.dtype)

    def xpos_into_chunk(self, state: Tensor) -> Tensor:
        """Decay of xPos from the token before the chunk to its first."""
        return state if self.xpos is None else decay_by(state, self.xpos_first)

    def xpos_out_of_chunk(self, state: Tensor) -> Tensor:
        """Decay of xPos from the chunk's first token to its last."""
        return state if self.xpos is None else decay_by(state, self.xpos.total)

    def decayed(self, x: Tensor, factor: Callable[[Decay, Tensor], Tensor]) -> Tensor:
        return x if self.decay is None else factor(self.decay, x)

    def causal_scores(self, scores: Tensor) -> Tensor:
        """scores (t, g, r, c, c), decayed, with 0 for the keys after a query."""
        return self.decayed(scores, Decay.decay_scores).tril()

    def states(self, sums: Sums | None) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """S (t, g, f, e) before and after each chunk, and z (t, g, f)."""
        kv_of_chunk = self.decayed(self.psi_hat, Decay.decay_to_end)[:, :, 0].mT @ self.v[:, :, 0]
        z_of_chunk = self.decayed(self.psi.double(), Decay.decay_to_end)[:, :, 0].sum(-2)
        kv, z = (None, None) if sums is None else (sums.kv, sums.z)
        kvs = states_around(self.xpos_out_of_chunk(kv_of_chunk), self.kv_log, self.key_cut, kv)
        return kvs, states_around(z_of_chunk, self.z_log, self.key_cut, z)

    def read(self, states: tuple[Tensor, Tensor]) -> Tensor:
        """The states that the queries of each chunk read: before it or, if bidirectional, after all keys."""
        return states[0] if self.call.causal else states[1][self.key_cut.last][self.query_cut.owner]

    def inverse_normalizer(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """1 / den (t, g, r, c, 1), and False where eps replaces den. z (t, g, f) is what the queries read."""
        den = product(self.decayed(self.phi, Decay.decay_to_query), z[:, :, None, :, None].to(self.dtype))
        if self.call.causal:
            den = den + self.causal_scores(product(self.phi, self.psi.mT)).sum(-1, keepdim=True)
        if self.call.eps_mode == "add":
            return 1 / (den + self.call.eps), torch.ones_like(den, dtype=torch.bool)
        return 1 / den.clamp(min=self.call.eps), den >= self.call.eps


def product(x: Tensor, y: Tensor) -> Tensor:
    """x (t, g, r, c, k) times y (t, g, 1, k, l). A long sum over k is formed in parts, to round less."""
    rows, columns, parts = x.flatten(2, 3), y[:, :, 0], max(1, -(-x.shape[-1] // MOST_TERMS))
    pairs = zip(rows.tensor_split(parts, -1), columns.tensor_split(parts, -2), strict=True)
    xy = reduce(torch.add, (part @ other for part, other in pairs))
    by_query: Tensor = xy.unflatten(2, x.shape[2:4])
    return by_query


def transposed_product(scores: Tensor, x: Tensor) -> Tensor:
    """scores (t, g, r, c, k) transposed, times x (t, g, r, c, l), summed over r: (t, g, 1, k, l)."""
    return (scores.flatten(2, 3).mT @ x.flatten(2, 3))[:, :, None]


def forward(call: Call, sums: Sums | None, save: bool) -> Results:
    outs, kvs, zs = zip(*[_forward(**part) for part in _by_heads(call, sums, ResultGradients())], strict=True)
    out = None if call.q is None else torch.cat(outs, 2)
    return out, (torch.cat(kvs, 1), torch.cat(zs, 1)) if call.return_state else None, []


def backward(call: Call, sums: Sums | None, results: list[Tensor], g: ResultGradients) -> Gradients:
    parts = [_backward(**part) for part in _by_heads(call, sums, g)]

    def joined(name: str) -> Tensor | None:
        heads = 1 if name in ("kv", "z") else 2  # the axis of heads
        tensors = [getattr(part, name) for part in parts]
        return None if tensors[0] is None else torch.cat(tensors, heads)

    gradients = Gradients(**{name: joined(name) for name in Gradients._fields})  # type: ignore[arg-type]
    summed = {
        name: summed_to(gradient, like)
        for name in ("log_decay", "angle_steps")
        if (like := getattr(call, name)) is not None and (gradient := getattr(gradients, name)) is not None
    }
    return gradients._replace(**summed)


def _by_heads(call: Call, sums: Sums | None, g: ResultGradients) -> Iterator[dict[str, Any]]:
    """Splits the call, its sums and the gradients g into a few key/value heads at a time."""
    all_heads, r = call.k.shape[2], call.group
    size = max(1, min(all_heads, MAX_K_PER_PASS * all_heads // max(call.k.numel(), 1)))

    def part(x: Tensor | None, dim: int, heads: slice) -> Tensor | None:
        return x if x is None or x.shape[dim] == 1 else x.narrow(dim, heads.start, heads.stop - heads.start)

    for low in range(0, all_heads, size):
        high = min(low + size, all_heads)
        heads, query_heads = slice(low, high), slice(low * r, high * r)
        tensors = {
            name: part(getattr(call, name), 2, heads) for name in ("k", "v", "log_decay", "angle_steps")
        }
        tensors |= {"q": part(call.q, 2, query_heads), "theta_turns": part(call.theta_turns, 1, heads)}
        yield {
            "call": replace(call, **tensors),  # type: ignore[arg-type]
            "sums": None if sums is None else Sums(*(part(x, 1, heads) for x in sums)),  # type: ignore[arg-type]
            "g": ResultGradients(part(g.out, 2, query_heads), part(g.kv, 1, heads), part(g.z, 1, heads)),
        }


def _forward(call: Call, sums: Sums | None, **_: None) -> tuple[Tensor | None, Tensor, Tensor]:
    """out (b, n, h, e), and the last kv and z."""
    x = Chunks(call, sums)
    kv, z = x.states(sums)
    last = kv[1][x.key_cut.last], z[1][x.key_cut.last]
    if sums is not None:
        last = last[0].to(sums.kv.dtype), last[1].to(sums.z.dtype)
    if call.q is None:
        return None, *last
    num = product(x.decayed(x.phi_hat, Decay.decay_to_query), x.xpos_into_chunk(x.read(kv))[:, :, None])
    if call.causal:
        num += product(x.causal_scores(product(x.phi_hat, x.psi_hat.mT)), x.v)
    if call.normalize:
        num *= x.inverse_normalizer(x.read(z))[0]
    return x.query_cut.put(num.to(call.v.dtype), call.q), *last


def _backward(call: Call, sums: Sums | None, g: ResultGradients) -> Gradients:
    """The gradients of q, k, v, log decay, angle steps and the first state.

    With the gradient g of out, gb = g / den, and delta = -<gb, out>, or 0 where eps replaces den:

    dphi^_i = sum_j (gb_i v_j) e^(D_i - D_j) psi^_j + e^(D_i) S gb_i       dphi_i = R^T dphi^_i + delta_i z_i
    dpsi^_j = sum_i (gb_i v_j) e^(D_i - D_j) phi^_i + e^(D_c - D_j) T v_j  dpsi_j = R^T dpsi^_j + tau_j
    dv_j    = sum_i e^(D_i - D_j) <phi^_i, psi^_j> gb_i + e^(D_c - D_j) T^T psi^_j
    T       = gradient of S: a chunk decays it by e^(D_c) and adds e^(D_i) phi^_i gb_i^T; tau = gradient of z
    da_t    = sum_(i>=t) <phi_i, dphi_i> - <psi_i, dpsi_i> + <S, T> + <z, tau>
    domega_t = sum_(i>=t) <J phi^_i, dphi^_i> + <J psi^_i, dpsi^_i>

    c is the chunk's last token and J a quarter turn. The sum of da ends with the chunk, where S and T are the state and
    its gradient; the sum of domega ends with the sequence. Terms i = j cancel in da. Their rounding errors would not,
    so da is summed before these terms are added.
    """
    x = Chunks(call, sums)
    kv, z = x.states(sums)
    phi_decayed = x.decayed(x.phi_hat, Decay.decay_to_query)
    kv_read, z_read = x.xpos_into_chunk(x.read(kv))[:, :, None], x.read(z)
    gb, delta = x.v.new_zeros(*x.phi.shape[:-1], x.v.shape[-1]), torch.zeros_like(x.phi[..., :1])
    if g.out is not None:
        gb = x.take(g.out, x.query_cut, call.group).masked_fill(~x.query_cut.valid[:, None, None, :, None], 0)
    if call.normalize:
        inverse, den_counts = x.inverse_normalizer(z_read)
        gb = gb * inverse
    d_phi_hat = x.decayed(product(gb, kv_read.mT), Decay.decay_to_query)
    if call.causal:
        d_scores = x.causal_scores(product(gb, x.v.mT))
        if call.log_decay is not None:
            diagonal_scores = _take_diagonal(d_scores)
        d_phi_hat += product(d_scores, x.psi_hat)
    if call.normalize:
        g_num = (x.phi_hat * d_phi_hat).sum(-1, keepdim=True)
        if call.log_decay is not None:
            g_num += diagonal_scores * (x.phi_hat * x.psi_hat).sum(-1, keepdim=True)
        delta = (-g_num * inverse).masked_fill(~den_counts, 0)
    d_phi = x.rotated(x.xpos_within_chunk(d_phi_hat, 1), x.query_cos_sin, -1)
    d_phi += x.decayed(delta, Decay.decay_to_query) * z_read[:, :, None, None].to(x.dtype)

    t_of_chunk = x.xpos_into_chunk(transposed_product(phi_decayed, gb)[:, :, 0])
    tau_of_chunk = (x.decayed(x.phi, Decay.decay_to_query) * delta).double().sum((2, 3))
    t_after, t_before = gradients_around(t_of_chunk, x.kv_log, x.query_cut, g.kv)
    tau_after, tau_before = gradients_around(tau_of_chunk, x.z_log, x.query_cut, g.z)
    at_first = x.query_cut.reverse().last
    d_kv, d_z = t_before.flip(0)[at_first], tau_before.flip(0)[at_first]
    if not call.causal:
        t_after, tau_after = d_kv[x.key_cut.owner], d_z[x.key_cut.owner]
    t_keys = x.xpos_out_of_chunk(t_after)[:, :, None]
    d_psi_hat = x.decayed(product(x.v, t_keys.mT), Decay.decay_to_end)
    d_v = x.decayed(product(x.psi_hat, t_keys), Decay.decay_to_end)
    d_psi = x.decayed(tau_after[:, :, None, None].to(x.dtype).expand_as(x.psi), Decay.decay_to_end)
    if call.causal:
        weights = x.causal_scores(delta.expand(*delta.shape[:-1], delta.shape[-2]))
        if call.log_decay is not None:
            diagonal_weights = _take_diagonal(weights)
        d_phi += product(weights, x.psi)
        d_psi = d_psi + transposed_product(weights, x.phi)
        d_psi_hat += transposed_product(d_scores, x.phi_hat)
        d_v += transposed_product(x.causal_scores(product(x.phi_hat, x.psi_hat.mT)), gb)
    d_psi = d_psi + x.rotated(x.xpos_within_chunk(d_psi_hat, -1), x.key_cos_sin, -1)

    d_log = d_steps = None
    if call.log_decay is not None:
        change = ((x.phi * d_phi).sum((2, 4)) - (x.psi * d_psi).sum((2, 4))).double()
        later = (kv[1] * t_after).sum((2, 3)) + (z[1] * tau_after).sum(2)
        d_log = _sums_from(x, change[..., None], later)[..., 0]
        d_phi += x.rotated(x.xpos_within_chunk(diagonal_scores * x.psi_hat, 1), x.query_cos_sin, -1)
        d_phi += diagonal_weights * x.psi
        rest = (diagonal_scores * x.phi_hat).sum(2, keepdim=True)
        d_psi = d_psi + x.rotated(x.xpos_within_chunk(rest, -1), x.key_cos_sin, -1)
        d_psi += (diagonal_weights * x.phi).sum(2, keepdim=True)
    if call.angle_steps is not None:
        change = _quarter_turned(x.phi_hat, d_phi_hat, call) + _quarter_turned(x.psi_hat, d_psi_hat, call)
        change = change.masked_fill(~x.key_cut.valid[:, None, :, None], 0).double()
        d_steps = _sums_from(x, change, gradients_around(change.sum(2), None, x.key_cut, None)[0])
    d_q = d_phi * x.function.slope(x.q, x.phi)
    d_k = (d_psi * x.function.slope(x.k, x.psi)).masked_fill(x.hidden, 0)
    return Gradients(
        q=None if call.q is None else x.query_cut.put(d_q.to(call.q.dtype), call.q),
        k=x.key_cut.put(d_k.to(call.k.dtype), call.k),
        v=x.key_cut.put(d_v.masked_fill(x.hidden, 0).to(call.v.dtype), call.v),
        log_decay=d_log,
        angle_steps=d_steps,
        write=None,
        kv=None if sums is None else d_kv.to(sums.kv.dtype),
        z=None if sums is None else d_z.to(sums.z.dtype),
    )


def _take_diagonal(scores: Tensor) -> Tensor:
    """Sets the diagonal of scores (.., c, c) to 0 and returns the old diagonal: (.., c, 1)."""
    diagonal = scores.diagonal(dim1=-2, dim2=-1)
    values = diagonal.clone()[..., None]
    diagonal.zero_()
    return values


def _sums_from(x: Chunks, change: Tensor, later: Tensor) -> Tensor:
    """Sums change (t, g, c, k) from each token to the chunk's end and adds later (t, g, k): (b, n, g, k)."""
    sums = change.flip(2).cumsum(2).flip(2) + later.view(*change.shape[:2], 1, -1)
    return x.key_cut.put(sums[:, :, None], x.call.k)


def _quarter_turned(x: Tensor, y: Tensor, call: Call) -> Tensor:
    """<J x, y> for each pair that turns, summed over r: (t, g, c, pairs). J is a quarter turn."""
    width, zero = 2 * call.pairs, x.new_zeros(call.pairs)
    pairs = (rotate(x[..., :width], zero, zero + 1, call.layout) * y[..., :width]).sum(2)
    one, other = (pairs[..., ::2], pairs[..., 1::2]) if call.layout == "interleaved" else pairs.chunk(2, -1)
    return one + other


attend = partial(bridge.attend, "eager")

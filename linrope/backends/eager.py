"""Equation 19 in chunks, in plain PyTorch: any device, any floating dtype, O(N), no loop over chunks.

    1  cut every sequence into chunks of c tokens (``linrope.recurrence.chunks``)
    2  num_i: the sum over keys (``key_sum``) of rotated features and values
    3  den_i: the same sum of features that are not rotated and values of 1
    4  out_i = num_i / max(den_i, eps)

The backward pass recomputes everything from the inputs. Tensors are (t, g, r, c, ..): t chunk, g key/value head, r its
query head, c position in the chunk.
"""

from collections.abc import Iterator, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linrope.backends import bridge
from linrope.backends.chunk_decay import Decay, DecayPerFeature, sums_from
from linrope.backends.delta_rule import erased, erased_gradients
from linrope.backends.key_sum import KeySum, KeySumGradients
from linrope.backends.protocol import COMMON, XPOS
from linrope.feature_maps import ELEMENTWISE
from linrope.recurrence.call import (
    TOKEN_INPUTS,
    Call,
    Gradients,
    ResultGradients,
    Results,
    Sums,
    split_heads,
    summed_to,
)
from linrope.recurrence.chunks import Cut
from linrope.recurrence.state import LinearAttentionState
from linrope.recurrence.transition import Transition, gradients_around
from linrope.rotation.angles import rotate, sums_of_units, units_to_features

MAPS, OPTIONS = ELEMENTWISE, COMMON | XPOS | {"erase"}
TAKES_VALUE_GROUPS = CLAMPS_GATES = False
# Elements of k in one pass. A larger call runs a few heads at a time, which bounds the memory.
MAX_K_PER_PASS = 2**20


def why_not() -> str | None:
    return None


def why_not_call(call: Call, state: LinearAttentionState | None) -> str | None:
    return None


def new_saved(call: Call) -> list[Tensor]:
    return []


def reads_results(call: Call) -> bool:
    return False


def forward(call: Call, sums: Sums | None, save: bool) -> Results:
    outs, kvs, zs = zip(*[_forward(**part) for part in _by_heads(call, sums, ResultGradients())], strict=True)
    kv, z = _joined(kvs, 1), _joined(zs, 1)
    return _joined(outs, 2), None if kv is None or z is None else (kv, z), []


def backward(call: Call, sums: Sums | None, saved: list[Tensor], g: ResultGradients) -> Gradients:
    parts = [_backward(**part) for part in _by_heads(call, sums, g)]

    def joined(name: str) -> Tensor | None:
        return _joined([getattr(part, name) for part in parts], 1 if name in ("kv", "z") else 2)

    gradients = Gradients(**{name: joined(name) for name in Gradients._fields})  # type: ignore[arg-type]
    summed = {
        name: summed_to(gradient, like)
        for name in TOKEN_INPUTS
        if (like := getattr(call, name)) is not None and (gradient := getattr(gradients, name)) is not None
    }
    return gradients._replace(**summed)


def _by_heads(call: Call, sums: Sums | None, g: ResultGradients) -> Iterator[dict[str, Any]]:
    """Splits the call, its sums and the gradients g into a few key/value heads at a time."""
    all_heads = call.k.shape[2]
    size = max(1, min(all_heads, MAX_K_PER_PASS * all_heads // max(call.k.numel(), 1)))
    parts = call.by_heads(size)

    def split(x: Tensor | None, dim: int, group: int = 1) -> Any:
        return split_heads(x, dim, size * group, len(parts))

    splits = [None] * len(parts) if sums is None else map(Sums, *(split(x, 1) for x in sums))
    gradients = map(ResultGradients, split(g.out, 2, call.group), split(g.kv, 1), split(g.z, 1))
    for part, part_sums, part_g in zip(parts, splits, gradients, strict=True):
        yield {"call": part, "sums": part_sums, "g": part_g}


def _joined(tensors: Sequence[Tensor | None], heads: int) -> Tensor | None:
    """Concatenates what ``_by_heads`` has split. heads: the axis of heads."""
    return None if tensors[0] is None else torch.cat(tensors, heads)  # type: ignore[arg-type]


def _forward(call: Call, sums: Sums | None, **_: None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """out (b, n, h, e), and the last kv and z."""
    x = ChunkedCall.of(call, sums)
    out = kv = z = None
    if call.q is not None:
        out = x.num.value()
        if call.normalize:
            out *= _inverse_normalizer(call, x.den.value())[0]
        out = x.queries.cut.put(out.to(call.v.dtype), call.q)
    if call.return_state:
        kv, z = x.num.last_state(), x.den.last_state()[..., 0]
        z = z if call.erase is None else torch.zeros_like(z)
        if sums is not None:
            kv, z = kv.to(sums.kv.dtype), z.to(sums.z.dtype)
    return out, kv, z


def _inverse_normalizer(call: Call, den: Tensor) -> tuple[Tensor, Tensor]:
    """1 / den (t, g, r, c, 1), and False where eps replaces den."""
    if call.eps_mode == "add":
        return 1 / (den + call.eps), torch.ones_like(den, dtype=torch.bool)
    return 1 / den.clamp(min=call.eps), den >= call.eps


def _backward(call: Call, sums: Sums | None, g: ResultGradients) -> Gradients:
    """The gradients of q, k, v, log decay, angle steps, erase and the first state.

    With the gradient g of out, num's is g / den, and den's is -<g, out> / den, or 0 where eps replaces den.
    <g, out> = <phi^, dphi^>, so out itself is not needed.
    """
    x = ChunkedCall.of(call, sums)
    phi_hat, psi_hat = x.queries.rotated, x.keys.rotated
    g_num = _gradient_of_out(call, x, g.out)
    if call.normalize:
        inverse, den_counts = _inverse_normalizer(call, x.den.value())
        g_num *= inverse

    if x.erase is not None:
        num, d_v = erased_gradients(x.num, x.erase, g_num, g.kv)
    else:
        num = KeySumGradients(x.num, g_num, g.kv)
        d_v = num.d_values()
    own_pairs = num.leave_out_own_pairs() if call.causal and call.angle_steps is not None else None
    d_phi_hat, d_psi_hat = num.d_queries(), num.d_keys()
    d_erase = None
    if x.erase is not None:  # the last query of each key/value head is its key times erase
        d_phi_hat, d_read = d_phi_hat.split([call.group, 1], 2)
        own_pairs = None if own_pairs is None else own_pairs[:, :, :-1]
        d_erase = x.keys.cut.put((psi_hat * d_read).sum(-1), call.k)
        d_psi_hat += x.erase * d_read
    d_steps = None if call.angle_steps is None else _d_angle_steps(call, x, d_phi_hat, d_psi_hat)
    if own_pairs is not None:
        d_phi_hat += own_pairs * psi_hat
        d_psi_hat += (own_pairs * phi_hat).sum(2, keepdim=True)

    g_den = torch.zeros_like(phi_hat[..., :1])
    if call.normalize:
        g_den = (-(phi_hat * d_phi_hat).sum(-1, keepdim=True) * inverse).masked_fill(~den_counts, 0)
    g_z = None if g.z is None or call.erase is not None else g.z[..., None]  # with erase z is 0
    den = KeySumGradients(x.den, g_den, g_z)

    return Gradients(
        q=None if call.q is None else x.queries.gradient(call, d_phi_hat, den.d_queries(), call.q),
        k=x.keys.gradient(call, d_psi_hat, den.d_keys(), call.k),
        v=x.keys.cut.put(_zero(d_v, x.keys.hidden).to(call.v.dtype), call.v),
        log_decay=None if call.log_decay is None else _d_log_decay(call, x, num, den),
        angle_steps=d_steps,
        write=None,
        erase=d_erase,
        kv=None if sums is None else num.first.to(sums.kv.dtype),
        z=None if sums is None else den.first[..., 0].to(sums.z.dtype),
    )


def _gradient_of_out(call: Call, x: "ChunkedCall", g: Tensor | None) -> Tensor:
    """g (b, n, h, e) by chunk: (t, g, r, c, e)."""
    phi, v, cut = x.queries.plain, x.num.v, x.queries.cut
    if g is None:
        return v.new_zeros(*phi.shape[:-1], v.shape[-1])
    return _zero(_by_chunk(g, cut, call.group, phi.dtype), _hidden(cut, g))


def _d_log_decay(call: Call, x: "ChunkedCall", num: KeySumGradients, den: KeySumGradients) -> Tensor:
    """(b, n, g), with units (b, n, g, units)."""
    per_sum = [one.d_log_decay() for one in ((num, den) if call.erase is None else (num,))]
    if call.decays_by_unit:
        da = sums_of_units(reduce(torch.add, per_sum), call.pairs, call.layout)
    else:  # with xPos the numerator's are per feature
        da = reduce(torch.add, (one.sum(-1) for one in per_sum))
    return x.keys.cut.put(da[:, :, None], call.k)


def _d_angle_steps(call: Call, x: "ChunkedCall", d_phi_hat: Tensor, d_psi_hat: Tensor) -> Tensor:
    """domega_t = sum_(i>=t) <J phi^_i, dphi^_i> + <J psi^_i, dpsi^_i> to the sequence's end: (b, n, g, pairs).

    J is a quarter turn of each pair. The gradients come without each token's pair with itself, which is in both terms
    and cancels. Its rounding errors would not.
    """
    cut = x.keys.cut
    change = _quarter_turned(call, x.queries.rotated, d_phi_hat)
    change += _quarter_turned(call, x.keys.rotated, d_psi_hat)
    change = change.masked_fill(~cut.valid[:, None, :, None], 0).double()
    later, _ = gradients_around(Transition(None), change.sum(2), cut, None)
    return cut.put((sums_from(change, 2) + later[:, :, None])[:, :, None], call.k)


def _quarter_turned(call: Call, x: Tensor, y: Tensor) -> Tensor:
    """<J x, y> for each pair that turns, summed over r: (t, g, c, pairs)."""
    width, zero = 2 * call.pairs, x.new_zeros(call.pairs)
    members = (rotate(x[..., :width], zero, zero + 1, call.layout) * y[..., :width]).sum(2)
    return sums_of_units(members, call.pairs, call.layout)


class ChunkedCall(NamedTuple):
    """A call cut into chunks: its features, and the two sums over keys."""

    queries: "ChunkedFeatures"
    keys: "ChunkedFeatures"
    num: KeySum
    den: KeySum
    erase: Tensor | None  # (t, g or 1, 1, c, 1)

    @classmethod
    def of(cls, call: Call, sums: Sums | None) -> "ChunkedCall":
        q, k = call.k[:, :0] if call.q is None else call.q, call.k
        kv, z, angle = sums or (None, None, None)
        dtype = torch.promote_types(q.dtype, torch.float32 if kv is None else kv.dtype)
        key_cut = query_cut = Cut.of(k, call.bounds)
        key_angles = query_angles = _cos_sin(call, angle, key_cut, dtype, keys=True)
        if call.q is not None and not call.causal:
            query_cut = Cut.of(q, call.bounds)
        if call.q is not None and (not call.causal or call.key_positions is not None):
            query_angles = _cos_sin(call, angle, query_cut, dtype, keys=False)

        q = _zero(_by_chunk(q, query_cut, call.group, dtype), _hidden(query_cut, q))
        hidden = _hidden(key_cut, k, call.key_mask)
        k, v = (_zero(_by_chunk(x, key_cut, 1, dtype), hidden) for x in (k, call.v))
        queries = ChunkedFeatures.of(call, q, None, query_cut, query_angles)
        keys = ChunkedFeatures.of(call, k, hidden, key_cut, key_angles)

        decay_hat, decay = _decays(call, key_cut, dtype)
        cuts = query_cut, key_cut, call.causal
        num = KeySum(queries.rotated, keys.rotated, v, decay_hat, kv, dtype, *cuts)
        erase = None
        if call.erase is not None:
            erase = _by_chunk(call.erase, key_cut, 1, dtype)[..., None]
            erase = _zero(erase, _hidden(key_cut, call.k))
            num = erased(num, erase)
        ones, z = v.new_ones(1, 1, 1, v.shape[3], 1), None if z is None else z[..., None]
        den = KeySum(queries.plain, keys.plain, ones, decay, z, torch.float64, *cuts)
        return cls(queries, keys, num, den, erase)


class ChunkedFeatures(NamedTuple):
    """Queries or keys by chunk, and their features: (t, g, r, c, f); r is 1 for keys."""

    inputs: Tensor  # q or k
    plain: Tensor  # phi or psi
    rotated: Tensor  # R(Theta) phi or R(Theta) psi
    hidden: Tensor | None  # (t, 1, 1, c, 1): whose features are 0
    cut: Cut
    angles: tuple[Tensor, Tensor] | None  # cos and sin of Theta, (t, g or 1, 1, c, pairs)

    @classmethod
    def of(
        cls, call: Call, inputs: Tensor, hidden: Tensor | None, cut: Cut, angles: tuple[Tensor, Tensor] | None
    ) -> "ChunkedFeatures":
        plain = _zero(MAPS[call.feature_map].value(inputs), hidden)
        rotated = plain if angles is None else rotate(plain, *angles, call.layout)
        return cls(inputs, plain, rotated, hidden, cut, angles)

    def gradient(self, call: Call, d_rotated: Tensor, d_plain: Tensor | None, like: Tensor) -> Tensor:
        """The gradient of q or k, in the shape and dtype of ``like``."""
        if self.angles is not None:
            cos, sin = self.angles
            d_rotated = rotate(d_rotated, cos, -sin, call.layout)
        d = d_rotated if d_plain is None else d_rotated.add_(d_plain)
        d *= MAPS[call.feature_map].slope(self.inputs, self.plain)
        return self.cut.put(_zero(d, self.hidden).to(like.dtype), like)


def _decays(call: Call, cut: Cut, dtype: torch.dtype) -> tuple[Decay, Decay]:
    """The numerator's decay, which has xPos's decay of each feature too, and the denominator's."""
    a, outside = None, ~cut.valid[:, None, None, :, None]
    if call.log_decay is not None:
        log = cut.take(call.log_decay if call.decays_by_unit else call.log_decay[..., None])
        a = log.transpose(1, 2)[:, :, None].double().masked_fill(outside, 0)
    if a is not None and call.decays_by_unit:
        a = units_to_features(a, call.pairs, call.layout)
        decay: Decay = DecayPerFeature(a, dtype)
    else:
        decay = Decay(a, dtype)
    if call.xpos_log_decay is None or call.distances is None:
        return decay, decay
    a_xpos = cut.take(call.distances)[:, None, None, :, None].masked_fill(outside, 0) * call.xpos_log_decay
    return DecayPerFeature(a_xpos if a is None else a + a_xpos, dtype), decay


def _cos_sin(
    call: Call, angle: Tensor | None, cut: Cut, dtype: torch.dtype, *, keys: bool
) -> tuple[Tensor, Tensor] | None:
    """cos and sin of the angles by chunk, (t, g or 1, 1, c, pairs)."""
    if (cos_sin := call.cos_sin(angle, dtype, keys=keys)) is None:
        return None
    cos, sin = (cut.take(x).transpose(1, 2)[:, :, None] for x in cos_sin)
    return cos, sin


def _by_chunk(x: Tensor, cut: Cut, r: int, dtype: torch.dtype) -> Tensor:
    """A copy of x (b, n, g r, ..) by chunk: (t, g, r, c, ..)."""
    by_chunk: Tensor = cut.take(x).transpose(1, 2).unflatten(1, (-1, r))
    return by_chunk.to(dtype)


def _hidden(cut: Cut, x: Tensor, mask: Tensor | None = None) -> Tensor | None:
    """(t, 1, 1, c, 1): True where the chunks of x (b, n, ..) have no token and for masked tokens. None: nowhere."""
    if mask is None and not cut.packed and cut.valid.numel() == x.shape[:2].numel():
        return None
    visible = cut.valid if mask is None else cut.valid & cut.take(mask)
    return ~visible[:, None, None, :, None]


def _zero(x: Tensor, hidden: Tensor | None) -> Tensor:
    """x with 0 for hidden tokens, written in place."""
    return x if hidden is None else x.masked_fill_(hidden, 0)


attend = partial(bridge.attend, "eager")

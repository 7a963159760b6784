"""The backend "reference": RoFormer's equation 19 as it is written, with decay and state, in any floating dtype.

    num_i = sum_j e^(L_i - L_j) <R(Theta_i) phi(q_i), R(Theta_j) psi(k_j)> v_j
    den_i = sum_j e^(L_i - L_j) <phi(q_i), psi(k_j)>,       out_i = num_i / max(den_i, eps)

The sums run over j <= i (causal) or over all j. v_j stands for w_j v_j: the values of a call that reaches this backend
are already multiplied by ``write`` (``Call.expanded``). With a log decay per unit or with xPos, e^(L_i - L_j) has a
number for each feature and stands inside the products. With erase b, u takes the place of v, and there is no den (delta
rule):

    u_i + b_i sum_(j<i) e^(L_i - L_j) <R(Theta_i) psi(k_i), R(Theta_j) psi(k_j)> u_j = v_i

Axes: b batch, n queries, m keys, g key/value heads, r query heads per key/value head, f features, e values. Autograd
differentiates it.
"""

import torch
from einops import rearrange
from torch import Tensor

from linrope.backends.contraction import contract
from linrope.backends.protocol import COMMON, XPOS
from linrope.backends.sequences import each_sequence, incoming_sums, pad_outside_tokens
from linrope.common.precision import full_precision
from linrope.common.private_names import scan
from linrope.common.tracing import exporting_to_onnx
from linrope.feature_maps import ELEMENTWISE
from linrope.feature_maps.log_scale import at_most_0
from linrope.recurrence.call import Call, Sums
from linrope.recurrence.packing import sums_so_far
from linrope.recurrence.state import LinearAttentionState
from linrope.rotation.angles import rotate, units_to_features

MAPS, OPTIONS = ELEMENTWISE, COMMON | XPOS | {"erase"}
TAKES_VALUE_GROUPS = CLAMPS_GATES = False


def why_not() -> str | None:
    return None


def why_not_call(call: Call, state: LinearAttentionState | None) -> str | None:
    if call.erase is not None and exporting_to_onnx() and not torch.compiler.is_compiling():
        return "erase: torch.onnx.export can only record its loop over tokens with dynamo=True"
    return None


def attend(call: Call, state: LinearAttentionState | None) -> tuple[Tensor, Sums | None]:
    """out (b, n, h, e) in v's dtype, computed in q's dtype, and the sums after the last key."""
    sums = incoming_sums(call, state)
    with full_precision(call.v.device):
        if call.cu_seqlens is None:
            out, kv, z = _attend(call, sums)
        else:
            outs, kvs, zs = zip(*[_attend(*one) for one in each_sequence(call, sums)], strict=True)
            out, kv, z = pad_outside_tokens(torch.cat(outs, 1), call), torch.cat(kvs), torch.cat(zs)
    return out, Sums(kv, z, call.last_angle(sums.angle)) if call.return_state else None


def _attend(call: Call, sums: Sums) -> tuple[Tensor, Tensor, Tensor]:
    """out, kv and z of an unpacked call. The incoming sums are decayed to the last token before the call."""
    # 1. Rotate the features, in the numerator only.       phi_hat = R(Theta_i) phi,   psi_hat = R(Theta_j) psi
    phi, psi, phi_hat, psi_hat, v = features(call, sums.angle)
    phi, phi_hat = (rearrange(x, "b n (g r) f -> b g r n f", g=psi.shape[2]) for x in (phi, phi_hat))
    psi, psi_hat, v = (rearrange(x, "b m g f -> b g m f") for x in (psi, psi_hat, v))

    # With erase: what each key finds of earlier values and of the state is subtracted from its own value.
    a, a_hat = (rearrange(x, "b m g f -> b g m f") for x in log_decays(call))
    if call.erase is not None:
        v = _erased(rearrange(call.erase, "b m g -> b g m 1"), psi_hat, v, a_hat, sums.kv)

    # 2. Add up the keys that each query sees, decayed.                 num += e^(L_i - L_j) <phi_hat, psi_hat> v
    if call.causal:
        num = contract("bgrnm,bgme->bgrne", _scores(phi_hat, psi_hat, a_hat), v)
        den = _scores(phi, psi, a).sum(-1)
    else:  # nothing decays, and opt_einsum takes the cheaper of phi (psi^T v) and (phi psi^T) v
        num = contract("bgrnf,bgmf,bgme->bgrne", phi_hat, psi_hat, v)
        den = contract("bgrnf,bgmf->bgrn", phi, psi)

    # 3. Add the incoming state, S and z.                       num += e^(L_i) phi_hat S,   den += e^(L_i) phi z
    S, z, decayed, decayed_hat = sums.kv, sums.z, phi, phi_hat
    if call.causal:
        L, L_hat = (x.cumsum(2)[:, :, None, : phi.shape[3]] for x in (a, a_hat))
        decayed, decayed_hat = phi * _exp(L, phi), phi_hat * _exp(L_hat, phi)
    num = num + contract("bgrnf,bgfe->bgrne", decayed_hat, S.to(phi.dtype))
    den = den + contract("bgrnf,bgf->bgrn", decayed, z.to(phi.dtype))

    # 4. Divide, and pass the state on.      S = e^(L_end) S + sum_j e^(L_end - L_j) psi_hat_j v_j^T, z likewise
    den = den + call.eps if call.eps_mode == "add" else den.clamp(min=call.eps)
    out = rearrange(num / den[..., None] if call.normalize else num, "b g r n e -> b n (g r) e")
    psi, psi_hat = psi * _exp(_later(a), psi), psi_hat * _exp(_later(a_hat), psi)
    L_end, L_end_hat = a.sum(2, keepdim=True), a_hat.sum(2, keepdim=True)
    S = S * L_end_hat.exp().mT.to(S.dtype) + contract("bgmf,bgme->bgfe", psi_hat.to(S.dtype), v.to(S.dtype))
    z = z * L_end.exp()[:, :, 0].to(z.dtype) + psi.to(z.dtype).sum(2)
    z = z if call.erase is None else torch.zeros_like(z)
    return out.to(call.v.dtype), S, z


def _erased(b: Tensor, psi_hat: Tensor, v: Tensor, a_hat: Tensor, S: Tensor) -> Tensor:
    """u (b, g, m, e): u_i = v_i - b_i (e^(L_i) S^T psi_hat_i + sum_(j<i) e^(L_i - L_j) <psi_hat_i, psi_hat_j> u_j).

    This is one unit lower triangular system for all tokens of the sequence, solved in float32 or wider. ONNX has no
    operator for such systems.
    """
    dtype, wide = v.dtype, torch.promote_types(torch.promote_types(v.dtype, b.dtype), torch.float32)
    b, psi_hat, v, S = b.to(wide), psi_hat.to(wide), v.to(wide), S.to(wide)
    if exporting_to_onnx():
        return _erased_by_token(b, psi_hat, v, a_hat, S).to(dtype)
    A = b * _scores(psi_hat[:, :, None], psi_hat, a_hat)[:, :, 0].tril(-1)
    found = contract("bgmf,bgfe->bgme", psi_hat * _exp(a_hat.cumsum(2), psi_hat), S)
    u: Tensor = torch.linalg.solve_triangular(A, v - b * found, upper=False, unitriangular=True)
    return u.to(dtype)


def _erased_by_token(b: Tensor, psi_hat: Tensor, v: Tensor, a_hat: Tensor, S: Tensor) -> Tensor:
    """u_t = v_t - b_t P_t^T psi_hat_t,   S_t = P_t + psi_hat_t u_t^T,   P_t = e^(a_t) S_(t-1)."""

    def step(S: Tensor, token: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        b, k, v, factor = token
        P = factor[..., None] * S
        u = v - b * (k[..., None] * P).sum(2)
        return P + k[..., None] * u[:, :, None], u.clone()  # a scan must not return a tensor twice

    tokens = tuple(x.expand(*v.shape[:3], -1).movedim(2, 0) for x in (b, psi_hat, v, _exp(a_hat, psi_hat)))
    return scan(step, S, tokens)[1].movedim(0, 2)


def _exp(x: Tensor, like: Tensor) -> Tensor:
    """e^x for x <= 0, in the dtype of ``like``. Rounding may lift x above 0, so it is clamped."""
    return at_most_0(x).exp().to(like.dtype)


def _scores(phi: Tensor, psi: Tensor, a: Tensor) -> Tensor:
    """<phi_i, psi_j> e^(L_i - L_j) for j <= i, else 0: (b, g, r, n, m)."""
    D = _exp(_between(a, phi.shape[3]), phi)
    if D.shape[-1] == 1:
        return contract("bgrnf,bgmf,bgnm->bgrnm", phi, psi, D[..., 0]).tril()
    return contract("bgrnf,bgmf,bgnmf->bgrnm", phi, psi, D).tril()


def _between(a: Tensor, n: int) -> Tensor:
    """L_i - L_j, (b, g, n, m, 1 or f) for j <= i."""
    if a.shape[-1] == 1:
        L = a.cumsum(2)
        return L[:, :, :n, None] - L[:, :, None]
    # Added up for each j on its own: the difference would lose the digits of gates beside much stronger ones.
    tokens = torch.arange(a.shape[2], device=a.device)
    after_j = tokens[:n, None, None] > tokens[:, None]
    return a[:, :, :n, None].where(after_j, 0).cumsum(2)


def _later(a: Tensor) -> Tensor:
    """L_end - L_j, the sum over the tokens after j: (b, g, m, 1 or f)."""
    return torch.cat((a[:, :, 1:].flip(2).cumsum(2).flip(2), torch.zeros_like(a[:, :, :1])), 2)


def features(call: Call, angle: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """phi, psi, phi_hat, psi_hat (b, n, heads, f) and v (b, m, g, e) in their dtype; 0 for hidden keys."""
    q, k, v = call.k[:, :0] if call.q is None else call.q, call.k, call.v.to(call.k.dtype)
    if call.key_mask is not None:  # before the map too, whose derivative at a hidden key may be infinite
        hidden = ~rearrange(call.key_mask, "b m -> b m 1 1")
        k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
    phi, psi = MAPS[call.feature_map].value(q), MAPS[call.feature_map].value(k)
    if call.key_mask is not None:
        psi = psi.masked_fill(hidden, 0)
    return phi, psi, _rotated(call, phi, angle, keys=False), _rotated(call, psi, angle, keys=True), v


def log_decays(call: Call) -> tuple[Tensor, Tensor]:
    """a of each token in den, (b or 1, m, g or 1, 1 or f), and in num, where xPos's decay is added to it."""
    a = call.k.new_zeros(1, call.k.shape[1], 1, 1, dtype=torch.float64)
    if call.log_decay is not None:
        log = call.log_decay.double()
        a = units_to_features(log, call.pairs, call.layout) if call.decays_by_unit else log[..., None]
    if call.xpos_log_decay is None or call.distances is None:
        return a, a
    return a, a + rearrange(call.distances, "b m -> b m 1 1") * call.xpos_log_decay


def _rotated(call: Call, x: Tensor, angle: Tensor | None, *, keys: bool) -> Tensor:
    """R(Theta) x for x (b, n, heads, f), in x's dtype. The gradient reaches angle_steps."""
    wide = torch.promote_types(x.dtype, torch.float32)
    cos_sin = call.cos_sin(angle, wide, keys=keys)
    if cos_sin is None or x.shape[1] == 0:
        return x
    cos, sin = cos_sin
    if call.angle_steps is not None and call.angle_steps.requires_grad:
        steps = sums_so_far(call.angle_steps.double(), None)
        # Integer angles carry no gradient. This zero carries d(angle) / d(steps).
        zero = (steps - steps.detach()).to(wide)
        cos, sin = cos - sin * zero, sin + cos * zero
    if cos.shape[2] > 1:  # query heads that share a key/value head share its angles
        cos, sin = (y.repeat_interleave(x.shape[2] // y.shape[2], 2) for y in (cos, sin))
    return rotate(x, cos, sin, call.layout)

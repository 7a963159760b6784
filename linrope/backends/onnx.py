"""Equation 19 in ONNX's operator LinearAttention: O(N), for graphs that torch.onnx.export records.

    S_t = P_t + k_t v_t^T,                          P_t = e^(a_t) S_(t-1),   out_t = S_t^T q_t
    S_t = P_t + beta_t k_t (v_t - P_t^T k_t)^T      with erase ("delta", "gated_delta")

One node computes the numerator from rotated features. With the normalizer, a second node computes it from features
that are not rotated, with v = 1. The nodes are onnxruntime's, com.microsoft; ONNX's own, from opset 27 on, has the
same inputs and attributes. Both compute in float32.

Axes: b batch, n tokens, h query heads, g key/value heads, f features, e values.
"""

import torch
from torch import Tensor

from linrope.backends import equation
from linrope.backends.protocol import COMMON, XPOS
from linrope.backends.sequences import incoming_sums
from linrope.common.private_names import FakeTensor
from linrope.recurrence.call import Call, Sums
from linrope.recurrence.state import LinearAttentionState

MAPS, OPTIONS = equation.MAPS, COMMON | XPOS | {"erase"}
TAKES_VALUE_GROUPS = CLAMPS_GATES = False
DOMAIN = "com.microsoft"
LEAST_BETA = 2.0**-60  # in place of smaller ones: values are divided by beta
_EXPORT_ONLY = "it makes nodes of a graph, which PyTorch cannot compute: use it under torch.onnx.export"
_USE_REFERENCE = "use backend='reference'"


def why_not() -> str | None:
    return _EXPORT_ONLY


def why_not_call(call: Call, state: LinearAttentionState | None) -> str | None:
    # Fake tensors are accepted too: export_onnx runs the model on them first, to get the error that the exporter
    # would hide.
    fake = isinstance(call.k, FakeTensor) and not torch.compiler.is_compiling()
    if not torch.onnx.is_in_onnx_export() and not fake:
        return _EXPORT_ONLY
    dtypes = {x.dtype for x in (call.q, call.k, call.v) if x is not None}
    if dtypes != {torch.float32}:
        return (
            f"{', '.join(sorted(map(str, dtypes)))}: ONNX's operator is for torch.float32; {_USE_REFERENCE}"
        )
    if not call.causal:
        return f"causal=False: ONNX's operator is causal; {_USE_REFERENCE}"
    if call.cu_seqlens is not None:
        return "cu_seqlens: ONNX's operator has no packed sequences"
    if call.erase is not None and call.decays_by_unit:
        # e^(D_t) o k_t would read and e^(-D_t) o k_t write (``_attend``), and the operator has one key.
        return f"log_decay with a last axis of units: with erase it must be per head; {_USE_REFERENCE}"
    return None


def attend(call: Call, state: LinearAttentionState | None) -> tuple[Tensor, Sums | None]:
    """out (b, n, h, e), and the sums after the last key."""
    sums = incoming_sums(call, state)
    phi, psi, phi_hat, psi_hat, v = equation.features(call, sums.angle)
    L = L_hat = None
    if call.log_decay is not None or call.xpos_log_decay is not None:
        L, L_hat = (a.cumsum(1) for a in equation.log_decays(call))
    out, kv = _attend(phi_hat, psi_hat, v, sums.kv.float(), L_hat, call.erase)
    if call.normalize:
        ones = v.new_ones(1, 1, 1, 1).expand(*psi.shape[:3], 1)
        den, _ = _attend(phi, psi, ones, sums.z.float()[..., None], L, None)
        out = out / (den + call.eps if call.eps_mode == "add" else den.clamp(min=call.eps))
    if not call.return_state:
        return out, None
    z = _next_z(sums.z, psi, L) if call.erase is None else torch.zeros_like(sums.z)
    return out, Sums(kv.to(sums.kv.dtype), z, call.last_angle(sums.angle))


def _attend(
    q: Tensor,  # (b, n, h, f)
    k: Tensor,  # (b, n, g, f)
    v: Tensor,  # (b, n, g, e)
    past: Tensor,  # (b, g, f, e)
    L: Tensor | None,  # (b or 1, n, g or 1, 1 or f) float64: log decay summed from the first token on
    erase: Tensor | None,  # (b or 1, n, g or 1)
) -> tuple[Tensor, Tensor]:
    """out (b, n, h, e) and the last S (b, g, f, e).

    The operator rounds e^(a_t) to float32. A fixed decay is rounded the same way at every token, which would cost
    two digits after thousands of tokens. So S decays in whole steps A, and q and k by the rest D, 0 >= D > -1:

        L = A + D,   S_t = e^(A_t - A_(t-1)) S_(t-1) + (e^(-D_t) k_t) v_t^T,   out_t = S_t^T (e^(D_t) q_t)

    With erase, k_t (v_t - erase_t P_t^T k_t)^T is that of the operator with v_t / beta_t. Since its key is e^(-D_t) k_t
    and its state e^(-D_t) S_t, beta_t = e^(2 D_t) erase_t.
    """
    if L is None:
        return _node(q, k, v, past, None, erase)
    A = L.ceil()
    D = L - A
    b, n, g, _ = k.shape
    by_group = q.unflatten(2, (g, q.shape[2] // g)) * D.exp().float()[:, :, :, None]
    steps = A - torch.cat((torch.zeros_like(A[:, :1]), A[:, :-1]), 1)
    k = k * (-D).exp().float()
    beta = None if erase is None else erase * (2 * D[..., 0]).exp()
    out, S = _node(by_group.flatten(2, 3), k, v, past, steps.float().expand(b, n, g, -1), beta)
    # Not S * e^D: where gates are near 1, every decoding step would make the same rounding error in e^D.
    return out, S + S * (D[:, -1].exp() - 1).float()[..., None]


def _node(
    q: Tensor, k: Tensor, v: Tensor, past: Tensor, steps: Tensor | None, beta: Tensor | None
) -> tuple[Tensor, Tensor]:
    (b, n, h, _), (g, e) = q.shape, v.shape[2:]
    if beta is not None:
        beta = torch.where(beta.abs() < LEAST_BETA, LEAST_BETA, beta).float().expand(b, n, g)
        v = v / beta[..., None]
    optional = [] if steps is beta is None else [None if steps is None else steps.flatten(2)]
    optional += [] if beta is None else [beta]
    rules = ("linear", "gated") if beta is None else ("delta", "gated_delta")
    out, S = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::LinearAttention",
        [q.flatten(2), k.flatten(2), v.flatten(2), past, *optional],
        {"q_num_heads": h, "kv_num_heads": g, "scale": 1.0, "update_rule": rules[steps is not None]},
        dtypes=(torch.float32, torch.float32),
        shapes=((b, n, h * e), past.shape),
        version=1,
    )
    return out.unflatten(2, (h, e)), S


def _next_z(z: Tensor, psi: Tensor, L: Tensor | None) -> Tensor:
    """e^(L_n) z + sum_j e^(L_n - L_j) psi_j, added up in float64: (b, g, f)."""
    if L is None:
        return z + psi.sum(1, dtype=z.dtype)
    end = L[:, -1:]
    return z * end[:, 0].exp().to(z.dtype) + (psi * (end - L).exp().float()).sum(1, dtype=z.dtype)

"""Gated DeltaNet and Kimi Delta Attention: what transformers' layers compute between their projections, by linrope.

    S_t = D_t S_(t-1) + k^_t b_t (v_t - (D_t S_(t-1))^T k^_t)^T     o_t = S_t^T q^_t     D_t = Diag(e^(g_t))
    k^ = k / sqrt(|k|^2 + 1e-6)     q^ = s^-1/2 q / sqrt(|q|^2 + 1e-6)

    feature_map = UnitMap     log_decay = g     write = erase = beta     no rotation, no normalizer

g is a number per head in Gated DeltaNet, and per feature in Kimi Delta Attention. b batch, n tokens, h heads of p
values, of which each of g heads of s features serves the same number.

Source: Gated DeltaNet, arXiv 2412.06464; Kimi Linear, arXiv 2510.26692.
"""

import torch
from torch import Tensor

from linrope.integrations.maps import unit_map
from linrope.integrations.transformers.shared import Gates, attend, attend_in_place


def chunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """All tokens: (b, n, h, p) and, if wanted, the state after each sequence's last token, in float32 or wider.

    q and k (b, n, g, s), v (b, n, h, p), g (b, n, h) or (b, n, h, s), beta (b, n, h), states (b, h, s, p). seq_idx
    (b, n) or cu_seqlens (sequences + 1,) pack sequences into rows; states are then (sequences, h, s, p).
    """
    wide, size = torch.promote_types(value.dtype, torch.float32), key.shape[-1]
    beta = beta.to(wide)
    return attend(
        query,
        key,
        value,
        Gates(log_decay=g.to(wide), write=beta, erase=beta),
        feature_map=unit_map(size, size**-0.5),
        before=initial_state,
        return_state=output_final_state,
        seq_idx=seq_idx,
        cu_seqlens=cu_seqlens,
    )


def recurrent(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The same for few tokens. One token overwrites initial_state, which is the cache's, and returns it."""
    wide, size = torch.promote_types(value.dtype, torch.float32), key.shape[-1]
    if initial_state is None or value.shape[1] != 1 or initial_state.dtype != wide:
        return chunk(
            query,
            key,
            value,
            g,
            beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            seq_idx=seq_idx,
            cu_seqlens=cu_seqlens,
        )
    beta = beta.to(wide)
    gates = Gates(log_decay=g.to(wide), write=beta, erase=beta)
    feature_map = unit_map(size, size**-0.5)
    out = attend_in_place(initial_state, query, key, value, gates, feature_map=feature_map, swapped=False)
    return out, initial_state if output_final_state else None

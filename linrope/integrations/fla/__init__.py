"""flash-linear-attention's functions by linrope: the names and arguments of fla 0.6, on a CPU too.

    h_t = D_t h_(t-1) + k_t u_t^T        u_t = v_t, or in delta rules beta_t (v_t - (D_t h_(t-1))^T k_t)
    o_t = scale h_t^T q_t                D_t = Diag(e^g_t)

Each function maps its arguments onto ``linear_rope_attention``, without a rotation. All have gradients, which reach the
initial state, and all chunk sizes and algorithms are one here: ``chunk_gla`` and ``fused_recurrent_gla`` are the same
call. fla need not be installed.

    q, k                     (B, T, H, K), of one dtype with v: float32, bfloat16, float16, or float64
    v                        (B, T, HV, V), HV a multiple of H: value head i reads head i // (HV / H) of q and k
    g                        <= 0, log decays: (B, T, HV), or (B, T, HV, K) per feature
    scale                    a positive factor of the queries. None: 1 / sqrt(K). Without use_qk_l2norm_in_kernel
                             it rounds queries in half precision once more.
    initial_state            (N, HV, K, V), for B or for len(cu_seqlens) - 1 sequences. None: zeros
    output_final_state       True: return the state after the last token, as a new tensor in float32 or wider
    state_v_first            True: both states are (N, HV, V, K)
    cu_seqlens               (N + 1,) integers, the bounds of N packed sequences; B is then 1
    use_qk_l2norm_in_kernel  True: q and k are divided by sqrt(|x|^2 + 1e-6), in float32
    chunk_size, chunk_indices, cu_seqlens_cpu, disable_recompute, safe_gate, max_num_seqs
                             choose how fla's kernels run, and are not read

They return o (B, T, HV, V) in v's dtype, and the final state or None. They raise TypeError and ValueError as
``linear_rope_attention`` does, with fla's names. Arguments without a counterpart raise ValueError, which says what to
do instead: reverse=True, gv, cp_context, use_graph=True, return_intermediate_states=True, head_first=True and
transpose_state_layout. Unlike in fla, unknown keywords raise TypeError.

Source: flash-linear-attention 0.6 (github.com/fla-org/flash-linear-attention), fla/ops.

>>> from linrope.integrations.fla import chunk_gated_delta_rule
>>> q, k, v = torch.randn(3, 1, 100, 4, 16)
>>> g, beta = -torch.rand(1, 100, 4), torch.rand(1, 100, 4)
>>> o, h = chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, output_final_state=True)
>>> o.shape, h.shape
(torch.Size([1, 100, 4, 16]), torch.Size([1, 4, 16, 16]))
"""

from linrope.integrations.fla.functions import (
    chunk_delta_rule,
    chunk_gated_delta_rule,
    chunk_gdn,
    chunk_gla,
    chunk_kda,
    chunk_linear_attn,
    chunk_retention,
    chunk_simple_gla,
    fused_chunk_linear_attn,
    fused_chunk_retention,
    fused_chunk_simple_gla,
    fused_recurrent_delta_rule,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn,
    fused_recurrent_gla,
    fused_recurrent_kda,
    fused_recurrent_linear_attn,
    fused_recurrent_retention,
    fused_recurrent_simple_gla,
)

__all__ = [
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_gla",
    "chunk_kda",
    "chunk_linear_attn",
    "chunk_retention",
    "chunk_simple_gla",
    "fused_chunk_linear_attn",
    "fused_chunk_retention",
    "fused_chunk_simple_gla",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_gla",
    "fused_recurrent_kda",
    "fused_recurrent_linear_attn",
    "fused_recurrent_retention",
    "fused_recurrent_simple_gla",
]

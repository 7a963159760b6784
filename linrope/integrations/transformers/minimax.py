"""MiniMax's lightning attention, by linrope.

    q, k, v = silu(W x)     S_t = e^-slope S_(t-1) + k_t v_t^T     o_t = q_t S_t     y = W_o (rms(o) * sigmoid(W_g x))

Source: Lightning Attention-2, arXiv 2401.04658; MiniMax-01, arXiv 2501.08313.
"""

from typing import Any

import torch
from torch import Tensor

from linrope.integrations.transformers.shared import Gates, attend, attend_in_place, requires_gradients


def forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    cache: Any = None,
    *,
    past_key_values: Any = None,
    seq_idx: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Replaces ``MiniMaxLightningAttention.forward``. Returns y and the sums (b, h, d, d) after the last token.

    The cache was called past_key_values before transformers 5.24. seq_idx (b, n): the packed sequence of each token.

    The sums stay in float32 if the model is in half precision. transformers rounds them to half precision after each
    token, so that sums with a slow decay stop growing after some hundred tokens.
    """
    b, n, _channels = hidden_states.shape
    cache = past_key_values if cache is None else cache
    qkv = self.act_fn(self.qkv_proj(hidden_states))
    if attention_mask is not None:
        qkv = qkv * attention_mask[:, :, None].to(qkv.dtype)
    q, k, v = qkv.view(b, n, self.num_attention_heads, 3 * self.head_dim).split(self.head_dim, dim=3)
    wide = torch.promote_types(v.dtype, torch.float32)
    q, k, v = q.to(wide), k.to(wide), v.to(wide)
    gates = Gates(decay=torch.exp(-self.slope_rate.double().flatten()))
    sums: Any = None if cache is None else cache.get_linear_cache(self.layer_idx)
    if sums is not None and n == 1 and sums.dtype == wide and not requires_gradients(v):
        out = attend_in_place(sums, q, k, v, gates, swapped=False)
    else:
        out, sums = attend(q, k, v, gates, before=sums, return_state=True, seq_idx=seq_idx)
    y = self.norm(out.flatten(2).to(hidden_states.dtype))
    y = self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * y)
    if cache is not None:
        cache.set_linear_cache(self.layer_idx, sums)
    return y, sums

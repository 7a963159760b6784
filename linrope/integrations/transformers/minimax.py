"""MiniMax's lightning attention, by linrope.

    q, k, v = silu(W x)     S_t = e^-slope S_(t-1) + k_t v_t^T     o_t = q_t S_t     y = W_o (rms(o) * sigmoid(W_g x))

Source: Lightning Attention-2, arXiv 2401.04658; MiniMax-01, arXiv 2501.08313.
"""

from typing import Any

import torch
from torch import Tensor

from linrope.integrations.transformers.mamba2 import attend_in_place
from linrope.operation.from_sums import state_from_sums
from linrope.operation.functional import linear_rope_attention


def forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    past_key_values: Any = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Replaces ``MiniMaxLightningAttention.forward``. Returns y and the sums (b, h, d, d) after the last token.

    The sums stay in float32 if the model is in half precision. transformers rounds them to half precision after each
    token, so that sums with a slow decay stop growing after some hundred tokens.
    """
    b, n, _channels = hidden_states.shape
    qkv = self.act_fn(self.qkv_proj(hidden_states))
    if attention_mask is not None:
        qkv = qkv * attention_mask[:, :, None].to(qkv.dtype)
    q, k, v = qkv.view(b, n, self.num_attention_heads, 3 * self.head_dim).split(self.head_dim, dim=3)
    wide = torch.promote_types(v.dtype, torch.float32)
    q, k, v = q.to(wide), k.to(wide), v.to(wide)
    decay = torch.exp(-self.slope_rate.double().flatten())
    sums = None if past_key_values is None else past_key_values.get_linear_cache(self.layer_idx)
    gradients = torch.is_grad_enabled() and v.requires_grad
    if sums is not None and n == 1 and not gradients and sums.dtype == wide:
        out = attend_in_place(sums, q, k, v, decay=decay, swapped=False)
    else:
        out, last = linear_rope_attention(
            q,
            k,
            v,
            feature_map=None,
            normalize=False,
            decay=decay,
            state=None if sums is None else state_from_sums(sums.to(wide), feature_map=None),
            return_state=True,
        )
        sums = last.kv
    y = self.norm(out.flatten(2).to(hidden_states.dtype))
    y = self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * y)
    if past_key_values is not None:
        past_key_values.set_linear_cache(self.layer_idx, sums)
    return y, sums

"""The linear attention layer of Ring-linear and Ling-linear 2.0 from parts of linrope, which loads their weights.

    q, k, v = W x                       q, k = norm(q), norm(k) per head, then RoPE on a part of each head
    S_t     = gamma S_(t-1) + k_t v_t^T           gamma = e^-slope, fixed per head; slopes fall from layer to layer
    y_t     = W_dense (norm(S_t^T q_t / sqrt(d)) * sigmoid(W_g x_t))           the norm is over groups of heads

It is one call of ``linear_rope_attention`` without feature map and normalizer. LinearRoPEAttention does not have this
gate (its own is SiLU), nor a norm over some of the heads.

    python docs/examples/ring_linear.py

Source: arXiv 2510.19338, and modeling_bailing_moe_linear_v2.py of inclusionAI/Ring-mini-linear-2.0.
"""

import math

import torch
from torch import Tensor, nn

from linrope import LinearAttentionState, Rotary, linear_rope_attention
from linrope.ops import gated_norm


def slopes(heads: int) -> list[float]:
    """ALiBi's slopes, 2^(-8 i / heads) for i = 1 .. heads. Other numbers than powers of two fill up from the next."""
    power = 2 ** int(math.log2(heads))
    first = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return first if power == heads else first + slopes(2 * power)[::2][: heads - power]


class RingLinearAttention(nn.Module):
    """x (b, n, hidden_size) -> y (b, n, hidden_size). The arguments are keys of the model's config.json, and layer_idx.

    group_norm_size is the number of groups of the norm. layer_idx counts all layers of the model from 0, those with
    softmax attention too.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        *,
        layer_idx: int,
        num_hidden_layers: int,
        head_dim: int | None = None,
        group_norm_size: int = 1,
        partial_rotary_factor: float = 0.5,
        rope_theta: float = 600_000.0,
        rms_norm_eps: float = 1e-6,
        use_qk_norm: bool = True,
        use_qkv_bias: bool = False,
        use_bias: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.groups, self.eps = num_attention_heads, group_norm_size, rms_norm_eps
        self.head_dim = d = head_dim or hidden_size // num_attention_heads
        inner = num_attention_heads * d
        self.query_key_value = nn.Linear(hidden_size, 3 * inner, bias=use_qkv_bias)
        self.query_layernorm = nn.RMSNorm(d, eps=rms_norm_eps) if use_qk_norm else nn.Identity()
        self.key_layernorm = nn.RMSNorm(d, eps=rms_norm_eps) if use_qk_norm else nn.Identity()
        self.g_proj = nn.Linear(hidden_size, inner, bias=False)
        self.g_norm = nn.RMSNorm(inner, eps=rms_norm_eps)
        self.dense = nn.Linear(inner, hidden_size, bias=use_bias)
        rotary_dim = int(d * partial_rotary_factor)
        self.rotary = Rotary(d, base=rope_theta, layout="half", rotary_dim=rotary_dim)
        # The published code counts layers from 0 and subtracts 1 here, so the first layer's slopes are the steepest.
        scale = 1 - (layer_idx - 1) / (num_hidden_layers - 1) + 1e-5
        self.decay = [math.exp(-slope * scale) for slope in slopes(num_attention_heads)]

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: LinearAttentionState | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, LinearAttentionState]:
        """Training, a prompt, a piece of one, and a step of one token are this one call."""
        q, k, v = self.query_key_value(x).unflatten(-1, (3, self.heads, self.head_dim)).unbind(2)
        out, last = linear_rope_attention(
            self.query_layernorm(q) * self.head_dim**-0.5,
            self.key_layernorm(k),
            v,
            feature_map=None,
            rotary=self.rotary,
            normalize=False,
            decay=torch.tensor(self.decay, dtype=torch.float64, device=x.device),
            positions=positions,
            key_mask=key_mask,
            cu_seqlens=cu_seqlens,
            state=state,
            return_state=True,
        )
        groups = out.flatten(2).unflatten(-1, (self.groups, -1))  # as if each group were a head
        normed = gated_norm(groups, self.g_norm.weight.view(self.groups, -1), eps=self.eps)
        y = self.dense(normed * self.g_proj(x).sigmoid())
        return (y, last) if return_state else y


@torch.no_grad()
def main(length: int = 500, steps: int = 20) -> None:
    torch.manual_seed(0)
    layer = RingLinearAttention(128, 8, layer_idx=0, num_hidden_layers=20, group_norm_size=4)
    x = torch.randn(1, length + steps, 128)
    whole = layer(x)
    y, state = layer(x[:, :length], return_state=True)
    pieces = [y]
    for token in x[:, length:].split(1, 1):
        y, state = layer(token, state=state.donate(), return_state=True)  # overwrites the state's memory
        pieces.append(y)
    difference = (torch.cat(pieces, 1) - whole).abs().max() / whole.abs().max()
    assert difference < 1e-5, difference
    size = sum(x.numel() * x.element_size() for x in state.tensors().values())
    print(f"a prompt of {length} tokens and {steps} steps are the whole sequence, to {difference:.0e}")
    print(f"the state has {size:,} bytes, after {state.position.item()} tokens as after one")


if __name__ == "__main__":
    main()

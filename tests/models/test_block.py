"""The block of a LanguageModel, written out as docs/assets/block.svg shows it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from linrope.models import LanguageModel, LanguageModelConfig


def normed(x: Tensor, norm: Any) -> Tensor:
    y: Tensor = norm.weight * x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    return y


def test_a_block_computes_what_its_picture_shows() -> None:
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(embed_dim=32, num_heads=2, num_layers=1)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    block: Any = model.blocks[0]
    layer, network, x = block.attention, block.feed_forward, torch.randn(2, 9, 32).double()
    expected, _ = block(x, None, None, None, False)

    y = normed(x, block.attention_norm)
    f = (y @ layer.forget_gate.weight.mT + layer.forget_gate.bias).sigmoid()[..., None, None]
    qkv = torch.cat([layer.q_proj(y), layer.k_proj(y), layer.v_proj(y)], -1)
    taps = F.pad(qkv, (0, 0, 3, 0)).mT
    qkv = F.silu(F.conv1d(taps, layer.short_conv.weight, layer.short_conv.bias, groups=qkv.shape[-1])).mT
    q, k, v = (part.unflatten(-1, (2, -1)) for part in qkv.split((32, 32, 64), -1))
    phi, psi = (layer.rotary(F.elu(part) + 1, torch.arange(9)) for part in (q, k))
    assert layer.rotary.rotary_dim == q.shape[-1] // 4

    S, outs = torch.zeros(2, 2, 16, 32).double(), []
    for t in range(9):
        S = f[:, t] * S + (1 - f[:, t]) * psi[:, t, :, :, None] * v[:, t, :, None]
        outs.append((S.mT @ phi[:, t, :, :, None])[..., 0])
    out = normed(torch.stack(outs, 1), layer.out_norm) + layer.skip[:, None] * v
    x = x + layer.o_proj(out.flatten(-2) * F.silu(layer.g_proj(y)))
    y = normed(x, block.feed_forward_norm)
    assert_close(x + network.w2(F.silu(network.w1(y)) * network.w3(y)), expected)

"""The base of the attention layers: projections and convolution before the attention; norm, skip and gate after it.

b batch, n queries, m keys, h query heads, g key/value heads, d head dim, e values, c channels.
"""

from dataclasses import asdict
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from linrope.layer.config import LayerConfig
from linrope.layer.norm import OutputNorm, RMSNorm
from linrope.layer.short_convolution import ShortConvolution
from linrope.operation import checks
from linrope.operation.shards import LayerShard
from linrope.ops import gated_norm
from linrope.rotation.rotary import Rotary


class Mixer(nn.Module):
    """The base of the attention layers: what precedes the attention, and what follows it. Subclasses add the attention.

        q, k, v = conv(W_q x), conv(W_k c), conv(W_v c)           c = context, or x
        y = W_o ((norm(out) + D v) * silu(W_g x))

    Convolution, norm, skip D and gate are options, described in ``LayerConfig``.
    """

    def __init__(self, config: LayerConfig, factory: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        h, g, d, e = config.num_heads, config.groups, config.key_dim, config.value_dim
        self.num_heads, self.num_kv_heads, self.head_dim, self.value_head_dim = h, g, d, e
        # num_state_heads: the heads of values, decay, gates and state
        self.num_state_heads, self.num_out_heads = config.num_state_heads, config.num_value_heads or h
        self.embed_dim, self.context_dim = config.embed_dim, config.context_dim or config.embed_dim
        inner, bias = self.num_out_heads * e, config.bias
        self.q_proj = nn.Linear(self.embed_dim, h * d, bias=bias, **factory)
        self.k_proj = nn.Linear(self.context_dim, g * d, bias=bias, **factory)
        self.v_proj = nn.Linear(self.context_dim, self.num_state_heads * e, bias=bias, **factory)
        self.o_proj = nn.Linear(inner, self.embed_dim, bias=bias, **factory)
        channels, conv, norm = (h + g) * d + self.num_state_heads * e, config.short_conv, config.out_norm
        self.short_conv = None if conv is None else ShortConvolution(channels, **asdict(conv), **factory)
        self.q_norm = RMSNorm(d, eps=1e-6, **factory) if config.qk_norm else None
        self.k_norm = RMSNorm(d, eps=1e-6, **factory) if config.qk_norm else None
        self.skip = None if config.skip is None else nn.Parameter(torch.empty(self.num_out_heads, **factory))
        self.out_norm = None
        if norm is not None:
            size = e if norm.over == "head" else inner
            orders = config.gate or "after", config.skip or "after"
            self.out_norm = OutputNorm(size, norm.eps or 1e-6, norm.over, *orders, **factory)
        self.g_proj = None if config.gate is None else nn.Linear(self.embed_dim, inner, bias=bias, **factory)
        self._reset_skip()

    @property
    def norm_over(self) -> str | None:
        """The span of the output norm: "head", each head alone, or "all" heads together; None without a norm."""
        return None if self.out_norm is None else self.out_norm.over

    def extra_repr(self) -> str:
        """The sizes, in one line."""
        text = f"heads={self.num_heads}, kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
        if self.num_state_heads != self.num_kv_heads:
            text += f", value_heads={self.num_state_heads}"
        if self.value_head_dim != self.head_dim:
            text += f", value_head_dim={self.value_head_dim}"
        return text

    @torch.no_grad()
    def _reset_skip(self) -> None:
        if self.skip is not None:
            self.skip.fill_(1)

    def reset_parameters(self) -> None:
        """Gives all weights new initial values, for example after ``to_empty`` on a layer from the meta device."""
        for child in self.children():
            if callable(reset := getattr(child, "reset_parameters", None)):
                reset()
        self._reset_skip()

    def _queries(self, y: Tensor) -> Tensor:
        return self._heads(y, self.num_heads, self.q_norm)

    def _keys(self, y: Tensor) -> Tensor:
        return self._heads(y, self.num_kv_heads, self.k_norm)

    def _values(self, y: Tensor) -> Tensor:
        return y.view(y.shape[0], y.shape[1], self.num_state_heads, self.value_head_dim)

    def _heads(self, y: Tensor, heads: int, norm: nn.Module | None) -> Tensor:
        """(b, n, heads d) -> (b, n, heads, d), normalized."""
        y = y.view(y.shape[0], y.shape[1], heads, self.head_dim)
        return y if norm is None else norm(y).to(y.dtype)

    def _output(self, out: Tensor, v: Tensor, x: Tensor) -> Tensor:
        """out (b, n, h, e) -> y (b, n, embed_dim); v: the values that the skip adds."""
        gate = None if self.g_proj is None else self.g_proj(x)
        skipping = None if self.skip is None else v
        if self.out_norm is not None:
            out = self.out_norm(out, gate, skipping, self.skip)
        elif gate is not None or skipping is not None:
            out = gated_norm(
                out,
                gate=gate,
                gate_order=self.config.gate or "after",
                v=skipping,
                skip=self.skip,
                skip_order=self.config.skip or "after",
            )
        else:
            out = out.flatten(-2)
        y: Tensor = self.o_proj(out)
        return y

    def _convolve(
        self,
        projected: tuple[Tensor, Tensor, Tensor],
        key_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        before: Tensor | None,
        shard: LayerShard | None = None,
        want_last: bool = True,
    ) -> tuple[list[Tensor], Tensor | None]:
        """q, k and v after the short convolution, and the last inputs of each sequence, for the state.

        before (s, taps - 1, c): the last inputs of the call before. None: the sequences begin here.
        """
        assert self.short_conv is not None
        if shard is not None:
            y, last = shard.convolve(self.short_conv, torch.cat(projected, -1), key_mask, before)
            return list(y.split([x.shape[-1] for x in projected], -1)), last
        (b, n, _), device = projected[0].shape, projected[0].device
        checks.check_mask(key_mask, b, n, device)
        checks.check_packing(cu_seqlens, b, n, n, device)
        sequences = b if cu_seqlens is None else len(cu_seqlens) - 1
        if before is not None and before.shape[0] != sequences:
            raise ValueError(f"state: got {before.shape[0]} sequences, expected {sequences}")
        y, last = self.short_conv(projected, before, key_mask, cu_seqlens, want_last)
        return y, last

    def _check_conv(self, conv: Tensor | None) -> None:
        """Rejects a state whose last inputs of the convolution do not fit this layer."""
        expected = None if self.short_conv is None else (self.short_conv.taps - 1, self.short_conv.channels)
        got = None if conv is None else tuple(conv.shape[1:])
        if got != expected:
            raise ValueError(
                f"state: got conv of (taps - 1, channels) = {got}, expected {expected} for this layer"
            )


def rotary_in_words(rotary: Rotary) -> str:
    """The layout, the share of features that it rotates, and another base than 10,000."""
    share = Fraction(rotary.rotary_dim, rotary.dim)
    base = "" if rotary.base == 10000.0 else f" base={rotary.base}"
    return f"{rotary.layout}{'' if share == 1 else f' {share}'}{base}"

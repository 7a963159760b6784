"""The base of the attention layers: projections and convolution before the attention; norm, skip and gate after it.

b batch, n queries, m keys, h query heads, g key/value heads, d head dim, e values, c channels.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from linrope.common.argument_checks import check_bools, check_name, check_sizes
from linrope.feature_maps.base import widen
from linrope.layer.choices import make_short_convolution, norm_options
from linrope.layer.norm import OutputNorm, RMSNorm
from linrope.operation import checks
from linrope.operation.shards import LayerShard
from linrope.ops import gated_norm
from linrope.ops.norm import ORDERS


class Mixer(nn.Module):
    """The base of the attention layers: what precedes the attention, and what follows it. Subclasses add the attention.

        q, k, v = conv(W_q x), conv(W_k c), conv(W_v c)           c = context, or x
        y = W_o ((norm(out) + D v) * silu(W_g x))

    Convolution, norm, skip D and gate are options, described in ``LinearRoPEAttention``.

    Raises:
        ValueError: one size is not a multiple of another as required, or a name is unknown.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None,
        num_value_heads: int | None = None,
        context_dim: int | None = None,
        head_dim: int | None,
        value_head_dim: int | None,
        short_conv: int | Mapping[str, Any] | None,
        qk_norm: bool,
        qk_bias: bool = False,
        out_norm: bool | str | Mapping[str, Any],
        skip: str | None,
        gate: bool | str,
        bias: bool,
        factory: dict[str, Any],
    ) -> None:
        super().__init__()
        check_bools(qk_norm=qk_norm, qk_bias=qk_bias, bias=bias)
        g, d, e = checks.resolve_heads(embed_dim, num_heads, num_kv_heads, head_dim, value_head_dim)
        self.num_heads, self.head_dim, self.value_head_dim = num_heads, d, e
        # num_state_heads: the heads of values, decay, gates and state
        self.num_kv_heads, self.num_state_heads, self.num_out_heads = g, g, num_heads
        if num_value_heads is not None:
            checks.check_value_heads(num_value_heads, num_heads, g)
            self.num_state_heads = self.num_out_heads = num_value_heads
        check_sizes(context_dim=context_dim)
        self.embed_dim, self.context_dim = embed_dim, embed_dim if context_dim is None else context_dim
        self.q_proj = nn.Linear(embed_dim, num_heads * d, bias=bias, **factory)
        self.k_proj = nn.Linear(self.context_dim, g * d, bias=bias, **factory)
        self.v_proj = nn.Linear(self.context_dim, self.num_state_heads * e, bias=bias, **factory)
        self.o_proj = nn.Linear(self.num_out_heads * e, embed_dim, bias=bias, **factory)
        channels = (num_heads + g) * d + self.num_state_heads * e
        self.short_conv = make_short_convolution(short_conv, channels, factory)
        self.q_norm = RMSNorm(d, eps=1e-6, **factory) if qk_norm else None
        self.k_norm = RMSNorm(d, eps=1e-6, **factory) if qk_norm else None
        if qk_bias and not qk_norm:
            raise ValueError("qk_bias=True: expected qk_norm=True with it")
        self.q_bias = nn.Parameter(torch.empty(num_heads, d, **factory)) if qk_bias else None
        self.k_bias = nn.Parameter(torch.empty(g, d, **factory)) if qk_bias else None
        self.norm_over, eps = norm_options(out_norm)
        size = {None: 0, "head": e, "all": self.num_out_heads * e}[self.norm_over]
        if skip is not None:
            check_name("skip", skip, ORDERS, also="None")
        self.skip_order = skip
        self.skip = nn.Parameter(torch.empty(self.num_out_heads, **factory)) if skip is not None else None
        if not isinstance(gate, bool):
            check_name("gate", gate, ORDERS, also="True or False")
        self.gate_order = "after" if gate is True else gate or None
        orders = self.gate_order or "after", skip or "after"
        self.out_norm = OutputNorm(size, eps, self.norm_over, *orders, **factory) if self.norm_over else None
        gate_channels = self.num_out_heads * e
        self.g_proj = nn.Linear(embed_dim, gate_channels, bias=bias, **factory) if gate else None
        self._reset_direct_parameters()

    @torch.no_grad()
    def _reset_direct_parameters(self) -> None:
        """Sets the parameters that the layer holds directly (skip, q_bias, k_bias) to 1."""
        for parameter in (self.skip, self.q_bias, self.k_bias):
            if parameter is not None:
                parameter.fill_(1)

    def reset_parameters(self) -> None:
        """Gives all weights new initial values, for example after ``to_empty`` on a layer from the meta device."""
        for child in self.children():
            if callable(reset := getattr(child, "reset_parameters", None)):
                reset()
        self._reset_direct_parameters()

    def _queries(self, y: Tensor) -> Tensor:
        return self._heads(y, self.num_heads, self.q_norm, self.q_bias)

    def _keys(self, y: Tensor) -> Tensor:
        return self._heads(y, self.num_kv_heads, self.k_norm, self.k_bias)

    def _values(self, y: Tensor) -> Tensor:
        return y.view(y.shape[0], y.shape[1], self.num_state_heads, self.value_head_dim)

    def _heads(self, y: Tensor, heads: int, norm: nn.Module | None, bias: Tensor | None) -> Tensor:
        """(b, n, heads d) -> (b, n, heads, d), normalized."""
        y = y.view(y.shape[0], y.shape[1], heads, self.head_dim)
        if norm is not None:
            normed: Tensor = norm(y) if bias is None else norm(widen(y)) + bias
            y = normed.to(y.dtype)
        return y

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
                gate_order=self.gate_order or "after",
                v=skipping,
                skip=self.skip,
                skip_order=self.skip_order or "after",
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
        earlier_inputs: Tensor | None,
        shard: LayerShard | None = None,
        want_last: bool = True,
    ) -> tuple[list[Tensor], Tensor | None]:
        """q, k and v after the short convolution, and the last inputs of each sequence, for the state.

        earlier_inputs (s, taps - 1, c): the last inputs of the call before. None: the sequences begin here.
        """
        assert self.short_conv is not None
        if shard is not None:
            y, last = shard.convolve(self.short_conv, torch.cat(projected, -1), key_mask, earlier_inputs)
            return list(y.split([x.shape[-1] for x in projected], -1)), last
        (b, n, _), device = projected[0].shape, projected[0].device
        checks.check_mask(key_mask, b, n, device)
        checks.check_packing(cu_seqlens, b, n, n, device)
        sequences = b if cu_seqlens is None else len(cu_seqlens) - 1
        if earlier_inputs is not None and earlier_inputs.shape[0] != sequences:
            raise ValueError(f"state: got {earlier_inputs.shape[0]} sequences, expected {sequences}")
        y, last = self.short_conv(projected, earlier_inputs, key_mask, cu_seqlens, want_last)
        return y, last

    def _check_conv(self, conv: Tensor | None) -> None:
        """Rejects a state whose last inputs of the convolution do not fit this layer."""
        expected = None if self.short_conv is None else (self.short_conv.taps - 1, self.short_conv.channels)
        got = None if conv is None else tuple(conv.shape[1:])
        if got != expected:
            raise ValueError(
                f"state: got conv of (taps - 1, channels) = {got}, expected {expected} for this layer"
            )

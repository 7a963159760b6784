"""The layer: project x, attend, normalize and gate the result, project it back.

b batch, n queries, m keys, h query heads, g key/value heads, d head dim, f features, e values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from linrope.common.constants import Constant
from linrope.common.names import check_name
from linrope.feature_maps import FeatureMap
from linrope.layer.choices import make_decay, make_forget_gate, make_map, make_rotation
from linrope.layer.short_convolution import ShortConvolution
from linrope.operation import checks
from linrope.operation.functional import linear_rope_attention
from linrope.operation.request import ORDERS, Options
from linrope.operation.shards import LayerShard
from linrope.rotation.rotary import Rotary
from linrope.sequence.state import LinearAttentionState


class LinearRoPEAttention(nn.Module):
    """Multi-head linear attention with rotary position embedding on the feature maps.

        q, k, v = conv(W_q x, W_k c, W_v c)                   c = context, or x
        y = W_o (norm(linear_rope_attention(q, k, v, a, omega)) * silu(W_g x))
        a = log sigmoid(W_a x + b_a)        omega = theta tanh(B A x)

    x is (b, n, embed_dim), context (b, m, embed_dim). The convolution, the norm, the gates a and W_g, and the steps
    omega are options. Rotated attention weights are signed and shrink as positions grow, so a model usually needs
    the norm or W_g. A language model gains most from a decay, either fixed or computed by the gate a.

    Args:
        embed_dim: size of x and y.
        num_heads: h.
        num_kv_heads: g, a divisor of h. Default: h.
        head_dim: d, the size of a query and a key. Default: embed_dim / num_heads.
        value_head_dim: e, the size of a value. Default: head_dim.
        feature_map: a name, {"name": .., options of feature_maps.make}, or a FeatureMap. A learned map that the layer
            makes itself has separate weights for each head.
        rotary: one of
            "interleaved" or "half": a Rotary with this layout;
            a Rotary for the map's feature_dim, or None;
            a dict with the arguments of Rotary, or of Rotary.axial if it has the key "axes", or Hugging Face's
            rope_parameters if it has the key "rope_theta" or "rope_type" (layout is then "half" by default);
            "selective": x speeds the rotation up or slows it down (``linrope.layer.selective.SelectiveSteps``). With
            options: {"name": "selective", "rank": 16, "bound": "multiply" or "add", "per_head": True}, to which the
            keys of the dicts above may be added;
            a module that computes angle_steps (b, n, g or 1, pairs) from x. If it has an attribute ``rotary``, that
            rotation applies too.
        causal: as in linear_rope_attention.
        normalize: as in linear_rope_attention. See out_norm.
        decay: the factor per position by which keys decay, one of
            None: no decay;
            g numbers in (0, 1];
            "spread": half-lives from 1 to 4096 tokens, in geometric steps over the key/value heads;
            "learned": one learned number per head, which starts as in "spread";
            {"name": "spread" or "learned", "longest": tokens}, where longest replaces 4096;
            "retnet": 1 - 2^(-5 - i) for head i (arXiv 2307.08621), which forgets more slowly.
        forget_gate: whether decay is computed from x: True, or {"longest": 4096}. The half-lives start as in
            decay="spread" (``linrope.layer.selective.ForgetGate``). Causal self-attention only.
        short_conv: the number of taps, usually 4, of a causal convolution on queries, keys and values before the map
            (``linrope.layer.short_convolution``). Models that have to recall earlier tokens need it. Causal
            self-attention only.
        qk_norm: RMS norm of each head's query and key before the map, with learned weights.
        rope_order: as in linear_rope_attention. With "before" the rotation has the size of the heads.
        backend: as in linear_rope_attention.
        out_norm: RMS norm of each head's output, with a learned weight. It cancels the normalizer, a single number
            per token and head, so the layer leaves the normalizer out even if normalize=True. It keeps the normalizer
            for maps that return a log_scale and for float16, whose numerator alone may overflow.
        gate: whether to multiply by silu(W_g x) before W_o.
        bias: whether the projections have a bias.

    Raises:
        ValueError: a size does not divide, a name is unknown, a signed map is combined with normalize=True, or an
            option that requires causal=True or rope_order="after" is used without it.

    Source: RoFormer eq. 19 (arXiv 2104.09864). ``linrope.layer.selective`` names the sources of the options.

    >>> layer = LinearRoPEAttention(256, 4, forget_gate=True, short_conv=4)
    >>> x = torch.randn(2, 100, 256)
    >>> y, state = layer(x, return_state=True)
    >>> layer(x[:, :1], state=state).shape  # the 101st token: constant time and memory
    torch.Size([2, 1, 256])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        feature_map: str | Mapping[str, Any] | FeatureMap = "elu+1",
        rotary: str | Mapping[str, Any] | Rotary | nn.Module | None = "interleaved",
        causal: bool = True,
        normalize: bool = True,
        decay: str | Mapping[str, Any] | Sequence[float] | Tensor | None = None,
        forget_gate: bool | Mapping[str, Any] = False,
        short_conv: int | None = None,
        qk_norm: bool = False,
        out_norm: bool = False,
        gate: bool = False,
        bias: bool = False,
        rope_order: str = "after",
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        g, d, e = checks.resolve_heads(embed_dim, num_heads, num_kv_heads, head_dim, value_head_dim)
        self.num_heads, self.num_kv_heads, self.head_dim, self.value_head_dim = num_heads, g, d, e
        self.causal, self.normalize, self.backend = causal, normalize, backend
        check_name("rope_order", rope_order, ORDERS)
        self.rope_order = rope_order
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        feature_map = make_map(feature_map, d, num_heads, g)
        if normalize and not feature_map.positive:
            raise ValueError(f"feature_map={feature_map}: its features are signed; expected normalize=False")
        self.feature_map = feature_map.to(device=device)
        dim = d if rope_order == "before" else feature_map.feature_dim
        self.rotary, self.angle_steps = make_rotation(rotary, dim, embed_dim, g, factory)
        self._decay, self.decay_logit = None, None
        if decay is not None:
            start, learned = make_decay(decay, g)
            self._decay = Constant(start)
            self.decay_logit = nn.Parameter(torch.empty(g, **factory)) if learned else None
        self.forget_gate = make_forget_gate(forget_gate, embed_dim, g, factory)
        channels = (num_heads + g) * d + g * e
        self.short_conv = None if short_conv is None else ShortConvolution(channels, short_conv, **factory)
        self._check_options()

        self.q_proj = nn.Linear(embed_dim, num_heads * d, bias=bias, **factory)
        self.k_proj = nn.Linear(embed_dim, g * d, bias=bias, **factory)
        self.v_proj = nn.Linear(embed_dim, g * e, bias=bias, **factory)
        self.o_proj = nn.Linear(num_heads * e, embed_dim, bias=bias, **factory)
        self.q_norm = nn.RMSNorm(d, eps=1e-6, **factory) if qk_norm else None
        self.k_norm = nn.RMSNorm(d, eps=1e-6, **factory) if qk_norm else None
        # Normalized outputs are averages of values, beside which 1e-6 is small. Unnormalized ones may be tiny.
        self._out_norm_replaces_normalizer = normalize and out_norm and not feature_map.log_scaled
        eps = 1e-12 if self._out_norm_replaces_normalizer else 1e-6
        self.out_norm = nn.RMSNorm(e, eps=eps, **factory) if out_norm else None
        self.g_proj = nn.Linear(embed_dim, num_heads * e, bias=bias, **factory) if gate else None
        self._reset_decay()

    def _check_options(self) -> None:
        """Rejects options that require causal=True or rope_order="after" if the layer has another setting."""
        for name in ("forget_gate", "short_conv"):
            if not self.causal and getattr(self, name) is not None:
                raise ValueError(
                    f"{name}: got causal=False, expected causal=True, because it runs forward in time"
                )
        if self.rope_order == "before" and self.angle_steps is not None:
            raise ValueError(
                "rope_order='before': got selective steps, which rotate features; expected 'after'"
            )

    @torch.no_grad()
    def _reset_decay(self) -> None:
        if self.decay_logit is not None and self._decay is not None:
            self.decay_logit.copy_(self._decay.on(torch.device("cpu")).logit())

    def reset_parameters(self) -> None:
        """Gives all weights new initial values, for example after ``to_empty`` on a layer from the meta device."""
        for child in self.children():
            if callable(reset := getattr(child, "reset_parameters", None)):
                reset()
        self._reset_decay()

    @property
    def decay(self) -> Tensor | None:
        """The decay of each key/value head, (g,) float64: fixed, or the current value of a learned one."""
        if self.decay_logit is not None:
            return self.decay_logit.double().sigmoid()
        return None if self._decay is None else self._decay.on(self.k_proj.weight.device)

    def extra_repr(self) -> str:
        """The sizes and options that are not modules, in one line."""
        text = f"heads={self.num_heads}, kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
        if self.value_head_dim != self.head_dim:
            text += f", value_head_dim={self.value_head_dim}"
        text += f", feature_map={self.feature_map.elementwise or type(self.feature_map).__name__}"
        if self.rotary is not None:
            base = "" if self.rotary.base == 10000.0 else f" base={self.rotary.base}"
            selective = "" if self.angle_steps is None else "selective "
            text += f", rotary={selective}{self.rotary.layout}{base}"
        elif self.angle_steps is not None:
            text += f", rotary={type(self.angle_steps).__name__}"
        else:
            text += ", rotary=None"
        if (decay := self.decay) is not None:
            numbers = "meta" if decay.is_meta else ", ".join(f"{x:.4g}" for x in decay.tolist())
            text += f", decay={'learned ' if self.decay_logit is not None else ''}[{numbers}]"
        gates = ("forget_gate", "short_conv", "q_norm", "out_norm", "g_proj")
        names = {"q_norm": "qk_norm", "g_proj": "gate"}
        text += "".join(f", {names.get(name, name)}" for name in gates if getattr(self, name) is not None)
        text += "" if self.normalize else ", normalize=False"
        text += "" if self.rope_order == "after" else ", rope_order=before"
        return text + ("" if self.causal else ", causal=False")

    @overload
    def forward(
        self,
        x: Tensor,
        context: Tensor | None = ...,
        *,
        positions: Tensor | None = ...,
        context_positions: Tensor | None = ...,
        key_mask: Tensor | None = ...,
        cu_seqlens: Tensor | None = ...,
        state: LinearAttentionState | None = ...,
        return_state: Literal[False] = ...,
        shard: LayerShard | None = ...,
    ) -> Tensor: ...
    @overload
    def forward(
        self,
        x: Tensor,
        context: Tensor | None = ...,
        *,
        positions: Tensor | None = ...,
        context_positions: Tensor | None = ...,
        key_mask: Tensor | None = ...,
        cu_seqlens: Tensor | None = ...,
        state: LinearAttentionState | None = ...,
        return_state: Literal[True],
        shard: LayerShard | None = ...,
    ) -> tuple[Tensor, LinearAttentionState]: ...
    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        context_positions: Tensor | None = None,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: LinearAttentionState | None = None,
        return_state: bool = False,
        shard: LayerShard | None = None,
    ) -> Tensor | tuple[Tensor, LinearAttentionState]:
        """Returns y (b, n, embed_dim), or (y, state). The arguments are those of ``linear_rope_attention``."""
        checks.check_inputs(x, context, self.q_proj.in_features)
        if context is not None:
            self._check_context(shard)
        c = x if context is None else context
        k, v = self.k_proj(c), self.v_proj(c)
        self._check_state(state)
        q = conv_inputs = None
        if self.short_conv is not None:
            q, k, v, conv_inputs = self._convolve(self.q_proj(x), k, v, key_mask, cu_seqlens, state, shard)
        k = self._heads(k, self.num_kv_heads, self.k_norm)
        v = v.unflatten(-1, (self.num_kv_heads, self.value_head_dim))
        norm_suffices = self._out_norm_replaces_normalizer and v.dtype != torch.float16
        options: Options = {
            "feature_map": self.feature_map,
            "rotary": self.rotary,
            "causal": self.causal,
            "normalize": self.normalize and not norm_suffices,
            "decay": self.decay,
            "log_decay": None if self.forget_gate is None else self.forget_gate(x),
            "angle_steps": None if self.angle_steps is None else self.angle_steps(x),
            "positions": positions,
            "key_positions": context_positions,
            "key_mask": key_mask,
            "cu_seqlens": cu_seqlens,
            "state": state,
            "rope_order": self.rope_order,
            "backend": self.backend,
        }
        # The state of the keys travels to the other ranks while this rank projects q and the gate.
        sent_shard = None if shard is None else shard.send_state(k, v, **options)
        q = self._heads(self.q_proj(x) if q is None else q, self.num_heads, self.q_norm)
        gate = None if self.g_proj is None else nn.functional.silu(self.g_proj(x))
        result = linear_rope_attention(q, k, v, return_state=return_state, shard=sent_shard, **options)
        out, last = result if isinstance(result, tuple) else (result, None)
        if conv_inputs is not None:
            last = _store_conv_inputs(conv_inputs, state, last)
        if self.out_norm is not None:
            out = self.out_norm(out.to(self.out_norm.weight.dtype))
        out = out.flatten(-2)
        if gate is not None:
            out = out * gate
        y = self.o_proj(out)
        return y if last is None or not return_state else (y, last)

    def _heads(self, y: Tensor, heads: int, norm: nn.RMSNorm | None) -> Tensor:
        y = y.unflatten(-1, (heads, self.head_dim))
        return y if norm is None else norm(y.to(norm.weight.dtype)).to(y.dtype)

    def _check_context(self, shard: LayerShard | None) -> None:
        """Rejects a context beside a shard, or beside options for which key t and query t are the same token."""
        if shard is not None:
            raise ValueError(
                "context: got one beside a shard, which splits queries and keys alike; expected None"
            )
        for name in ("forget_gate", "angle_steps", "short_conv"):
            if getattr(self, name) is not None:
                argument = "rotary='selective'" if name == "angle_steps" else name
                raise ValueError(
                    f"context: got one beside {argument}, for which key t and query t must be the same token; "
                    "expected None"
                )

    def _check_state(self, state: LinearAttentionState | None) -> None:
        if not isinstance(state, LinearAttentionState):  # the operation accepts None and rejects other types
            return
        expected = None if self.short_conv is None else (self.short_conv.taps - 1, self.short_conv.channels)
        got = None if state.conv is None else tuple(state.conv.shape[1:])
        if got != expected:
            raise ValueError(
                f"state: got conv of (taps - 1, channels) = {got}, expected {expected} for this layer"
            )

    def _convolve(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        state: LinearAttentionState | None,
        shard: LayerShard | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k and v after the short convolution, and the last inputs of each sequence, for the state."""
        assert self.short_conv is not None
        if shard is not None:
            y, last = shard.convolve(self.short_conv, torch.cat((q, k, v), -1), key_mask, state)
            q, k, v = y.split((q.shape[-1], k.shape[-1], v.shape[-1]), -1)
            return q, k, v, last
        (b, n, _), device = q.shape, q.device
        checks.check_mask(key_mask, b, n, device)
        checks.check_packing(cu_seqlens, b, n, n, device)
        before, sequences = None, b if cu_seqlens is None else len(cu_seqlens) - 1
        if isinstance(state, LinearAttentionState) and state.conv is not None:
            if state.sequences != sequences:
                raise ValueError(f"state: got {state.sequences} sequences, expected {sequences}")
            before = state.conv if state.slots is None else state.conv.index_select(0, state.slots)
        y, last = self.short_conv(torch.cat((q, k, v), -1), before, key_mask, cu_seqlens)
        q, k, v = y.split((q.shape[-1], k.shape[-1], v.shape[-1]), -1)
        return q, k, v, last


def _store_conv_inputs(
    inputs: Tensor, state: LinearAttentionState | None, last: LinearAttentionState | None
) -> LinearAttentionState | None:
    """Stores the convolution's last inputs in the last state, in place if the operation wrote the state in place."""
    pool = state if state is not None and state.slots is not None else None
    if pool is None and (last is None or last.conv is None or inputs.requires_grad):
        return None if last is None else replace(last, conv=inputs)
    target = last if pool is None else pool
    assert target is not None
    assert target.conv is not None
    if inputs.requires_grad:
        raise RuntimeError("state: got rows of a pool in a call with gradients, expected torch.no_grad()")
    if target.slots is None:
        target.conv.copy_(inputs)
    else:
        target.conv.index_copy_(0, target.slots, inputs.to(target.conv.dtype))
    return last

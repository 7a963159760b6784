"""The layer: project x, attend, normalize and gate the result, project it back.

b batch, n queries, m keys, h query heads, g key/value heads, d head dim, f features, e values.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from linrope import backends
from linrope.common.argument_checks import check_bools, check_name
from linrope.common.constants import Constant
from linrope.feature_maps import FeatureMap
from linrope.layer.choices import make_decay, make_forget_gate, make_map, make_rotation, make_write_gate
from linrope.layer.fitting import check_context, check_options
from linrope.layer.mixer import Mixer
from linrope.layer.state import LayerState, next_state
from linrope.layer.trapezoid import TrapezoidGate, trapezoidal_attention
from linrope.operation import checks
from linrope.operation.functional import linear_rope_attention
from linrope.operation.request import ORDERS, Options
from linrope.operation.shards import LayerShard
from linrope.recurrence.state import LinearAttentionState
from linrope.rotation.rotary import Rotary


class LinearRoPEAttention(Mixer):
    """Multi-head linear attention with rotary position embedding on the feature maps.

        q, k, v = conv(W_q x), conv(W_k c), conv(W_v c)       c = context, or x
        out = linear_rope_attention(q, k, w v, a, omega)
        y = W_o ((norm(out) + D v) * silu(W_g x))
        a = log sigmoid(W_a x + b_a)        w = 1 - e^a        omega = theta tanh(B A x)

    x is (b, n, embed_dim), context (b, m, context_dim). By default the layer is W_o linear_rope_attention(W_q x, W_k c,
    W_v c), RoFormer's equation 19; all else is an option. Rotated attention weights are signed and shrink as positions
    grow, so a model usually needs the norm or W_g. A language model gains most from a decay, fixed or computed by the
    gate a, and next from the other parts of the block that this library's models use, above all the convolution.
    ``linrope.models.defaults`` lists the options of that block.

    Args:
        embed_dim: size of x and y.
        num_heads: h.
        num_kv_heads: g, a divisor of h. Default: h.
        num_value_heads: a multiple of h, if values, decay and gates have more heads than queries and keys, which are
            then shared (as in Mamba-2; num_kv_heads must be h or None). g below and the attribute num_state_heads
            then count the value heads. backend="native" shares queries and keys without copies.
        context_dim: the size of a context's vectors, if they differ from x's in size. Such a layer is for
            cross-attention alone. Default: embed_dim.
        head_dim: d, the size of a query and a key. Default: embed_dim / num_heads.
        value_head_dim: e, the size of a value. Default: head_dim.
        feature_map: a name, {"name": .., options of feature_maps.make}, or a FeatureMap. A learned map that the layer
            makes itself has separate weights for each head.
        rotary: one of
            "interleaved" or "half": a Rotary with this layout;
            a Rotary for the map's feature_dim, or None;
            a dict with the arguments of Rotary, or of Rotary.axial if it has the key "axes". In place of rotary_dim it
            may have "partial_rotary_factor", the share of the features to rotate, rounded down to an even number, but
            at least 2;
            a dict with Hugging Face's rope_parameters, if it has the key "rope_theta" or "rope_type" (layout is then
            "half" by default);
            "selective": x speeds the rotation up or slows it down (``linrope.layer.selective.SelectiveSteps``). With
            options: {"name": "selective", "rank": 16, "bound": "multiply" or "add", "per_head": True}, to which the
            keys of the dicts above may be added;
            a module that computes angle_steps (b, n, g or 1, pairs) from x. If it has an attribute ``rotary``, that
            rotation applies too.
        causal: as in linear_rope_attention.
        normalize: as in linear_rope_attention. See out_norm.
        decay: the factor by which keys decay per position, in causal attention only, one of
            None: no decay;
            a number in (0, 1] for each head of values;
            "spread": half-lives from 1 to 4096 tokens, in geometric steps over the key/value heads;
            "learned": one learned number per head, which starts as in "spread";
            {"name": "spread" or "learned", "longest": tokens}, where longest replaces 4096;
            "retnet": 1 - 2^(-5 - i) for head i (arXiv 2307.08621): half-lives of 22, 44, 88 .. tokens.
        forget_gate: whether a decay is computed from x, besides the one above: True, or {"longest": 4096}. The
            half-lives start as in decay="spread" (``linrope.layer.selective.ForgetGate``). Causal self-attention
            only.
        write_gate: the factor w per token and key/value head on the values that enter the sums: "tied", 1 - f with
            the forget gate f = e^a, so that what is forgotten makes room for what is written; "independent",
            sigmoid(W_w x + b_w), which starts at the same values; or None. Both require a forget_gate.
        trapezoid: whether each token also writes the key and value before it, as in Mamba-3: S_t = f_t (S_(t-1) +
            (1 - l_t) w_t k_(t-1) v_(t-1)^T) + l_t w_t k_t v_t^T with l = sigmoid(W_l x + b_l)
            (``linrope.layer.trapezoid``). It requires normalize=False, or an out_norm that replaces the normalizer.
            Causal self-attention only, without a shard.
        short_conv: the number of taps, usually 4, of a causal convolution on queries, keys and values before the map;
            or the options of ``linrope.layer.short_convolution``: {"taps": 4, "activation": "silu", "bias": True,
            "start": "uniform"}. Models that have to recall earlier tokens need it. Causal self-attention only.
        qk_norm: RMS norm of each head's query and key before the map, with learned weights.
        qk_bias: a learned vector per head, which starts at 1, added to the normed queries and keys. It requires
            qk_norm.
        rope_order: as in linear_rope_attention. With "before" the rotation has the size of the heads.
        backend: as in linear_rope_attention.
        out_norm: RMS norm of the output, with a learned weight: True or "head" (each head alone), "all" (all heads
            together), or {"over": "head" or "all", "eps": ..}; eps is 1e-6, or 1e-12 where the norm replaces the
            normalizer. A norm per head cancels the normalizer, a single number per token and
            head, so the layer leaves the normalizer out even if normalize=True. It keeps the normalizer for maps that
            return a log_scale, for float16, whose numerator alone may overflow, and with skip="before".
        skip: where to add D v: "before" the norm, "after" it, or None for nowhere. v is the token's value without w,
            and D is a learned number per head of the output, which starts at 1.
        gate: where to multiply by silu(W_g x): "after" the norm (also True), "before" it as in Mamba-2, or False for
            nowhere.
        bias: whether the projections have a bias.

    Raises:
        TypeError: a size is not an integer, a switch is not a bool, or feature_map is of another type.
        ValueError: one size is not a multiple of another as required, a name is unknown, a signed map is combined with
            normalize=True, or two options do not fit together, such as a decay and causal=False.

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
        num_value_heads: int | None = None,
        context_dim: int | None = None,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        feature_map: str | Mapping[str, Any] | FeatureMap = "elu+1",
        rotary: str | Mapping[str, Any] | Rotary | nn.Module | None = "interleaved",
        causal: bool = True,
        normalize: bool = True,
        decay: str | Mapping[str, Any] | Sequence[float] | Tensor | None = None,
        forget_gate: bool | Mapping[str, Any] = False,
        write_gate: str | None = None,
        trapezoid: bool = False,
        short_conv: int | Mapping[str, Any] | None = None,
        qk_norm: bool = False,
        qk_bias: bool = False,
        out_norm: bool | str | Mapping[str, Any] = False,
        skip: str | None = None,
        gate: bool | str = False,
        bias: bool = False,
        rope_order: str = "after",
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(
            embed_dim,
            num_heads,
            num_kv_heads=num_kv_heads,
            num_value_heads=num_value_heads,
            context_dim=context_dim,
            head_dim=head_dim,
            value_head_dim=value_head_dim,
            short_conv=short_conv,
            qk_norm=qk_norm,
            qk_bias=qk_bias,
            out_norm=out_norm,
            skip=skip,
            gate=gate,
            bias=bias,
            factory=factory,
        )
        check_bools(causal=causal, normalize=normalize, trapezoid=trapezoid)
        check_name("rope_order", rope_order, ORDERS)
        check_name("backend", backend, backends.NAMES)
        self.causal, self.normalize, self.backend = causal, normalize, backend
        self.rope_order = rope_order
        g, d = self.num_state_heads, self.head_dim
        new_map = make_map(feature_map, d, self.num_heads, self.num_kv_heads)
        if normalize and not new_map.positive:
            raise ValueError(f"feature_map={new_map}: its features are signed; expected normalize=False")
        self.feature_map = new_map.to(device=device)
        dim = d if rope_order == "before" else new_map.feature_dim
        self.rotary, self.angle_steps = make_rotation(rotary, dim, embed_dim, g, factory)
        self._decay, self.decay_logit = None, None
        if decay is not None:
            start, learned = make_decay(decay, g)
            self._decay = Constant(start)
            self.decay_logit = nn.Parameter(torch.empty(g, **factory)) if learned else None
        self.forget_gate = make_forget_gate(forget_gate, embed_dim, g, factory)
        self.write_gate = make_write_gate(write_gate, self.forget_gate, embed_dim, g, factory)
        # A norm per head cancels a factor per token and head, unless something else was added before it.
        self._out_norm_replaces_normalizer = (
            normalize and self.norm_over == "head" and skip != "before" and not new_map.log_scaled
        )
        # The normalizer keeps outputs near the size of the values, so that an eps of 1e-6 is small beside their square.
        # Without it outputs may be tiny.
        if self._out_norm_replaces_normalizer and not (isinstance(out_norm, Mapping) and "eps" in out_norm):
            assert self.out_norm is not None
            self.out_norm.eps = 1e-12
        self.trapezoid = TrapezoidGate(embed_dim, g, **factory) if trapezoid else None
        check_options(self)
        self._reset_decay()

    @torch.no_grad()
    def _reset_decay(self) -> None:
        if self.decay_logit is not None and self._decay is not None:
            self.decay_logit.copy_(self._decay.on(torch.device("cpu")).logit())

    def reset_parameters(self) -> None:
        """Gives all weights new initial values, for example after ``to_empty`` on a layer from the meta device."""
        super().reset_parameters()
        self._reset_decay()

    @property
    def decay(self) -> Tensor | None:
        """The decay of each key/value head, (g,) float64: fixed, or the current value of a learned one."""
        # Not a projection's weight: a quantized projection may have no such tensor.
        tensors = (*self.parameters(), *self.buffers())
        return self._decay_on(tensors[0].device if tensors else torch.device("cpu"))

    def _decay_on(self, device: torch.device) -> Tensor | None:
        if self.decay_logit is not None:
            return self.decay_logit.double().sigmoid()
        return None if self._decay is None else self._decay.on(device)

    def extra_repr(self) -> str:
        """The sizes and options that are not modules, in one line."""
        text = f"heads={self.num_heads}, kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
        if self.num_state_heads != self.num_kv_heads:
            text += f", value_heads={self.num_state_heads}"
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
        parts = (
            "forget_gate",
            "write_gate",
            "trapezoid",
            "short_conv",
            "q_norm",
            "q_bias",
            "out_norm",
            "skip",
            "g_proj",
        )
        names = {"q_norm": "qk_norm", "q_bias": "qk_bias", "g_proj": "gate"}
        text += "".join(f", {names.get(name, name)}" for name in parts if getattr(self, name) is not None)
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
        state: LayerState | None = ...,
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
        state: LayerState | None = ...,
        return_state: Literal[True],
        shard: LayerShard | None = ...,
    ) -> tuple[Tensor, LayerState]: ...
    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        context_positions: Tensor | None = None,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: LayerState | None = None,
        return_state: bool = False,
        shard: LayerShard | None = None,
    ) -> Tensor | tuple[Tensor, LayerState]:
        """Maps x (b, n, embed_dim), and context (b, m, context_dim), to y (b, n, embed_dim) or (y, state).

        context_positions are the key_positions of ``linear_rope_attention``. The other arguments are as there.
        """
        self._check_call(x, context, state, shard)
        c = x if context is None else context
        q, k, v, conv = None, self.k_proj(c), self.v_proj(c), None
        if self.short_conv is not None:
            before = None if state is None or state.conv is None else state.at_slots(state.conv)
            want_last = return_state or state is not None  # a pool's rows are written in any case
            projected = self.q_proj(x), k, v
            (q, k, v), conv = self._convolve(projected, key_mask, cu_seqlens, before, shard, want_last)
        k, v = self._keys(k), self._values(v)
        log_decay = None if self.forget_gate is None else self.forget_gate(x)
        norm_suffices = self._out_norm_replaces_normalizer and v.dtype != torch.float16
        options: Options = {
            "feature_map": self.feature_map,
            "rotary": self.rotary,
            "causal": self.causal,
            "normalize": self.normalize and not norm_suffices,
            "decay": self._decay_on(x.device),
            "log_decay": log_decay,
            "angle_steps": None if self.angle_steps is None else self.angle_steps(x),
            "write": None if self.write_gate is None else self.write_gate(x, log_decay),
            "positions": positions,
            "key_positions": context_positions,
            "key_mask": key_mask,
            "cu_seqlens": cu_seqlens,
            "state": None if state is None else state.sums,
            "rope_order": self.rope_order,
            "backend": self.backend,
        }
        # The state of the keys travels to the other ranks while this rank projects q.
        sent_shard = None if shard is None else shard.send_state(k, v, **options)
        q = self._queries(self.q_proj(x) if q is None else q)
        last_token = None
        if self.trapezoid is not None:
            out, sums, last_token = self._attend_by_trapezoid(x, q, k, v, state, return_state, options)
        else:
            result = linear_rope_attention(q, k, v, return_state=return_state, shard=sent_shard, **options)
            out, sums = result if isinstance(result, tuple) else (result, None)
        last = next_state(state, sums, conv=conv, last_token=last_token)
        y = self._output(out, v, x)
        return y if last is None else (y, last)

    def _check_call(
        self, x: Tensor, context: Tensor | None, state: LayerState | None, shard: LayerShard | None
    ) -> None:
        """Rejects what the operation cannot know; it checks the rest."""
        checks.check_inputs(x, context, self.embed_dim, self.context_dim, self.causal)
        if shard is not None and self.trapezoid is not None:
            raise ValueError("shard: got a shard with trapezoid=True, expected None")
        if context is not None:
            check_context(self, shard)
        if state is not None:
            if not isinstance(state, LayerState):
                raise TypeError(f"state: got {type(state).__name__}, expected LayerState")
            self._check_conv(state.conv)
            state.check_before_step(x.shape[1])

    def _attend_by_trapezoid(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: LayerState | None,
        return_state: bool,
        options: Options,
    ) -> tuple[Tensor, LinearAttentionState | None, Tensor | None]:
        """out, and the sums and the last token after the call."""
        assert self.trapezoid is not None
        if options["normalize"]:
            raise TypeError(
                "trapezoid=True: got float16 values, whose numerator may overflow; expected bfloat16, a wider dtype, "
                "or normalize=False"
            )
        implied = ("causal", "normalize", "key_positions", "rope_order", "state")
        others: dict[str, Any] = {name: y for name, y in options.items() if name not in implied}
        result = trapezoidal_attention(
            q, k, v, share=self.trapezoid(x), state=state, return_state=return_state, **others
        )
        if isinstance(result, Tensor):
            return result, None, None
        out, after = result
        return out, after.sums, after.last_token

"""The layer: project x, attend, normalize and gate the result, project it back.

b batch, n queries, m keys, h query heads, g key/value heads, d head dim, f features, e values.
"""

import math
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from typing_extensions import Never, Unpack

from linrope import backends
from linrope.common.argument_checks import check_name
from linrope.common.constants import Constant
from linrope.common.keywords import PYTORCH, check_keywords, shows
from linrope.layer.choices import decay_units, make_decay, make_map, make_rotation
from linrope.layer.config import DEFAULTS, LayerConfig
from linrope.layer.feature_gate import FeatureForgetGate
from linrope.layer.fitting import check_context, check_inputs, check_parts, check_wide
from linrope.layer.keywords import layer_config
from linrope.layer.mixer import Mixer, rotary_in_words
from linrope.layer.options import map_in_words
from linrope.layer.recording import first_tokens, record
from linrope.layer.selective import EraseGate, ForgetGate, WriteGate
from linrope.layer.state import LayerState, next_state
from linrope.layer.step import one_token
from linrope.layer.typed_options import LayerOptions
from linrope.operation.functional import linear_rope_attention
from linrope.operation.options import Options
from linrope.operation.shards import LayerShard, check_shard

_THIRD = (
    f"got a third argument by place, expected options by name; in place of dropout use {PYTORCH['dropout']}"
)
_TOKENS = ("positions", "context_positions", "key_mask", "cu_seqlens", "state", "return_state", "shard")
_IN_THE_CALL = PYTORCH | {
    "key_positions": "context_positions",
    "log_decay": "forget_gate=True in the constructor, or linear_rope_attention",
    **{name: f"{name} in the constructor, LinearRoPEAttention(.., {name}=..)" for name in DEFAULTS},
}

_Three = tuple[Tensor, Tensor, Tensor]


class LinearRoPEAttention(Mixer):
    """Multi-head linear attention with rotary position embedding on the feature maps.

        q, k, v = conv(W_q x), conv(W_k c), conv(W_v c)       c = context, or x
        out = linear_rope_attention(q, k, w v, a, omega)
        y = W_o ((norm(out) + D v) * silu(W_g x))
        a = log sigmoid(W_a x + b_a)        w = 1 - e^a        omega = theta tanh(B A x)

    With an erase_gate, b = sigmoid(W_b x + b_b), the operation follows the delta rule (``erase``).

    x is (b, n, embed_dim), context (b, m, context_dim). By default the layer is W_o linear_rope_attention(W_q x, W_k c,
    W_v c), RoFormer's equation 19; all else is an option. Rotated attention weights are signed and shrink as positions
    grow, so a model usually needs the norm or W_g. A language model gains most from a decay, fixed or computed by the
    gate a, and next from the other parts of the block that this library's models use, above all the convolution.
    ``LinearRoPEAttention.block`` makes that block.

    Args:
        embed_dim: size of x and y, or a LayerConfig in place of this, num_heads and the options.
        num_heads: h.
        device: the device of the weights.
        dtype: the dtype of the weights.
        **options: the options of ``linrope.layer.config.LayerConfig``, which describes them all.

    Raises:
        TypeError: an option is unknown, or as in LayerConfig.
        ValueError: as in LayerConfig; also if a signed map is combined with normalize=True, or if the map, the rotation
            and other options do not fit together.

    Source: RoFormer eq. 19 (arXiv 2104.09864). ``linrope.layer.selective`` names the sources of the options.

    >>> layer = LinearRoPEAttention(256, 4, forget_gate=True, short_conv=4)
    >>> x = torch.randn(2, 100, 256)
    >>> y, state = layer(x, return_state=True)
    >>> layer(x[:, :1], state=state).shape  # the 101st token: constant time and memory
    torch.Size([2, 1, 256])
    """

    # Read by nn.TransformerEncoderLayer before its call, which then says what to use instead of that class.
    batch_first, in_proj_bias, _qkv_same_embed_dim = True, None, False

    @shows(DEFAULTS)
    def __init__(
        self,
        embed_dim: int | LayerConfig,
        num_heads: int | None = None,
        *others: Never,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        if others:
            raise TypeError(_THIRD)
        config = layer_config(embed_dim, num_heads, options)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        check_name("backend", config.backend, backends.NAMES)
        super().__init__(config, factory)
        self.causal, self.normalize, self.backend = config.causal, config.normalize, config.backend
        self.rope_order = config.rope_order
        g, d, x_dim = self.num_state_heads, self.head_dim, self.embed_dim
        new_map = make_map(config.feature_map, d, self.num_heads, self.num_kv_heads)
        if self.normalize and not new_map.positive:
            raise ValueError(
                f"feature_map={map_in_words(config.feature_map)}: its features are signed; expected normalize=False or "
                "a positive map"
            )
        self.feature_map = new_map.to(device=device)
        dim = d if self.rope_order == "before" else new_map.feature_dim
        self.rotary, self.angle_steps = make_rotation(config.rotary, dim, x_dim, g, factory)
        self._decay, self.decay_logit = None, None
        if config.decay is not None:
            start, learned = make_decay(config.decay, g)
            self._decay = Constant(start)
            self.decay_logit = nn.Parameter(torch.empty(g, **factory)) if learned else None
        self.forget_gate: nn.Module | None = None
        self.write_gate = None
        if (gate := config.forget_gate) is not None:
            if gate.per == "feature":
                units, rank = decay_units(new_map.feature_dim, self.rotary, self.angle_steps), gate.rank or d
                self.forget_gate = FeatureForgetGate(
                    x_dim, g, units, gate.longest, rank, gate.bound, **factory
                )
            else:
                self.forget_gate = ForgetGate(x_dim, g, gate.longest, **factory)
            if config.write_gate == "independent":
                self.write_gate = WriteGate(x_dim, g, gate.longest, **factory)
        self.erase_gate = None
        if config.erase_gate is not None:
            tied, largest = config.tied_erase_gate, config.erase_gate.largest
            self.erase_gate = EraseGate(x_dim, g, largest, tied=tied, **factory)
        # A norm per head cancels a factor per token and head, unless something else was added before it.
        self._out_norm_replaces_normalizer = (
            self.normalize and self.norm_over == "head" and config.skip != "before" and not new_map.log_scaled
        )
        # The normalizer keeps outputs near the size of the values, so that an eps of 1e-6 is small beside their square.
        # Without it outputs may be tiny.
        if self._out_norm_replaces_normalizer and config.out_norm is not None and config.out_norm.eps is None:
            assert self.out_norm is not None
            self.out_norm.eps = 1e-12
        check_parts(self)
        self._reset_decay()

    @property
    def norm_suffices(self) -> bool:
        """Whether the output norm takes the place of the normalizer, but for values in float16."""
        return self.out_norm is not None and self._out_norm_replaces_normalizer

    @classmethod
    @shows(DEFAULTS)
    def block(
        cls,
        embed_dim: int,
        num_heads: int,
        *others: Never,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **changes: Unpack[LayerOptions],
    ) -> "LinearRoPEAttention":
        """The layer of this library's models: ``LayerConfig.block`` with these changes.

        They are the options of the constructor, above all causal, num_kv_heads, forget_gate, decay and rotary, which
        ``linrope.layer.config.LayerConfig`` describes. The defaults shown are the bare layer's; ``LayerConfig.block``
        says what a block has.

        >>> LinearRoPEAttention.block(256, 8)(torch.randn(2, 100, 256)).shape
        torch.Size([2, 100, 256])
        """
        if others:
            raise TypeError(_THIRD)
        return cls(LayerConfig.block(embed_dim, num_heads, **changes), device=device, dtype=dtype)

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

    @torch.no_grad()
    def half_lives(self) -> Tensor | None:
        """The current half-lives in tokens, (g,) float64: of the decay and, at x = 0, of the forget gate, together.

        With a forget gate per feature (g, units). Where nothing decays they are inf. None: the layer has no decay.

        >>> LinearRoPEAttention(64, 4, decay="spread").half_lives()
        tensor([1.0000e+00, 1.6000e+01, 2.5600e+02, 4.0960e+03], dtype=torch.float64)
        """
        logs = [] if (decay := self.decay) is None else [decay.log()[:, None]]
        if self.forget_gate is not None:
            x = next(self.forget_gate.parameters()).new_zeros(1, 1, self.embed_dim)
            logs.append(self.forget_gate(x).double().view(self.num_state_heads, -1))
        if not logs:
            return None
        tokens = math.log(2) / sum(logs[1:], logs[0]).abs()
        return tokens if self.config.has_gates_per_feature else tokens[:, 0]

    def extra_repr(self) -> str:
        """The sizes and options that are not modules, in one line."""
        text = super().extra_repr()
        text += f", feature_map={self.feature_map.elementwise or type(self.feature_map).__name__}"
        if self.rotary is not None:
            selective = "" if self.angle_steps is None else "selective "
            text += f", rotary={selective}{rotary_in_words(self.rotary)}"
        elif self.angle_steps is not None:
            text += f", rotary={type(self.angle_steps).__name__}"
        else:
            text += ", rotary=None"
        if (decay := self.decay) is not None:
            numbers = "meta" if decay.is_meta else ", ".join(f"{x:.4g}" for x in decay.tolist())
            text += f", decay={'learned ' if self.decay_logit is not None else ''}[{numbers}]"
        parts = (
            *("forget_gate", "write_gate", "erase_gate", "short_conv"),
            *("q_norm", "out_norm", "skip", "g_proj"),
        )
        names = {"q_norm": "qk_norm", "g_proj": "gate"}
        there = {name: getattr(self, name) is not None for name in parts}
        if (gate := self.config.forget_gate) is not None:
            names["forget_gate"] = f"forget_gate (half-lives from 1 to {gate.longest:g})"
        there["write_gate"] = self.config.write_gate is not None  # a tied one has no module
        text += "".join(f", {names.get(name, name)}" for name in parts if there[name])
        text += f", backend={backends.in_words(self.backend, next(self.parameters(), None))}"
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
    @shows({}, required=["x"])
    def forward(
        self,
        x: Tensor = None,  # type: ignore[assignment]
        context: Tensor | None = None,
        *others: Any,
        positions: Tensor | None = None,
        context_positions: Tensor | None = None,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: LayerState | None = None,
        return_state: bool = False,
        shard: LayerShard | None = None,
        **unknown: Any,
    ) -> Tensor | tuple[Tensor, LayerState]:
        """Maps x (b, n, embed_dim), and context (b, m, context_dim), to y (b, n, embed_dim) or (y, state).

        context_positions are the key_positions of ``linear_rope_attention``; the other arguments are called as there.
        """
        if others or unknown:
            check_keywords("the layer's call", ["value"] if others else unknown, _TOKENS, _IN_THE_CALL)
        if (
            type(state) is LayerState
            and context is positions is context_positions is key_mask is cu_seqlens is None
            and shard is None
            and type(self) is LinearRoPEAttention
            and not torch.compiler.is_compiling()
            and (done := one_token(self, x, state, return_state)) is not None
        ):
            return done
        self._check_call(x, context, state, shard)
        c = x if context is None else context
        q, k, v, conv, projected = None, self.k_proj(c), self.v_proj(c), None, None
        if self.short_conv is not None:
            before = None if state is None or state.conv is None else state.at_slots(state.conv)
            want_last = return_state or state is not None  # a pool's rows are written in any case
            projected = self.q_proj(x), k, v
            (q, k, v), conv = self._convolve(projected, key_mask, cu_seqlens, before, shard, want_last)
        k, v = self._keys(k), self._values(v)
        write = None if self.write_gate is None else self.write_gate(x)
        if self.config.write_gate == "tied" and self.forget_gate is not None:
            log_decay, write = self.forget_gate(x, writes=True)
        else:
            log_decay = None if self.forget_gate is None else self.forget_gate(x)
        erase = None if self.erase_gate is None else self.erase_gate(x)
        options: Options = {
            "feature_map": self.feature_map,
            "rotary": self.rotary,
            "causal": self.causal,
            "normalize": self.normalize and not (self.norm_suffices and v.dtype != torch.float16),
            "decay": self._decay_on(x.device),
            "log_decay": log_decay,
            "angle_steps": None if self.angle_steps is None else self.angle_steps(x),
            "write": erase if self.config.tied_erase_gate else write,
            "erase": erase,
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
        result = linear_rope_attention(q, k, v, return_state=return_state, shard=sent_shard, **options)
        out, sums = (result, None) if isinstance(result, Tensor) else result
        record(partial(self._state_after, (q, k, v), projected, state, options))
        last = next_state(state, sums, conv)
        y = self._output(out, v, x)
        return y if last is None else (y, last)

    def _check_call(
        self, x: Tensor, context: Tensor | None, state: LayerState | None, shard: LayerShard | None
    ) -> None:
        """Rejects what the operation cannot see. The operation checks the rest."""
        check_inputs(x, context, self.embed_dim, self.context_dim, self.causal)
        if x.dtype == torch.float64:
            check_wide(x, self.k_proj)
        if shard is not None:
            check_shard(shard)
        if context is not None:
            check_context(self, shard)
        if state is not None:
            if not isinstance(state, LayerState):
                raise TypeError(f"state: got {type(state).__name__}, expected LayerState")
            self._check_conv(state.conv)
            state.check_inputs_writable(x.shape[1])

    def _state_after(
        self, qkv: _Three, projected: _Three | None, state: LayerState | None, options: Options, count: int
    ) -> LayerState | None:
        """The state after the first tokens of a call, from what its projections gave. For ``record``."""
        first: Any = first_tokens(options, count)
        conv = None
        if projected is not None:
            q, k, v = (y[:, :count] for y in projected)
            _, conv = self._convolve(
                (q, k, v), first["key_mask"], None, None if state is None else state.conv
            )
        q, k, v = (y[:, :count] for y in qkv)
        _, sums = linear_rope_attention(q, k, v, return_state=True, **first)
        return next_state(state, sums, conv)

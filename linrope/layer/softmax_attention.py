"""Softmax attention with the interface of LinearRoPEAttention, for hybrids and for comparison."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import Unpack

from linrope.common.keywords import check_keywords, shows
from linrope.layer.choices import make_rotary
from linrope.layer.config import DEFAULTS, SHARED, LayerConfig
from linrope.layer.fitting import check_inputs
from linrope.layer.key_value_state import KeyValueState
from linrope.layer.mixer import Mixer, rotary_in_words
from linrope.layer.recording import record
from linrope.layer.typed_options import Options, SharedOptions
from linrope.operation.checks import check_mask, check_packing
from linrope.operation.positions import resolve_positions, spell_out_positions
from linrope.operation.rotary_type import check_overridden
from linrope.recurrence.packing import owners
from linrope.rotation.rotary import Rotary


class SoftmaxAttention(Mixer):
    """Multi-head softmax attention with a rotation.

        q, k, v = conv(W_q x), conv(W_k c), conv(W_v c)       c = context, or x
        out = softmax(<R q_i, R k_j> / sqrt(d)) v             R: the rotation of RoFormer eq. 15
        y = W_o ((norm(out) + D v) * silu(W_g x))

    Convolution, norm, skip D and gate are options, so that softmax and linear attention can be compared in one block.

    x is (b, n, embed_dim), context (b, m, embed_dim). Time grows with n m; so does memory with a
    key_mask, a state or packed sequences. The attention of a query that sees no key is exactly 0.

    Args:
        embed_dim: the size of x and y.
        num_heads: h.
        rotary: as in ``linrope.layer.config.LayerConfig``, without axes, xpos and steps.
        device: the device of the weights.
        dtype: the dtype of the weights.
        **options: num_kv_heads, head_dim, value_head_dim, causal, short_conv, qk_norm, out_norm, skip, gate and bias,
            as in ``linrope.layer.config.LayerConfig``. With causal, query i sees only the keys j <= i of this call (and
            all keys of the state).

    Raises:
        TypeError: an option is unknown, a size is not an integer, or a switch is not a bool.
        ValueError: one size is not a multiple of another as required, a name is unknown, or the rotation is of
            another kind or size.

    Source: Vaswani et al. 2017, arXiv 1706.03762; RoFormer eq. 16 (arXiv 2104.09864).

    >>> from linrope.layer.softmax_attention import SoftmaxAttention
    >>> layer = SoftmaxAttention(256, 4)
    >>> x = torch.randn(2, 100, 256)
    >>> y, state = layer(x, return_state=True)
    >>> layer(x[:, :1], state=state).shape  # the 101st token sees all keys before it
    torch.Size([2, 1, 256])
    """

    @shows({name: DEFAULTS[name] for name in SHARED})
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        rotary: str | Options | Rotary | None = "interleaved",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[SharedOptions],
    ) -> None:
        check_keywords("SoftmaxAttention", options, SHARED)
        config = LayerConfig(embed_dim, num_heads, rotary=rotary, **options)
        super().__init__(config, {"device": device, "dtype": dtype})
        self.causal = config.causal
        if config.has_selective_steps or isinstance(config.rotary, nn.Module):
            raise ValueError(f"rotary={rotary!r}: expected a rotation without steps")
        self.rotary = make_rotary(config.rotary, self.head_dim)
        if self.rotary is not None:
            check_overridden(self.rotary, rotates_before_map=True)  # q and k are rotated here, too
        if (r := self.rotary) and (r.dim != self.head_dim or r.axes is not None or r.xpos is not None):
            raise ValueError(f"rotary={rotary}: expected dim={self.head_dim}, without axes and xpos")

    def extra_repr(self) -> str:
        """The sizes and the rotation, in one line."""
        rotary = "None" if self.rotary is None else rotary_in_words(self.rotary)
        return super().extra_repr() + f", rotary={rotary}" + ("" if self.causal else ", causal=False")

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        context_positions: Tensor | None = None,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: KeyValueState | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, KeyValueState]:
        """x (b, n, embed_dim) -> y of the same shape, or (y, state); arguments as in LinearRoPEAttention.

        Sequences packed by cu_seqlens are masked from each other, which saves no time. They cannot have
        states.
        """
        check_inputs(x, context, self.embed_dim, self.embed_dim, self.causal)
        if context is not None and self.short_conv is not None:
            raise ValueError("context: got a tensor with short_conv, expected None")
        context = x if context is None else context
        (b, n, _), m = x.shape, context.shape[1]
        check_mask(key_mask, b, m, x.device)
        check_packing(cu_seqlens, b, n, m, x.device)
        if cu_seqlens is not None and (state is not None or return_state):
            raise ValueError("cu_seqlens: got a state or return_state=True with it, expected neither")
        if isinstance(state, KeyValueState):
            self._check_conv(state.conv)
        projected = q, k, v = self.q_proj(x), self.k_proj(context), self.v_proj(context)
        before = state.conv if isinstance(state, KeyValueState) else None
        conv_inputs = None
        if self.short_conv is not None:
            want_last = return_state or state is not None
            (q, k, v), conv_inputs = self._convolve(
                projected, key_mask, cu_seqlens, before, want_last=want_last
            )
        q, k, v = self._queries(q), self._keys(k), self._values(v)
        skip_values = v
        rotary = self.rotary
        identity = str(rotary and rotary.identity)

        if state is not None:
            _check_state(state, k, v, identity)
        tokens = resolve_positions(
            positions=positions,
            key_positions=context_positions,
            start=None if state is None else state.position,
            keys=k,
            num_queries=n,
            bounds=cu_seqlens,
        )
        q_positions, k_positions = spell_out_positions(tokens, q, k)
        if rotary is not None:
            q = rotary(q * rotary.attention_factor, q_positions)
            k = rotary(k * rotary.attention_factor, k_positions)
        unmasked = key_mask is None and state is None and cu_seqlens is None
        if key_mask is None:
            key_mask = torch.ones(b, m, dtype=torch.bool, device=x.device)
        else:  # padding may hold inf or NaN, which a weight of 0 would not remove
            k, v = (tensor.masked_fill(~key_mask[:, :, None, None], 0) for tensor in (k, v))
        new_state = KeyValueState(k, v, k_positions.expand(b, m), key_mask, identity)
        if state is not None:
            new_state = replace(state, conv=None).append(new_state)
        new_state = replace(new_state, conv=conv_inputs)
        record(partial(self._state_after, projected, before, new_state))

        mask = None if unmasked else self._mask(new_state.mask, n, cu_seqlens)
        out = _attend(q, new_state, self.causal, mask)
        y = self._output(out, skip_values, x)
        return (y, new_state) if return_state else y

    def _state_after(
        self,
        projected: tuple[Tensor, Tensor, Tensor],
        before: Tensor | None,
        state: KeyValueState,
        count: int,
    ) -> KeyValueState:
        """The state after the first tokens of a call, from the one after all. For ``record``."""
        n = projected[0].shape[1]
        conv = None
        if self.short_conv is not None:
            q, k, v = (x[:, :count] for x in projected)
            _, conv = self._convolve((q, k, v), state.mask[:, -n:][:, :count], None, before)
        return state.first(state.k.shape[1] - n + count, conv)

    def _mask(self, key_mask: Tensor, n: int, cu_seqlens: Tensor | None) -> Tensor:
        """The keys that each query sees: bool (b, 1, n or 1, m)."""
        m = key_mask.shape[1]
        mask = key_mask[:, None, None]
        if self.causal:  # the last n keys belong to this call
            mask = mask & torch.ones(n, m, dtype=torch.bool, device=mask.device).tril(m - n)
        if cu_seqlens is not None:
            sequence = owners(cu_seqlens, n)
            mask = mask & (sequence[:, None] == sequence)
        return mask


def _attend(q: Tensor, state: KeyValueState, causal: bool, mask: Tensor | None) -> Tensor:
    """softmax(<q_i, k_j> / sqrt(d)) v, (b, n, h, e)."""
    q, k, v = (x.transpose(1, 2) for x in (q, state.k, state.v))
    d, e = q.shape[-1], v.shape[-1]
    if d < e and q.shape[2] > 1:  # PyTorch's fused kernels require one size. Zeros do not change the scores.
        q, k = (F.pad(x, (0, e - d)) for x in (q, k))
    options: dict[str, Any] = {"scale": d**-0.5, "enable_gqa": True}
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, **options).transpose(1, 2)
    no_keys = ~mask.any(-1, keepdim=True)  # such a query would give NaN: it sees all keys, then becomes 0
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask | no_keys, **options)
    return out.masked_fill(no_keys, 0).transpose(1, 2)


def _check_state(state: KeyValueState, k: Tensor, v: Tensor, identity: str) -> None:
    if not isinstance(state, KeyValueState):
        raise TypeError(f"state: got {type(state).__name__}, expected KeyValueState")
    for name, old, new in (("k", state.k, k), ("v", state.v, v)):
        same = old.ndim == 4 and (len(old), *old.shape[2:]) == (len(new), *new.shape[2:])
        if not same or (old.dtype, old.device) != (new.dtype, new.device):
            raise ValueError(
                f"state.{name}: got {old.dtype} {tuple(old.shape)} on {old.device}, expected "
                f"{new.dtype} ({len(new)}, length, {new.shape[2]}, {new.shape[3]}) on {new.device}"
            )
    if state.identity != identity:
        raise ValueError(f"state: made with {state.identity}; expected {identity}, this layer's rotation")

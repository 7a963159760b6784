"""The layer: project, attend, normalize and gate, project."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from linrope import arguments, feature_maps
from linrope.feature_maps import FeatureMap
from linrope.functional import ORDERS, linear_rope_attention
from linrope.names import check_name
from linrope.rotary import LAYOUTS, Rotary
from linrope.state import LinearAttentionState


class LinearRoPEAttention(nn.Module):
    """Multi-head linear attention with rotary position embedding on the feature maps.

        q, k, v = W_q x, W_k c, W_v c                         c = context, or x
        y = W_o (norm(linear_rope_attention(q, k, v)) * silu(W_g x))

    x is (b, n, embed_dim), context (b, m, embed_dim). Norm and gate are options: the rotated weights
    are signed and shrink as positions grow, so a model usually wants one of them.

    Args:
        embed_dim: size of x and y.
        num_heads: h.
        num_kv_heads: g, a divisor of h; default h.
        head_dim: d of queries and keys; default embed_dim / num_heads.
        value_head_dim: e of values; default head_dim.
        feature_map: name, {"name": .., options of feature_maps.make}, or FeatureMap. Learned maps that are
            made here have weights for each head.
        rotary: "interleaved", "half", a Rotary of the map's feature_dim, None, or a dict: arguments of
            Rotary, of Rotary.axial if it has "axes", or Hugging Face's rope_parameters if it has a key
            "rope_theta" or "rope_type" (then with layout "half" unless it says otherwise).
        decay: g numbers in (0, 1], None, or "retnet": 1 - 2^(-5 - i) for key/value head i (arXiv 2307.08621).
        rope_order: as in linear_rope_attention, like causal, normalize and backend. With "before" the
            rotation has the size of the heads.
        out_norm: RMS norm of each head's output, with a learned weight.
        gate: multiply by silu(W_g x) before W_o.
        bias: of the projections.

    Raises:
        ValueError: sizes that do not divide, unknown names, a signed map with normalize=True.

    Source: RoFormer eq. 19 (arXiv 2104.09864).

    >>> layer = LinearRoPEAttention(256, 4)
    >>> x = torch.randn(2, 100, 256)
    >>> y, state = layer(x, return_state=True)
    >>> layer(x[:, :1], state=state).shape  # the 101st token: constant time and memory
    torch.Size([2, 1, 256])
    """

    decay_bits: Tensor | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        feature_map: str | Mapping[str, Any] | FeatureMap = "elu+1",
        rotary: str | Mapping[str, Any] | Rotary | None = "interleaved",
        causal: bool = True,
        normalize: bool = True,
        decay: str | Sequence[float] | Tensor | None = None,
        out_norm: bool = False,
        gate: bool = False,
        bias: bool = False,
        rope_order: str = "after",
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        g, d, e = arguments.resolve_heads(embed_dim, num_heads, num_kv_heads, head_dim, value_head_dim)
        self.num_heads, self.num_kv_heads, self.head_dim, self.value_head_dim = num_heads, g, d, e
        self.causal, self.normalize, self.backend = causal, normalize, backend
        if rope_order not in ORDERS:
            raise ValueError(f"rope_order={rope_order!r}: expected one of {', '.join(ORDERS)}")
        self.rope_order = rope_order
        feature_map = _make_map(feature_map, d, num_heads, g)
        if normalize and not feature_map.positive:
            raise ValueError(f"feature_map={feature_map}: its features are signed; expected normalize=False")
        self.feature_map = feature_map.to(device=device)
        self.rotary = _make_rotary(rotary, d if rope_order == "before" else feature_map.feature_dim)
        # float64, as int64: casting a model to half precision must not round it.
        bits = None if decay is None else _make_decay(decay, g).view(torch.int64).to(device)
        self.register_buffer("decay_bits", bits)

        new: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.q_proj = nn.Linear(embed_dim, num_heads * d, **new)
        self.k_proj = nn.Linear(embed_dim, g * d, **new)
        self.v_proj = nn.Linear(embed_dim, g * e, **new)
        self.o_proj = nn.Linear(num_heads * e, embed_dim, **new)
        self.out_norm = nn.RMSNorm(e, eps=1e-6, device=device, dtype=dtype) if out_norm else None
        self.g_proj = nn.Linear(embed_dim, num_heads * e, **new) if gate else None

    @property
    def decay(self) -> Tensor | None:
        """(g,) float64."""
        return None if self.decay_bits is None else self.decay_bits.view(torch.float64)

    @overload
    def forward(
        self, x: Tensor, context: Tensor | None = ..., *, positions: Tensor | None = ...,
        context_positions: Tensor | None = ..., key_mask: Tensor | None = ...,
        cu_seqlens: Tensor | None = ..., state: LinearAttentionState | None = ...,
        return_state: Literal[False] = ...,
    ) -> Tensor: ...  # fmt: skip
    @overload
    def forward(
        self, x: Tensor, context: Tensor | None = ..., *, positions: Tensor | None = ...,
        context_positions: Tensor | None = ..., key_mask: Tensor | None = ...,
        cu_seqlens: Tensor | None = ..., state: LinearAttentionState | None = ...,
        return_state: Literal[True],
    ) -> tuple[Tensor, LinearAttentionState]: ...  # fmt: skip
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
    ) -> Tensor | tuple[Tensor, LinearAttentionState]:
        """x (b, n, embed_dim) -> y of the same shape, or (y, state); arguments as in the operation."""
        arguments.check_inputs(x, context, self.q_proj.in_features)
        context = x if context is None else context
        out, state = linear_rope_attention(
            self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim)),
            self.k_proj(context).unflatten(-1, (self.num_kv_heads, self.head_dim)),
            self.v_proj(context).unflatten(-1, (self.num_kv_heads, self.value_head_dim)),
            feature_map=self.feature_map,
            rotary=self.rotary,
            causal=self.causal,
            normalize=self.normalize,
            positions=positions,
            key_positions=context_positions,
            key_mask=key_mask,
            cu_seqlens=cu_seqlens,
            state=state,
            return_state=True,
            decay=self.decay,
            rope_order=self.rope_order,
            backend=self.backend,
        )
        if self.out_norm is not None:
            out = self.out_norm(out.to(self.out_norm.weight.dtype))
        out = out.flatten(-2)
        if self.g_proj is not None:
            out = out * nn.functional.silu(self.g_proj(x))
        y = self.o_proj(out)
        return (y, state) if return_state else y


def _make_map(
    choice: str | Mapping[str, Any] | FeatureMap, head_dim: int, num_heads: int, num_kv_heads: int
) -> FeatureMap:
    if isinstance(choice, FeatureMap):
        return choice
    options = {"name": choice} if isinstance(choice, str) else dict(choice)
    if "name" not in options:
        raise ValueError(f"feature_map={options}: expected the key 'name'")
    if {options["name"], options.get("inner")} & feature_maps.PER_HEAD:
        options = {"num_heads": num_heads, "num_kv_heads": num_kv_heads} | options
    return feature_maps.make(options.pop("name"), head_dim, **options)


def _make_rotary(choice: str | Mapping[str, Any] | Rotary | None, dim: int) -> Rotary | None:
    if choice is None or isinstance(choice, Rotary):
        return choice
    if isinstance(choice, str):
        check_name("rotary", choice, LAYOUTS, also="a dict, a Rotary or None")
        return Rotary(dim, layout=choice)
    if "axes" in choice:
        return Rotary.axial(dim, **choice)
    if {"rope_theta", "rope_type"} & set(choice):
        own = {key: choice[key] for key in ("layout", "max_position_embeddings", "seq_len") if key in choice}
        config = {key: value for key, value in choice.items() if key not in own}
        return Rotary.from_config(config, head_dim=dim, **own)
    return Rotary(dim, **choice)


def _make_decay(choice: str | Sequence[float] | Tensor, heads: int) -> Tensor:
    if isinstance(choice, str):
        if choice != "retnet":
            raise ValueError(f"decay={choice!r}: expected 'retnet', {heads} numbers, or None")
        return 1 - 2.0 ** -(5 + torch.arange(heads, dtype=torch.float64, device="cpu"))
    decay = torch.as_tensor(choice, dtype=torch.float64, device="cpu").detach().clone()
    if decay.shape != (heads,) or not bool(((decay > 0) & (decay <= 1)).all()):
        raise ValueError(f"decay: got {decay.tolist()}, expected {heads} numbers in (0, 1]")
    return decay

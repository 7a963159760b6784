"""The operation: check the arguments, choose a backend, call it."""

import math
from dataclasses import replace
from typing import Literal, overload

import torch
from torch import Tensor

from linrope import arguments, backends
from linrope.feature_maps import FeatureMap
from linrope.rotary import Rotary, spell_out
from linrope.state import LinearAttentionState

ORDERS = ("after", "before")


@overload
def linear_rope_attention(
    q: Tensor, k: Tensor, v: Tensor, *, feature_map: str | FeatureMap | None = ...,
    rotary: Rotary | None = ..., causal: bool = ..., normalize: bool = ..., decay: Tensor | None = ...,
    positions: Tensor | None = ..., key_positions: Tensor | None = ..., key_mask: Tensor | None = ...,
    cu_seqlens: Tensor | None = ..., state: LinearAttentionState | None = ...,
    return_state: Literal[False] = ..., eps: float = ..., rope_order: str = ..., backend: str = ...,
) -> Tensor: ...  # fmt: skip
@overload
def linear_rope_attention(
    q: Tensor, k: Tensor, v: Tensor, *, feature_map: str | FeatureMap | None = ...,
    rotary: Rotary | None = ..., causal: bool = ..., normalize: bool = ..., decay: Tensor | None = ...,
    positions: Tensor | None = ..., key_positions: Tensor | None = ..., key_mask: Tensor | None = ...,
    cu_seqlens: Tensor | None = ..., state: LinearAttentionState | None = ...,
    return_state: Literal[True], eps: float = ..., rope_order: str = ..., backend: str = ...,
) -> tuple[Tensor, LinearAttentionState]: ...  # fmt: skip
@overload
def linear_rope_attention(
    q: Tensor, k: Tensor, v: Tensor, *, feature_map: str | FeatureMap | None = ...,
    rotary: Rotary | None = ..., causal: bool = ..., normalize: bool = ..., decay: Tensor | None = ...,
    positions: Tensor | None = ..., key_positions: Tensor | None = ..., key_mask: Tensor | None = ...,
    cu_seqlens: Tensor | None = ..., state: LinearAttentionState | None = ...,
    return_state: bool, eps: float = ..., rope_order: str = ..., backend: str = ...,
) -> Tensor | tuple[Tensor, LinearAttentionState]: ...  # fmt: skip
def linear_rope_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str | FeatureMap | None = "elu+1",
    rotary: Rotary | None = None,
    causal: bool = True,
    normalize: bool = True,
    decay: Tensor | None = None,
    positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: LinearAttentionState | None = None,
    return_state: bool = False,
    eps: float = 1e-6,
    rope_order: str = "after",
    backend: str = "auto",
) -> Tensor | tuple[Tensor, LinearAttentionState]:
    """Linear attention with rotary position embedding on the feature maps.

        num_i = sum_j g^(p_i - p_j) <R(p_i) phi(q_i), R(p_j) psi(k_j)> v_j
        den_i = sum_j g^(p_i - p_j) <phi(q_i), psi(k_j)>
        out_i = num_i / max(den_i, eps)

    The sums run over j <= i (causal) or over all keys; a query that sees no key gets 0. Training,
    prefill and decoding are this one call: feeding a sequence in pieces, each with the state of the
    one before, gives what one call gives.

    Args:
        q: (b, n, h, d) queries; float64, float32, bfloat16 or float16.
        k: (b, m, g, d) keys; query head i reads key/value head i // (h/g).
        v: (b, m, g, e) values.
        feature_map: name or FeatureMap for phi and psi; None: q and k are features already.
        rotary: the rotation R; None: plain linear attention (eq. 18).
        causal: whether query i sees only the keys j <= i of this call (and all of the state).
        normalize: False: the numerator alone.
        decay: g in (0, 1], fixed, (g,): one per key/value head; None: 1. Causal attention only; positions
            must then not fall.
        positions: integers (n,) or (b, n), 0 .. 2^31 - 1; with a rotation of several axes (.., axes).
            Default: 0, 1, .., or on from the state. For padded batches (left or right):
            ``(key_mask.cumsum(1) - 1).clamp(min=0)``.
        key_positions: the same for keys, (m,) or (b, m). Default: positions if m == n, else 0, 1, ..,
            or on from the state.
        key_mask: bool (b, m), True = attend.
        cu_seqlens: int32 or int64 (s + 1,): sequence i of s packed ones (b == 1) is the tokens
            cu_seqlens[i] .. cu_seqlens[i + 1] - 1. Default positions restart at each; the state has s
            sequences. On a GPU its numbers are not checked, and never lead out of bounds.
        state: to go on from.
        return_state: whether to return (out, state).
        eps: lower bound of the normalizer.
        rope_order: "after", eq. 19; "before" rotates q and k and not their features, as pretrained
            softmax models have it. With maps other than the identity scores are then no functions of
            the relative position.
        backend: "auto", "reference" (quadratic, in the inputs' dtype), "eager" (chunked) or "triton"
            (fused, for GPUs). "auto" takes triton on a GPU where it supports the call, else eager.

    Returns:
        out (b, n, h, e) in v's dtype, or (out, state). eager and triton keep sums in float32 or wider.

    Raises:
        TypeError: dtypes differ or are not floating; positions or cu_seqlens are not integers.
        ValueError: shapes, devices, positions, decay, mask, packing, state or a name do not fit; a signed
            feature map with normalize=True.
        RuntimeError: the backend cannot run this call.

    Source: RoFormer eq. 19 (arXiv 2104.09864); decay as in RetNet (arXiv 2307.08621).

    >>> q, k, v = torch.randn(3, 1, 1000, 8, 64)
    >>> rotary = Rotary(64)
    >>> out = linear_rope_attention(q, k, v, rotary=rotary)
    >>> a, b = [x[:, :900] for x in (q, k, v)], [x[:, 900:] for x in (q, k, v)]
    >>> head, state = linear_rope_attention(*a, rotary=rotary, return_state=True)
    >>> tail = linear_rope_attention(*b, rotary=rotary, state=state)
    >>> torch.testing.assert_close(torch.cat((head, tail), 1), out)
    >>> packed = linear_rope_attention(q, k, v, rotary=rotary, cu_seqlens=torch.tensor([0, 900, 1000]))
    >>> torch.testing.assert_close(packed[:, :900], head)
    """
    arguments.check_tensors(q, k, v, causal)
    if not 0 < eps < math.inf:
        raise ValueError(f"eps={eps}: expected a positive finite number")
    if rope_order not in ORDERS:
        raise ValueError(f"rope_order={rope_order!r}: expected one of {', '.join(ORDERS)}")
    (b, n, _, d), (m, g, e), device = q.shape, v.shape[1:], q.device
    before = rope_order == "before"

    arguments.check_mask(key_mask, b, m, device)
    arguments.check_decay(decay, g, causal, device)
    arguments.check_packing(cu_seqlens, b, n, m, device)
    fmap, elementwise, positive, map_identity = arguments.resolve_map(feature_map, d)
    if normalize and not positive:
        raise ValueError(
            f"feature_map={feature_map!r}: its features are signed, so the normalizer can vanish; "
            "expected normalize=False or a positive map"
        )
    f = d if fmap is None else fmap.feature_dim
    arguments.check_rotary(rotary, d if before else f, g, causal, before)
    fading = decay is not None or (rotary is not None and rotary.fade is not None)
    if fading and key_positions is not None:
        raise ValueError("key_positions: got them beside fading keys (decay or xpos), expected None")
    axes = None if rotary is None else rotary.axes
    if axes is not None and (decay is not None or (fmap is not None and fmap.positional)):
        name = "decay" if decay is not None else f"feature_map={feature_map}"
        raise ValueError(f"{name}: got a rotation with axes={axes}, expected one with axes=None")

    sequences = b if cu_seqlens is None else len(cu_seqlens) - 1
    identity = f"{map_identity}; {rotary and rotary.identity}{' before' if before else ''}"
    if state is None:
        wide = torch.promote_types(v.dtype, torch.float32)
        kv, z = v.new_zeros(sequences, g, f, e, dtype=wide), v.new_zeros(sequences, g, f, dtype=torch.float64)
        start = torch.zeros(1 if cu_seqlens is None else sequences, dtype=torch.int64, device=device)
    else:
        arguments.check_state(state, (sequences, g, f, e), identity, device)
        kv, z, start = state.kv, state.z, state.position
    in_place = state is not None and state.donated
    where, key_where, end = arguments.resolve_positions(
        positions, key_positions, start, b, n, m, axes, cu_seqlens
    )
    if fading and positions is not None:
        arguments.check_order(where, start, cu_seqlens)

    if rotary is not None and rotary.attention_factor != 1:
        q, k = q * rotary.attention_factor, k * rotary.attention_factor
    each, key_each = where, where if key_where is None else key_where
    if before or (fmap is not None and fmap.positional):
        each, key_each = spell_out(each, n), spell_out(key_each, m)
    if before and rotary is not None:
        q, k, rotary = rotary(q, each), rotary(k, key_each), None
    if fmap is not None:
        if key_mask is not None:  # what padding holds may overflow in the map, and 0 * inf is no 0
            k = k.masked_fill(~key_mask[:, :, None, None], 0)
        if fmap.positional:
            q, k = fmap.queries(q, each), fmap.keys(k, key_each)
        else:
            q, k = fmap.queries(q), fmap.keys(k)

    module = backends.choose(backend, q, v, kv, rotary)
    out: Tensor
    out, kv, z = module.attend(
        q, k, v, kv, z,
        feature_map=elementwise, rotary=rotary, decay=decay, positions=where, key_positions=key_where,
        start=start, key_mask=key_mask, cu_seqlens=cu_seqlens, causal=causal, normalize=normalize, eps=eps,
        carry=return_state or state is not None, in_place=in_place,
    )  # fmt: skip
    if state is not None and in_place and kv is state.kv and z is state.z:  # then all of it is in place
        state.position.copy_(end)
        return (out, replace(state, donated=False)) if return_state else out
    if not return_state:
        return out
    return out, LinearAttentionState(kv, z, end.expand(sequences).clone(), identity)

"""The operation: check the arguments, choose a backend, call it."""

import math
from dataclasses import replace
from typing import Literal, overload

import torch
from torch import Tensor

from linrope import backends, feature_maps
from linrope.feature_maps import ELEMENTWISE, FeatureMap
from linrope.rotary import MAX_POSITION, Rotary
from linrope.state import LinearAttentionState

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@overload
def linear_rope_attention(
    q: Tensor, k: Tensor, v: Tensor, *, feature_map: str | FeatureMap | None = ...,
    rotary: Rotary | None = ..., causal: bool = ..., normalize: bool = ..., decay: Tensor | None = ...,
    positions: Tensor | None = ..., key_positions: Tensor | None = ..., key_mask: Tensor | None = ...,
    cu_seqlens: Tensor | None = ..., state: LinearAttentionState | None = ...,
    return_state: Literal[False] = ..., eps: float = ..., backend: str = ...,
) -> Tensor: ...  # fmt: skip
@overload
def linear_rope_attention(
    q: Tensor, k: Tensor, v: Tensor, *, feature_map: str | FeatureMap | None = ...,
    rotary: Rotary | None = ..., causal: bool = ..., normalize: bool = ..., decay: Tensor | None = ...,
    positions: Tensor | None = ..., key_positions: Tensor | None = ..., key_mask: Tensor | None = ...,
    cu_seqlens: Tensor | None = ..., state: LinearAttentionState | None = ...,
    return_state: Literal[True], eps: float = ..., backend: str = ...,
) -> tuple[Tensor, LinearAttentionState]: ...  # fmt: skip
@overload
def linear_rope_attention(
    q: Tensor, k: Tensor, v: Tensor, *, feature_map: str | FeatureMap | None = ...,
    rotary: Rotary | None = ..., causal: bool = ..., normalize: bool = ..., decay: Tensor | None = ...,
    positions: Tensor | None = ..., key_positions: Tensor | None = ..., key_mask: Tensor | None = ...,
    cu_seqlens: Tensor | None = ..., state: LinearAttentionState | None = ...,
    return_state: bool, eps: float = ..., backend: str = ...,
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
    backend: str = "auto",
) -> Tensor | tuple[Tensor, LinearAttentionState]:
    """Linear attention with rotary position embedding on the feature maps.

        num_i = sum_j <R(p_i) phi(q_i), R(p_j) psi(k_j)> v_j
        den_i = sum_j <phi(q_i), psi(k_j)>
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
        decay: not in this version.
        positions: integers (n,) or (b, n), 0 .. 2^31 - 1. Default: 0, 1, .., or on from the state.
        key_positions: the same for keys, (m,) or (b, m). Default: positions if m == n, else 0, 1, ..,
            or on from the state.
        key_mask: bool (b, m), True = attend.
        cu_seqlens: not in this version.
        state: to go on from.
        return_state: whether to return (out, state).
        eps: lower bound of the normalizer.
        backend: "auto", "reference" (quadratic, in the inputs' dtype), "eager" (chunked) or "triton"
            (fused, for GPUs). "auto" takes triton on a GPU where it supports the call, else eager.

    Returns:
        out (b, n, h, e) in v's dtype, or (out, state). eager and triton keep sums in float32 or wider.

    Raises:
        TypeError: dtypes differ or are not floating; positions are not integers.
        ValueError: shapes, devices, positions, mask, state or a name do not fit; a signed feature map
            with normalize=True.
        RuntimeError: the backend cannot run this call.
        NotImplementedError: decay or cu_seqlens.

    Source: RoFormer eq. 19 (arXiv 2104.09864).

    >>> q, k, v = torch.randn(3, 1, 1000, 8, 64)
    >>> rotary = Rotary(64)
    >>> out = linear_rope_attention(q, k, v, rotary=rotary)
    >>> a, b = [x[:, :900] for x in (q, k, v)], [x[:, 900:] for x in (q, k, v)]
    >>> head, state = linear_rope_attention(*a, rotary=rotary, return_state=True)
    >>> tail = linear_rope_attention(*b, rotary=rotary, state=state)
    >>> torch.testing.assert_close(torch.cat((head, tail), 1), out)
    """
    if decay is not None or cu_seqlens is not None:
        name = "decay" if decay is not None else "cu_seqlens"
        raise NotImplementedError(f"{name}: not in this version, expected None")
    _check_tensors(q, k, v, causal)
    if not 0 < eps < math.inf:
        raise ValueError(f"eps={eps}: expected a positive finite number")
    (b, n, _, d), (m, g, e) = q.shape, v.shape[1:]

    _check_mask(key_mask, b, m, q.device)
    fmap, elementwise, positive, map_identity = _resolve_map(feature_map, d)
    if normalize and not positive:
        raise ValueError(
            f"feature_map={feature_map!r}: its features are signed, so the normalizer can vanish; "
            "expected normalize=False or a positive map"
        )
    if fmap is not None:
        if key_mask is not None:  # what padding holds may overflow in the map, and 0 * inf is no 0
            k = k.masked_fill(~key_mask[:, :, None, None], 0)
        q, k = fmap.queries(q), fmap.keys(k)
    f = q.shape[-1]
    _check_rotary(rotary, f, g)

    identity = f"{map_identity}; {rotary and rotary.identity}"
    if state is None:
        wide = torch.promote_types(v.dtype, torch.float32)
        kv, z = v.new_zeros(b, g, f, e, dtype=wide), v.new_zeros(b, g, f, dtype=torch.float64)
        start = torch.zeros(1, dtype=torch.int64, device=q.device)
    else:
        more = max(n, m) if positions is None else 0
        _check_state(state, (b, g, f, e), identity, q.device, more)
        kv, z, start = state.kv, state.z, state.position
    in_place = state is not None and state.donated
    where, key_where, end = _resolve_positions(positions, key_positions, start, b, n, m, q.device)

    module = backends.choose(backend, q, v, kv)
    out: Tensor
    out, kv, z = module.attend(
        q, k, v, kv, z,
        feature_map=elementwise, rotary=rotary, positions=where, key_positions=key_where,
        key_mask=key_mask, causal=causal, normalize=normalize, eps=eps,
        carry=return_state or state is not None, in_place=in_place,
    )  # fmt: skip
    if state is not None and in_place and kv is state.kv and z is state.z:  # then all of it is in place
        state.position.copy_(end)
        return (out, replace(state, donated=False)) if return_state else out
    if not return_state:
        return out
    return out, LinearAttentionState(kv, z, end.expand(b).clone(), identity)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    named = {"q": q, "k": k, "v": v}
    for name, x in named.items():
        if not isinstance(x, Tensor) or x.layout != torch.strided:
            kind = x.layout if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{name}: got {kind}, expected a dense torch.Tensor")
        if x.dtype not in _DTYPES:
            raise TypeError(f"{name}: got {x.dtype}, expected float64, float32, bfloat16 or float16")
        if x.ndim != 4:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected (batch, length, heads, dim)")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k, v: got {q.dtype}, {k.dtype}, {v.dtype}, expected one dtype")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k, v: got {q.device}, {k.device}, {v.device}, expected one device")
    (b, n, h, d), (_, m, g, _) = q.shape, k.shape
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k, v: got {tuple(k.shape)}, {tuple(v.shape)}, expected (b, m, g, d), (b, m, g, e)")
    if k.shape[0] != b:
        raise ValueError(f"k: got batch {k.shape[0]}, expected q's {b}")
    if k.shape[3] != d or d == 0:
        raise ValueError(f"q, k: got head dims {d}, {k.shape[3]}, expected equal and positive ones")
    if g == 0 or h == 0 or h % g:
        raise ValueError(f"k: got {g} heads, expected a divisor of q's {h}")
    if causal and n != m:
        raise ValueError(f"k: got length {m}, expected q's {n} with causal=True")


def _resolve_map(feature_map: str | FeatureMap | None, d: int) -> tuple[FeatureMap | None, str, bool, str]:
    """The map to run before the backend, the elementwise one inside it, positivity, identity."""
    if feature_map is None:
        return None, "identity", True, "features"
    if isinstance(feature_map, str) and feature_map in ELEMENTWISE:  # every decoding step comes here
        return None, feature_map, ELEMENTWISE[feature_map].positive, f"{feature_map}({d})"
    if isinstance(feature_map, str):
        if feature_map in feature_maps.NAMES and feature_map != "softmax":
            raise ValueError(
                f"feature_map={feature_map!r}: it has a projection of its own; "
                f"expected the object that feature_maps.make({feature_map!r}, {d}) made"
            )
        feature_map = feature_maps.make(feature_map, d)
    if not isinstance(feature_map, FeatureMap):
        raise TypeError(f"feature_map: got {type(feature_map).__name__}, expected a name, FeatureMap or None")
    if feature_map.head_dim not in (None, d):
        raise ValueError(f"feature_map={feature_map}: made for heads of {feature_map.head_dim}, expected {d}")
    if feature_map.elementwise is not None:
        return None, feature_map.elementwise, feature_map.positive, feature_map.identity
    return feature_map, "identity", feature_map.positive, feature_map.identity


def _check_rotary(rotary: Rotary | None, f: int, g: int) -> None:
    if rotary is None:
        return
    if not isinstance(rotary, Rotary):
        raise TypeError(f"rotary: got {type(rotary).__name__}, expected Rotary or None")
    if rotary.dim != f:
        raise ValueError(f"rotary: got dim={rotary.dim}, expected the number of features, {f}")
    if rotary.theta.ndim == 2 and len(rotary.theta) != g:
        raise ValueError(f"rotary: got theta for {len(rotary.theta)} heads, expected {g} key/value heads")


def _check_mask(key_mask: Tensor | None, b: int, m: int, device: torch.device) -> None:
    if key_mask is None:
        return
    if not isinstance(key_mask, Tensor):
        raise TypeError(f"key_mask: got {type(key_mask).__name__}, expected a torch.Tensor")
    if key_mask.dtype != torch.bool or key_mask.shape != (b, m):
        raise ValueError(
            f"key_mask: got {key_mask.dtype} {tuple(key_mask.shape)}, expected torch.bool {(b, m)}"
        )
    if key_mask.device != device:
        raise ValueError(f"key_mask: got device {key_mask.device}, expected {device}")


def _check_state(
    state: LinearAttentionState,
    shape: tuple[int, ...],
    identity: str,
    device: torch.device,
    more: int,  # tokens whose positions follow the state's
) -> None:
    if not isinstance(state, LinearAttentionState):
        raise TypeError(f"state: got {type(state).__name__}, expected LinearAttentionState")
    if state.kv.shape != shape:
        raise ValueError(f"state: got kv of shape {tuple(state.kv.shape)}, expected (b, g, f, e) = {shape}")
    if state.identity != identity:
        raise ValueError(f"state: made with {state.identity}; expected {identity}, as this call has it")
    if state.kv.device != device:
        raise ValueError(f"state: got device {state.kv.device}, expected {device}")
    if _readable(device):
        positions = state.position.tolist()
        if positions and (min(positions) < 0 or max(positions) + more - 1 > MAX_POSITION):
            raise ValueError(
                f"state: got positions {positions} and {more} tokens more, expected 0 .. {MAX_POSITION}"
            )


def _readable(device: torch.device) -> bool:
    """Whether to look at numbers: it would stall a GPU and break a compiled graph."""
    return device.type == "cpu" and not torch.compiler.is_compiling()


def _resolve_positions(
    positions: Tensor | None,
    key_positions: Tensor | None,
    start: Tensor,  # (b or 1,)
    b: int,
    n: int,
    m: int,
    device: torch.device,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Positions of queries, of keys (None: the same), and the one after the last key."""
    consecutive = start[:, None]
    where = consecutive if positions is None else _check_positions("positions", positions, b, n, device)
    if key_positions is not None:
        key_where = _check_positions("key_positions", key_positions, b, m, device)
    else:
        key_where = where if m == n else consecutive
    same = key_where is where and m == n
    if m == 0:
        end = start
    elif key_positions is None and (positions is None or m != n):
        end = start + m
    else:
        end = key_where[:, -1] + 1
    return where, None if same else key_where, end


def _check_positions(name: str, positions: Tensor, b: int, n: int, device: torch.device) -> Tensor:
    if not isinstance(positions, Tensor):
        raise TypeError(f"{name}: got {type(positions).__name__}, expected a torch.Tensor")
    if positions.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise TypeError(f"{name}: got {positions.dtype}, expected integers")
    rows = positions.shape[0] if positions.ndim == 2 else 1
    if positions.ndim not in (1, 2) or positions.shape[-1] != n or rows not in (1, b):
        raise ValueError(f"{name}: got shape {tuple(positions.shape)}, expected {(n,)} or {(b, n)}")
    if positions.device != device:
        raise ValueError(f"{name}: got device {positions.device}, expected {device}")
    if _readable(device) and positions.numel():
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high > MAX_POSITION:
            raise ValueError(f"{name}: got {low} .. {high}, expected 0 .. {MAX_POSITION}")
    return positions.to(torch.int64).view(rows, n)

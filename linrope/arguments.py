"""What the arguments of linear_rope_attention and of the layers must be, and the positions they amount to."""

import torch
from torch import Tensor

from linrope import feature_maps
from linrope.feature_maps import ELEMENTWISE, FeatureMap
from linrope.rotary import MAX_POSITION, Rotary
from linrope.state import LinearAttentionState

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def readable(device: torch.device) -> bool:
    """Whether to look at numbers: it would stall a GPU and break a compiled graph."""
    return device.type == "cpu" and not torch.compiler.is_compiling()


def resolve_heads(
    embed_dim: int, num_heads: int, num_kv_heads: int | None, head_dim: int | None, value_head_dim: int | None
) -> tuple[int, int, int]:
    """g, d and e of a layer."""
    g = num_heads if num_kv_heads is None else num_kv_heads
    if embed_dim < 1 or num_heads < 1 or g < 1 or num_heads % g:
        raise ValueError(
            f"num_kv_heads={g}: expected a divisor of num_heads={num_heads}, "
            f"and embed_dim={embed_dim} positive"
        )
    if head_dim is None and embed_dim % num_heads:
        raise ValueError(f"embed_dim={embed_dim}: expected a multiple of num_heads={num_heads}")
    d = embed_dim // num_heads if head_dim is None else head_dim
    e = d if value_head_dim is None else value_head_dim
    if d < 1 or e < 1:
        raise ValueError(f"head_dim={d}, value_head_dim={e}: expected at least 1")
    return g, d, e


def check_inputs(x: Tensor, context: Tensor | None, embed_dim: int) -> None:
    """Of a layer."""
    for name, tensor in (("x", x), ("context", context)):
        if tensor is not None and (tensor.ndim != 3 or tensor.shape[-1] != embed_dim):
            raise ValueError(
                f"{name}: got shape {tuple(tensor.shape)}, expected (batch, length, {embed_dim})"
            )


def check_tensors(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
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


def resolve_map(feature_map: str | FeatureMap | None, d: int) -> tuple[FeatureMap | None, str, bool, str]:
    """The map to run before the backend, the elementwise one inside it, positivity, identity."""
    if feature_map is None:
        return None, "identity", True, "features"
    if isinstance(feature_map, str) and feature_map in ELEMENTWISE:  # every decoding step comes here
        return None, feature_map, ELEMENTWISE[feature_map].positive, f"{feature_map}({d})"
    if isinstance(feature_map, str):
        made = feature_maps.make(feature_map, d)
        if made.state_dict():
            raise ValueError(
                f"feature_map={feature_map!r}: it has weights or a projection of its own; "
                f"expected the object that feature_maps.make({feature_map!r}, {d}) made"
            )
        feature_map = made
    if not isinstance(feature_map, FeatureMap):
        raise TypeError(f"feature_map: got {type(feature_map).__name__}, expected a name, FeatureMap or None")
    if feature_map.head_dim not in (None, d):
        raise ValueError(f"feature_map={feature_map}: made for heads of {feature_map.head_dim}, expected {d}")
    if feature_map.elementwise is not None:
        return None, feature_map.elementwise, feature_map.positive, feature_map.identity
    return feature_map, "identity", feature_map.positive, feature_map.identity


def check_rotary(rotary: Rotary | None, f: int, g: int, causal: bool, before: bool) -> None:
    if rotary is None:
        return
    if not isinstance(rotary, Rotary):
        raise TypeError(f"rotary: got {type(rotary).__name__}, expected Rotary or None")
    if rotary.dim != f:
        what = "head dim" if before else "number of features"
        raise ValueError(f"rotary: got dim={rotary.dim}, expected the {what}, {f}")
    if (heads := rotary.frequencies.shape[1]) not in (1, g):
        raise ValueError(f"rotary: got theta for {heads} heads, expected {g} key/value heads")
    if rotary.fade is not None and (before or not causal):
        raise ValueError(f"rotary: got xpos={rotary.xpos}, expected causal=True and rope_order='after'")


def check_mask(key_mask: Tensor | None, b: int, m: int, device: torch.device) -> None:
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


def check_decay(decay: Tensor | None, g: int, causal: bool, device: torch.device) -> None:
    if decay is None:
        return
    if not isinstance(decay, Tensor) or not decay.is_floating_point():
        kind = decay.dtype if isinstance(decay, Tensor) else type(decay).__name__
        raise TypeError(f"decay: got {kind}, expected a floating-point torch.Tensor")
    if decay.shape != (g,):
        raise ValueError(f"decay: got shape {tuple(decay.shape)}, expected {(g,)}, one per key/value head")
    if decay.device != device:
        raise ValueError(f"decay: got device {decay.device}, expected {device}")
    if decay.requires_grad:
        raise ValueError("decay: got a tensor that requires gradients, expected a fixed one")
    if not causal:
        raise ValueError("decay: got causal=False, expected causal=True, where distances have a sign")
    if readable(device) and not bool(((decay > 0) & (decay <= 1)).all()):
        raise ValueError(f"decay: got {decay.tolist()}, expected numbers in (0, 1]")


def check_packing(cu_seqlens: Tensor | None, b: int, n: int, m: int, device: torch.device) -> None:
    if cu_seqlens is None:
        return
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens: got {type(cu_seqlens).__name__}, expected a torch.Tensor")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens: got {cu_seqlens.dtype}, expected int32 or int64")
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens: got shape {tuple(cu_seqlens.shape)}, expected (sequences + 1,)")
    if cu_seqlens.device != device:
        raise ValueError(f"cu_seqlens: got device {cu_seqlens.device}, expected {device}")
    if b != 1:
        raise ValueError(f"cu_seqlens: got batch {b}, expected 1: the sequences lie one behind the other")
    if n != m:
        raise ValueError(f"cu_seqlens: got {n} queries and {m} keys, expected as many of one as of the other")
    if readable(device):
        bounds = cu_seqlens.tolist()
        if bounds[0] != 0 or bounds[-1] != n or bounds != sorted(bounds):
            raise ValueError(
                f"cu_seqlens: got {bounds}, expected numbers that rise from 0 to the length, {n}"
            )


def check_state(
    state: LinearAttentionState, shape: tuple[int, ...], identity: str, device: torch.device
) -> None:
    if not isinstance(state, LinearAttentionState):
        raise TypeError(f"state: got {type(state).__name__}, expected LinearAttentionState")
    if state.kv.shape != shape:
        raise ValueError(f"state: got kv of shape {tuple(state.kv.shape)}, expected (b, g, f, e) = {shape}")
    if state.identity != identity:
        raise ValueError(f"state: made with {state.identity}; expected {identity}, as this call has it")
    if state.kv.device != device:
        raise ValueError(f"state: got device {state.kv.device}, expected {device}")


def resolve_positions(
    positions: Tensor | None,
    key_positions: Tensor | None,
    start: Tensor,  # (b or 1,), of packed sequences (s,): the position of the first token to come
    b: int,
    n: int,
    m: int,
    axes: int | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Positions of queries, of keys (None: the same), and the one after each sequence's last key.

    (b or 1, n), with axes (b or 1, n, axes); (b or 1, 1): consecutive from there on.
    """
    if axes is not None and (positions is None or (m != n and key_positions is None)):
        name = "positions" if positions is None else "key_positions"
        raise ValueError(f"{name}: got None, expected coordinates, as the rotation has axes={axes}")
    consecutive = start[:, None]
    if cu_seqlens is not None:
        tokens = torch.arange(n, device=start.device)
        owner = torch.searchsorted(cu_seqlens[1:], tokens, right=True).clamp_(max=len(start) - 1)
        consecutive = (tokens + (start - cu_seqlens[:-1])[owner])[None]
    if readable(start.device) and (positions is None or (key_positions is None and m != n)) and start.numel():
        more = max(n, m) if cu_seqlens is None else int(cu_seqlens.diff().max())
        numbers = start.tolist()  # one call into PyTorch: each costs a decoding step some microseconds
        if min(numbers) < 0 or max(numbers) + more - 1 > MAX_POSITION:
            raise ValueError(
                f"state: got positions {numbers} and {more} tokens more, expected 0 .. {MAX_POSITION}"
            )
    where = consecutive if positions is None else _check_positions("positions", positions, start, b, n, axes)
    if key_positions is not None:
        key_where = _check_positions("key_positions", key_positions, start, b, m, axes)
    else:
        key_where = where if m == n else consecutive
    same = key_where is where and m == n
    return where, None if same else key_where, _end(key_where, start, m, axes, cu_seqlens)


def _end(key_where: Tensor, start: Tensor, m: int, axes: int | None, cu_seqlens: Tensor | None) -> Tensor:
    if m == 0:
        return start
    if cu_seqlens is not None:
        lengths = cu_seqlens.diff()
        if axes is not None:
            return start + lengths
        last = key_where[0].index_select(0, (cu_seqlens[1:] - 1).clamp(min=0, max=m - 1))
        return torch.where(lengths > 0, last + 1, start)
    if axes is not None or (key_where.shape[1] == 1 and m > 1):
        return start + m  # on a grid a state counts tokens
    return key_where[:, -1] + 1


def _check_positions(name: str, positions: Tensor, start: Tensor, b: int, n: int, axes: int | None) -> Tensor:
    if not isinstance(positions, Tensor):
        raise TypeError(f"{name}: got {type(positions).__name__}, expected a torch.Tensor")
    if positions.dtype not in _INTEGERS:
        raise TypeError(f"{name}: got {positions.dtype}, expected integers")
    shape = (n,) if axes is None else (n, axes)
    rows = positions.shape[0] if positions.ndim > len(shape) else 1
    fits = positions.ndim - len(shape) in (0, 1) and rows in (1, b)
    if not fits or any(have != want for have, want in zip(positions.shape[-len(shape) :], shape)):
        raise ValueError(f"{name}: got shape {tuple(positions.shape)}, expected {shape} or {(b, *shape)}")
    if positions.device != start.device:
        raise ValueError(f"{name}: got device {positions.device}, expected {start.device}")
    if readable(start.device) and positions.numel():
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high > MAX_POSITION:
            raise ValueError(f"{name}: got {low} .. {high}, expected 0 .. {MAX_POSITION}")
    return positions.to(torch.int64).view(rows, *shape)


def check_order(positions: Tensor, start: Tensor, cu_seqlens: Tensor | None) -> None:
    """Where keys fade with distance, positions must not fall; start: as in resolve_positions."""
    if not readable(start.device) or positions.shape[1] == 0:
        return
    if cu_seqlens is None:
        first, rising = positions[:, 0], positions.diff(dim=1) >= 0
    else:
        begins = cu_seqlens[:-1][cu_seqlens.diff() > 0]
        first, start = positions[0, begins], start[cu_seqlens.diff() > 0]
        rising = positions.diff(dim=1) >= 0
        rising[:, begins[1:] - 1] = True
    if not bool(rising.all()) or not bool((first >= start - 1).all()):
        raise ValueError(
            "positions: got falling ones, expected each at least the one before it (with a state from "
            "its position - 1 on), since keys fade with distance"
        )

"""What the arguments of linear_rope_attention and of the layers must be, and the positions they amount to."""

from collections.abc import Sequence

import torch
from torch import Tensor

from linrope import feature_maps
from linrope.common.names import readable
from linrope.feature_maps import FeatureMap
from linrope.feature_maps.base import same_identity
from linrope.rotation.rotary import MAX_POSITION, Rotary
from linrope.sequence.decay import Tokens
from linrope.sequence.packing import at_last, owners, previous
from linrope.sequence.state import LinearAttentionState

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


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


def check_tensors(q: Tensor | None, k: Tensor, v: Tensor, causal: bool) -> None:
    """q None: the last state alone is asked for."""
    named = {"k": k, "v": v} if q is None else {"q": q, "k": k, "v": v}
    for name, x in named.items():
        if not isinstance(x, Tensor) or x.layout is not torch.strided:
            kind = x.layout if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{name}: got {kind}, expected a dense torch.Tensor")
        if x.dtype not in _DTYPES:
            raise TypeError(f"{name}: got {x.dtype}, expected float64, float32, bfloat16 or float16")
        if x.ndim != 4:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected (batch, length, heads, dim)")
    q = k if q is None else q
    dtype, device = v.dtype, v.device
    if k.dtype != dtype or q.dtype != dtype:
        got = ", ".join(str(x.dtype) for x in named.values())
        raise TypeError(f"{', '.join(named)}: got {got}, expected one dtype")
    if k.device != device or q.device != device:
        got = ", ".join(str(x.device) for x in named.values())
        raise ValueError(f"{', '.join(named)}: got {got}, expected one device")
    (b, m, g, d), (q_b, n, h, q_d), (v_b, v_m, v_g, _) = k.shape, q.shape, v.shape
    if b != v_b or m != v_m or g != v_g:
        raise ValueError(f"k, v: got {tuple(k.shape)}, {tuple(v.shape)}, expected (b, m, g, d), (b, m, g, e)")
    if q_b != b:
        raise ValueError(f"k: got batch {b}, expected q's {q_b}")
    if q_d != d or d == 0:
        raise ValueError(f"q, k: got head dims {q_d}, {d}, expected equal and positive ones")
    if g == 0 or h == 0 or h % g:
        raise ValueError(f"k: got {g} heads, expected a divisor of q's {h}")
    if causal and n != m:
        raise ValueError(f"k: got length {m}, expected q's {n} with causal=True")


def resolve_map(feature_map: str | FeatureMap | None, d: int) -> FeatureMap | None:
    """The FeatureMap; None: q and k are features."""
    if feature_map is None:
        return None
    if isinstance(feature_map, str):
        return _made_by_name(feature_map, d)
    if not isinstance(feature_map, FeatureMap):
        raise TypeError(f"feature_map: got {type(feature_map).__name__}, expected a name, FeatureMap or None")
    if feature_map.head_dim not in (None, d):
        raise ValueError(f"feature_map={feature_map}: made for heads of {feature_map.head_dim}, expected {d}")
    return feature_map


_MADE: dict[tuple[str, int], FeatureMap] = {}  # every decoding step asks


def _made_by_name(name: str, d: int) -> FeatureMap:
    if (name, d) in _MADE and not torch.compiler.is_compiling():
        return _MADE[name, d]
    made = feature_maps.make(name, d)
    if [*made.parameters(), *made.buffers()]:
        raise ValueError(
            f"feature_map={name!r}: it has weights or a projection of its own; "
            f"expected the object that feature_maps.make({name!r}, {d}) made"
        )
    if not torch.compiler.is_compiling():
        _MADE[name, d] = made
    return made


def check_rotary(rotary: Rotary | None, f: int, g: int, causal: bool, before: bool) -> None:
    if rotary is None:
        return
    if not isinstance(rotary, Rotary):
        raise TypeError(f"rotary: got {type(rotary).__name__}, expected Rotary or None")
    if rotary.dim != f:
        what = "head dim" if before else "number of features"
        raise ValueError(f"rotary: got dim={rotary.dim}, expected the {what}, {f}")
    if rotary.heads not in (1, g):
        raise ValueError(f"rotary: got theta for {rotary.heads} heads, expected {g} key/value heads")
    if rotary.xpos is not None and (before or not causal):
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


def _check_floating(name: str, x: Tensor, device: torch.device) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name}: got {kind}, expected a floating-point torch.Tensor")
    if x.device != device:
        raise ValueError(f"{name}: got device {x.device}, expected {device}")


def check_decay(decay: Tensor | None, g: int, causal: bool, device: torch.device) -> None:
    if decay is None:
        return
    _check_floating("decay", decay, device)
    if decay.shape != (g,):
        raise ValueError(f"decay: got shape {tuple(decay.shape)}, expected {(g,)}, one per key/value head")
    if not causal:
        raise ValueError("decay: got causal=False, expected causal=True, where distances have a sign")
    if readable(decay) and not bool(((decay > 0) & (decay <= 1)).all()):
        raise ValueError(f"decay: got {decay.tolist()}, expected numbers in (0, 1]")


def check_log_decay(log_decay: Tensor | None, k: Tensor, causal: bool) -> None:
    if log_decay is None:
        return
    _check_floating("log_decay", log_decay, k.device)
    b, m, g, _ = k.shape
    if log_decay.ndim != 3 or not _broadcasts(log_decay.shape, (b, m, g), (0, 2)):
        raise ValueError(
            f"log_decay: got shape {tuple(log_decay.shape)}, expected (b or 1, n, g or 1) = {(b, m, g)}"
        )
    if not causal:
        raise ValueError("log_decay: got causal=False, expected causal=True: it fades what came before")
    if readable(log_decay) and log_decay.numel() and float(log_decay.detach().max()) > 0:
        raise ValueError(f"log_decay: got up to {float(log_decay.detach().max()):.3g}, expected numbers <= 0")


def check_angle_steps(angle_steps: Tensor | None, k: Tensor, n: int, f: int, rotary: Rotary | None) -> None:
    if angle_steps is None:
        return
    _check_floating("angle_steps", angle_steps, k.device)
    b, m, g, _ = k.shape
    most = f // 2 if rotary is None else rotary.rotary_dim // 2
    if angle_steps.ndim != 4 or not _broadcasts(angle_steps.shape[:3], (b, m, g), (0, 2)):
        raise ValueError(
            f"angle_steps: got shape {tuple(angle_steps.shape)}, expected (b or 1, n, g or 1, pairs) with "
            f"b, n, g = {(b, m, g)}"
        )
    pairs = angle_steps.shape[3]
    if not 1 <= pairs <= most or (rotary is not None and pairs != most):
        raise ValueError(f"angle_steps: got {pairs} pairs, expected {most}")
    if n != m:
        raise ValueError(
            f"angle_steps: got {n} queries and {m} keys, expected as many of one as of the other"
        )
    if rotary is not None and rotary.xpos is not None:
        raise ValueError(f"angle_steps: got them beside xpos={rotary.xpos}, expected a rotation without it")


def _broadcasts(shape: Sequence[int], full: Sequence[int], ones: Sequence[int]) -> bool:
    return all(have == want or (i in ones and have == 1) for i, (have, want) in enumerate(zip(shape, full)))


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
    if readable(cu_seqlens):
        bounds = cu_seqlens.tolist()
        if bounds[0] != 0 or bounds[-1] != n or bounds != sorted(bounds):
            raise ValueError(
                f"cu_seqlens: got {bounds}, expected numbers that rise from 0 to the length, {n}"
            )


def check_state(
    state: LinearAttentionState, shape: tuple[int, ...], identity: str, device: torch.device
) -> None:
    """shape: (s, g, f, e)."""
    if not isinstance(state, LinearAttentionState):
        raise TypeError(f"state: got {type(state).__name__}, expected LinearAttentionState")
    got = state.kv.shape if state.slots is None else (state.sequences, *state.kv.shape[1:])
    if got != shape:
        got = tuple(got)
        raise ValueError(f"state: got kv of shape {got}, expected (b, g, f, e) = {shape}")
    if not same_identity(state.identity, identity):
        raise ValueError(f"state: made with {state.identity}; expected {identity}, as this call has it")
    if state.kv.device != device:
        raise ValueError(f"state: got device {state.kv.device}, expected {device}")


def check_angle(state: LinearAttentionState, angle_steps: Tensor) -> None:
    """Whether the state's sum of steps fits these, and a pool has a place for the sum."""
    (heads, pairs), angle = angle_steps.shape[2:], state.angle
    if angle is None:
        if state.slots is not None:
            raise ValueError(
                "state: got rows of a pool made without angle_steps, which has no place for theirs"
            )
        return
    g = state.kv.shape[1]
    if angle.shape[1] not in (1, g) or angle.shape[2] != pairs:
        raise ValueError(
            f"state.angle: got {tuple(angle.shape)}, expected ({angle.shape[0]}, {g} or 1, {pairs}) beside "
            f"these angle_steps"
        )
    if state.slots is not None and angle.shape[1] < heads:
        raise ValueError(
            f"state.angle: got rows of a pool made with angle_steps of one head, expected a place for {heads}"
        )


def resolve_positions(
    positions: Tensor | None,
    key_positions: Tensor | None,
    start: Tensor,  # (b or 1,), of packed sequences (s,): the position of the first token to come
    b: int,
    n: int,
    m: int,
    axes: int | None,
    bounds: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Positions of queries, and of keys (None: the same).

    (b or 1, n), with axes (b or 1, n, axes); (b or 1, 1): consecutive from there on.
    """
    if axes is not None and (positions is None or (m != n and key_positions is None)):
        name = "positions" if positions is None else "key_positions"
        raise ValueError(f"{name}: got None, expected coordinates, as the rotation has axes={axes}")
    by_default = positions is None or (key_positions is None and m != n)
    if by_default and readable(start) and start.numel():
        more = max(n, m) if bounds is None else int(bounds.diff().max())
        numbers = start.tolist()  # one call into PyTorch: each costs a decoding step some microseconds
        if min(numbers) < 0 or max(numbers) + more - 1 > MAX_POSITION:
            raise ValueError(
                f"state: got positions {numbers} and {more} tokens more, expected 0 .. {MAX_POSITION}"
            )
    consecutive = start.unsqueeze(1)
    if by_default and bounds is not None:
        consecutive = (torch.arange(n, device=start.device) + (start - bounds[:-1])[owners(bounds, n)])[None]
    given = consecutive
    if positions is not None:
        given = _check_positions("positions", positions, start, b, n, axes)
    key_given = given if m == n else consecutive
    if key_positions is not None:
        key_given = _check_positions("key_positions", key_positions, start, b, m, axes)
    same = key_given is given and m == n
    return given, None if same else key_given


def next_position(tokens: Tokens, m: int, counted: bool) -> Tensor:
    """(b or 1,) or (s,): the position after each sequence's last key; counted: they rose by one per token."""
    if counted:
        return tokens.start + (m if tokens.bounds is None else tokens.bounds.diff())
    keys = tokens.positions if tokens.key_positions is None else tokens.key_positions
    return tokens.start if m == 0 else at_last(keys + 1, tokens.start, tokens.bounds)


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
    if readable(positions) and positions.numel():
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high > MAX_POSITION:
            raise ValueError(f"{name}: got {low} .. {high}, expected 0 .. {MAX_POSITION}")
    return positions.to(torch.int64).view(rows, *shape)


def check_order(positions: Tensor, start: Tensor, bounds: Tensor | None) -> None:
    """Where keys fade with distance, positions must not fall; start: as in resolve_positions."""
    if readable(positions) and bool((positions < previous(positions, start - 1, bounds)).any()):
        raise ValueError(
            "positions: got falling ones, expected each at least the one before it (with a state from "
            "its position - 1 on), since keys fade with distance"
        )

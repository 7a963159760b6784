"""The checks of the arguments of linear_rope_attention."""

from collections.abc import Sequence

import torch
from torch import Tensor

from linrope import feature_maps
from linrope.common.argument_checks import ROPE_ORDERS, check_bools, check_dense, check_name, check_numbers
from linrope.common.tracing import values_readable
from linrope.feature_maps import FeatureMap
from linrope.feature_maps.base import is_feature_map
from linrope.operation.map_facts import MapFacts, facts_of
from linrope.operation.rotary_type import check_overridden, check_rotary_type
from linrope.recurrence.call import EPS_MODES, Call
from linrope.recurrence.decay import check_gates
from linrope.recurrence.identities import WITHOUT_Z, same_identity
from linrope.recurrence.state import LinearAttentionState
from linrope.rotation.rotary import Rotary


def check_settings(call: Call) -> FeatureMap | None:
    """Raises if the settings and shapes do not fit together. Returns the feature map; None: q and k are features."""
    q, k, v, rotary, causal = call.q, call.k, call.v, call.rotary, call.causal
    check_tensors(q, k, v, causal)
    check_bools(causal=causal, normalize=call.normalize, return_state=call.return_state)
    check_numbers(eps=call.eps)
    if not 0 < call.eps < torch.inf:
        raise ValueError(f"eps={call.eps}: expected a positive finite number")
    check_name("eps_mode", call.eps_mode, EPS_MODES)
    check_name("rope_order", call.rope_order, ROPE_ORDERS)
    (b, m, _, d), g = k.shape, v.shape[2]
    n, device = m if q is None else q.shape[1], k.device
    rotates_before_map = call.rope_order == "before"
    check_mask(call.key_mask, b, m, device)
    check_decay(call.decay, g, causal, device)
    check_write(call.write, v)
    check_cu_seqlens(call.cu_seqlens, b, n, m, device)
    fmap = resolve_map(call.feature_map, d)
    facts = facts_of(fmap)
    check_erase(call, v, facts)
    if call.normalize and not facts.positive:
        raise ValueError(
            f"feature_map={call.feature_map!r}: its features are signed, so the normalizer can vanish; "
            "expected normalize=False or a positive map"
        )
    f = facts.feature_dim or d
    rotated = d if rotates_before_map else f
    check_rotary(rotary, rotated, g, causal, rotates_before_map)
    check_angle_steps(call.angle_steps, v, n, rotated, rotary)
    if rotates_before_map and rotary is not None and call.decays_by_unit:
        raise ValueError(
            "rope_order='before': got log_decay with a last axis of units, which are pairs of features that turn; "
            "expected 'after', or log_decay per head, (b or 1, n, g or 1)"
        )
    if rotates_before_map and call.angle_steps is not None:
        raise ValueError("rope_order='before': got angle_steps, which turn features; expected 'after'")
    check_log_decay(call.log_decay, v, causal, units=f - call.pairs)
    if call.key_positions is not None and (call.decays_by_position or call.log_decay is not None):
        raise ValueError("key_positions: got a tensor, expected None with decay, log_decay or xpos")
    check_axes(rotary, call.decay is not None)
    return fmap


def check_values(call: Call) -> None:
    """Raises if a number is out of range, as far as numbers can be read without waiting for a GPU."""
    if call.decay is not None:
        check_decay_values(call.decay)
    if call.log_decay is not None:
        check_log_decay_values(call.log_decay)
    if call.cu_seqlens is not None:
        check_bounds(call.cu_seqlens, call.num_queries)


def check_axes(rotary: Rotary | None, decays: bool) -> None:
    """Rejects a rotation with axes together with what depends on a single position."""
    if decays and rotary is not None and rotary.axes is not None:
        raise ValueError(f"decay: got a rotation with axes={rotary.axes}, expected one with axes=None")


def check_tensors(q: Tensor | None, k: Tensor, v: Tensor, causal: bool) -> None:
    """Checks the types, dtypes, devices and shapes of q, k and v. q is None if only the last state is wanted."""
    named = {"k": k, "v": v} if q is None else {"q": q, "k": k, "v": v}
    for name, x in named.items():
        check_dense(name, x)
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
    (b, m, g, d), (q_b, n, h, q_d), (v_b, v_m, v_g, e) = k.shape, q.shape, v.shape
    if b != v_b or m != v_m or g > v_g or (g and v_g % g):
        raise ValueError(
            f"k, v: got {tuple(k.shape)}, {tuple(v.shape)}, expected (b, m, g, d), (b, m, a multiple of g, e)"
        )
    if q_b != b:
        raise ValueError(f"k: got batch {b}, expected q's {q_b}")
    if q_d != d or d == 0:
        raise ValueError(f"q, k: got head dims {q_d}, {d}, expected equal and positive ones")
    if e == 0:
        raise ValueError("v: got head dim 0, expected a positive one")
    if g == 0 or h == 0 or h % g:
        raise ValueError(f"k: got {g} heads, expected a divisor of q's {h}")
    if v_g != g and h != g:
        raise ValueError(
            f"v: got {v_g} heads, expected k's {g}; more heads of v require q to have {g} heads too, not {h}"
        )
    if causal and n != m:
        raise ValueError(f"k: got length {m}, expected q's {n} with causal=True")


def resolve_map(feature_map: str | FeatureMap | None, d: int) -> FeatureMap | None:
    """The FeatureMap of that name, or the object itself. None: q and k already are features."""
    if feature_map is None:
        return None
    if isinstance(feature_map, str):
        return _map_by_name(feature_map, d)
    if not is_feature_map(feature_map):
        raise TypeError(f"feature_map: got {type(feature_map).__name__}, expected a name, FeatureMap or None")
    if feature_map.head_dim not in (None, d):
        raise ValueError(f"feature_map={feature_map}: made for heads of {feature_map.head_dim}, expected {d}")
    return feature_map


def _map_by_name(name: str, d: int) -> FeatureMap:
    fmap = feature_maps.make(name, d)
    if [*fmap.parameters(), *fmap.buffers()]:
        raise ValueError(
            f"feature_map={name!r}: it has weights or a projection of its own; "
            f"expected the object that feature_maps.make({name!r}, {d}) made"
        )
    return fmap


def check_rotary(rotary: Rotary | None, f: int, g: int, causal: bool, rotates_before_map: bool) -> None:
    if rotary is None:
        return
    check_rotary_type(rotary)
    check_overridden(rotary, rotates_before_map)
    if rotary.dim != f:
        what = "head dim" if rotates_before_map else "number of features"
        raise ValueError(f"rotary: got dim={rotary.dim}, expected the {what}, {f}")
    if rotary.heads not in (1, g):
        raise ValueError(f"rotary: got theta for {rotary.heads} heads, expected {g} key/value heads")
    if rotary.xpos is not None and (rotates_before_map or not causal):
        raise ValueError(f"rotary: got xpos={rotary.xpos}, expected causal=True and rope_order='after'")


def check_mask(key_mask: Tensor | None, b: int, m: int, device: torch.device) -> None:
    if key_mask is None:
        return
    if not isinstance(key_mask, Tensor):
        raise TypeError(f"key_mask: got {type(key_mask).__name__}, expected a torch.Tensor")
    if key_mask.dtype != torch.bool:
        raise TypeError(f"key_mask: got {key_mask.dtype}, expected torch.bool")
    if key_mask.shape != (b, m):
        raise ValueError(f"key_mask: got shape {tuple(key_mask.shape)}, expected {(b, m)}")
    if key_mask.device != device:
        raise ValueError(f"key_mask: got device {key_mask.device}, expected {device}")


def check_decay(decay: Tensor | None, g: int, causal: bool, device: torch.device) -> None:
    if decay is None:
        return
    check_dense("decay", decay, device)
    if decay.shape != (g,):
        raise ValueError(f"decay: got shape {tuple(decay.shape)}, expected {(g,)}, one per key/value head")
    if not causal:
        raise ValueError("decay: got causal=False, expected causal=True: keys decay towards later queries")


def check_decay_values(decay: Tensor) -> None:
    if values_readable(decay) and not bool(((decay > 0) & (decay <= 1)).all()):
        raise ValueError(f"decay: got {decay.tolist()}, expected numbers in (0, 1]")


def check_log_decay(log_decay: Tensor | None, v: Tensor, causal: bool, *, units: int | None = None) -> None:
    """units: the pairs of features that turn and the features that do not; None: log_decay must be per head."""
    if log_decay is None:
        return
    check_dense("log_decay", log_decay, v.device)
    b, m, g, _ = v.shape
    shapes = [(b, m, g)] if units is None else [(b, m, g), (b, m, g, units)]
    shape = tuple(log_decay.shape)
    if not any(len(shape) == len(x) and _broadcasts(shape, x, (0, 2)) for x in shapes):
        per_unit = (
            "" if units is None else f", or {(b, m, g, units)}: per pair that turns, then per other feature"
        )
        raise ValueError(
            f"log_decay: got shape {shape}, expected (b or 1, n, g or 1) = {(b, m, g)}{per_unit}"
        )
    if not causal:
        raise ValueError("log_decay: got causal=False, expected causal=True: a gate decays earlier keys")


def check_log_decay_values(log_decay: Tensor) -> None:
    if values_readable(log_decay):
        check_gates(log_decay)


def _check_per_token(name: str, x: Tensor, v: Tensor, tokens: str) -> None:
    """Checks a number per token and head; ``tokens`` is the letter of their axis."""
    check_dense(name, x, v.device)
    if x.ndim != 3 or not _broadcasts(x.shape, v.shape[:3], (0, 2)):
        raise ValueError(
            f"{name}: got shape {tuple(x.shape)}, expected (b or 1, {tokens}, g or 1) = {tuple(v.shape[:3])}"
        )


def check_write(write: Tensor | None, v: Tensor) -> None:
    if write is None:
        return
    _check_per_token("write", write, v, "m")


def check_erase(call: Call, v: Tensor, fmap: MapFacts) -> None:
    """Checks erase, and refuses the options that the delta rule does not go with."""
    if call.erase is None:
        return
    _check_per_token("erase", call.erase, v, "n")
    if not call.causal:
        raise ValueError(
            "erase: got causal=False, expected causal=True: a key erases what earlier keys wrote; for both directions "
            "add the outputs of a causal call and of one on x.flip(1)"
        )
    if call.normalize:
        raise ValueError(
            "erase: got normalize=True, expected normalize=False, and keys of length 1: feature_map='unit'; with erase "
            "the normalizer can vanish; if you need its output, divide by that of a second call with values of 1, "
            "rotary=None and normalize=False"
        )
    features = ", or None if q and k are features already, with keys of length 1"
    given = call.feature_map
    name = repr(given) if isinstance(given, str) else type(given).__name__
    check_parts_with_erase(fmap, call.rotary, name, "erase", features)


def check_parts_with_erase(
    fmap: FeatureMap | MapFacts, rotary: Rotary | None, name: str, option: str, or_else: str = ""
) -> None:
    """Refuses maps and rotations that the delta rule does not go with. name: the map's; option: of the delta rule."""
    if fmap.log_scaled:
        raise ValueError(
            f"feature_map={name}: its features have scales, which mean nothing with {option}; expected 'unit'"
        )
    if fmap.long_keys:
        raise ValueError(
            f"feature_map={name}: with {option} keys must have length 1, or the state grows without bound; "
            f"expected 'unit', which may have an activation{or_else}"
        )
    if isinstance(rotary, Rotary) and rotary.xpos is not None:
        raise ValueError(f"rotary: got xpos={rotary.xpos} with {option}, expected xpos=None")


def check_angle_steps(angle_steps: Tensor | None, v: Tensor, n: int, f: int, rotary: Rotary | None) -> None:
    if angle_steps is None:
        return
    check_dense("angle_steps", angle_steps, v.device)
    b, m, g, _ = v.shape
    max_pairs = f // 2 if rotary is None else rotary.rotary_dim // 2
    if angle_steps.ndim != 4 or not _broadcasts(angle_steps.shape[:3], (b, m, g), (0, 2)):
        raise ValueError(
            f"angle_steps: got shape {tuple(angle_steps.shape)}, expected (b or 1, n, g or 1, pairs) with "
            f"b, n, g = {(b, m, g)}"
        )
    pairs = angle_steps.shape[3]
    if not 1 <= pairs <= max_pairs or (rotary is not None and pairs != max_pairs):
        expected = f"1 to {max_pairs}" if rotary is None else f"{max_pairs}, the pairs of rotary"
        raise ValueError(f"angle_steps: got {pairs} pairs, expected {expected}")
    if n != m:
        raise ValueError(f"angle_steps: got {n} queries and {m} keys, expected equal numbers")
    if rotary is not None and rotary.xpos is not None:
        raise ValueError(
            f"angle_steps: got a tensor and a rotation with xpos={rotary.xpos}; expected a rotation without xpos"
        )


def _broadcasts(shape: Sequence[int], full: Sequence[int], axes: Sequence[int]) -> bool:
    """True if shape equals full, except that ``axes`` may have size 1."""
    return all(have == want or (i in axes and have == 1) for i, (have, want) in enumerate(zip(shape, full)))


def check_packing(cu_seqlens: Tensor | None, b: int, n: int, m: int, device: torch.device) -> None:
    """Checks the bounds of packed sequences, and their values."""
    check_cu_seqlens(cu_seqlens, b, n, m, device)
    if cu_seqlens is not None:
        check_bounds(cu_seqlens, n)


def check_cu_seqlens(cu_seqlens: Tensor | None, b: int, n: int, m: int, device: torch.device) -> None:
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
        raise ValueError(f"cu_seqlens: got batch {b}, expected 1: packed sequences share one row")
    if n != m:
        raise ValueError(f"cu_seqlens: got {n} queries and {m} keys, expected equal numbers")


def check_bounds(cu_seqlens: Tensor, n: int) -> None:
    if values_readable(cu_seqlens):
        bounds = cu_seqlens.tolist()
        if bounds[0] != 0 or bounds[-1] != n or bounds != sorted(bounds):
            raise ValueError(
                f"cu_seqlens: got {bounds}, expected numbers that rise from 0 to the length, {n}"
            )


def check_state(call: Call, fmap: FeatureMap | None) -> None:
    """Raises if the state's shapes and device do not fit the call."""
    state, k = call.state, call.k
    if not isinstance(state, LinearAttentionState):
        raise TypeError(
            f"state: got {type(state).__name__}, expected LinearAttentionState; state_from_sums makes one of sums"
        )
    shape = (
        call.sequences,
        call.v.shape[2],
        k.shape[3] if fmap is None else fmap.feature_dim,
        call.v.shape[3],
    )
    got = state.kv.shape if state.slots is None else (state.sequences, *state.kv.shape[1:])
    if got != shape:
        got = tuple(got)
        raise ValueError(f"state: got kv of shape {got}, expected (b, g, f, e) = {shape}")
    if call.normalize and state.identity.endswith(WITHOUT_Z):
        raise ValueError("state: made without z; expected normalize=False, which needs none")
    if call.erase is not None and state.slots is not None and not state.identity.endswith(WITHOUT_Z):
        raise ValueError(
            "state: got rows of a pool with z, expected one without z: make the pool with erase, for example by "
            "linear_rope_state(k[:, :0], v[:, :0], feature_map='unit', erase=erase[:, :0])"
        )
    if state.kv.device != k.device:
        raise ValueError(f"state: got device {state.kv.device}, expected {k.device}")
    if call.angle_steps is not None:
        check_angle(state, call.angle_steps)
    elif state.angle is not None:
        raise ValueError("angle_steps: got None, expected a tensor, as in the calls that made the state")


def check_identity(state: LinearAttentionState, identity: str) -> None:
    """Raises if calls with another map or rotation made the state."""
    if not same_identity(state.identity.removesuffix(WITHOUT_Z), identity):
        raise ValueError(f"state: made with {state.identity}; expected {identity}, as in this call")


def check_angle(state: LinearAttentionState, angle_steps: Tensor) -> None:
    """Raises if the state's angle does not fit angle_steps, or if a pool has no room for the next angle."""
    (heads, pairs), angle = angle_steps.shape[2:], state.angle
    if angle is None:
        if state.slots is not None:
            raise ValueError(
                "state: got rows of a pool made without angle_steps, which cannot store the angle of this call"
            )
        return
    g = state.kv.shape[1]
    if angle.shape[1] not in (1, g) or angle.shape[2] != pairs:
        raise ValueError(
            f"state.angle: got {tuple(angle.shape)}, expected ({angle.shape[0]}, {g} or 1, {pairs}) with "
            "these angle_steps"
        )
    if state.slots is not None and angle.shape[1] < heads:
        raise ValueError(
            f"state.angle: got rows of a pool made with angle_steps of one head, expected one made with {heads}"
        )

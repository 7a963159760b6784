"""The operation on a shard: the own tokens' state, a gather of all ranks' states, then the ordinary call."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linrope.decay import NOTHING_KEPT, visible
from linrope.distributed.exchange import Gathered
from linrope.distributed.fold import Rules, fold
from linrope.distributed.shard import Shard
from linrope.feature_maps import FeatureMap
from linrope.names import readable
from linrope.rotary import Rotary
from linrope.state import NO_KEYS, LinearAttentionState

FIRST = "first."  # before the names of what belongs to the first local document


class Operation(NamedTuple):
    """What the operation does with a request, whose fields are its arguments."""

    check: Callable[[Any], FeatureMap | None]
    attend: Callable[[Any], tuple[Tensor, LinearAttentionState | None]]
    identity: Callable[[FeatureMap | None, Rotary | None, str], str]


class Started(NamedTuple):
    """A call whose states are on their way to the other ranks."""

    shard: Shard
    names: list[str]
    gathered: Gathered | None  # None: in a group of one nothing is sent


def attend_shard(
    request: Any, shard: Shard | Started, operation: Operation
) -> tuple[Tensor, LinearAttentionState | None]:
    """out, and the last state where it is wanted."""
    if request.cu_seqlens is not None:
        raise ValueError("cu_seqlens: got them beside a shard, expected None, as the shard has them")
    started = shard if isinstance(shard, Started) else begin_shard(request, shard, operation)
    request = request._replace(cu_seqlens=started.shard.cu_seqlens)
    if started.gathered is None:
        return operation.attend(request)
    return _finish(started, started.gathered.wait(), request, operation)


def begin_shard(request: Any, shard: Shard, operation: Operation) -> Started:
    """Sends the state of the last local document (bidirectional and packed: and the first)."""
    if not isinstance(shard, Shard):
        raise TypeError(f"shard: got {type(shard).__name__}, expected linrope.distributed.Shard or None")
    if shard.size == 1:
        return Started(shard, [], None)
    shard.agree(lambda: _describe(request, shard, operation))
    own = _own(request, shard, operation, -1)
    if not request.causal and shard.cu_seqlens is not None:
        own |= {f"{FIRST}{name}": x for name, x in _own(request, shard, operation, 0).items()}
    return Started(shard, list(own), shard.channel.gather(list(own.values()), bool(_learned(request))))


def _finish(
    started: Started, tensors: list[Tensor], request: Any, operation: Operation
) -> tuple[Tensor, LinearAttentionState | None]:
    """The ordinary call, with the other ranks' tokens as its state."""
    shard = started.shard
    if request.q.shape[1] != request.k.shape[1]:
        raise ValueError(
            f"q: got {request.q.shape[1]} queries and {request.k.shape[1]} keys beside a shard, expected as "
            "many of one as of the other"
        )
    own = dict(zip(started.names, tensors, strict=True))
    log_gamma = None if request.decay is None else request.decay.double().log()
    rotary = request.rotary
    xpos = None if rotary is None or rotary.fade is None else rotary.fade.to(request.k.device)
    rules = Rules(log_gamma, xpos, "interleaved" if rotary is None else rotary.layout)
    before = _before(request, shard, operation, own)
    fresh = request.state is None
    rows = _rows(own, shard, before, rules, request.causal, fresh)
    # Positions that are given begin anywhere; on a grid a state counts tokens.
    by_default = request.positions is None or (rotary is not None and rotary.axes is not None)
    position = _positions(request, shard).expand(-1, request.k.shape[0]).flatten() if by_default else None
    state, packed = _together(rows, position), shard.cu_seqlens is not None
    out, last = operation.attend(request._replace(state=state, return_state=request.return_state and packed))
    if request.return_state and not packed:
        last = fold(own, shard.everywhere, before, rules, fresh=fresh)
    return out, last


def _describe(request: Any, shard: Shard, operation: Operation) -> str:
    """What has to be the same on all ranks; raises what is wrong on this one."""
    operation.check(request._replace(q=None, causal=True, normalize=False, key_positions=None))
    k, v, state = request.k, request.v, request.state
    if k.shape[1] != shard.length:
        raise ValueError(
            f"k: got {k.shape[1]} tokens on rank {shard.rank}, expected {shard.length} as its shard has"
        )
    if state is not None and (state.slots is not None or shard.cu_seqlens is not None):
        what = "packed sequences" if state.slots is None else "rows of a pool"
        raise NotImplementedError(f"state: got one of {what} beside a shard, expected None")
    b, _, g, d = k.shape
    tensors = {"k": k, "v": v, "decay": request.decay, "log_decay": request.log_decay}
    tensors |= {"angle_steps": request.angle_steps}
    given = [name for name in (*tensors, "positions", "state") if getattr(request, name) is not None]
    steps = None if request.angle_steps is None else tuple(request.angle_steps.shape[2:])
    if state is not None and readable(state.position):
        given[-1] = f"state at {state.position.tolist()}"
    return (
        f"{v.dtype} k (b, m, g, d) = ({b}, m, {g}, {d}), e={v.shape[3]}, causal={request.causal}, "
        f"feature_map={_named(request.feature_map)}, rotary={request.rotary}, given {given}, steps {steps}, "
        f"gradients of {_learned(request)}"
    )


def _learned(request: Any) -> list[str]:
    """What the state of the keys has gradients for."""
    names = ("k", "v", "decay", "log_decay", "angle_steps")
    tensors: list[tuple[str, Tensor | None]] = [(name, getattr(request, name)) for name in names]
    if isinstance(request.feature_map, FeatureMap):
        tensors += [("feature_map", x) for x in request.feature_map.parameters()]
    found = [name for name, x in tensors if x is not None and x.requires_grad and torch.is_grad_enabled()]
    return sorted(set(found), key=found.index)


def _named(feature_map: object) -> str:
    return feature_map if isinstance(feature_map, str) else type(feature_map).__name__


def _own(request: Any, shard: Shard, operation: Operation, index: int) -> dict[str, Tensor]:
    """The state of the first (0) or last (-1) local document's tokens alone, and the sum of its gates."""
    tokens = shard.piece(index)

    def part(x: Tensor | None, dim: int = 1) -> Tensor | None:
        return None if x is None else x.narrow(dim, tokens.start, tokens.stop - tokens.start)

    given = request.positions if request.key_positions is None else request.key_positions
    axes = request.rotary is not None and request.rotary.axes is not None
    key_mask, b = part(request.key_mask), request.k.shape[0]
    here = request._replace(
        q=None, k=part(request.k), v=part(request.v), causal=True, normalize=False, return_state=True,
        positions=part(given, -2 if axes else -1), key_positions=None, key_mask=key_mask, cu_seqlens=None,
        log_decay=part(request.log_decay), angle_steps=part(request.angle_steps),
    )  # fmt: skip
    position = _positions(request, shard)[index].expand(b)
    if here.positions is not None and not axes and here.k.shape[1]:
        position = here.positions[..., 0].long().expand(b)  # its own distances alone are of interest
    state = operation.attend(here._replace(state=_empty(request, position, operation)))[1]
    assert state is not None
    own = state.tensors()
    if here.log_decay is not None:
        gates = visible(here.log_decay, key_mask).clamp(min=NOTHING_KEPT).double().sum(1)
        own["gates"] = gates.expand(b, request.k.shape[2])
    return own


def _positions(request: Any, shard: Shard) -> Tensor:
    """(s or 1, b or 1): by default, of the first token of each local document; 0 where there is none."""
    begins = [piece.position for piece in shard.mine] or [0]
    positions = torch.tensor(begins, device=request.k.device)[:, None]
    return positions if request.state is None else positions + request.state.position


def _empty(request: Any, position: Tensor, operation: Operation) -> LinearAttentionState:
    """Of no tokens, for sequences that begin at position (s,)."""
    (_, _, g, d), fmap, v, before = request.k.shape, operation.check(request), request.v, request.state
    f, e, s = d if fmap is None else fmap.feature_dim, v.shape[3], len(position)
    kv_dtype = torch.promote_types(v.dtype, torch.float32) if before is None else before.kv.dtype
    kv = v.new_zeros(s, g, f, e, dtype=kv_dtype)
    z = v.new_zeros(s, g, f, dtype=torch.float64 if before is None else before.z.dtype)
    identity = operation.identity(fmap, request.rotary, request.rope_order)
    return LinearAttentionState(kv, z, position, identity)


def _before(request: Any, shard: Shard, operation: Operation, own: dict[str, Tensor]) -> LinearAttentionState:
    """What precedes all ranks: the state given to each of them, or an empty one."""
    state: LinearAttentionState | None = request.state
    if state is None:
        state = _empty(request, own["position"].new_zeros(request.k.shape[0]), operation)
    if "log_scale" in own and state.log_scale is None:
        state = replace(state, log_scale=own["log_scale"].new_full(own["log_scale"].shape[1:], NO_KEYS))
    return replace(state, conv=None)


def _rows(
    own: dict[str, Tensor],
    shard: Shard,
    before: LinearAttentionState,
    rules: Rules,
    causal: bool,
    fresh: bool,
) -> list[LinearAttentionState]:
    """What each local document goes on from: earlier ranks' tokens; bidirectional, later ones' too."""
    left = fold(own, shard.before, before, rules, fresh=fresh)
    rows = [left] + [before] * (len(shard.mine) - 1)
    if causal or not shard.mine:
        return rows
    # Of later ranks their first document counts, of earlier ones the last.
    here = shard.rank + 1
    sides = {
        name: torch.cat((x[:here], own.get(f"{FIRST}{name}", x)[here:]))
        for name, x in own.items()
        if not name.startswith(FIRST)
    }
    alone = len(rows) == 1
    chain = [*(shard.before if alone else []), shard.rank, *shard.after]
    both = fold(sides, chain, before, rules, fresh=fresh, skip=shard.rank)
    rows[-1] = replace(rows[-1], kv=both.kv, z=both.z, log_scale=both.log_scale)
    return rows


def _together(rows: list[LinearAttentionState], position: Tensor | None) -> LinearAttentionState:
    """One state of all rows; position: by default, of each."""
    first = rows[0]
    position = torch.cat([row.position for row in rows]) if position is None else position
    if len(rows) == 1:
        return replace(first, position=position)
    tensors: dict[str, Any] = {}
    for name, x in first.tensors().items():
        others = [getattr(row, name) for row in rows[1:]]
        tensors[name] = torch.cat([x, *(torch.zeros_like(x) if y is None else y for y in others)])
    return replace(first, **tensors | {"position": position})

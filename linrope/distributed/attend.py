"""The operation on a shard: the state of the local tokens, a gather of all states, then the ordinary call."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linrope.common.values import values_readable
from linrope.distributed.exchange import Gathered
from linrope.distributed.fold import Rules, fold
from linrope.distributed.layout import Layout
from linrope.distributed.uncompiled import uncompiled
from linrope.feature_maps import FeatureMap
from linrope.operation.attend import attend, identity_of
from linrope.operation.checks import check
from linrope.operation.request import Request
from linrope.sequence.decay import NOTHING_KEPT, visible
from linrope.sequence.state import NO_KEYS, LinearAttentionState

FIRST = "first."  # before the names of what belongs to the first local document


class SentState(NamedTuple):
    """A call on a shard whose states are on their way to the other processes."""

    shard: Layout
    names: list[str]
    gathered: Gathered | None  # None: in a group of one nothing is sent

    def attend(self, request: Request) -> tuple[Tensor, LinearAttentionState | None]:
        """out, and the last state if it is wanted."""
        return _attend(request, self)


@uncompiled
def send_state(request: Request, shard: Layout) -> SentState:
    """Sends the state of the last local document (bidirectional and packed: of the first too)."""
    _refuse_packing(request)
    if shard.size == 1:
        return SentState(shard, [], None)
    shard.agree(lambda: _describe(request, shard))
    request = _dense(request)
    local = _local_state(request, shard, -1)
    if not request.causal and shard.cu_seqlens is not None:
        local |= {f"{FIRST}{name}": x for name, x in _local_state(request, shard, 0).items()}
    return SentState(shard, list(local), shard.channel.gather(list(local.values()), bool(_learned(request))))


@uncompiled
def _attend(request: Request, sent: SentState) -> tuple[Tensor, LinearAttentionState | None]:
    _refuse_packing(request)
    request = replace(request, cu_seqlens=sent.shard.cu_seqlens)
    if sent.gathered is None:
        return attend(request)
    pool, state = request.state, _dense(request).state
    if pool is None or pool.slots is None:
        return _finish(sent, sent.gathered.wait(), request)
    out, last = _finish(sent, sent.gathered.wait(), replace(request, state=state, return_state=True))
    assert last is not None
    if last.kv.requires_grad:
        raise RuntimeError("state: got rows of a pool in a call with gradients, expected torch.no_grad()")
    pool.write(last)
    return out, pool._marked(donated=False, loop=None)


def _refuse_packing(request: Request) -> None:
    if request.cu_seqlens is not None:
        raise ValueError("cu_seqlens: got them beside a shard, expected None, as the shard has them")


def _dense(request: Request) -> Request:
    """The request with a copy of a pool's rows."""
    return request if request.state is None else replace(request, state=request.state.rows())


def _finish(
    sent: SentState, tensors: list[Tensor], request: Request
) -> tuple[Tensor, LinearAttentionState | None]:
    """The ordinary call, with the other ranks' tokens as its state."""
    shard = sent.shard
    assert request.q is not None
    if request.q.shape[1] != request.k.shape[1]:
        raise ValueError(
            f"q: got {request.q.shape[1]} queries and {request.k.shape[1]} keys beside a shard, expected as "
            "many of one as of the other"
        )
    own = dict(zip(sent.names, tensors, strict=True))
    log_gamma = None if request.decay is None else request.decay.double().log()
    rotary = request.rotary
    xpos = None if rotary is None or rotary.fade is None else rotary.fade.to(request.k.device)
    rules = Rules(log_gamma, xpos, "interleaved" if rotary is None else rotary.layout)
    before = _before(request, shard, own)
    fresh = request.state is None
    rows = _rows(own, shard, before, rules, request.causal, fresh)
    # Positions that are given begin anywhere; on a grid a state counts tokens.
    by_default = request.positions is None or (rotary is not None and rotary.axes is not None)
    position = _positions(request, shard).expand(-1, request.k.shape[0]).flatten() if by_default else None
    state, packed = _together(rows, position), shard.cu_seqlens is not None
    out, last = attend(replace(request, state=state, return_state=request.return_state and packed))
    if request.return_state and not packed:
        last = fold(own, shard.everywhere, before[0], rules, fresh=fresh)
    return out, last


def _describe(request: Request, shard: Layout) -> str:
    """What has to be the same on all ranks; raises what is wrong on this one."""
    check(replace(request, q=None, causal=True, normalize=False, key_positions=None))
    k, v, state = request.k, request.v, request.state
    if k.shape[1] != shard.length:
        raise ValueError(
            f"k: got {k.shape[1]} tokens on rank {shard.rank}, expected {shard.length} as its shard has"
        )
    if state is not None and shard.cu_seqlens is not None:
        if state.slots is not None:
            raise NotImplementedError(
                "state: got rows of a pool beside packed sequences in shards, of which a rank knows its own "
                "last states alone; expected a state"
            )
        if state.sequences != len(shard.bounds) - 1:
            documents = len(shard.bounds) - 1
            raise ValueError(
                f"state: got {state.sequences} sequences, expected those of all ranks, {documents}"
            )
    b, _, g, d = k.shape
    tensors = {"k": k, "v": v, "decay": request.decay, "log_decay": request.log_decay}
    tensors |= {"angle_steps": request.angle_steps}
    given = [name for name in (*tensors, "positions", "state") if getattr(request, name) is not None]
    steps = None if request.angle_steps is None else tuple(request.angle_steps.shape[2:])
    if state is not None and values_readable(state.position):
        given[-1] = f"state at {state.rows().position.tolist()}"
    return (
        f"{v.dtype} k (b, m, g, d) = ({b}, m, {g}, {d}), e={v.shape[3]}, causal={request.causal}, "
        f"feature_map={_named(request.feature_map)}, rotary={request.rotary}, given {given}, steps {steps}, "
        f"gradients of {_learned(request)}"
    )


def _learned(request: Request) -> list[str]:
    """What the state of the keys has gradients for."""
    names = ("k", "v", "decay", "log_decay", "angle_steps")
    tensors: list[tuple[str, Tensor | None]] = [(name, getattr(request, name)) for name in names]
    if isinstance(request.feature_map, FeatureMap):
        tensors += [("feature_map", x) for x in request.feature_map.parameters()]
    found = [name for name, x in tensors if x is not None and x.requires_grad and torch.is_grad_enabled()]
    return sorted(set(found), key=found.index)


def _named(feature_map: object) -> str:
    return feature_map if isinstance(feature_map, str) else type(feature_map).__name__


def _local_state(request: Request, shard: Layout, index: int) -> dict[str, Tensor]:
    """The state of the first (0) or last (-1) local document's tokens alone, and the sum of its gates."""
    tokens = shard.piece(index)

    def cut(x: Tensor, dim: int = 1) -> Tensor:
        if tokens == slice(0, x.shape[dim]):  # the backward pass of narrow() would fill and copy a tensor
            return x
        return x.narrow(dim, tokens.start, tokens.stop - tokens.start)

    def part(x: Tensor | None, dim: int = 1) -> Tensor | None:
        return None if x is None else cut(x, dim)

    given = request.positions if request.key_positions is None else request.key_positions
    axes = request.rotary is not None and request.rotary.axes is not None
    key_mask, b = part(request.key_mask), request.k.shape[0]
    here = replace(
        request,
        q=None, k=cut(request.k), v=cut(request.v), causal=True, normalize=False, return_state=True,
        positions=part(given, -2 if axes else -1), key_positions=None, key_mask=key_mask, cu_seqlens=None,
        log_decay=part(request.log_decay), angle_steps=part(request.angle_steps),
    )  # fmt: skip
    position = _positions(request, shard)[index].expand(b)
    if here.positions is not None and not axes and here.k.shape[1]:
        position = here.positions[..., 0].long().expand(b)  # its own distances alone are of interest
    state = attend(replace(here, state=_empty(request, position)))[1]
    assert state is not None
    own = state.tensors()
    if here.log_decay is not None:
        gates = visible(here.log_decay, key_mask).clamp(min=NOTHING_KEPT).double().sum(1)
        own["gates"] = gates.expand(b, request.k.shape[2])
    return own


def _positions(request: Request, shard: Layout) -> Tensor:
    """(s or 1, b or 1): by default, of the first token of each local document; 0 where there is none."""
    begins = [piece.position for piece in shard.mine] or [0]
    positions = torch.tensor(begins, device=request.k.device)[:, None]
    if request.state is None:
        return positions
    if shard.cu_seqlens is None:
        return positions + request.state.position
    return positions + request.state.position[shard.documents(positions.device)][:, None]


def _empty(request: Request, position: Tensor) -> LinearAttentionState:
    """Of no tokens, for sequences that begin at position (s,)."""
    (_, _, g, d), fmap, v, before = request.k.shape, check(request), request.v, request.state
    f, e, s = d if fmap is None else fmap.feature_dim, v.shape[3], len(position)
    kv_dtype = torch.promote_types(v.dtype, torch.float32) if before is None else before.kv.dtype
    kv = v.new_zeros(s, g, f, e, dtype=kv_dtype)
    z = v.new_zeros(s, g, f, dtype=torch.float64 if before is None else before.z.dtype)
    identity = identity_of(fmap, request.rotary, request.rope_order)
    return LinearAttentionState(kv, z, position, identity)


def _before(request: Request, shard: Layout, own: dict[str, Tensor]) -> list[LinearAttentionState]:
    """What precedes all ranks, of each local document: the state given to each of them, or an empty one."""
    state: LinearAttentionState | None = request.state
    if state is None:
        state = _empty(request, own["position"].new_zeros(request.k.shape[0]))
    if "log_scale" in own and state.log_scale is None:
        state = replace(state, log_scale=own["log_scale"].new_full(own["log_scale"].shape[1:], NO_KEYS))
    state = replace(state, conv=None)
    if shard.cu_seqlens is None:
        return [state]
    if request.state is None:
        return [state] * max(1, len(shard.mine))
    return [state.reorder(document) for document in shard.documents(state.kv.device)[:, None]]


def _rows(
    own: dict[str, Tensor],
    shard: Layout,
    before: list[LinearAttentionState],
    rules: Rules,
    causal: bool,
    fresh: bool,
) -> list[LinearAttentionState]:
    """What each local document goes on from: earlier ranks' tokens; bidirectional, later ones' too."""
    left = fold(own, shard.before, before[0], rules, fresh=fresh)
    rows = [left, *before[1:]]
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
    both = fold(sides, chain, before[-1], rules, fresh=fresh, skip=shard.rank)
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

"""The operation on a shard: the state of the local tokens, a gather of all states, then the ordinary call.

With erase only positions and angles are gathered, and the states take the way of ``pipeline.py``.

b batch, n queries, m keys, g key/value heads, d head dim, f features, e values, s sequences.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from linrope.common.tracing import values_readable
from linrope.distributed.exchange import Gathered
from linrope.distributed.fold import KNOWN, Rules, fold, follow
from linrope.distributed.layout import Layout
from linrope.distributed.pipeline import Pipeline
from linrope.distributed.uncompiled import uncompiled
from linrope.operation.attend import attend
from linrope.operation.checks import check_settings, check_state, check_values
from linrope.operation.plan import identity_of
from linrope.operation.positions import next_positions, resolve
from linrope.recurrence.call import INPUTS, TOKEN_INPUTS, Call, option_beyond
from linrope.recurrence.decay import MIN_LOG_DECAY, gradient_path, steps_of_tokens, zero_hidden
from linrope.recurrence.state import NO_KEYS, LinearAttentionState
from linrope.rotation.angles import units_to_features

FIRST = "first."  # prefix of the fields of the first local document's state


class SentState(NamedTuple):
    """A call on a shard whose states are on their way to the other ranks."""

    shard: Layout
    names: list[str]
    gathered: Gathered | None  # None: a group of one sends nothing

    def attend(self, call: Call) -> tuple[Tensor, LinearAttentionState | None]:
        """out, and the last state if the call wants it."""
        return _receive_and_attend(call, self)


@uncompiled
def send_state(call: Call, shard: Layout) -> SentState:
    """Sends the state of the last local document; in bidirectional packed calls, also that of the first."""
    _check_options(call)
    if shard.size == 1:
        shard.check_length("k", call.k.shape[1])
        return SentState(shard, [], None)
    shard.agree(lambda: _describe(call, shard))
    call = _without_slots(call)
    local = _place_after(call, shard) if call.erase is not None else _local_state(call, shard, -1)
    if not call.causal and shard.cu_seqlens is not None:
        local |= {f"{FIRST}{name}": x for name, x in _local_state(call, shard, 0).items()}
    return SentState(
        shard, list(local), shard.channel.gather(list(local.values()), bool(_with_gradients(call)))
    )


@uncompiled
def _receive_and_attend(call: Call, sent: SentState) -> tuple[Tensor, LinearAttentionState | None]:
    _check_options(call)
    call = replace(call, cu_seqlens=sent.shard.cu_seqlens)
    if sent.gathered is None:
        return attend(call)
    pool, state = call.state, _without_slots(call).state
    if pool is None or pool.slots is None:
        return _attend_after(sent, sent.gathered.wait(), call)
    out, last = _attend_after(sent, sent.gathered.wait(), replace(call, state=state, return_state=True))
    assert last is not None
    if last.kv.requires_grad:
        raise RuntimeError("state: got rows of a pool in a call with gradients, expected torch.no_grad()")
    pool.write(last)
    return out, pool._replace_unchecked(donated=False)


def _check_options(call: Call) -> None:
    """Rejects what a shard holds itself, and options that shards do not know."""
    if (name := option_beyond(KNOWN, call)) is not None:
        raise NotImplementedError(f"{name}: got a call with a shard, expected one without {name}")
    if call.cu_seqlens is not None:
        raise ValueError(
            "cu_seqlens: got a tensor in a call with a shard; expected None, because the shard already holds cu_seqlens"
        )


def _without_slots(call: Call) -> Call:
    """The call with rows of a pool replaced with a copy of them."""
    return call if call.state is None else replace(call, state=call.state.rows())


def _attend_after(
    sent: SentState, tensors: list[Tensor], call: Call
) -> tuple[Tensor, LinearAttentionState | None]:
    """Makes the ordinary call, with a state that holds the other ranks' tokens."""
    shard = sent.shard
    assert call.q is not None
    if call.q.shape[1] != call.k.shape[1]:
        raise ValueError(
            f"q: got {call.q.shape[1]} queries and {call.k.shape[1]} keys in a call with a shard, expected as "
            "many queries as keys"
        )
    gathered = dict(zip(sent.names, tensors, strict=True))
    log_gamma = None if call.decay is None else call.decay.double().log()
    rotary = call.rotary
    if (xpos := None if rotary is None else rotary.xpos_log_decay) is not None:
        xpos = xpos.to(call.k.device)
    rules = Rules(log_gamma, xpos, "interleaved" if rotary is None else rotary.layout)
    states_before = _states_before(call, shard, gathered)
    if call.erase is not None:
        return _attend_in_turn(gathered, shard, states_before, call)
    fresh = call.state is None
    incoming = _incoming_states(gathered, shard, states_before, rules, call.causal, fresh)
    state, packed = _stack(incoming, _starts_of(call, shard)), shard.cu_seqlens is not None
    out, last = attend(replace(call, state=state, return_state=call.return_state and packed))
    if call.return_state and not packed:
        last = fold(gathered, shard.ranks_with_tokens, states_before[0], rules, fresh=fresh)
    return out, last


def _attend_in_turn(
    gathered: dict[str, Tensor], shard: Layout, states_before: list[LinearAttentionState], call: Call
) -> tuple[Tensor, LinearAttentionState | None]:
    """Makes a call with erase. The first sequence goes on from the state that the rank before has sent."""
    earlier = follow(gathered, shard.ranks_before, states_before[0])
    state = _stack([earlier, *states_before[1:]], _starts_of(call, shard))
    pipeline = Pipeline.of(shard, bool(_with_gradients(call)))
    out, last = attend(replace(call, state=state), pipeline.attend)
    if last is None or shard.cu_seqlens is not None or not shard.ranks_with_tokens:
        return out, last
    out, kv = pipeline.of_last_rank(out, last.kv, shard.ranks_with_tokens[-1])
    place = follow(gathered, shard.ranks_with_tokens, states_before[0])
    return out, replace(place, kv=kv, z=last.z, identity=last.identity)


def _describe(call: Call, shard: Layout) -> str:
    """A text that must be the same on all ranks. Raises if this rank's call is invalid."""
    of_keys = replace(call, q=None, causal=True, normalize=False, key_positions=None)
    fmap = check_settings(of_keys)
    check_values(of_keys)
    k, v, state = call.k, call.v, call.state
    if state is not None and state.slots is not None and shard.cu_seqlens is None:
        check_state(of_keys, fmap)  # later the call has a copy of the rows
    shard.check_length("k", k.shape[1])
    if call.positions is not None or call.key_positions is not None:
        resolve(replace(call, q=None, state=None, cu_seqlens=shard.cu_seqlens))
    if state is not None and shard.cu_seqlens is not None:
        if state.slots is not None:
            raise NotImplementedError(
                "state: got rows of a pool with packed sequences in shards, expected a state without slots, because a "
                "rank knows the last states of its own sequences only"
            )
        documents = len(shard.bounds) - 1
        if state.sequences != documents:
            raise ValueError(f"state: got {state.sequences} sequences, expected the {documents} of all ranks")
    b, _, g, d = k.shape
    names = (*INPUTS[1:], "decay", "positions", "state")
    present = [name for name in names if getattr(call, name) is not None]
    steps = None if call.angle_steps is None else tuple(call.angle_steps.shape[2:])
    if state is not None and values_readable(state.position):
        present[-1] = f"state at {state.rows().position.tolist()}"
    rotary = call.rotary and call.rotary.identity
    return (
        f"{v.dtype} k (b, m, g, d) = ({b}, m, {g}, {d}), v with {tuple(v.shape[2:])}, causal={call.causal}, "
        f"feature_map={_map_name(call.feature_map)}, rotary={rotary}, arguments {present}, steps {steps}, "
        f"log_decay per unit: {call.decays_by_unit}, "
        f"gradients of {_with_gradients(call)}"
    )


def _with_gradients(call: Call) -> list[str]:
    """The arguments that the state of the keys passes gradients to."""
    names = (*INPUTS[1:], "decay")  # all but q
    tensors: list[tuple[str, Tensor | None]] = [(name, getattr(call, name)) for name in names]
    if call.erase is not None and call.state is not None:  # which only the first rank continues from
        tensors.append(("state", call.state.kv))
    if isinstance(call.feature_map, nn.Module):
        tensors += [("feature_map", x) for x in call.feature_map.parameters()]
    required = [name for name, x in tensors if x is not None and x.requires_grad and torch.is_grad_enabled()]
    return list(dict.fromkeys(required))


def _map_name(feature_map: object) -> str:
    return feature_map if isinstance(feature_map, str) else type(feature_map).__name__


def _local_state(call: Call, shard: Layout, index: int) -> dict[str, Tensor]:
    """The fields of the state of the first (0) or last (-1) local document alone, and the sum of its gates."""
    local = _local_call(call, shard, index)
    state = attend(local)[1]
    assert state is not None
    tensors = state.tensors()
    if local.log_decay is not None:
        gates = zero_hidden(local.log_decay, local.key_mask).clamp(min=MIN_LOG_DECAY).double()
        gates = gates if call.decays_by_unit else gates[..., None]
        shape = call.k.shape[0], call.v.shape[2], -1
        tensors["gates"] = gates.sum(1).expand(shape)
        if call.decays_by_unit:
            layout = "interleaved" if call.rotary is None else call.rotary.layout
            tensors["gates"] = units_to_features(tensors["gates"], call.pairs, layout)
            if state.log_scale is not None:  # which decays by the largest of each token's units
                tensors["largest_gates"] = gates.detach().amax(-1, keepdim=True).sum(1).expand(shape)
    return tensors


def _place_after(call: Call, shard: Layout) -> dict[str, Tensor]:
    """The position after the last local document, and the angle by which its tokens turn, with its gradient path."""
    local = _local_call(call, shard, -1)
    tokens = resolve(local)
    place = {"position": next_positions(local, tokens)}
    steps = steps_of_tokens(local.angle_steps, local.key_mask, None, tokens)
    if steps is not None:
        angle = replace(local, angle_steps=steps).last_angle(None)
        assert angle is not None
        place["angle"] = angle
        if (path := gradient_path(steps, None, tokens)) is not None:
            place["angle_gradient_path"] = path
    return place


def _local_call(call: Call, shard: Layout, index: int) -> Call:
    """The call for the state of the first (0) or last (-1) local document alone."""
    tokens = shard.piece(index)

    def cut(x: Tensor, dim: int = 1) -> Tensor:
        if tokens == slice(0, x.shape[dim]):  # the backward pass of narrow() would fill and copy
            return x
        return x.narrow(dim, tokens.start, tokens.stop - tokens.start)

    def cut_if_any(x: Tensor | None, dim: int = 1) -> Tensor | None:
        return None if x is None else cut(x, dim)

    key_positions = call.positions if call.key_positions is None else call.key_positions
    axes = call.rotary is not None and call.rotary.axes is not None
    inputs: dict[str, Any] = {name: cut_if_any(getattr(call, name)) for name in TOKEN_INPUTS}
    local = replace(
        call,
        q=None,
        k=cut(call.k),
        v=cut(call.v),
        causal=True,
        normalize=False,
        return_state=True,
        positions=cut_if_any(key_positions, -2 if axes else -1),
        key_positions=None,
        key_mask=cut_if_any(call.key_mask),
        cu_seqlens=None,
        **inputs,
    )
    position = _document_starts(call, shard)[index].expand(call.k.shape[0])
    if local.positions is not None and not axes and local.k.shape[1]:
        # Only the distances between local tokens count.
        position = local.positions[..., 0].long().expand(call.k.shape[0])
    return replace(local, state=_empty_state(call, position))


def _document_starts(call: Call, shard: Layout) -> Tensor:
    """The default position of the first token of each local document, (s or 1, b or 1). An empty rank has 0."""
    begins = [piece.position for piece in shard.local_pieces] or [0]
    positions = torch.tensor(begins, device=call.k.device)[:, None]
    if call.state is None:
        return positions
    if shard.cu_seqlens is None:
        return positions + call.state.position
    return positions + call.state.position[shard.documents(positions.device)][:, None]


def _starts_of(call: Call, shard: Layout) -> Tensor | None:
    """The position of each local sequence's first token, if it is that of the token among all tokens, else None.

    By default, and on a grid, a state's position counts tokens. Explicit positions may begin anywhere.
    """
    if call.positions is not None and (call.rotary is None or call.rotary.axes is None):
        return None
    return _document_starts(call, shard).expand(-1, call.k.shape[0]).flatten()


def _empty_state(call: Call, position: Tensor) -> LinearAttentionState:
    """A state without keys, for sequences that begin at position (s,)."""
    fmap, v, state, s = check_settings(call), call.v, call.state, len(position)
    g, e, f = *v.shape[2:], call.k.shape[3] if fmap is None else fmap.feature_dim
    kv_dtype = torch.promote_types(v.dtype, torch.float32) if state is None else state.kv.dtype
    kv = v.new_zeros(s, g, f, e, dtype=kv_dtype)
    z = v.new_zeros(s, g, f, dtype=torch.float64 if state is None else state.z.dtype)
    identity = identity_of(fmap, call.rotary, call.rope_order)
    return LinearAttentionState(kv, z, position, identity)


def _states_before(call: Call, shard: Layout, gathered: dict[str, Tensor]) -> list[LinearAttentionState]:
    """The state before the first rank, for each local document: the caller's, or an empty one."""
    state: LinearAttentionState | None = call.state
    if state is None:
        state = _empty_state(call, gathered["position"].new_zeros(call.k.shape[0]))
    if (scales := gathered.get("log_scale")) is not None and state.log_scale is None:
        state = replace(state, log_scale=scales.new_full(scales.shape[1:], NO_KEYS))
    if shard.cu_seqlens is None:
        return [state]
    if call.state is None:
        return [state] * max(1, len(shard.local_pieces))
    return [state.reorder(document) for document in shard.documents(state.kv.device)[:, None]]


def _incoming_states(
    gathered: dict[str, Tensor],
    shard: Layout,
    states_before: list[LinearAttentionState],
    rules: Rules,
    causal: bool,
    fresh: bool,
) -> list[LinearAttentionState]:
    """The state that each local document starts from: earlier ranks' tokens and, if bidirectional, later ranks'."""
    earlier = fold(gathered, shard.ranks_before, states_before[0], rules, fresh=fresh)
    states = [earlier, *states_before[1:]]
    if causal or not shard.local_pieces:
        return states
    # The document of the last local token may be the first document of later ranks, and the last of earlier ones.
    later = shard.rank + 1
    neighbours = {
        name: torch.cat((x[:later], gathered.get(f"{FIRST}{name}", x)[later:]))
        for name, x in gathered.items()
        if not name.startswith(FIRST)
    }
    chain = [*(shard.ranks_before if len(states) == 1 else []), shard.rank, *shard.ranks_after]
    both = fold(neighbours, chain, states_before[-1], rules, fresh=fresh, skip=shard.rank)
    states[-1] = replace(states[-1], kv=both.kv, z=both.z, log_scale=both.log_scale)
    return states


def _stack(states: list[LinearAttentionState], position: Tensor | None) -> LinearAttentionState:
    """Stacks the states of several sequences into one. position replaces theirs, unless it is None."""
    first = states[0]
    position = torch.cat([state.position for state in states]) if position is None else position
    if len(states) == 1:
        return replace(first, position=position)
    tensors: dict[str, Any] = {}
    for name, x in first.tensors().items():
        others = [getattr(state, name) for state in states[1:]]
        tensors[name] = torch.cat([x, *(torch.zeros_like(x) if y is None else y for y in others)])
    return replace(first, **tensors | {"position": position})

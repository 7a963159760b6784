"""The positions of a call's tokens: the caller's, or by default consecutive ones that continue from the state."""

import torch
from torch import Tensor

from linrope.common.argument_checks import check_integer_tensors
from linrope.common.constants import Constant
from linrope.common.tracing import traced, values_readable
from linrope.recurrence.call import Call
from linrope.recurrence.packing import Tokens, at_last, owners, previous, rising_bounds
from linrope.recurrence.state import LinearAttentionState
from linrope.rotation.rotary import MAX_POSITION, spell_out

# The position of the first token if there is no state. Made once: in a short call, making them takes noticeable time.
_ZERO = Constant(torch.zeros(1, dtype=torch.int64))
_ZERO_ROW = Constant(torch.zeros(1, 1, dtype=torch.int64))


def resolve(call: Call) -> Tokens:
    """The positions and the packing of the call's tokens. Raises if the caller's positions do not fit."""
    tokens = resolve_positions(
        positions=call.positions,
        key_positions=call.key_positions,
        start=None if call.state is None else first_positions(call.state),
        keys=call.k,
        num_queries=call.num_queries,
        axes=None if call.rotary is None else call.rotary.axes,
        bounds=rising_bounds(call.cu_seqlens, call.num_queries),
    )
    if call.positions is not None and call.decays_by_position:
        _check_order(tokens)
    return tokens


def first_positions(state: LinearAttentionState) -> Tensor:
    """(s,): the default position of each sequence's first token, if the call continues from this state."""
    return state.position if state.slots is None else state.position[state.slots]


def next_positions(call: Call, tokens: Tokens) -> Tensor:
    """(s,), a new tensor: the position of the token after each sequence's last key."""
    m, start = call.k.shape[1], tokens.start
    if call.state is None:
        start = start.expand(call.sequences)
    uses_default = call.positions is None or m != call.num_queries
    # Coordinates on several axes have no next position: a state then counts tokens.
    has_axes = call.rotary is not None and call.rotary.axes is not None
    if has_axes or (call.key_positions is None and uses_default):
        return start + (m if tokens.bounds is None else tokens.bounds.diff())
    keys = tokens.positions if tokens.key_positions is None else tokens.key_positions
    return (start if m == 0 else at_last(keys + 1, start, tokens.bounds).expand(call.sequences)).clone()


def resolve_positions(
    *,
    positions: Tensor | None,
    key_positions: Tensor | None = None,
    start: Tensor | None,  # (b or 1,), packed (s,): the default position of the first token; None: 0
    keys: Tensor,  # (b, m, ..)
    num_queries: int,
    axes: int | None = None,
    bounds: Tensor | None = None,
) -> Tokens:
    """The positions of queries and keys: the caller's, or by default consecutive ones from ``start``."""
    (b, m), n = keys.shape[:2], num_queries
    if axes is not None and (positions is None or (m != n and key_positions is None)):
        name = "positions" if positions is None else "key_positions"
        raise ValueError(f"{name}: got None, expected coordinates, as the rotation has axes={axes}")
    uses_default = positions is None or (key_positions is None and m != n)
    consecutive = None
    if start is None and bounds is None and _takes_constants(keys):
        start, consecutive = _ZERO.on(keys.device), _ZERO_ROW.on(keys.device)
    elif start is None:
        start = torch.zeros(1 if bounds is None else len(bounds) - 1, dtype=torch.int64, device=keys.device)
    elif uses_default and values_readable(start) and start.numel():
        count = max(n, m) if bounds is None else int(bounds.diff().max())
        starts = start.tolist()  # min and max in Python: calls into PyTorch cost a decoding step microseconds
        if min(starts) < 0 or max(starts) + count - 1 > MAX_POSITION:
            raise ValueError(
                f"state: got positions {starts} and {count} more tokens, expected 0 .. {MAX_POSITION}"
            )
    if consecutive is None:
        consecutive = start.unsqueeze(1)
    if uses_default and bounds is not None:
        consecutive = (torch.arange(n, device=start.device) + (start - bounds[:-1])[owners(bounds, n)])[None]
    of_queries = consecutive
    if positions is not None:
        of_queries = _check_positions("positions", positions, start, b, n, axes)
    of_keys = of_queries if m == n else consecutive
    if key_positions is not None:
        of_keys = _check_positions("key_positions", key_positions, start, b, m, axes)
    return Tokens(bounds, start, of_queries, None if of_keys is of_queries and m == n else of_keys)


def _takes_constants(keys: Tensor) -> bool:
    """False while tracing, and while a CUDA graph is captured, when constants cannot be copied to the device."""
    if keys.device.type == "cpu":
        return values_readable(keys)
    return not traced(keys) and not (keys.is_cuda and torch.cuda.is_current_stream_capturing())


def are_constant(tokens: Tokens) -> bool:
    """True if all calls that have no state and no positions of their own can share these tokens."""
    return _ZERO.is_copy(tokens.start)


def spell_out_positions(tokens: Tokens, q: Tensor | None, k: Tensor) -> tuple[Tensor, Tensor]:
    """A position for each query, and for each key."""
    n, m = k.shape[1] if q is None else q.shape[1], k.shape[1]
    key_positions = tokens.positions if tokens.key_positions is None else tokens.key_positions
    return spell_out(tokens.positions, n), spell_out(key_positions, m)


def _check_positions(name: str, positions: Tensor, start: Tensor, b: int, n: int, axes: int | None) -> Tensor:
    if not isinstance(positions, Tensor):
        raise TypeError(f"{name}: got {type(positions).__name__}, expected a torch.Tensor")
    check_integer_tensors(**{name: positions})
    shape = (n,) if axes is None else (n, axes)
    rows = positions.shape[0] if positions.ndim > len(shape) else 1
    fits = positions.ndim - len(shape) in (0, 1) and rows in (1, b)
    if not fits or any(have != want for have, want in zip(positions.shape[-len(shape) :], shape)):
        raise ValueError(f"{name}: got shape {tuple(positions.shape)}, expected {shape} or {(b, *shape)}")
    if positions.device != start.device:
        raise ValueError(f"{name}: got device {positions.device}, expected {start.device}")
    positions = positions.to(torch.int64)
    if values_readable(positions) and positions.numel():
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high > MAX_POSITION:
            raise ValueError(f"{name}: got {low} .. {high}, expected 0 .. {MAX_POSITION}")
    return positions.view(rows, *shape)


def _check_order(tokens: Tokens) -> None:
    """Raises if positions decrease. Called if keys decay with distance."""
    positions = tokens.positions
    if not values_readable(positions):
        return
    if bool((positions < previous(positions, tokens.start - 1, tokens.bounds)).any()):
        raise ValueError(
            "positions: got decreasing numbers; since keys decay with distance, expected each at least as large as "
            "the one before it, and the first after a state at least state.position - 1"
        )

"""Going back within a call: the state after its first tokens, from what the layer has projected already.

A caller that may reject the last tokens of a call makes it inside ``recording``:

>>> from linrope.layer.recording import recording
>>> layer, x = LinearRoPEAttention(8, 2), torch.randn(1, 5, 8)
>>> with recording() as made:
...     y, state = layer(x, return_state=True)
>>> (after,) = made  # one function for each layer that was called
>>> after(3).position
tensor([3])
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from linrope.recurrence.call import TOKEN_INPUTS

StateAfter = Callable[[int], Any]  # from a number of tokens: the state after as many of the call's first ones
# Caches keep what they need to go back by this many tokens, or to their beginning. Drafts are shorter.
TOKENS_BACK = 256

_PER_TOKEN = (*TOKEN_INPUTS, "key_mask")  # (b, n, ..)

_made: ContextVar[list[StateAfter] | None] = ContextVar("linrope_recording", default=None)


@contextmanager
def recording() -> Iterator[list[StateAfter]]:
    """Fills a list with a function for each call of a layer inside. The state given to that call must stay as it is."""
    made: list[StateAfter] = []
    token = _made.set(made)
    try:
        yield made
    finally:
        _made.reset(token)


def record(after: StateAfter) -> None:
    """Keeps the function, if the caller of the layer records."""
    if not torch.compiler.is_compiling() and (made := _made.get()) is not None:
        made.append(after)


def first_tokens(options: Mapping[str, Any], count: int) -> dict[str, Any]:
    """The arguments of ``linear_rope_attention`` for the first ``count`` tokens."""
    cut = {name: x[:, :count] for name, x in options.items() if name in _PER_TOKEN and x is not None}
    positions, rotary = options.get("positions"), options.get("rotary")
    if positions is not None:  # (n,) or (b, n), with axes (n, axes) or (b, n, axes)
        cut["positions"] = positions.narrow(-1 if rotary is None or rotary.axes is None else -2, 0, count)
    return {**options, **cut}

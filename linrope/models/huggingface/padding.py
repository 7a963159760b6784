"""Finds padding in attention masks, and the sequences that are packed into rows."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from linrope.models.huggingface.cache import LinRopeCache
from linrope.operation.checks import check_packing
from linrope.recurrence.packing import rising_bounds, sums_so_far


def count_positions(attention_mask: Tensor, bounds: Tensor | None = None) -> Tensor:
    """(b, m) -> (b, m): counts the tokens of each sequence. Padding has the position of the token before it."""
    return (sums_so_far(attention_mask.long(), bounds) - 1).clamp(min=0)


def may_pad(attention_mask: Tensor, n: int) -> bool:
    """True unless the mask is known to be all ones. A decoding step on a GPU does not wait to read it."""
    unread = torch.compiler.is_compiling() or (n == 1 and attention_mask.device.type != "cpu")
    return unread or not bool(attention_mask.all())


def read_rows(
    shape: tuple[int, int],
    cache: LinRopeCache | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    arguments: Mapping[str, Any],
    *,
    shared: bool,
) -> dict[str, Any]:
    """The layers' arguments positions, key_mask and cu_seqlens for rows of the shape (b, n), after those in the cache.

    arguments: the others of the call, among which may be those of packing collators. shared: the tokens are a rank's
    part of longer sequences. If sequences are packed into several rows, positions and key_mask are those of all
    rows one after the other, (1, b n).

    Raises:
        ValueError: a cache with packed sequences, or arguments that do not fit.
    """
    (b, n), seen = shape, 0 if cache is None else cache.get_seq_length()
    if attention_mask is not None and attention_mask.shape != (b, seen + n):
        raise ValueError(f"attention_mask: got shape {tuple(attention_mask.shape)}, expected {(b, seen + n)}")
    if attention_mask is not None and not may_pad(attention_mask, n):
        attention_mask = None
    cu_seqlens = flash_bounds(arguments) if cu_seqlens is None else cu_seqlens
    if cu_seqlens is None and not shared and n > 1:
        cu_seqlens = packed_bounds(position_ids, arguments.get("seq_idx"), attention_mask, b, n)
        if cu_seqlens is not None and b > 1 and cache is None:
            attention_mask = None if attention_mask is None else attention_mask.reshape(1, b * n)
            position_ids = None if position_ids is None else position_ids.expand(b, n).reshape(1, b * n)
            b, n = 1, b * n
    if cu_seqlens is not None and cache is not None:
        raise ValueError(
            "cache: got a cache and packed sequences (cu_seqlens, seq_idx, or position_ids that begin anew), "
            "expected one of the two"
        )
    if attention_mask is None:
        return {"positions": position_ids, "key_mask": None, "cu_seqlens": cu_seqlens}
    check_packing(cu_seqlens, b, n, n, attention_mask.device)
    key_mask = attention_mask[:, seen:].bool()
    counted = count_positions(attention_mask, rising_bounds(cu_seqlens, n))[:, seen:]
    if position_ids is None:
        position_ids = counted
    elif _have_one_axis(position_ids, n):
        # The positions that transformers gives to padding may fall, and decay needs rising ones.
        position_ids = position_ids.where(key_mask, counted)
    padding = key_mask if may_pad(key_mask, n) else None  # None: the padding is older than this call
    return {"positions": position_ids, "key_mask": padding, "cu_seqlens": cu_seqlens}


def flash_bounds(arguments: Mapping[str, Any]) -> Tensor | None:
    """cu_seqlens from the arguments of flash attention that packing collators return; None if there are none.

    Raises:
        ValueError: they come without the bounds, or the bounds of queries and keys differ.
    """
    q: Tensor | None = arguments.get("cu_seq_lens_q")
    k: Tensor | None = arguments.get("cu_seq_lens_k")
    bounds = k if q is None else q
    if bounds is None:
        lengths = [name for name in ("max_length_q", "max_length_k") if arguments.get(name) is not None]
        if lengths:
            raise ValueError(
                f"{lengths[0]}: got no cu_seq_lens_q, expected the bounds of the packed sequences too"
            )
        return None
    if q is not None and k is not None and q is not k and not torch.equal(q, k):
        raise ValueError(
            "cu_seq_lens_k: got other bounds than cu_seq_lens_q, expected the same: each sequence sees itself alone"
        )
    return bounds


def packed_bounds(
    position_ids: Tensor | None, seq_idx: Tensor | None, attention_mask: Tensor | None, b: int, n: int
) -> Tensor | None:
    """The bounds of the sequences in the rows, all b n tokens one after the other; None: each row is one sequence.

    A sequence begins where seq_idx (b or 1, n) changes. Without seq_idx it begins at each position 0. Padding is not
    looked at, since its positions may be anything.

    Raises:
        ValueError: seq_idx has another shape, or positions fall, but not to 0.
    """
    if seq_idx is not None and seq_idx.shape not in ((1, n), (b, n)):
        raise ValueError(f"seq_idx: got shape {tuple(seq_idx.shape)}, expected {(b, n)}")
    numbers = position_ids if seq_idx is None else seq_idx
    if numbers is None or numbers.ndim > 2 or numbers.shape not in ((n,), (1, n), (b, n)):
        return None  # positions of several axes, and wrong shapes, which the operation refuses
    numbers = numbers.expand(b, n).flatten()
    real = torch.arange(b * n, device=numbers.device)
    if attention_mask is not None:
        real = real[attention_mask[:, -n:].flatten().bool()]
    before, after = numbers[real[:-1]], numbers[real[1:]]
    begins = before != after if seq_idx is not None else (after == 0) | (after < before)
    begins &= real[:-1] // n == real[1:] // n  # rows begin anyway
    first = real[1:][begins]
    if not len(first):
        return None
    if seq_idx is None and bool(numbers[first].any()):
        at = int(first[numbers[first] != 0][0])
        raise ValueError(
            f"position_ids: falls to {int(numbers[at])} at token {at % n} of row {at // n}, expected positions that "
            "rise, or 0 where a new sequence begins"
        )
    rows = torch.arange(0, b * n + 1, n, device=numbers.device)
    return torch.cat((rows, first)).sort().values


def _have_one_axis(position_ids: Tensor, n: int) -> bool:
    """False for coordinates on several axes, (n, axes) or (b, n, axes)."""
    return position_ids.ndim < 3 and position_ids.shape[-1] == n


def span(tokens: Mapping[str, Tensor | None], n: int, start: int, stop: int) -> dict[str, Tensor | None]:
    """The layers' arguments positions and key_mask of the tokens start .. stop - 1 of n."""
    given = {name: x for name, x in tokens.items() if x is not None}
    axes = {name: -1 if _have_one_axis(x, n) else -2 for name, x in given.items()}
    return {**tokens, **{name: x.narrow(axes[name], start, stop - start) for name, x in given.items()}}

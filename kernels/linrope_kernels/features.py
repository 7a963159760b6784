"""phi^ = R phi(x) as a tensor of its own, and back: the first and the last launch of the delta rule's kernels.

Several of those kernels read the features of a token, so that making them once is cheaper than making them anew. They
are stored as a tile has them: the two members of a pair stand side by side, whatever their layout in q and k.

Under the map "unit" of length l:    phi(x) = l y / s,   s = sqrt(|y|^2 + 1e-6),   y = MAP(x)
                                     dy = l / s (dphi - y <y, dphi> / s^2)
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from linrope_kernels.decay import load_per_token
from linrope_kernels.launch import delta_precision, features_dtype
from linrope_kernels.memory import (
    Chunk,
    Pairs,
    broadcast_rows,
    load_features,
    load_rotation,
    load_values,
    mask_features,
    rows_of,
    seen,
    store_features,
    store_values,
)
from linrope_kernels.pieces import (
    feature_map,
    inverse_length,
    operand,
    rotate,
    rotate_back,
    slope,
    sum_of_products,
)
from linrope_kernels.start import start_kernel
from linrope_kernels.tiles import power_of_two_from_16


@triton.jit
def head_of_program(n, heads, C: tl.constexpr):
    """This program's batch row and head, and its tokens with those that exist."""
    blocks = tl.cdiv(n, C)
    rows = tl.program_id(0) % blocks * C + tl.arange(0, C)
    head = tl.program_id(0) // blocks
    return (head // heads).to(tl.int64), (head % heads).to(tl.int64), rows, rows < n


@triton.jit
def load_mapped(x, chunk, MASK, n, MAP: tl.constexpr, PAIRS: tl.constexpr):
    """x, and y = MAP(x) in float32, which is 0 for masked tokens."""
    loaded = load_features(x, chunk, 0, PAIRS)
    return loaded, mask_features(feature_map(loaded, MAP), seen(MASK, chunk, n).inside, 0, PAIRS)


@triton.jit(do_not_specialize=["n", "heads", "value_group", "group"])
def features_fwd_kernel(
    x,  # Rows (b, n, heads, f): q or k
    table,  # Rows of cos and sin, as in Tokens
    MASK,  # (b, n) bool: the tokens whose features are not 0; None: all
    y,  # Rows (b, n, heads value_group, f): R phi(x)
    erase,  # Rows (b or 1, n, g or 1): b; None: not wanted
    ERASE,  # (b, n, g) float32: b / max(1, |R phi(x)|^2), so that rounded keys of length 1 erase no more than b
    n, heads, value_group, group,
    F: tl.constexpr, P: tl.constexpr, MAP: tl.constexpr, INTERLEAVED: tl.constexpr, LENGTH: tl.constexpr,
    DOT: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """One program per block of tokens and head of y. LENGTH: under the map "unit" that of features; 0: another map."""
    PAIRS: tl.constexpr = Pairs(F, P, INTERLEAVED, W)
    batch, head, rows, inside = head_of_program(n, heads * value_group, C)
    _, phi = load_mapped(x, Chunk(batch, head // value_group, rows, inside), MASK, n, MAP, PAIRS)
    if LENGTH > 0:
        phi *= LENGTH * inverse_length(phi)
    phi_hat = rotate(phi, load_rotation(table, Chunk(batch, head // group, rows, inside), 0, PAIRS), P)
    chunk, phi_hat = Chunk(batch, head, rows, inside), operand(phi_hat, DOT)
    store_values(y, phi_hat, chunk, tl.arange(0, 2 * W), (F + 1) // 2 * 2, 2 * W)
    if ERASE is not None:
        length = sum_of_products(phi_hat.to(tl.float32), phi_hat.to(tl.float32), 1)
        b = load_per_token(erase, chunk).to(tl.float32) / tl.maximum(length, 1.0)
        tl.store(ERASE + (batch * n + rows) * heads * value_group + head, b, mask=inside)


@triton.jit(do_not_specialize=["n", "heads", "value_group", "group"])
def features_bwd_kernel(
    x, table, MASK,  # as in features_fwd_kernel
    dy,  # Rows (b, n, heads value_group, f): the gradient of R phi(x)
    dx,  # Rows (b, n, heads, f)
    n, heads, value_group, group,
    F: tl.constexpr, P: tl.constexpr, MAP: tl.constexpr, INTERLEAVED: tl.constexpr, LENGTH: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """dx = slope(x) R^T dy. It is 0 where all of R^T dy is, whatever x holds: nothing reads masked tokens."""
    PAIRS: tl.constexpr = Pairs(F, P, INTERLEAVED, W)
    batch, head, rows, inside = head_of_program(n, heads, C)
    chunk, d = Chunk(batch, head, rows, inside), tl.zeros([C, 2 * W], tl.float32)
    for r in range(value_group):
        of_value = Chunk(batch, head * value_group + r, rows, inside)
        d_hat = load_values(dy, of_value, tl.arange(0, 2 * W), (F + 1) // 2 * 2, 2 * W).to(tl.float32)
        of_angles = Chunk(batch, of_value.head // group, rows, inside)
        d += rotate_back(d_hat, load_rotation(table, of_angles, 0, PAIRS), P)
    loaded, phi = load_mapped(x, chunk, MASK, n, MAP, PAIRS)
    unread = (tl.sum(tl.abs(d), 1) == 0)[:, None]
    if LENGTH > 0:
        inverse = inverse_length(phi)
        phi *= inverse
        d = (d - phi * sum_of_products(phi, d, 1)[:, None]) * (LENGTH * inverse)
    d = tl.where(unread, 0.0, d * slope(tl.where(unread, 0.0, loaded), MAP))
    store_features(dx, d, chunk, 0, PAIRS)


def features_of_queries(call: Any, table: Tensor | None) -> Tensor:
    """R phi(q) of every value head, (b, n, heads, f) with f rounded up to an even number."""
    return _features(call, call.q, table, False, None)


def features_of_keys(call: Any, table: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """R psi(k), likewise, and b, by which these features erase."""
    erase = call.erase
    if erase is not None and call.query_factor:
        erase = call.v.new_empty(call.v.shape[:3], dtype=torch.float32)
        return _features(call, call.k, table, True, erase), erase
    return _features(call, call.k, table, True, None), erase


def _features(call: Any, x: Tensor, table: Tensor | None, keys: bool, erase: Tensor | None) -> Tensor:
    b, n, heads, f = x.shape
    hat = x.new_empty(b, n, heads * call.value_group, -(-f // 2) * 2, dtype=features_dtype(call))
    others = rows_of(hat), broadcast_rows(None if erase is None else call.erase, 3), erase
    _start(features_fwd_kernel, call, x, table, keys, hat.shape[2], *others, DOT=delta_precision(call))
    return hat


def d_features(call: Any, x: Tensor, table: Tensor | None, d_hat: Tensor, keys: bool) -> Tensor:
    """The gradient of q or k from that of its features, summed over the value heads that share one of its heads."""
    dx = x.new_empty(x.shape)
    _start(features_bwd_kernel, call, x, table, keys, x.shape[2], rows_of(d_hat), rows_of(dx))
    return dx


def _start(
    kernel: Any, call: Any, x: Tensor, table: Tensor | None, keys: bool, heads_of_programs: int, *others: Any,
    **constants: Any,
) -> None:  # fmt: skip
    """Starts a kernel of this module. keys: x is k, whose features have length 1 under the map "unit"."""
    (b, n, heads, f), chunk = x.shape, 16
    mask = call.key_mask.contiguous() if keys and call.key_mask is not None else None
    start_kernel(
        kernel, b * heads_of_programs * -(-n // chunk), rows_of(x), broadcast_rows(table, 2), mask, *others,
        n, heads, call.value_group, 1 if keys else call.group,
        F=f, P=call.pairs, MAP=call.feature_map, INTERLEAVED=not call.pairs or call.layout == "interleaved",
        LENGTH=1.0 if keys and call.query_factor else float(call.query_factor), C=chunk,
        W=power_of_two_from_16((f + 1) // 2), **constants,
    )  # fmt: skip

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

from linrope_kernels.memory import (
    Chunk,
    Pairs,
    Rows,
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
from linrope_kernels.pieces import feature_map, inverse_length, rotate, rotate_back, slope, sum_of_products
from linrope_kernels.start import start_kernel
from linrope_kernels.tiles import power_of_two_from_16


@triton.jit
def block_of_tokens(n, heads, group, C: tl.constexpr):
    """This program's tokens of a head of x, and of the key/value head whose angles it has."""
    blocks = tl.cdiv(n, C)
    block, head = tl.program_id(0) % blocks, tl.program_id(0) // blocks % heads
    batch = (tl.program_id(0) // blocks // heads).to(tl.int64)
    rows = block * C + tl.arange(0, C)
    chunk = Chunk(batch, head.to(tl.int64), rows, rows < n)
    return chunk, Chunk(batch, (head // group).to(tl.int64), rows, rows < n)


@triton.jit
def load_mapped(x, chunk, MASK, n, MAP: tl.constexpr, PAIRS: tl.constexpr):
    """x, and y = MAP(x) in float32, which is 0 for masked tokens."""
    loaded = load_features(x, chunk, 0, PAIRS)
    return loaded, mask_features(feature_map(loaded, MAP), seen(MASK, chunk, n).inside, 0, PAIRS)


@triton.jit(do_not_specialize=["n", "heads", "group"])
def features_fwd_kernel(
    x,  # Rows (b, n, heads, f): q or k
    table,  # Rows of cos and sin, as in Tokens
    MASK,  # (b, n) bool: the tokens whose features are not 0; None: all
    y,  # Rows (b, n, heads, f): R phi(x)
    n, heads, group,
    F: tl.constexpr, P: tl.constexpr, MAP: tl.constexpr, INTERLEAVED: tl.constexpr, LENGTH: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """LENGTH: that of the features under the map "unit"; 0: another map."""
    PAIRS: tl.constexpr = Pairs(F, P, INTERLEAVED, W)
    chunk, of_angles = block_of_tokens(n, heads, group, C)
    _, phi = load_mapped(x, chunk, MASK, n, MAP, PAIRS)
    if LENGTH > 0:
        phi *= LENGTH * inverse_length(phi)
    phi_hat = rotate(phi, load_rotation(table, of_angles, 0, PAIRS), P)
    store_values(y, phi_hat, chunk, tl.arange(0, 2 * W), (F + 1) // 2 * 2, 2 * W)


@triton.jit(do_not_specialize=["n", "heads", "group"])
def features_bwd_kernel(
    x, table, MASK,  # as in features_fwd_kernel
    dy,  # Rows (b, n, heads, f): the gradient of R phi(x)
    dx,  # Rows (b, n, heads, f)
    n, heads, group,
    F: tl.constexpr, P: tl.constexpr, MAP: tl.constexpr, INTERLEAVED: tl.constexpr, LENGTH: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """dx = slope(x) R^T dy. It is 0 where all of dy is, whatever x holds: nothing reads masked tokens."""
    PAIRS: tl.constexpr = Pairs(F, P, INTERLEAVED, W)
    chunk, of_angles = block_of_tokens(n, heads, group, C)
    loaded, phi = load_mapped(x, chunk, MASK, n, MAP, PAIRS)
    d_hat = load_values(dy, chunk, tl.arange(0, 2 * W), (F + 1) // 2 * 2, 2 * W).to(tl.float32)
    d = rotate_back(d_hat, load_rotation(table, of_angles, 0, PAIRS), P)
    if LENGTH > 0:
        inverse = inverse_length(phi)
        phi *= inverse
        d = (d - phi * sum_of_products(phi, d, 1)[:, None]) * (LENGTH * inverse)
    unread = (tl.sum(tl.abs(d_hat), 1) == 0)[:, None]
    d = tl.where(unread, 0.0, d * slope(tl.where(unread, 0.0, loaded), MAP))
    store_features(dx, d, chunk, 0, PAIRS)


def features(call: Any, x: Tensor, table: Tensor | None, dtype: torch.dtype, keys: bool) -> Tensor:
    """R phi(x) for q or k, (b, n, heads, f) with f rounded up to an even number."""
    hat = x.new_empty(*x.shape[:3], -(-x.shape[3] // 2) * 2, dtype=dtype)
    _start(features_fwd_kernel, call, x, table, keys, rows_of(hat))
    return hat


def d_features(call: Any, x: Tensor, table: Tensor | None, d_hat: Tensor, keys: bool) -> Tensor:
    """The gradient of q or k from that of its features."""
    dx = x.new_empty(x.shape)
    _start(features_bwd_kernel, call, x, table, keys, rows_of(d_hat), rows_of(dx))
    return dx


def _start(kernel: Any, call: Any, x: Tensor, table: Tensor | None, keys: bool, *others: Rows) -> None:
    """Starts a kernel of this module. keys: x is k, whose features have length 1 under the map "unit"."""
    (b, n, heads, f), chunk = x.shape, 16
    mask = call.key_mask.contiguous() if keys and call.key_mask is not None else None
    start_kernel(
        kernel, b * heads * -(-n // chunk), rows_of(x), broadcast_rows(table, 2), mask, *others,
        n, heads, heads // call.k.shape[2],
        F=f, P=call.pairs, MAP=call.feature_map, INTERLEAVED=not call.pairs or call.layout == "interleaved",
        LENGTH=1.0 if keys and call.unit else float(call.unit), C=chunk, W=power_of_two_from_16((f + 1) // 2),
    )  # fmt: skip

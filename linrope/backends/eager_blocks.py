"""How the eager backend cuts a sequence: blocks that fit the cache, made of chunks of C tokens.

Inside this backend a block of a (b, n, heads, d) tensor is seen as (t, b, g, r, c, d): t chunk, b batch,
g key/value head, r query heads per key/value head (1 for keys and values), c position in the chunk.
"""

import copy
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from linrope.feature_maps import Elementwise

CHUNK = 64  # C: a chunk costs C x C scores, and one state update
SUM_CHUNK = 32  # the normalizer's own: its state is only a vector
BLOCK = 512  # tokens per step: enough to amortise PyTorch's calls, few enough for the cache
ROWS = 16  # heads per step at full blocks, likewise
KEPT_BYTES = 64 * 2**20  # at most, per thread and dtype

_kept = threading.local()


def scratch(like: Tensor, dtype: torch.dtype, numel: int) -> Tensor:
    """Uninitialized memory for one call; on a CPU the thread keeps it, as BLAS libraries keep theirs.

    The first touch of a page costs a CPU about 1 us per 4 kB, as much as computing its contents.
    """
    if like.device.type != "cpu" or numel * dtype.itemsize > KEPT_BYTES:
        return like.new_empty(numel, dtype=dtype)
    buffers: dict[Any, Tensor] = _kept.__dict__
    if dtype not in buffers or buffers[dtype].numel() < numel:
        with torch.inference_mode(False):  # or later calls outside could not write to it
            buffers[dtype] = torch.empty(numel, dtype=dtype, device="cpu")
    return buffers[dtype]


def release_scratch() -> None:
    """Gives this thread's kept memory back."""
    _kept.__dict__.clear()


def blocks(first: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(start, t, c) of each step: whole chunks, and a last short one where C does not divide the length."""
    for start in range(first, end, BLOCK):
        full, rest = divmod(min(BLOCK, end - start), CHUNK)
        if full:
            yield start, full, CHUNK
        if rest:
            yield start + full * CHUNK, 1, rest


def num_blocks(n: int, sequences: int = 1) -> int:
    """At least the number of blocks; an expression without branches, so that lengths stay symbolic."""
    return n // BLOCK + 2 * sequences


def row_groups(b: int, g: int, r: int, n: int, f: int) -> Iterator[tuple[slice, slice]]:
    """Slices of batch and of key/value heads, so that one step's tensors stay in the cache."""
    rows = max(1, ROWS * BLOCK * 128 // (max(1, min(n, BLOCK)) * max(128, f)))
    heads = max(1, min(g, rows // r))
    batches = max(1, rows // (r * heads)) if heads == g else 1
    for i in range(0, b, batches):
        for j in range(0, g, heads):
            yield slice(i, i + batches), slice(j, j + heads)


def split(x: Tensor, t: int, c: int, g: int, start: int = 0) -> Tensor:
    """t c tokens of x (b, n, g r, d), from start on, as (t, b, g, r, c, d): a view, in one call."""
    (b, _, h, d), (sb, sn, sh, sd) = x.shape, x.stride()
    r = h // g
    offset = x.storage_offset() + start * sn
    return x.as_strided((t, b, g, r, c, d), (c * sn, sb, r * sh, sh, sn, sd), offset)


def rows(x: Tensor) -> Tensor:
    """(.., b, g, r, c, d) -> (.. b g, r c, d): the matrices that bmm takes."""
    return x.flatten(-3, -2).flatten(0, -3)


class Angles:
    """cos and sin of a sequence's angles, block by block, formed in float64.

    theta (axes or 1, g or 1, p), None: no rotation; n tokens, ``longest`` of them in the longest block.
    positions (b or 1, n), (b or 1, n, axes), or (b or 1, 1) for consecutive ones: then
    R(p + j) = R(p) R(j), and a block costs one complex product instead of its sines.
    """

    def __init__(
        self,
        theta: Tensor | None,
        layout: str,
        positions: Tensor,
        n: int,
        longest: int,
        dtype: torch.dtype,
    ) -> None:
        self.theta, self.interleaved, self.dtype = theta, layout == "interleaved", dtype
        self.positions, self.consecutive = positions, positions.ndim == 2 and positions.shape[1] == 1
        self.turn: Turn | None = None
        self.buffer: Tensor | None = None
        if theta is not None and self.consecutive:
            steps = torch.arange(longest, device=positions.device)[None]
            if longest == n:  # a single block
                self.positions, self.consecutive = positions + steps, False
            else:
                self.steps = self._turns(steps)

    def _turns(self, positions: Tensor) -> Tensor:  # (b or 1, l) -> (b or 1, l, g or 1, p) complex128
        assert self.theta is not None
        angles = positions[..., None, None].double() * (self.theta if positions.ndim == 3 else self.theta[0])
        if positions.ndim == 3:
            angles = angles.sum(2)
        return torch.complex(angles.cos(), angles.sin())

    def select(self, batch: slice, heads: slice) -> "Angles":
        """Those of some batch entries and key/value heads."""
        part = copy.copy(self)
        if len(self.positions) > 1:
            part.positions = self.positions[batch]
        if self.theta is not None and self.theta.shape[1] > 1:
            part.theta = self.theta[:, heads]
            if self.consecutive:
                part.steps = self.steps[:, :, heads]
        return part

    def block(self, start: int, t: int, c: int) -> "Turn | None":
        """The rotation of t c tokens from start on; the next call reuses its memory."""
        if self.theta is None:
            return None
        if self.consecutive:
            steps = self.steps[:, : t * c]
            turns = torch.mul(self._turns(self.positions + start), steps, out=self._buffer(steps))
        else:
            turns = self._turns(self.positions[:, start : start + t * c])
        b, _, g, p = turns.shape
        turns = turns.view(b, t, c, g, 1, p).permute(1, 0, 3, 4, 2, 5)
        if self.turn is None or self.turn.shape != turns.shape:
            self.turn = Turn(turns.shape, self.interleaved, self.dtype, turns.device)
        self.turn.set(turns)
        return self.turn

    def _buffer(self, steps: Tensor) -> Tensor:
        shape = len(self.positions), *steps.shape[1:]
        if self.buffer is None or self.buffer.shape != shape:
            self.buffer = steps.new_empty(shape)
        return self.buffer


class Turn:
    """The rotation of one block: ``apply`` is R, ``undo`` its transpose, on the first 2p features."""

    def __init__(
        self, shape: torch.Size, interleaved: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape, self.interleaved = shape, interleaved
        if interleaved:  # a pair is a complex number, a rotation a complex product
            self.cis = torch.empty(shape, dtype=torch.promote_types(dtype, torch.complex64), device=device)
            self.conj = torch.empty_like(self.cis)
        else:
            self.cos = torch.empty(shape, dtype=dtype, device=device)
            self.sin = torch.empty_like(self.cos)

    def set(self, turns: Tensor) -> None:
        if self.interleaved:
            self.cis.copy_(turns)
        else:
            self.cos.copy_(turns.real)
            self.sin.copy_(turns.imag)

    def apply(self, x: Tensor, out: Tensor) -> None:
        if self.interleaved:
            self._multiply(x, self.cis, out)
        else:
            self._rotate(x, self.sin, out)

    def undo(self, x: Tensor, out: Tensor) -> None:
        if self.interleaved:
            self._multiply(x, torch.conj_physical(self.cis, out=self.conj), out)
        else:
            self._rotate(x, -self.sin, out)

    def scaled(self, factor: Tensor) -> "Turn":
        """This rotation with each pair made longer by a factor: undo is the transpose of that."""
        turn = copy.copy(self)
        if self.interleaved:
            turn.cis = self.cis * factor
            turn.conj = torch.empty_like(turn.cis)
        else:
            turn.cos, turn.sin = self.cos * factor, self.sin * factor
        return turn

    @staticmethod
    def _multiply(x: Tensor, cis: Tensor, out: Tensor) -> None:
        width = 2 * cis.shape[-1]
        pairs = [torch.view_as_complex(y[..., :width].unflatten(-1, (-1, 2))) for y in (x, out)]
        torch.mul(pairs[0], cis, out=pairs[1])
        if width < x.shape[-1]:
            out[..., width:] = x[..., width:]

    def _rotate(self, x: Tensor, sin: Tensor, out: Tensor) -> None:
        p = self.cos.shape[-1]
        x1, x2 = x[..., :p], x[..., p : 2 * p]
        torch.mul(x1, self.cos, out=out[..., :p]).addcmul_(x2, sin, value=-1)
        torch.mul(x2, self.cos, out=out[..., p : 2 * p]).addcmul_(x1, sin)
        if 2 * p < x.shape[-1]:
            out[..., 2 * p :] = x[..., 2 * p :]


def load_features(
    x: Tensor, function: Elementwise, turn: Turn | None, hidden: Tensor | None, out: Tensor
) -> None:
    """x (t, b, g, r, c, d) -> out[0] = phi(x), out[1] = R phi(x), zero where hidden."""
    features, rotated = out.unbind(0)
    if x.dtype != features.dtype:  # or PyTorch would compute in x's narrow type
        x = rotated.copy_(x)
    function.value(x, features, rotated)
    if hidden is not None:
        features.masked_fill_(hidden, 0)
    if turn is None:
        rotated.copy_(features)
    else:
        turn.apply(features, rotated)


def load_values(v: Tensor, hidden: Tensor | None, out: Tensor) -> None:
    out.copy_(v)
    if hidden is not None:
        out.masked_fill_(hidden, 0)

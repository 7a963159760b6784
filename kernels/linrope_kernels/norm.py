"""Launchers of the RMS norm of the heads' outputs with a gate and a skip connection.

b batch, n tokens, h heads, g heads of v, e values.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import next_power_of_2

from linrope_kernels.norm_kernels import norm_bwd_kernel, norm_fwd_kernel
from linrope_kernels.partial_sums import sum_rows
from linrope_kernels.tiles import power_of_two_from_16

# The largest result of ``tile_values`` for which a tile fits 16 warps
MOST_VALUES = 16_384
# The most elements in the tiles of all programs: about 8 programs of 1024 for each of an H200's multiprocessors
ELEMENTS = 2**20


class NormTile(NamedTuple):
    tokens: int  # T
    kv_heads: int  # GB
    members: int  # RP
    values: int  # BE
    blocks: int  # the number of blocks of heads

    @property
    def elements(self) -> int:
        return self.tokens * self.kv_heads * self.members * self.values


def tile_values(group: int, e: int) -> int:
    """group rounded up to a power of two, times e rounded up to a power of two of at least 16."""
    return int(next_power_of_2(group)) * power_of_two_from_16(e)


def tile(h: int, group: int, e: int, over_heads: bool) -> NormTile:
    """The tile for h heads in groups of ``group``, with e values per head.

    It depends on these arguments alone, so a token's result has the same bits whatever else is in the call.
    """
    members, values, kv_heads = next_power_of_2(group), power_of_two_from_16(e), h // group
    most = 4096 if over_heads else 1024  # over all heads: their values at once, where registers hold them
    block = max(1, min(next_power_of_2(kv_heads), most // (members * values)))
    blocks = -(-kv_heads // block)
    tokens = 1 if over_heads and blocks > 1 else max(1, 1024 // (block * members * values))
    return NormTile(tokens, block, members, values, blocks)


@dataclass(frozen=True, kw_only=True)
class Norm:
    """The inputs of a gated norm. The last stride of out, gate and v is 1."""

    out: Tensor  # (b, n, h, e)
    weight: Tensor | None  # (e,) or (h, e)
    gate: Tensor | None  # (b, n, h e)
    v: Tensor | None  # (b, n, g, e)
    skip: Tensor | None  # (h,)
    eps: float
    over_heads: bool
    gate_first: bool
    skip_first: bool

    @property
    def group(self) -> int:
        """Heads that share a head of v."""
        return 1 if self.v is None else self.out.shape[2] // self.v.shape[2]

    @property
    def loops(self) -> bool:
        """True if a program goes through all blocks of heads."""
        return self.over_heads and self.weight is not None

    @property
    def tile(self) -> NormTile:
        h, e = self.out.shape[2:]
        return tile(h, self.group, e, self.loops)

    def split(self) -> tuple[int, int]:
        """The number of parts that the tokens are cut into, and tiles per part. Each part has a program per block."""
        tiles = -(-self.out.shape[0] * self.out.shape[1] // self.tile.tokens)
        most = max(1, ELEMENTS // self.tile.elements // (1 if self.loops else self.tile.blocks))
        per_part = max(1, -(-tiles // most))
        return -(-tiles // per_part), per_part

    def launch(self, kernel: Any, *args: Any, **constants: Any) -> None:
        (b, n, h, e), tile = self.out.shape, self.tile
        weight = None if self.weight is None else self.weight.expand(h, e)
        parts, tiles = self.split()
        blocks, loop = (1, tile.blocks) if self.loops else (tile.blocks, 1)
        if parts * blocks * h * e:
            kernel[(parts * blocks,)](
                self.out, self.out.stride()[:3],
                self.gate, (0, 0, 0) if self.gate is None else (*self.gate.stride()[:2], e),
                self.v, (0, 0, 0) if self.v is None else self.v.stride()[:3],
                self.skip, 0 if self.skip is None else self.skip.stride(0),
                weight, (0, 0) if weight is None else weight.stride(),
                *args, n, b * n, tiles, self.eps,
                HEADS=h, GROUP=self.group, E=e, OVER_ALL=self.loops,
                GATE_FIRST=self.gate_first and self.gate is not None, SKIP_FIRST=self.skip_first,
                BLOCKS=blocks, LOOP=loop, T=tile.tokens, GB=tile.kv_heads, RP=tile.members, BE=tile.values,
                num_warps=min(16, max(1, tile.elements // (256 if tile.elements <= 2048 else 512))), **constants,
            )  # fmt: skip


def norm_fwd(call: Norm) -> Tensor:
    b, n, h, e = call.out.shape
    y = call.out.new_empty(b, n, h * e)
    call.launch(norm_fwd_kernel, y)
    return y


def norm_bwd(call: Norm, dy: Tensor) -> list[Tensor | None]:
    """The gradients of out, weight, gate, v and skip, each in its dtype. dy: (b, n, h e), last stride 1."""
    h, e = call.out.shape[2:]
    inputs = call.out, call.weight, call.gate, call.v, call.skip
    d_out, d_weight, d_gate, d_v, d_skip = gradients = [
        None if x is None else x.new_empty(x.shape) for x in inputs
    ]
    if not call.out.numel():
        return [None if x is None else x.zero_() for x in gradients]
    parts, shared = call.split()[0], call.weight is not None and call.weight.ndim == 1
    weight_sums = skip_sums = None
    if call.weight is not None:
        rows = parts * call.tile.blocks if shared else parts
        weight_sums = call.out.new_empty(rows, call.weight.numel(), dtype=torch.float32)
    if call.skip is not None:
        skip_sums = call.out.new_empty(parts, h, dtype=torch.float32)
    call.launch(
        norm_bwd_kernel, dy, (*dy.stride()[:2], e), d_out, d_gate, d_v, weight_sums, skip_sums, SHARED=shared
    )
    sum_rows(weight_sums, d_weight, skip_sums, d_skip)
    return gradients

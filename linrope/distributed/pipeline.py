"""The delta rule on a shard: the states of all heads pass from rank to rank, one head after the other.

With erase the tokens of a rank multiply the state by a dense f x f matrix, so a rank waits for the state before its
tokens instead of combining the states of all ranks. While a rank computes a head, the rank before computes the next:

    rank r, for each head:    receive S from rank r - 1,    compute the head from S on,    send the last S to rank r + 1

With H heads and P ranks each rank computes H / (H + P - 1) of the time. Backwards the ranks and the heads take their
turns in the reverse order, and the gradient of S passes from rank r + 1 to rank r.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from linrope.distributed.exchange import Channel
from linrope.distributed.layout import Layout
from linrope.recurrence.call import INPUTS, Call, Sums, split_heads
from linrope.recurrence.state import LinearAttentionState

Attend = Callable[[Call, LinearAttentionState | None], tuple[Tensor, Sums | None]]


class Pipeline(NamedTuple):
    """This rank's place between the ranks that hold earlier and later tokens of its sequences."""

    channel: Channel
    before: Sequence[int]  # the rank that sends the states before this rank's tokens, if any
    after: Sequence[int]  # the rank that receives the states after them, if any
    first: slice  # the sequences that begin on earlier ranks
    last: slice  # the sequences that go on on later ranks
    differentiable: bool  # whether gradients travel back, which must be the same on all ranks

    @classmethod
    def of(cls, shard: Layout, differentiable: bool) -> "Pipeline":
        packed = shard.cu_seqlens is not None
        first, last = (slice(0, 1), slice(-1, None)) if packed else (slice(None), slice(None))
        return cls(shard.channel, shard.ranks_before[-1:], shard.ranks_after[:1], first, last, differentiable)

    def attend(
        self, attend: Attend, call: Call, state: LinearAttentionState | None
    ) -> tuple[Tensor, Sums | None]:
        """out and the last sums of a call that a backend gets. attend: the backend's."""
        assert state is not None
        parts = call.by_heads(1)
        sums = [split_heads(x, 1, call.value_group, len(parts)) for x in (state.kv, state.z, state.angle)]
        outs: list[Tensor] = []
        kvs: list[Tensor] = []
        zs: list[Tensor] = []
        for part, kv, z, angle in zip(parts, *sums, strict=True):
            for rank in self.before:
                part, kv = self._receive(rank, part, kv, is_first=not outs)
            out, last = attend(replace(part, return_state=True), replace(state, kv=kv, z=z, angle=angle))
            assert last is not None
            kv = last.kv
            for rank in self.after:
                out, kv = self._send(rank, out, kv)
            outs.append(out)
            kvs.append(kv)
            zs.append(last.z)
        self.channel.wait_for_sent()
        out = torch.cat(outs, 2)
        if not call.return_state:
            return out, None
        return out, Sums(torch.cat(kvs, 1), torch.cat(zs, 1), call.last_angle(state.angle))

    def _receive(self, rank: int, part: Call, kv: Tensor, is_first: bool) -> tuple[Call, Tensor]:
        """The call of a head, and kv with the rows that the rank before has sent."""
        inputs = {name: x for name in INPUTS if (x := getattr(part, name)) is not None and x.requires_grad}
        if not self.differentiable:
            inputs = {}
        kv, *same = _Receive.apply(self.channel, rank, self.first, is_first, kv, *inputs.values())  # type: ignore[no-untyped-call]
        return replace(part, **dict(zip(inputs, same, strict=True))), kv

    def _send(self, rank: int, out: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """out and kv, whose rows for the rank after are on their way."""
        if self.differentiable:
            return _Send.apply(self.channel, rank, self.last, out, kv)  # type: ignore[no-any-return, no-untyped-call]
        self.channel.send(kv[self.last], rank)
        return out, kv

    def of_last_rank(self, out: Tensor, kv: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """out, and the kv of this rank of the group, which every rank gets."""
        gathered = self.channel.gather([kv], self.differentiable).wait()[0]
        # Adds nothing: out depends on the gather, as no rank may skip its backward pass.
        return out + gathered[:0].sum().to(out.dtype), gathered[rank].clone()


class _Receive(torch.autograd.Function):
    """kv with the rows that another rank sends, to which the gradient of these goes back.

    The call's inputs pass through: a rank whose caller asks for the gradient of any of them takes part.
    """

    @staticmethod
    def forward(
        ctx: Any, channel: Channel, rank: int, rows: slice, is_first: bool, kv: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.channel, ctx.rank, ctx.rows, ctx.is_first = channel, rank, rows, is_first
        kv = kv.clone()
        kv[rows] = channel.receive(kv[rows], rank)
        return kv, *inputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, *of_inputs: Tensor) -> tuple[Tensor | None, ...]:
        ctx.channel.send(g[ctx.rows], ctx.rank)
        if ctx.is_first:  # the first heads are the last ones of the backward pass
            ctx.channel.wait_for_sent()
        g = g.clone()
        g[ctx.rows] = 0
        return None, None, None, None, g, *of_inputs


class _Send(torch.autograd.Function):
    """out and kv. Sends rows of kv to another rank, which sends their gradient back."""

    @staticmethod
    def forward(
        ctx: Any, channel: Channel, rank: int, rows: slice, out: Tensor, kv: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.channel, ctx.rank, ctx.rows = channel, rank, rows
        channel.send(kv[rows], rank)
        ctx.save_for_backward(kv)
        return out, kv

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_out: Tensor, g_kv: Tensor) -> tuple[Tensor | None, ...]:
        # Under torch.utils.checkpoint this computes the forward pass again, which the other rank waits for: it can send
        # nothing before.
        (kv,) = ctx.saved_tensors
        g_kv = g_kv.clone()
        g_kv[ctx.rows] += ctx.channel.receive(kv[ctx.rows], ctx.rank)
        return None, None, None, g_out, g_kv

"""What ranks send each other: tensors of one size from each to all, and the gradients back."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

ALIGNED = 8  # bytes: each tensor begins at a multiple, so that it can be read where it arrives
TEXT = 2048  # bytes of a description

# Before PyTorch 2.13, which deprecates it, the same function has another name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Channel:
    """A process group, and how much was sent through it."""

    def __init__(self, group: "dist.ProcessGroup | None") -> None:
        alone = not (dist.is_available() and dist.is_initialized())
        self.group = group
        self.rank = 0 if alone else dist.get_rank(group)
        self.size = 1 if alone else dist.get_world_size(group)
        self.collectives, self.bytes_sent = 0, 0
        self.seconds = 0.0  # in collectives and waiting for them
        if self.rank < 0:
            raise ValueError("group: got one that this process is not in, expected one of its own")

    def gather(self, tensors: Sequence[Tensor], learned: bool) -> "Gathered":
        """Sends each rank's tensors, which have the same shapes everywhere; does not wait for them.

        learned: whether gradients go back, on all ranks or on none.
        """
        with torch.no_grad():
            sent = _packed([x.detach()[None] for x in tensors], 1)[0]
        received = sent.new_empty(self.size * len(sent))
        with self.sending(len(sent)):
            work = _all_gather(received, sent, group=self.group, async_op=True)
        return Gathered(self, list(tensors), learned, sent, received, work)

    def compare(self, text: str, checksum: int) -> list[tuple[int, str]]:
        """Each rank's checksum and text, cut where it is long."""
        data = checksum.to_bytes(8, "little") + text.encode()[:TEXT]
        sent = torch.frombuffer(bytearray(data.ljust(8 + TEXT, b"\0")), dtype=torch.uint8).to(self.device())
        received = sent.new_empty(self.size * len(sent))
        with self.sending(len(sent)):
            _all_gather(received, sent, group=self.group)
        rows = [bytes(row.tolist()) for row in received.cpu().view(self.size, -1)]
        return [
            (int.from_bytes(row[:8], "little"), row[8:].rstrip(b"\0").decode(errors="replace"))
            for row in rows
        ]

    def total(self, count: Tensor) -> Tensor:
        """The sum of a number of each rank, without a gradient."""
        total = count.detach().clone()
        if self.size > 1:
            with self.sending(total.element_size()):
                dist.all_reduce(total, group=self.group)
        return total

    def device(self) -> torch.device:
        """Where the group's tensors have to be."""
        backend = dist.get_backend(self.group)
        return torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")

    @contextmanager
    def sending(self, count: int | None) -> Iterator[None]:
        """Around a collective that sends so many bytes to each other rank; None: the wait for one."""
        if count is not None:
            self.collectives += 1
            self.bytes_sent += count * (self.size - 1)
        start = time.perf_counter()
        try:
            yield
            self.seconds += time.perf_counter() - start
        except RuntimeError as error:
            raise RuntimeError(
                f"shard: rank {self.rank} of {self.size} could not exchange with the others: {error}; "
                "expected all of them in the same call, within the group's timeout; the cause is in the "
                "output of the one that ended or came late"
            ) from error


class Gathered(NamedTuple):
    """Tensors of all ranks, which are on their way."""

    channel: Channel
    own: list[Tensor]
    learned: bool
    sent: Tensor  # its memory is read until all has arrived
    received: Tensor  # bytes
    work: Any

    def wait(self) -> list[Tensor]:
        """(size, ..) each, where they have arrived.

        Their gradient goes back to the rank that sent them, where all ranks' are added in rank order.
        """
        with self.channel.sending(None):
            self.work.wait()
        # An empty shard's tensors may need no gradient, but its rank has to be there when others send theirs.
        anchor = self.received.new_zeros((), dtype=torch.float32, requires_grad=self.learned)
        found = _Gather.apply(self.channel, self.received, anchor, *self.own)  # type: ignore[no-untyped-call]
        return list(found)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, channel: Channel, received: Tensor, anchor: Tensor, *own: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.channel = channel
        results = _unpacked(received.view(channel.size, -1), own)
        ctx.mark_non_differentiable(*[x for x in results if not x.is_floating_point()])
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        channel, floating = ctx.channel, [x for x in gradients if x.is_floating_point()]
        sent = _packed(floating, channel.size)
        received = torch.empty_like(sent)
        with channel.sending(sent.shape[1]):
            dist.all_to_all_single(received.view(-1), sent.view(-1), group=channel.group)
        found = iter(_unpacked(received, [x[0] for x in floating]))
        return (
            None,
            None,
            None,
            *[_in_order(next(found)) if x.is_floating_point() else None for x in gradients],
        )


def _in_order(x: Tensor) -> Tensor:
    """x summed over its first axis, one after the other: the order of a sum() is PyTorch's affair."""
    total = x[0].clone()
    for part in x[1:]:
        total += part
    return total


def _padded(x: Tensor) -> int:
    return -(-x.numel() * x.element_size() // ALIGNED) * ALIGNED


def _packed(tensors: Sequence[Tensor], size: int) -> Tensor:
    """(size, bytes) of tensors (size, ..)."""
    like = [x[0] for x in tensors]
    data = like[0].new_zeros(size, sum(map(_padded, like)), dtype=torch.uint8)
    for place, x in zip(_unpacked(data, like), tensors, strict=True):
        place.copy_(x)
    return data


def _unpacked(data: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Tensors (size, ..) in the memory of data (size, bytes)."""
    found, low = [], 0
    for x in like:
        flat = data[:, low : low + x.numel() * x.element_size()].view(x.dtype)
        found.append(flat.unflatten(1, x.shape) if x.ndim else flat[:, 0])
        low += _padded(x)
    return found

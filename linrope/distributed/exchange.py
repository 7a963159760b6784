"""Communication between ranks, through which gradients travel back.

Each rank gathers the same tensors of all ranks, or a rank passes a tensor on to another.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

ALIGNMENT = 8  # bytes: each tensor begins at a multiple of it, so that a view can read it where it arrives
TEXT_BYTES = 2048  # the longest text that ranks compare

# Before PyTorch 2.13 this function has another name, which 2.13 deprecates.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Channel:
    """A process group, and how much this rank has sent through it."""

    def __init__(self, group: "dist.ProcessGroup | None") -> None:
        alone = not (dist.is_available() and dist.is_initialized())
        self.group = group
        self.rank = 0 if alone else dist.get_rank(group)
        self.size = 1 if alone else dist.get_world_size(group)
        self.collectives, self.bytes_sent = 0, 0
        self.seconds = 0.0  # spent in collectives and waiting for them
        self._sent: list[tuple[Any, Tensor]] = []  # what is on its way, and the memory that is read meanwhile
        if self.rank < 0:
            raise ValueError("group: got a group without this process, expected one that it belongs to")

    def gather(self, tensors: Sequence[Tensor], differentiable: bool) -> "Gathered":
        """Sends this rank's tensors, which have the same shapes on all ranks, without waiting for the others'.

        differentiable: whether gradients travel back, which must be the same on all ranks.
        """
        with torch.no_grad():
            sent = _pack([x.detach()[None] for x in tensors], 1)[0]
        received = sent.new_empty(self.size * len(sent))
        with self.sending(len(sent)):
            work = _all_gather(received, sent, group=self.group, async_op=True)
        return Gathered(self, list(tensors), differentiable, sent, received, work)

    def send(self, x: Tensor, rank: int) -> None:
        """Sends x to another rank, which calls ``receive``. Does not wait until it has arrived."""
        x = x.detach().clone(memory_format=torch.contiguous_format)
        self.bytes_sent += x.numel() * x.element_size()
        with self.sending(None):
            self._sent.append((dist.isend(x, group=self.group, group_dst=rank), x))

    def receive(self, like: Tensor, rank: int) -> Tensor:
        """Waits for the tensor that another rank sends. It has the shape and dtype of ``like``."""
        received = torch.empty_like(like, memory_format=torch.contiguous_format)
        with self.sending(None):
            dist.recv(received, group=self.group, group_src=rank)
        return received

    def wait_for_sent(self) -> None:
        """Waits until all that this rank has sent to others has arrived."""
        with self.sending(None):
            for work, _ in self._sent:
                work.wait()
        self._sent.clear()

    def compare(self, text: str, checksum: int) -> list[tuple[int, str]]:
        """Each rank's checksum and text. Long texts are cut off."""
        data = checksum.to_bytes(8, "little") + text.encode()[:TEXT_BYTES]
        sent = torch.frombuffer(bytearray(data.ljust(8 + TEXT_BYTES, b"\0")), dtype=torch.uint8).to(
            self.device()
        )
        received = sent.new_empty(self.size * len(sent))
        with self.sending(len(sent)):
            _all_gather(received, sent, group=self.group)
        rows = [bytes(row.tolist()) for row in received.cpu().view(self.size, -1)]
        return [
            (int.from_bytes(row[:8], "little"), row[8:].rstrip(b"\0").decode(errors="replace"))
            for row in rows
        ]

    def total(self, count: Tensor) -> Tensor:
        """The sum of ``count`` over all ranks, without a gradient."""
        total = count.detach().clone()
        if self.size > 1:
            with self.sending(total.element_size()):
                dist.all_reduce(total, group=self.group)
        return total

    def device(self) -> torch.device:
        """The device that tensors must be on to be sent through the group."""
        backend = dist.get_backend(self.group)
        return torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")

    @contextmanager
    def sending(self, count: int | None) -> Iterator[None]:
        """Times a collective and rewrites its failures. count: bytes per peer; None for a wait."""
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
                "expected all ranks to make the same call within the group's timeout; the output of the rank that "
                "ended or was late shows the cause"
            ) from error


class Gathered(NamedTuple):
    """Tensors of all ranks that are on their way."""

    channel: Channel
    local: list[Tensor]  # this rank's
    differentiable: bool
    sent: Tensor  # kept alive here, because its memory is read until everything has arrived
    received: Tensor  # bytes
    work: Any

    def wait(self) -> list[Tensor]:
        """Waits for the tensors of all ranks and returns them, stacked by rank: (size, ..) each.

        A gradient travels back to the rank that sent the tensor, which adds up all ranks' gradients in rank order.
        """
        with self.channel.sending(None):
            self.work.wait()
        # The tensors of an empty shard may require no gradient, but its rank must still join the backward collective.
        anchor = self.received.new_zeros((), dtype=torch.float32, requires_grad=self.differentiable)
        stacked = _Gather.apply(self.channel, self.received, anchor, *self.local)  # type: ignore[no-untyped-call]
        return list(stacked)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, channel: Channel, received: Tensor, anchor: Tensor, *local: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.channel = channel
        results = _unpack(received.view(channel.size, -1), local)
        ctx.mark_non_differentiable(*[x for x in results if not x.is_floating_point()])
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        channel, floating = ctx.channel, [x for x in gradients if x.is_floating_point()]
        sent = _pack(floating, channel.size)
        received = torch.empty_like(sent)
        with channel.sending(sent.shape[1]):
            dist.all_to_all_single(received.view(-1), sent.view(-1), group=channel.group)
        by_rank = iter(_unpack(received, [x[0] for x in floating]))
        sums = [_sum_in_order(next(by_rank)) if x.is_floating_point() else None for x in gradients]
        return None, None, None, *sums


def _sum_in_order(x: Tensor) -> Tensor:
    """Sums x over its first axis from front to back. torch.sum promises no order."""
    total = x[0].clone()
    for part in x[1:]:
        total += part
    return total


def _padded_bytes(x: Tensor) -> int:
    return -(-x.numel() * x.element_size() // ALIGNMENT) * ALIGNMENT


def _pack(tensors: Sequence[Tensor], size: int) -> Tensor:
    """Copies tensors (size, ..) into one tensor of bytes (size, bytes)."""
    like = [x[0] for x in tensors]
    data = like[0].new_zeros(size, sum(map(_padded_bytes, like)), dtype=torch.uint8)
    for view, x in zip(_unpack(data, like), tensors, strict=True):
        view.copy_(x)
    return data


def _unpack(data: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of data (size, bytes) as tensors (size, ..), with the shapes and dtypes of ``like``."""
    views, low = [], 0
    for x in like:
        flat = data[:, low : low + x.numel() * x.element_size()].view(x.dtype)
        views.append(flat.unflatten(1, x.shape) if x.ndim else flat[:, 0])
        low += _padded_bytes(x)
    return views

"""Which tokens of a batch each process of a group holds, and the check that all processes agree on it.

b batch, n tokens of this rank, s documents (packed sequences).
"""

import operator
import zlib
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from linrope.common.keywords import shows
from linrope.distributed.exchange import Channel

DIMENSION = "cp"  # the mesh dimension that splits sequences, as torchtitan and accelerate name it
SHOWN = 8  # how many numbers of a list an error shows
NO_TARGET = -100  # the default ignore_index of cross_entropy


class Piece(NamedTuple):
    """The tokens of one document that one rank holds: low .. high - 1 among all tokens of the batch."""

    document: int
    low: int
    high: int
    position: int  # the position of the token `low` in its document


class Layout:
    """The contiguous part of each sequence that this process holds, and the parts that the others hold.

    ``linrope.distributed.Shard`` adds the calls that use a layout, and describes the arguments.
    """

    @shows({}, required=["lengths"])
    def __init__(
        self,
        group: "dist.ProcessGroup | DeviceMesh | None" = None,
        *,
        lengths: Sequence[int] | None = None,
        cu_seqlens: Tensor | Sequence[int] | None = None,
    ) -> None:
        if lengths is None:
            raise TypeError(
                "lengths: got None, expected the number of tokens of each rank, [n] in one process"
            )
        self.channel = Channel(_group_of(group))
        self.rank, self.size = self.channel.rank, self.channel.size
        self.lengths = _integers("lengths", lengths)
        if len(self.lengths) != self.size or min(self.lengths) < 0:
            raise ValueError(
                f"lengths: got {_shown(self.lengths)}, expected {self.size}, one per rank and none negative"
            )
        starts = [0, *accumulate(self.lengths)]
        self.start, self.stop, self.total = starts[self.rank], starts[self.rank + 1], starts[-1]
        device, bounds = None, [0, self.total]
        if cu_seqlens is not None:
            device = cu_seqlens.device if isinstance(cu_seqlens, Tensor) else torch.device("cpu")
            bounds = _integers("cu_seqlens", cu_seqlens)
            if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != self.total or bounds != sorted(bounds):
                raise ValueError(
                    f"cu_seqlens: got {_shown(bounds)}, expected numbers that rise from 0 to the sum of "
                    f"lengths, {self.total}"
                )
        self.bounds = bounds
        self.pieces = [_pieces(bounds, low, high) for low, high in pairwise(starts)]
        self.cu_seqlens: Tensor | None = None
        if device is not None:
            ends = [piece.high - self.start for piece in self.local_pieces] or [0]
            self.cu_seqlens = torch.tensor([0, *ends], device=device)
        self._agreed: set[str] = set()

    @property
    def local_pieces(self) -> list[Piece]:
        """The pieces of this rank, one per document. An empty rank has none."""
        return self.pieces[self.rank]

    @property
    def length(self) -> int:
        """The number of tokens of this rank."""
        return self.lengths[self.rank]

    def check_length(self, name: str, tokens: int) -> None:
        """Raises ValueError unless a tensor has as many tokens as this rank holds. name: the tensor's."""
        if tokens != self.length:
            raise ValueError(
                f"{name}: got {tokens} tokens on rank {self.rank}, expected its shard's {self.length}"
            )

    @property
    def ranks_before(self) -> list[int]:
        """The earlier ranks that hold tokens of the document of this rank's first token."""
        if not self.local_pieces:
            return []
        first = self.local_pieces[0].document
        return [s for s in range(self.rank) if self.pieces[s] and self.pieces[s][-1].document == first]

    @property
    def ranks_after(self) -> list[int]:
        """The later ranks that hold tokens of the document of this rank's last token."""
        if not self.local_pieces:
            return []
        last, later = self.local_pieces[-1].document, range(self.rank + 1, self.size)
        return [s for s in later if self.pieces[s] and self.pieces[s][0].document == last]

    @property
    def ranks_with_tokens(self) -> list[int]:
        """All ranks that hold tokens."""
        return [s for s in range(self.size) if self.pieces[s]]

    def piece(self, index: int) -> slice:
        """The tokens of the first (0) or last (-1) local document, as a slice of the local tokens."""
        if not self.local_pieces:
            return slice(0, 0)
        return slice(self.local_pieces[index].low - self.start, self.local_pieces[index].high - self.start)

    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        """Cuts this rank's part out of x, which holds the tokens of all ranks."""
        if x.shape[dim] != self.total:
            raise ValueError(
                f"x: got {x.shape[dim]} tokens, expected those of all ranks, {self.total} = the sum of "
                f"{_shown(self.lengths)}"
            )
        return x.narrow(dim, self.start, self.length)

    def targets(self, tokens: Tensor, ignore: int = NO_TARGET) -> Tensor:
        """The token after each local one, even if the next rank holds it, or ``ignore`` after a document: (b, n).

        tokens (b, sum of lengths) are those of all ranks. Divide a sum of losses by the number of targets of all
        ranks, not of this one, as ``mean_loss`` does.
        """
        targets = tokens.roll(-1, 1)
        targets[:, [end - 1 for end in self.bounds[1:] if end]] = ignore
        return self.take(targets)

    def mean_loss(
        self, logits: Tensor, targets: Tensor, count: Tensor | int | None = None, ignore: int = NO_TARGET
    ) -> Tensor:
        """This rank's part of the mean cross-entropy over the targets of all ranks. The parts add up to the mean.

            sum_i -log softmax(logits_i)[target_i] / count

        logits are (b, n, vocabulary), and targets (b, n) come from ``targets``. count is the divisor. Its default is
        the number of targets of all ranks, which takes a collective. Pass it if an optimizer step adds up the
        losses of several batches. If gradients are averaged over processes, multiply the loss by the number of
        processes.
        """
        if count is None:
            count = self.channel.total((targets != ignore).sum()).clamp(min=1)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
        return F.cross_entropy(wide, targets.flatten(), ignore_index=ignore, reduction="sum") / count

    def positions(self, device: torch.device | str | None = None, start: Tensor | None = None) -> Tensor:
        """Each local token's position in its document, (n,).

        start: (documents of all ranks,), the position of each document's first token; None: 0. A document is a packed
        sequence; without packing there is one.
        """
        parts = [
            torch.arange(x.position, x.position + x.high - x.low, device=device) for x in self.local_pieces
        ]
        if start is not None:
            parts = [part + start[x.document] for part, x in zip(parts, self.local_pieces, strict=True)]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=device)

    def documents(self, device: torch.device | str | None = None) -> Tensor:
        """The index of each local document among those of all ranks, (s,). An empty rank has 0, without tokens."""
        return torch.tensor([piece.document for piece in self.local_pieces] or [0], device=device)

    def agree(self, describe: Callable[[], str]) -> None:
        """Raises if describe() fails on any rank, or if the ranks' texts differ.

        A text that the ranks have agreed on before is not compared again. So all ranks must come with a new text in the
        same call, or those that do wait for the others. Before the ranks first agree, a failure of describe() is sent
        as the text of that rank, and every rank raises. Afterwards only the rank whose describe() fails raises.
        """
        failure: Exception | None = None
        try:
            text = describe()
        except (TypeError, ValueError, RuntimeError) as error:
            failure, text = error, f"{type(error).__name__}: {error}"
        if text in self._agreed:
            return
        if failure is not None and self._agreed:  # the other ranks agreed earlier and no longer compare
            raise failure
        bounds, lengths = self.bounds, self.lengths
        text_of_all = f"lengths={_shown(lengths)}, cu_seqlens={_shown(bounds)}, {text}"
        texts = self.channel.compare(text_of_all, zlib.crc32(f"{lengths} {bounds} {text}".encode()))
        odd = next((r for r in range(self.size) if texts[r] != texts[0]), None)
        if odd is not None:
            raise ValueError(
                f"shard: the ranks disagree: rank 0 has {texts[0][1]}; rank {odd} has {texts[odd][1]}"
            ) from failure
        if failure is not None:
            raise failure
        self._agreed.add(text)

    def __repr__(self) -> str:
        packed = "" if self.cu_seqlens is None else f", {len(self.bounds) - 1} packed sequences"
        return (
            f"{type(self).__name__}(rank {self.rank} of {self.size}, lengths={_shown(self.lengths)}{packed})"
        )


def _group_of(group: "dist.ProcessGroup | DeviceMesh | None") -> "dist.ProcessGroup | None":
    if isinstance(group, DeviceMesh):
        names = group.mesh_dim_names or ()
        if group.ndim > 1 and DIMENSION not in names:
            raise ValueError(
                f"group: got a mesh of dimensions {names}, expected one dimension, or {DIMENSION!r} among them"
            )
        return group.get_group(DIMENSION if group.ndim > 1 else None)
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: got {type(group).__name__}, expected a ProcessGroup, a DeviceMesh or None")
    return group


def _integers(name: str, numbers: Tensor | Sequence[int]) -> list[int]:
    values = numbers.tolist() if isinstance(numbers, Tensor) else list(numbers)
    try:
        return [operator.index(x) for x in values]
    except TypeError:
        raise TypeError(f"{name}: got {_shown(values)}, expected integers") from None


def _pieces(bounds: list[int], low: int, high: int) -> list[Piece]:
    """Splits the tokens low .. high - 1 by document."""
    pieces = []
    for document, (begin, end) in enumerate(pairwise(bounds)):
        first, last = max(begin, low), min(end, high)
        if first < last:
            pieces.append(Piece(document, first, last, first - begin))
    return pieces


def _shown(numbers: Sequence[int]) -> str:
    if len(numbers) <= SHOWN:
        return str(list(numbers))
    head = ", ".join(map(str, numbers[:SHOWN]))
    return f"[{head}, ..] ({len(numbers)} numbers, checksum {zlib.crc32(str(list(numbers)).encode()):08x})"

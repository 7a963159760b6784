"""How the processes of a run share rows, the tokens of a row, and heads."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from linrope.distributed.shard import Shard
from linrope.models.language_model import LanguageModel
from linrope.models.tensor_parallel import share_heads
from linrope.sequence.state import LinearAttentionState


class Processes:
    """A run's processes: sequence_parallel of them share a batch's tokens, tensor_parallel the heads.

    What is left, ``rows`` of them, read rows of their own. The mesh's dimensions are dp, cp and tp.

    Raises:
        ValueError: numbers whose product does not divide the processes there are; beside tensor parallelism
            mixed precision or another way of accelerate's to share weights.
    """

    def __init__(self, accelerator: Any, sequence_parallel: int = 1, tensor_parallel: int = 1) -> None:
        self.accelerator, self.tokens, self.heads = accelerator, sequence_parallel, tensor_parallel
        count, shared = accelerator.num_processes, sequence_parallel * tensor_parallel
        if min(sequence_parallel, tensor_parallel) < 1 or count % shared:
            raise ValueError(
                f"sequence_parallel={sequence_parallel}, tensor_parallel={tensor_parallel}: expected numbers "
                f"whose product divides the processes, {count}"
            )
        kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
        if tensor_parallel > 1 and (accelerator.mixed_precision != "no" or not kind.startswith("MULTI")):
            raise ValueError(
                f"tensor_parallel={tensor_parallel}: got mixed_precision={accelerator.mixed_precision!r} and "
                f"accelerate's {kind}; expected 'no' and plain processes"
            )
        self.rows = count // shared
        self.mesh: DeviceMesh | None = None
        if shared > 1:
            sizes = (self.rows, sequence_parallel, tensor_parallel)
            self.mesh = init_device_mesh(accelerator.device.type, sizes, mesh_dim_names=("dp", "cp", "tp"))

    @property
    def row(self) -> int:
        """Which of those that read rows of their own this one belongs to."""
        return int(self.accelerator.process_index) // (self.tokens * self.heads)

    def share(self, model: LanguageModel) -> None:
        """Leaves each process its heads of the model; before the optimizer is made."""
        if self.heads == 1:
            return
        assert self.mesh is not None
        model.to(self.accelerator.device)
        for tensor in model.state_dict().values():
            if isinstance(tensor, Tensor):
                dist.broadcast(tensor, 0)
        share_heads(model, self.mesh["tp"])

    def prepare(self, model: LanguageModel, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        """Both as accelerate has them. It knows no shared heads: gradients are then added up here."""
        if self.heads > 1:
            return model, self.accelerator.prepare(optimizer)
        prepared: tuple[Any, Any] = self.accelerator.prepare(model, optimizer)
        return prepared

    def sum(self, x: Tensor, *dimensions: str) -> Tensor:
        """x added up over those dimensions of the mesh; "dp": over what others read."""
        if self.mesh is None:
            total: Tensor = self.accelerator.reduce(x, "sum") if "dp" in dimensions else x
            return total
        total = x.clone()
        for name in dimensions:
            dist.all_reduce(total, group=self.mesh.get_group(name))
        return total

    def scale(self) -> float:
        """What a process's loss is multiplied with, as gradients of several are averaged and not added."""
        return 1.0 if self.heads > 1 else float(self.accelerator.num_processes)

    @torch.no_grad()
    def clip_gradients(self, model: nn.Module, largest: float) -> float:
        """The norm of the gradient of all processes; each then has its part of it, no longer than largest."""
        if self.heads == 1:
            return float(self.accelerator.clip_grad_norm_(model.parameters(), largest))
        parameters = [p for p in model.parameters() if p.grad is not None]
        local = [_local(p.grad) for p in parameters]
        flat = self.sum(torch.cat([x.flatten() for x in local]), "dp", "cp")
        for x, part in zip(local, flat.split([x.numel() for x in local]), strict=True):
            x.copy_(part.view_as(x))
        kinds = [[p for p in parameters if isinstance(p, DTensor) == shared] for shared in (True, False)]
        norms: list[Any] = [get_total_norm([p.grad for p in kind if p.grad is not None]) for kind in kinds]
        norms = [x.full_tensor() if isinstance(x, DTensor) else x for x in norms]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        for kind in kinds:
            clip_grads_with_norm_(kind, largest, norm)
        return float(norm)

    def shard(self, cu_seqlens: Tensor) -> Shard | None:
        """Of packed rows, whose tokens are shared out in parts as equal as may be."""
        if self.tokens == 1:
            return None
        parts = torch.arange(int(cu_seqlens[-1]), device="cpu").tensor_split(self.tokens)
        return Shard(self.mesh, lengths=[len(part) for part in parts], cu_seqlens=cu_seqlens)


def _local(x: Any) -> Tensor:
    """This process's part of a gradient."""
    part: Tensor = x.to_local() if isinstance(x, DTensor) else x
    return part


def last_states(
    states: Sequence[LinearAttentionState], sequence: Tensor, shard: Shard | None, learned: bool
) -> list[LinearAttentionState]:
    """Of states of packed sequences, those of the sequences (b,), on every process that shares their tokens.

    learned: whether gradients go back through them.
    """
    if shard is None:
        return [state.reorder(sequence) for state in states]
    documents, ends = sequence.tolist(), shard.bounds[1:]
    # A sequence's last token is on one rank: there its state is that of the whole.
    owners = [
        next(r for r, pieces in enumerate(shard.pieces) if any(_ends(p, d, ends) for p in pieces))
        for d in documents
    ]
    mine = [next((i for i, p in enumerate(shard.mine) if _ends(p, d, ends)), 0) for d in documents]
    index = torch.tensor(mine, device=sequence.device)
    own = [state.reorder(index).tensors() for state in states]
    sent = shard.channel.gather([x for tensors in own for x in tensors.values()], learned).wait()
    owner, row = (
        torch.tensor(owners, device=sequence.device),
        torch.arange(len(documents), device=sequence.device),
    )
    found = iter([x[owner, row] for x in sent])
    new: list[dict[str, Any]] = [{name: next(found) for name in tensors} for tensors in own]
    return [replace(state, **tensors) for state, tensors in zip(states, new, strict=True)]


def _ends(piece: Any, document: int, ends: Sequence[int]) -> bool:
    return bool(piece.document == document and piece.high == ends[document])

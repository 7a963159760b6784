"""Splits rows, the tokens of a row, and heads over the processes of a run."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from linrope.distributed.shard import Shard
from linrope.layer.state import LayerState
from linrope.models.language_model import LanguageModel
from linrope.models.tensor_parallel import split_heads


class Processes:
    """The processes of a run.

    Each group of sequence_parallel processes splits a batch's tokens; each group of tensor_parallel processes splits
    the model's heads. That leaves ``row_groups`` groups of processes, each of which reads different rows. The
    dimensions of the mesh are dp (rows), cp (tokens) and tp (heads).

    Raises:
        ValueError: the product of both numbers does not divide the number of processes, or tensor
            parallelism is combined with mixed precision or with another of accelerate's ways to split
            weights.
    """

    def __init__(self, accelerator: Any, sequence_parallel: int = 1, tensor_parallel: int = 1) -> None:
        self.accelerator, self.token_parts, self.head_parts = accelerator, sequence_parallel, tensor_parallel
        count, shared = accelerator.num_processes, sequence_parallel * tensor_parallel
        if min(sequence_parallel, tensor_parallel) < 1 or count % shared:
            raise ValueError(
                f"sequence_parallel={sequence_parallel}, tensor_parallel={tensor_parallel}: expected numbers "
                f"whose product divides the number of processes, {count}"
            )
        kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
        if tensor_parallel > 1 and (accelerator.mixed_precision != "no" or not kind.startswith("MULTI")):
            raise ValueError(
                f"tensor_parallel={tensor_parallel}: got mixed_precision={accelerator.mixed_precision!r} and "
                f"accelerate's {kind}; expected 'no' and plain processes"
            )
        self.row_groups = count // shared
        self.mesh: DeviceMesh | None = None
        if shared > 1:
            sizes = (self.row_groups, sequence_parallel, tensor_parallel)
            self.mesh = init_device_mesh(accelerator.device.type, sizes, mesh_dim_names=("dp", "cp", "tp"))

    @property
    def row_group(self) -> int:
        """The index of this process's group, 0 .. row_groups - 1. The groups read different rows."""
        return int(self.accelerator.process_index) // (self.token_parts * self.head_parts)

    def split_heads(self, model: LanguageModel) -> None:
        """Splits the heads of the model over the processes; called before the optimizer is made."""
        if self.head_parts == 1:
            return
        assert self.mesh is not None
        model.to(self.accelerator.device)
        weights = model.state_dict()
        for name, tensor in weights.items():
            if isinstance(tensor, Tensor):
                # The extra state of a random map is a copy on the CPU.
                weights[name] = tensor.to(self.accelerator.device)
                dist.broadcast(weights[name], 0)
        model.load_state_dict(weights)
        split_heads(model, self.mesh["tp"])

    def prepare(self, model: LanguageModel, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        """Wraps both with accelerate, except a model with split heads: see clip_gradients."""
        if self.head_parts > 1:
            return model, self.accelerator.prepare(optimizer)
        prepared: tuple[Any, Any] = self.accelerator.prepare(model, optimizer)
        return prepared

    def sum(self, x: Tensor, *dimensions: str) -> Tensor:
        """The sum of x over these dimensions of the mesh."""
        if self.mesh is None:
            total: Tensor = self.accelerator.reduce(x, "sum") if "dp" in dimensions else x
            return total
        total = x.clone()
        for name in dimensions:
            dist.all_reduce(total, group=self.mesh.get_group(name))
        return total

    def scale(self) -> float:
        """The factor for the loss of a process: it undoes accelerate's mean over processes."""
        return 1.0 if self.head_parts > 1 else float(self.accelerator.num_processes)

    @torch.no_grad()
    def clip_gradients(self, model: nn.Module, largest: float) -> float:
        """Clips the gradient of all processes to the norm ``largest``; returns the norm before.

        With split heads it first adds up the gradients of the processes that have the same heads.
        """
        if self.head_parts == 1:
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
        """This process's shard of packed rows; the shards are as equal as possible."""
        if self.token_parts == 1:
            return None
        parts = torch.arange(int(cu_seqlens[-1]), device="cpu").tensor_split(self.token_parts)
        return Shard(self.mesh, lengths=[len(part) for part in parts], cu_seqlens=cu_seqlens)


def _local(x: Any) -> Tensor:
    """This process's part of a gradient."""
    part: Tensor = x.to_local() if isinstance(x, DTensor) else x
    return part


def last_states(
    states: Sequence[LayerState], sequence: Tensor, shard: Shard | None, differentiable: bool
) -> list[LayerState]:
    """The states of the sequences with the indices ``sequence`` (b,), on every process that shares their tokens.

    differentiable: whether gradients pass back through the states.
    """
    if shard is None:
        return [state.reorder(sequence) for state in states]
    documents, ends = sequence.tolist(), shard.bounds[1:]
    # The rank that has a sequence's last token has its final state.
    owners = [
        next(r for r, pieces in enumerate(shard.pieces) if any(_ends(p, d, ends) for p in pieces))
        for d in documents
    ]
    pieces = [next((i for i, p in enumerate(shard.local_pieces) if _ends(p, d, ends)), 0) for d in documents]
    index = torch.tensor(pieces, device=sequence.device)
    local = [state.reorder(index).tensors() for state in states]
    gathered = shard.channel.gather([x for tensors in local for x in tensors.values()], differentiable).wait()
    owner, row = (
        torch.tensor(owners, device=sequence.device),
        torch.arange(len(documents), device=sequence.device),
    )
    selected = iter([x[owner, row] for x in gathered])
    new: list[dict[str, Any]] = [{name: next(selected) for name in tensors} for tensors in local]
    return [LayerState.from_tensors(x, state.identity) for x, state in zip(new, states, strict=True)]


def _ends(piece: Any, document: int, ends: Sequence[int]) -> bool:
    """True if the piece holds the last token of the document."""
    return bool(piece.document == document and piece.high == ends[document])

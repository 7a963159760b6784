"""Tensor parallelism: each process has some of the heads, and some of the feed-forward's hidden units.

    y = sum over processes of W_o[:, its heads] (out of its heads)       one all-reduce forward, one backward

Weights are DTensors and keep their names, so that optimizers, distributed checkpoints and state dicts see a
whole model. Projections lie cut into rows or columns; what is small lies whole on each process, which reads
its heads' part of it, and gradients are added up over all.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from linrope.common.constants import Constant
from linrope.feature_maps.base import FeatureMap
from linrope.feature_maps.learned import LearnedMap
from linrope.layer.attention import LinearRoPEAttention
from linrope.layer.selective import SelectiveSteps
from linrope.models.language_model import Block, LanguageModel
from linrope.rotation.rotary import Rotary

# Of what a layer's process has a part of its own: the dimension that is cut.
CUT = {
    **dict.fromkeys(("q_proj.weight", "k_proj.weight", "v_proj.weight", "g_proj.weight"), 0),
    **dict.fromkeys(("q_proj.bias", "k_proj.bias", "v_proj.bias", "g_proj.bias"), 0),
    **dict.fromkeys(("forget_gate.weight", "forget_gate.bias", "decay_logit"), 0),
    "o_proj.weight": 1,
}


def share_heads(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Gives each process of the mesh its heads of a LinearRoPEAttention, or of each block of a LanguageModel.

    Inputs and outputs stay whole, and so do the model's embedding and norms. A state has its process's heads.
    Transformers' models are shared out as they are loaded, ``from_pretrained(..,
    distributed_config=DistributedConfig(tp_size=..))``; in plans of your own for
    ``torch.distributed.tensor.parallel.parallelize_module`` a layer's style is ``HeadParallel``.

    Args:
        module: is changed; the weights are those of the mesh's first process.
        mesh: of one dimension, as mesh["tp"].

    Raises:
        ValueError: key/value heads or hidden units that the number of processes does not divide; a layer that
            is shared already; softmax attention; a module that gives angle steps and is no SelectiveSteps.
        TypeError: another module.

    Source: Megatron-LM, arXiv 1909.08053, section 3.
    """
    if isinstance(module, LinearRoPEAttention):
        return parallelize_module(module, mesh, HeadParallel())
    if not isinstance(module, LanguageModel):
        kind = type(module).__name__
        raise TypeError(f"module: got {kind}, expected LinearRoPEAttention or LanguageModel")
    if module.config.attention == "softmax":
        raise ValueError("attention='softmax': expected 'linear' for tensor parallelism")
    for block in module.blocks:  # all are checked before one is changed
        assert isinstance(block, Block)
        assert isinstance(block.attention, LinearRoPEAttention)
        _check_divides("hidden_dim", block.feed_forward.w1.out_features, mesh.size())
        _check(block.attention, mesh.size())
    plan: dict[str, ParallelStyle] = {
        "blocks.*.attention": HeadParallel(),
        "blocks.*.feed_forward.w1": ColwiseParallel(),
        "blocks.*.feed_forward.w3": ColwiseParallel(),
        "blocks.*.feed_forward.w2": RowwiseParallel(),
    }
    return parallelize_module(module, mesh, plan)


class HeadParallel(ParallelStyle):
    """The style of a LinearRoPEAttention in a plan for ``parallelize_module``: see ``share_heads``."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) is not LinearRoPEAttention:
            shared = " that has been shared already" if isinstance(module, SharedHeads) else ""
            raise ValueError(f"module: got {type(module).__name__}{shared}, expected LinearRoPEAttention")
        _check(module, device_mesh.size())
        _place(module, device_mesh, self.src_data_rank)
        return module


class SharedHeads(LinearRoPEAttention):
    """A layer of which this process has some of the heads; ``HeadParallel`` makes it of an ordinary one."""

    mesh: DeviceMesh
    _readers: dict[str, Callable[[DTensor], Tensor]]  # by parameter: what this process reads of it

    def forward(self, x: Tensor, context: Tensor | None = None, **how: Any) -> Any:
        """As of the ordinary layer, with its x and y; the state is of the own heads."""
        with self._own_parts():
            result = super().forward(
                _copied(x, self.mesh), None if context is None else _copied(context, self.mesh), **how
            )
        if isinstance(result, tuple):
            return _added(result[0], self.mesh), result[1]
        return _added(result, self.mesh)

    @contextmanager
    def _own_parts(self) -> Iterator[None]:
        """Has the layer's parameters be plain tensors of the own heads."""
        found = []
        for name, read in self._readers.items():
            owner, _, last = name.rpartition(".")
            module = self.get_submodule(owner)
            whole: Any = module._parameters[last]
            found.append((module, last, whole))
            module._parameters[last] = read(whole)  # type: ignore[assignment]
        try:
            yield
        finally:
            for module, last, whole in found:
                module._parameters[last] = whole

    def extra_repr(self) -> str:
        with self._own_parts():
            return f"{super().extra_repr()}, rank {self.mesh.get_local_rank()} of {self.mesh.size()}"


def _copied(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """x, whose gradients of all processes are added up."""
    whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])


def _added(y: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of all processes' y."""
    parts = DTensor.from_local(y, mesh, [Partial()], run_check=False)
    return parts.redistribute(placements=[Replicate()]).to_local()


def _check_divides(name: str, number: int, size: int) -> None:
    if number % size:
        raise ValueError(f"{name}={number}: expected a multiple of the {size} processes that share them")


def _check(layer: LinearRoPEAttention, size: int) -> None:
    _check_divides("num_kv_heads", layer.num_kv_heads, size)
    steps = layer.angle_steps
    if steps is not None and not isinstance(steps, SelectiveSteps):
        raise ValueError(
            f"rotary: got a {type(steps).__name__}, whose heads are not known; expected SelectiveSteps for "
            "tensor parallelism"
        )


def _place(layer: LinearRoPEAttention, mesh: DeviceMesh, source: int | None) -> None:
    """Makes the layer one of the own heads: parameters become DTensors, constants those of these heads."""
    size, rank, g = mesh.size(), mesh.get_local_rank(), layer.num_kv_heads
    own = slice(rank * g // size, (rank + 1) * g // size)
    cut = dict(CUT)
    for name, module in layer.named_modules():
        if isinstance(module, LearnedMap) and module.num_heads is not None:
            cut |= {f"{name}.{weight}": 0 for weight, _ in module.named_parameters()}
            module.num_heads = module.num_heads // size
            module.num_kv_heads = (module.num_kv_heads or 0) // size
    layer.rotary = _rotary(layer.rotary, own)
    if isinstance(steps := layer.angle_steps, SelectiveSteps):
        if steps.up.shape[0] > 1:
            cut["angle_steps.up"] = 0
        if steps.rotary.heads > 1:
            steps.rotary = layer.rotary if layer.rotary is not None else steps.rotary
            steps._theta = Constant(steps._theta.on(torch.device("cpu"))[own])
    if layer._decay is not None:
        layer._decay = Constant(layer._decay.on(torch.device("cpu"))[own])
    readers: dict[str, Callable[[DTensor], Tensor]] = {}
    for name, parameter in list(layer.named_parameters()):
        placement: Placement = Shard(cut[name]) if name in cut else Replicate()
        if name == "short_conv.weight":
            readers[name] = partial(_channels, ranges=_ranges(layer, rank, size))
        elif name == "o_proj.bias":
            readers[name] = partial(_once, here=rank == 0)
        else:
            readers[name] = DTensor.to_local if name in cut else _whole
        owner, _, last = name.rpartition(".")
        data = distribute_tensor(parameter, mesh, [placement], src_data_rank=source)
        layer.get_submodule(owner)._parameters[last] = nn.Parameter(data, parameter.requires_grad)
    layer.num_heads, layer.num_kv_heads = layer.num_heads // size, g // size
    if layer.short_conv is not None:
        layer.short_conv.channels //= size
    layer.__class__ = SharedHeads
    layer.mesh, layer._readers = mesh, readers  # type: ignore[assignment]
    if isinstance(layer.feature_map, FeatureMap):
        layer.feature_map._last = None


def _rotary(rotary: Rotary | None, own: slice) -> Rotary | None:
    if rotary is None or rotary.heads == 1:
        return rotary
    factor = None if rotary.attention_factor == 1.0 else rotary.attention_factor
    return Rotary(
        rotary.dim, base=rotary.base, layout=rotary.layout, rotary_dim=rotary.rotary_dim,
        theta=rotary.theta[own], axes=rotary.axes, attention_factor=factor, xpos=rotary.xpos,
    )  # fmt: skip


def _ranges(layer: LinearRoPEAttention, rank: int, size: int) -> list[tuple[int, int]]:
    """The channels of the own heads: of queries, keys and values."""
    found, start = [], 0
    for projection in (layer.q_proj, layer.k_proj, layer.v_proj):
        count = projection.out_features // size
        found.append((start + rank * count, start + (rank + 1) * count))
        start += projection.out_features
    return found


def _whole(x: DTensor) -> Tensor:
    """x, whose gradients of all processes are added up."""
    return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def _channels(x: DTensor, ranges: list[tuple[int, int]]) -> Tensor:
    whole = _whole(x)
    return torch.cat([whole[low:high] for low, high in ranges])


def _once(x: DTensor, here: bool) -> Tensor:
    """A bias, which one process adds to the sum of all."""
    return _whole(x) * here

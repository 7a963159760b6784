"""Tensor parallelism: each process has some of the heads, and some of the feed-forward's hidden units.

    y = sum over all processes p of W_o[:, heads of p] out_p       out_p: the output of the heads of p

The sum is one all-reduce; the backward pass takes another, for the gradient of x.

Weights are DTensors and keep their names, so that optimizers, distributed checkpoints and state dicts see a
whole model. Projections are sharded by rows or columns. Small parameters are replicated: each process reads
the part of its heads, and the gradients of all processes are added up.
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
from linrope.common.private_names import parameters_of
from linrope.feature_maps.base import FeatureMap
from linrope.feature_maps.learned import LearnedMap
from linrope.layer.attention import LinearRoPEAttention
from linrope.layer.selective import SelectiveSteps
from linrope.models.language_model import Block, LanguageModel
from linrope.rotation.rotary import Rotary

# Sharded parameters and the dimension each is split along.
SHARDED = {
    **dict.fromkeys(("q_proj.weight", "k_proj.weight", "v_proj.weight", "g_proj.weight"), 0),
    **dict.fromkeys(("q_proj.bias", "k_proj.bias", "v_proj.bias", "g_proj.bias"), 0),
    **dict.fromkeys(("forget_gate.weight", "forget_gate.up", "forget_gate.bias", "decay_logit", "skip"), 0),
    **dict.fromkeys(("write_gate.weight", "write_gate.bias"), 0),
    **dict.fromkeys(("erase_gate.weight", "erase_gate.bias"), 0),
    "o_proj.weight": 1,
}


def split_heads(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Splits the heads of a LinearRoPEAttention, or of each block of a LanguageModel, over a mesh.

    Each process has the whole inputs, outputs, embedding and norms. A state holds only the heads of its
    process. Models of transformers are split as they are loaded: ``from_pretrained(..,
    distributed_config=DistributedConfig(tp_size=..))``. In your own plan for
    ``torch.distributed.tensor.parallel.parallelize_module`` the style of a layer is ``HeadParallel``.

    Args:
        module: the module, which is changed. All processes take the weights of the mesh's first process.
        mesh: a mesh of one dimension, such as mesh["tp"].

    Raises:
        ValueError: the number of processes does not divide the key/value heads or the hidden units, a layer
            is split already, the attention is softmax, several processes would share a norm over "all" heads, another
            module than SelectiveSteps makes angle steps, or a theta per head belongs to a subclass of Rotary.
        TypeError: module is of another class.

    Source: Megatron-LM, arXiv 1909.08053, section 3.
    """
    if isinstance(module, LinearRoPEAttention):
        return parallelize_module(module, mesh, HeadParallel())
    if not isinstance(module, LanguageModel):
        kind = type(module).__name__
        raise TypeError(f"module: got {kind}, expected LinearRoPEAttention or LanguageModel")
    if module.config.attention == "softmax":
        raise ValueError("attention='softmax': expected 'linear' for tensor parallelism")
    for block in module.blocks:  # check all blocks before changing the first
        assert isinstance(block, Block)
        assert isinstance(block.attention, LinearRoPEAttention)
        if block.feed_forward is not None:
            _check_divides("hidden_dim", block.feed_forward.w1.out_features, mesh.size())
        _check_heads(block.attention, mesh.size())
    plan: dict[str, ParallelStyle] = {
        "blocks.*.attention": HeadParallel(),
        "blocks.*.feed_forward.w1": ColwiseParallel(),
        "blocks.*.feed_forward.w3": ColwiseParallel(),
        "blocks.*.feed_forward.w2": RowwiseParallel(),
    }
    return parallelize_module(module, mesh, plan)


class HeadParallel(ParallelStyle):
    """The style of a LinearRoPEAttention in a plan for ``parallelize_module``: see ``split_heads``."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) is not LinearRoPEAttention:
            shared = " that is split already" if isinstance(module, SplitHeads) else ""
            raise ValueError(f"module: got {type(module).__name__}{shared}, expected LinearRoPEAttention")
        _check_heads(module, device_mesh.size())
        _distribute(module, device_mesh, self.src_data_rank)
        return module


class SplitHeads(LinearRoPEAttention):
    """A layer whose heads are split over processes; ``HeadParallel`` turns an ordinary layer into one."""

    mesh: DeviceMesh
    _readers: dict[str, Callable[[DTensor], Tensor]]  # by parameter: reads this rank's part of it

    def forward(self, x: Tensor, context: Tensor | None = None, **options: Any) -> Any:
        """Takes and returns what the ordinary layer does; the state holds only this rank's heads."""
        with self._local_parameters():
            result = super().forward(
                _sum_gradients(x, self.mesh),
                None if context is None else _sum_gradients(context, self.mesh),
                **options,
            )
        if isinstance(result, tuple):
            return _sum(result[0], self.mesh), result[1]
        return _sum(result, self.mesh)

    @contextmanager
    def _local_parameters(self) -> Iterator[None]:
        """Temporarily swaps DTensor parameters for this rank's local tensors."""
        swapped = []
        try:
            for name, read in self._readers.items():
                owner, _, last = name.rpartition(".")
                parameters = parameters_of(self.get_submodule(owner))
                swapped.append((parameters, last, parameters[last]))
                parameters[last] = read(parameters[last])
            yield
        finally:
            for parameters, last, parameter in swapped:
                parameters[last] = parameter

    def reset_parameters(self) -> None:
        """Raises RuntimeError: a rank cannot draw the initial values of its part alone."""
        raise RuntimeError(
            "reset_parameters: got a layer whose heads are split, expected a call before split_heads"
        )

    def extra_repr(self) -> str:
        with self._local_parameters():
            return f"{super().extra_repr()}, rank {self.mesh.get_local_rank()} of {self.mesh.size()}"


def _sum_gradients(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """x itself; the backward pass adds up the gradients of all processes."""
    replicated = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return replicated.to_local(grad_placements=[Partial()])


def _sum(y: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of y over all processes."""
    parts = DTensor.from_local(y, mesh, [Partial()], run_check=False)
    return parts.redistribute(placements=[Replicate()]).to_local()


def _check_divides(name: str, number: int, size: int) -> None:
    if number % size:
        raise ValueError(f"{name}={number}: expected a multiple of the {size} processes that share them")


def _check_heads(layer: LinearRoPEAttention, size: int) -> None:
    _check_divides("num_kv_heads", layer.num_kv_heads, size)
    if layer.norm_over == "all" and size > 1:
        raise ValueError(
            "out_norm='all': expected 'head' for tensor parallelism, since no process has all heads"
        )
    steps = layer.angle_steps
    if steps is not None and not isinstance(steps, SelectiveSteps):
        raise ValueError(
            f"rotary: got a {type(steps).__name__}, which cannot be split by heads; expected SelectiveSteps "
            "for tensor parallelism"
        )
    if (rotary := layer.rotary) is not None and rotary.heads > 1 and type(rotary) is not Rotary:
        raise ValueError(
            f"rotary: got a {type(rotary).__name__} with a theta per head, which cannot be split by heads; expected a "
            "Rotary for tensor parallelism"
        )


def _distribute(layer: LinearRoPEAttention, mesh: DeviceMesh, source: int | None) -> None:
    """Makes parameters DTensors, cuts constants down to this rank's heads, and changes the layer's class."""
    size, rank, g = mesh.size(), mesh.get_local_rank(), layer.num_state_heads
    heads = slice(rank * g // size, (rank + 1) * g // size)
    sharded = dict(SHARDED)
    for name, module in layer.named_modules():
        if isinstance(module, LearnedMap) and module.num_heads is not None:
            sharded |= {f"{name}.{weight}": 0 for weight, _ in module.named_parameters()}
            module.num_heads = module.num_heads // size
            module.num_kv_heads = (module.num_kv_heads or 0) // size
    layer.rotary = _local_rotary(layer.rotary, heads)
    if isinstance(steps := layer.angle_steps, SelectiveSteps):
        if steps.up.shape[0] > 1:
            sharded["angle_steps.up"] = 0
        if steps.rotary.heads > 1:
            steps.rotary = layer.rotary if layer.rotary is not None else steps.rotary
            steps._theta = Constant(steps._theta.on(torch.device("cpu"))[heads])
    if layer._decay is not None:
        layer._decay = Constant(layer._decay.on(torch.device("cpu"))[heads])
    readers: dict[str, Callable[[DTensor], Tensor]] = {}
    for name, parameter in list(layer.named_parameters()):
        placement: Placement = Shard(sharded[name]) if name in sharded else Replicate()
        if name in ("short_conv.weight", "short_conv.bias"):
            readers[name] = partial(_channels, ranges=_channel_ranges(layer, rank, size))
        elif name == "o_proj.bias":
            readers[name] = partial(_on_one_rank, this_rank=rank == 0)
        else:
            readers[name] = DTensor.to_local if name in sharded else _replicated
        owner, _, last = name.rpartition(".")
        data = distribute_tensor(parameter, mesh, [placement], src_data_rank=source)
        setattr(layer.get_submodule(owner), last, nn.Parameter(data, parameter.requires_grad))
    layer.num_heads, layer.num_kv_heads = layer.num_heads // size, layer.num_kv_heads // size
    layer.num_state_heads, layer.num_out_heads = g // size, layer.num_out_heads // size
    if layer.short_conv is not None:
        layer.short_conv.channels //= size
    layer.__class__ = SplitHeads
    layer.mesh, layer._readers = mesh, readers  # type: ignore[assignment]
    if isinstance(layer.feature_map, FeatureMap):
        layer.feature_map.forget_digest()


def _local_rotary(rotary: Rotary | None, heads: slice) -> Rotary | None:
    if rotary is None or rotary.heads == 1:
        return rotary
    factor = None if rotary.attention_factor == 1.0 else rotary.attention_factor
    return Rotary(
        rotary.dim,
        base=rotary.base,
        layout=rotary.layout,
        rotary_dim=rotary.rotary_dim,
        theta=rotary.theta[heads],
        axes=rotary.axes,
        attention_factor=factor,
        xpos=rotary.xpos,
    )


def _channel_ranges(layer: LinearRoPEAttention, rank: int, size: int) -> list[tuple[int, int]]:
    """The channels of this rank's queries, keys and values in the convolution over all of them."""
    ranges, start = [], 0
    for projection in (layer.q_proj, layer.k_proj, layer.v_proj):
        count = projection.out_features // size
        ranges.append((start + rank * count, start + (rank + 1) * count))
        start += projection.out_features
    return ranges


def _replicated(x: DTensor) -> Tensor:
    """The whole x; the backward pass adds up the gradients of all processes."""
    return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def _channels(x: DTensor, ranges: list[tuple[int, int]]) -> Tensor:
    channels = _replicated(x)
    return torch.cat([channels[low:high] for low, high in ranges])


def _on_one_rank(x: DTensor, this_rank: bool) -> Tensor:
    """A bias that only one process adds, since the outputs of all are summed."""
    return _replicated(x) * this_rank

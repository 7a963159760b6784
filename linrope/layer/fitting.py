"""Whether the parts of a layer fit together, and whether a call's inputs fit the layer."""

from typing import Any

import torch
from torch import Tensor, nn

from linrope.feature_maps import FeatureMap, PairedMap
from linrope.layer.options import map_in_words
from linrope.operation import checks
from linrope.rotation.rotary import Rotary


def check_parts(layer: Any) -> None:
    """Raises ValueError if map, rotation and other parts do not fit together: whatever every call would refuse."""
    before, fmap = layer.rope_order == "before", checks.resolve_map(layer.feature_map, layer.head_dim)
    assert fmap is not None
    rotated = layer.head_dim if before else fmap.feature_dim
    checks.check_rotary(layer.rotary, rotated, layer.num_state_heads, layer.causal, before)
    checks.check_axes(layer.rotary, layer._decay is not None)
    if not before:
        check_pairs(fmap, layer.rotary)
    name = map_in_words(layer.config.feature_map)
    if layer.erase_gate is not None:
        checks.check_parts_with_erase(fmap, layer.rotary, name, "an erase_gate")


def check_pairs(fmap: FeatureMap, rotary: Rotary | None) -> None:
    """Raises ValueError if a rotation turns features together that a paired map has not made equal."""
    if not isinstance(fmap, PairedMap) or rotary is None:
        return
    if rotary.layout != fmap.layout:
        raise ValueError(
            f"feature_map: got a paired map with layout={fmap.layout!r}, expected the rotation's, {rotary.layout!r}"
        )
    if rotary.layout == "half" and rotary.rotary_dim != rotary.dim:
        raise ValueError(
            f"rotary: got rotary_dim={rotary.rotary_dim}, expected all {rotary.dim} features of a paired map with "
            "layout='half'"
        )


def check_inputs(
    x: Tensor, context: Tensor | None, embed_dim: int, context_dim: int, causal: bool = False
) -> None:
    """Checks a layer's inputs."""
    check_vectors("x", x, embed_dim)
    if context is not None:
        check_vectors("context", context, context_dim)
        (b, n, _), (rows, m, _) = x.shape, context.shape
        if rows != b:
            raise ValueError(f"context: got batch {rows}, expected x's {b}")
        if causal and n != m:
            raise ValueError(f"context: got {m} tokens, expected x's {n}, or causal=False")
    elif context_dim != embed_dim:
        raise ValueError(f"context: got None, expected (batch, length, {context_dim})")


def check_wide(x: Tensor, projection: Any) -> None:
    """Raises TypeError for float64 inputs of a projection with other weights."""
    weight = getattr(projection, "weight", None)
    if isinstance(weight, nn.Parameter) and weight.dtype in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"x: got {x.dtype}, expected the weights' {weight.dtype}; or call layer.double()")


def check_vectors(name: str, x: Tensor, dim: int) -> None:
    """Raises unless x is a tensor (b, n, dim) of floating-point numbers."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name}: got {kind}, expected a floating-point torch.Tensor")
    if x.ndim != 3 or x.shape[-1] != dim:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected (batch, length, {dim})")


def check_context(layer: Any, shard: Any) -> None:
    """Rejects a context with a shard, or with options for which key t and query t are the same token."""
    if shard is not None:
        raise ValueError(
            "context: got a tensor with a shard, which splits queries and keys alike; expected a call without shard"
        )
    if options := layer.config.options_of_one_sequence:
        raise ValueError(
            f"context: got a tensor, expected a layer without {', '.join(options)}, for which key t and query t must "
            "be the same token"
        )

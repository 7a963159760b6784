"""Whether the parts of a LinearRoPEAttention fit together, and whether it can read a context."""

from typing import Any

from linrope.layer.trapezoid import check_map_and_rotation
from linrope.operation import checks


def check_parts(layer: Any) -> None:
    """Raises ValueError if map, rotation and other parts do not fit together: whatever every call would refuse."""
    before, fmap = layer.rope_order == "before", checks.resolve_map(layer.feature_map, layer.head_dim)
    assert fmap is not None
    rotated = layer.head_dim if before else fmap.feature_dim
    checks.check_rotary(layer.rotary, rotated, layer.num_state_heads, layer.causal, before)
    checks.check_axes(layer.rotary, layer._decay is not None, fmap)
    if layer.trapezoid is None:
        return
    if layer.normalize and not layer._out_norm_replaces_normalizer:
        raise ValueError(
            "trapezoid=True: got normalize=True, expected False, or an out_norm that replaces the normalizer"
        )
    check_map_and_rotation(fmap, layer.rotary)


def check_context(layer: Any, shard: Any) -> None:
    """Rejects a context with a shard, or with options for which key t and query t are the same token."""
    if shard is not None:
        raise ValueError(
            "context: got a tensor in a call with a shard, which splits queries and keys alike; expected None"
        )
    for option in layer.config.options_of_one_sequence:
        raise ValueError(
            f"context: got a tensor with {option}, for which key t and query t must be the same token; expected None"
        )

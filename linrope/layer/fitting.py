"""Whether the options of a LinearRoPEAttention fit together, and whether it can read a context."""

from typing import Any

from linrope.layer.trapezoid import check_map_and_rotation
from linrope.operation import checks

# Options for which key t and query t are the same token, by the attribute that is None without them
_OF_ONE_SEQUENCE = {
    "forget_gate": "forget_gate",
    "angle_steps": "rotary='selective'",
    "short_conv": "short_conv",
    "trapezoid": "trapezoid",
}


def check_options(layer: Any) -> None:
    """Raises ValueError if options do not fit together: whatever every call would refuse."""
    if layer.context_dim != layer.embed_dim:
        for name, option in _OF_ONE_SEQUENCE.items():
            if getattr(layer, name) is not None:
                raise ValueError(
                    f"context_dim={layer.context_dim}: got {option}, for which key t and query t must be the same "
                    f"token; expected None or embed_dim={layer.embed_dim}"
                )
    if not layer.causal:
        for name in ("forget_gate", "short_conv", "trapezoid"):
            if getattr(layer, name) is not None:
                raise ValueError(
                    f"{name}: got causal=False, expected causal=True, because it runs forward in time"
                )
        if layer._decay is not None:
            raise ValueError(
                "decay: got causal=False, expected causal=True: keys decay towards later queries"
            )
    before, fmap = layer.rope_order == "before", checks.resolve_map(layer.feature_map, layer.head_dim)
    assert fmap is not None
    if before and layer.angle_steps is not None:
        raise ValueError("rope_order='before': got selective steps, which rotate features; expected 'after'")
    rotated = layer.head_dim if before else fmap.feature_dim
    checks.check_rotary(layer.rotary, rotated, layer.num_state_heads, layer.causal, before)
    checks.check_axes(layer.rotary, layer._decay is not None, fmap)
    if layer.trapezoid is None:
        return
    if layer.normalize and not layer._out_norm_replaces_normalizer:
        raise ValueError(
            "trapezoid=True: got normalize=True, expected False, or an out_norm that replaces the normalizer"
        )
    if before:
        raise ValueError("trapezoid=True: got rope_order='before', expected 'after'")
    check_map_and_rotation(fmap, layer.rotary)


def check_context(layer: Any, shard: Any) -> None:
    """Rejects a context with a shard, or with options for which key t and query t are the same token."""
    if shard is not None:
        raise ValueError(
            "context: got a tensor in a call with a shard, which splits queries and keys alike; expected None"
        )
    for name, option in _OF_ONE_SEQUENCE.items():
        if getattr(layer, name) is not None:
            raise ValueError(
                f"context: got a tensor with {option}, for which key t and query t must be the same token; "
                "expected None"
            )

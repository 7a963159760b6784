"""The reasons why a prepared step cannot take the place of a layer's or a model's own call."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from linrope.backends import native
from linrope.common.private_names import has_global_hooks, hooks_of, watched
from linrope.common.writable import check_writable
from linrope.decode.parts import DecodableModel, ModelParts
from linrope.feature_maps import ElementwiseMap, UnitMap
from linrope.feature_maps.base import has_hooks
from linrope.layer.attention import LinearRoPEAttention
from linrope.layer.config import OPTIONS
from linrope.layer.feature_gate import FeatureForgetGate
from linrope.layer.norm import OutputNorm, RMSNorm
from linrope.layer.selective import EraseGate, ForgetGate, WriteGate
from linrope.layer.short_convolution import ShortConvolution
from linrope.layer.state import LayerState
from linrope.operation.plan import backend_map, identity_of
from linrope.ops.convolution import MAX_TAPS
from linrope.ops.norm import MOST_VALUES
from linrope.recurrence.identities import WITHOUT_Z
from linrope.rotation.rotary import Rotary

# transformers leaves hooks of this module on a model that was once asked for its hidden states. In other calls they do
# nothing, so a prepared step may ignore them.
_IDLE_HOOKS = "transformers.utils.output_capturing"
# The options of the layer that the operator computes. ``_why_not_options`` names the values that it cannot compute.
_COMPUTED = frozenset(
    (
        *("num_kv_heads", "num_value_heads", "context_dim", "head_dim", "value_head_dim", "bias", "backend"),
        *("feature_map", "rotary", "normalize", "decay", "forget_gate", "write_gate", "erase_gate"),
        *("short_conv", "out_norm", "skip", "gate"),
    )
)
_KINDS = (
    LinearRoPEAttention,
    nn.Linear,
    RMSNorm,
    OutputNorm,
    ForgetGate,
    FeatureForgetGate,
    WriteGate,
    EraseGate,
    ShortConvolution,
    ElementwiseMap,
    UnitMap,
)


def why_not(module: object, states: Any) -> str | None:
    """The reason why ``prepare`` refuses these arguments; None: it takes them."""
    if isinstance(module, LinearRoPEAttention):
        return why_not_layer(module, states)
    if isinstance(module, ModelParts):
        return _why_not_parts(module, states)
    if isinstance(module, DecodableModel):
        parts = module.decoding_parts()
        model: object = parts.model
        if model is module:  # not a wrapper that passes this method on, and computes something else
            return _why_not_parts(parts, states)
    return f"a module of another kind, {type(module).__name__}"


def _why_not_parts(parts: ModelParts, states: Sequence[Any]) -> str | None:
    if len(states) != len(parts.blocks):
        return f"{len(states)} states for {len(parts.blocks)} blocks"
    attention: set[nn.Module] = set()
    for block, state in zip(parts.blocks, states, strict=True):
        if (reason := why_not_layer(block.attention, state)) is not None:
            return reason
        if not torch.equal(state.position, states[0].position):
            return "states at different positions"
        attention.update(block.attention.modules())
    outside = [x for x in parts.model.modules() if x not in attention]
    if any(
        max(x.weight.shape) > MOST_VALUES for x in outside if isinstance(x, nn.Linear) and x is not parts.head
    ):
        return f"vectors of more than {MOST_VALUES} numbers"
    return _why_not_plain(outside, parts.kinds)


def why_not_layer(layer: nn.Module, state: Any) -> str | None:
    """The reason why a step cannot take the place of the layer's call with a donated state; None: it can."""
    if (reason := native.why_not()) is not None:
        return reason
    if not isinstance(layer, LinearRoPEAttention):
        return f"attention in {type(layer).__name__}"
    return (
        _why_not_options(layer) or _why_not_plain([*layer.modules()], _KINDS) or _why_not_state(layer, state)
    )


def _why_not_plain(modules: list[nn.Module], kinds: tuple[type, ...]) -> str | None:
    """The reason why a prepared step cannot stand in for calls of these modules, such as a hook; None: it can.

    kinds: the classes that they may have.
    """
    if watched():
        return "a compiler or a transformation that watches the call"
    if torch.is_autocast_enabled("cpu"):
        return "autocast"
    for module in modules:
        if type(module) not in kinds or "forward" in vars(module):
            return f"a module of another kind, {type(module).__name__}"
        active = any(getattr(hook, "__module__", None) != _IDLE_HOOKS for hook in hooks_of(module))
        if active or has_global_hooks():
            return f"a hook on {type(module).__name__}"
        for x in module.parameters(recurse=False):
            if type(x.data) is not Tensor or x.dtype != torch.float32 or x.device.type != "cpu":
                return (
                    f"weights in {type(x.data).__name__} of {x.dtype} on {x.device}, not float32 on the CPU"
                )
            if not x.is_contiguous():
                return "weights that are not contiguous"
    return None


def _why_not_options(layer: LinearRoPEAttention) -> str | None:
    """The reason why the operator does not cover the layer's options."""
    fmap, taps = layer.feature_map, 2 if layer.short_conv is None else layer.short_conv.taps
    if not has_hooks(fmap) and backend_map(fmap)[0] not in native.MAPS:  # _why_not_plain names hooks
        return f"feature_map={fmap}"
    if layer.angle_steps is not None or (layer.rotary is not None and not _is_plain(layer.rotary)):
        return "a rotation with steps, axes, xpos or an attention factor"
    for name, option in OPTIONS.items():
        if name not in _COMPUTED and (value := getattr(layer.config, name)) != option.default:
            return f"{name}={value!r}"
    if layer.backend not in ("auto", "native"):
        return f"backend={layer.backend!r}"
    if (size := max(layer.head_dim, layer.value_head_dim)) > native.MAX_DIM:
        return f"heads of {size} numbers, more than {native.MAX_DIM}"
    if taps > MAX_TAPS:
        return f"{taps} taps, more than {MAX_TAPS}"
    return None


def _is_plain(rotary: Rotary) -> bool:
    return rotary.axes is None and rotary.xpos is None and rotary.attention_factor == 1


def _why_not_state(layer: LinearRoPEAttention, state: Any) -> str | None:
    """The reason why the operator cannot write the layer's next state into this one's memory."""
    if not isinstance(state, LayerState) or state.slots is not None:
        return "a state in rows of a pool, or of another kind"
    identity = identity_of(layer.feature_map, layer.rotary, layer.rope_order)
    if state.identity != identity + (WITHOUT_Z if layer.erase_gate is not None else ""):
        return f"a state of {state.identity}"
    b, conv = state.sums.kv.shape[0], layer.short_conv
    expected = {
        "kv": ((b, layer.num_state_heads, layer.head_dim, layer.value_head_dim), torch.float32),
        "z": ((b, layer.num_state_heads, layer.head_dim), torch.float64),
        "position": ((b,), torch.int64),
    }
    if conv is not None:
        expected["conv"] = ((b, conv.taps - 1, conv.channels), torch.float32)
    tensors = state.tensors()
    if {name: (tuple(x.shape), x.dtype) for name, x in tensors.items()} != expected:
        return f"a state with {', '.join(tensors)} of other shapes or dtypes"
    if not all(x.is_contiguous() and x.device.type == "cpu" for x in tensors.values()):
        return "a state that is not contiguous, or not on the CPU"
    try:
        check_writable(tensors)
    except ValueError as error:
        return str(error)
    return None

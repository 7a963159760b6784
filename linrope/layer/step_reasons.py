"""The reasons why the native library's step of one token cannot take the place of a layer's other code."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from linrope.backends import native
from linrope.common.private_names import hooks_of
from linrope.common.writable import check_writable
from linrope.feature_maps import ElementwiseMap, UnitMap
from linrope.feature_maps.base import METHODS, is_changed
from linrope.layer.config import OPTIONS
from linrope.layer.feature_gate import FeatureForgetGate
from linrope.layer.norm import OutputNorm, RMSNorm
from linrope.layer.selective import EraseGate, ForgetGate, WriteGate
from linrope.layer.short_convolution import ShortConvolution
from linrope.layer.state import LayerState
from linrope.operation.map_facts import backend_map
from linrope.rotation.rotary import Rotary

# transformers leaves hooks of this module on a model that was once asked for its hidden states. In other calls they do
# nothing, so a step may ignore them.
_IDLE_HOOKS = "transformers.utils.output_capturing"
# The options of the layer that the operator computes. ``why_not_options`` names the values that it cannot compute.
_COMPUTED = frozenset(
    (
        *("num_kv_heads", "num_value_heads", "context_dim", "head_dim", "value_head_dim", "bias", "backend"),
        *("feature_map", "rotary", "normalize", "decay", "forget_gate", "write_gate", "erase_gate"),
        *("short_conv", "out_norm", "skip", "gate"),
    )
)
_KINDS = (
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


def why_not_calls(modules: Sequence[nn.Module], kinds: tuple[type, ...] = _KINDS) -> str | None:
    """The reason why nothing can stand in for calls of these modules, such as a hook; None: something can.

    kinds: the classes that they may have.
    """
    for module in modules:
        if type(module) not in kinds or not METHODS.isdisjoint(vars(module)):
            return f"a module of another kind, {type(module).__name__}"
        if any(getattr(hook, "__module__", None) != _IDLE_HOOKS for hook in hooks_of(module)):
            return f"a hook on {type(module).__name__}"
    return None


def why_not_weights(modules: Sequence[nn.Module]) -> str | None:
    """The reason why the library cannot read the modules' parameters; None: it can."""
    for x in (x for module in modules for x in module.parameters(recurse=False)):
        if type(x.data) is not Tensor or x.dtype != torch.float32 or x.device.type != "cpu":
            return f"weights in {type(x.data).__name__} of {x.dtype} on {x.device}, not float32 on the CPU"
        if not x.is_contiguous():
            return "weights that are not contiguous"
    return None


def why_not_options(layer: Any) -> str | None:
    """The reason why the operator does not cover the layer's options; None: it does."""
    fmap, taps = layer.feature_map, 2 if layer.short_conv is None else layer.short_conv.taps
    if not is_changed(fmap) and backend_map(fmap)[0] not in native.MAPS:  # why_not_calls names hooks
        return f"feature_map={fmap}"
    if layer.angle_steps is not None or (layer.rotary is not None and not _is_plain(layer.rotary)):
        return "a rotation with steps, axes, xpos, an attention factor or a class of its own"
    # Read from the layer what its call reads there: it may differ from the config.
    values = vars(layer.config) | {
        "causal": layer.causal,
        "rope_order": layer.rope_order,
        "qk_norm": layer.q_norm is not None or layer.k_norm is not None,
    }
    for name, option in OPTIONS.items():
        if name not in _COMPUTED and values[name] != option.default:
            return f"{name}={values[name]!r}"
    if own := [name for name in vars(layer) if callable(getattr(type(layer), name, None))]:
        return f"its own {own[0]}"
    if layer.backend not in ("auto", "native"):
        return f"backend={layer.backend!r}"
    if (size := max(layer.head_dim, layer.value_head_dim)) > native.MAX_DIM:
        return f"heads of {size} numbers, more than {native.MAX_DIM}"
    if taps > native.MAX_TAPS:
        return f"{taps} taps, more than {native.MAX_TAPS}"
    return None


def _is_plain(rotary: Rotary) -> bool:
    """A subclass's angles may change from call to call."""
    return type(rotary) is Rotary and rotary.axes is rotary.xpos is None and rotary.attention_factor == 1


def why_not_state(layer: Any, identity: str, state: Any) -> str | None:
    """The reason why the operator cannot write the layer's next state into this one's memory; None: it can.

    identity: that of the layer's states.
    """
    if not isinstance(state, LayerState) or state.slots is not None:
        return "a state in rows of a pool, or of another kind"
    if state.identity != identity:
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

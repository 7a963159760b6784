"""A layer's decoding step: its matrix products, and one operator for all that is between them.

b sequences, h query heads, g key/value heads, d head dim, e values, c channels.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linrope.backends import native
from linrope.common.private_names import has_global_hooks, hooks_of, watched
from linrope.common.writable import check_writable
from linrope.feature_maps import ElementwiseMap
from linrope.layer.attention import LinearRoPEAttention
from linrope.layer.norm import OutputNorm, RMSNorm
from linrope.layer.selective import ForgetGate, WriteGate
from linrope.layer.short_convolution import ShortConvolution
from linrope.operation.attend import identity_of
from linrope.ops.convolution import MAX_TAPS
from linrope.recurrence.decay import MIN_LOG_DECAY
from linrope.recurrence.state import LinearAttentionState
from linrope.rotation.rotary import Rotary

_ops = torch.ops.linrope_native
# transformers leaves hooks of this module on a model that was once asked for its hidden states. In other calls they do
# nothing, so a prepared step may ignore them.
_IDLE_HOOKS = "transformers.utils.output_capturing"
_KINDS = (
    LinearRoPEAttention,
    nn.Linear,
    RMSNorm,
    OutputNorm,
    ForgetGate,
    WriteGate,
    ShortConvolution,
    ElementwiseMap,
)


class LayerStep:
    """Runs a LinearRoPEAttention on one token at a time and overwrites the state in place.

        y = W_o mixer_step(W x)        x, y: (b, embed_dim);  W: all projections of x, one below the other

    One call of the native library does everything between the matrix products. W may be a copy: make a new step after
    the weights have changed.

    Raises:
        ValueError: ``why_not`` has a reason.

    >>> from linrope import LinearRoPEAttention
    >>> layer, x = LinearRoPEAttention(8, 2, short_conv=2).requires_grad_(False), torch.randn(1, 4, 8)
    >>> _, state = layer(x[:, :3], return_state=True)
    >>> if why_not(layer, state) is None:
    ...     torch.testing.assert_close(LayerStep(layer, state)(x[:, 3]), layer(x)[:, 3], rtol=1e-4, atol=1e-5)
    """

    def __init__(self, layer: LinearRoPEAttention, state: LinearAttentionState) -> None:
        if (reason := why_not(layer, state)) is not None:
            raise ValueError(f"a decoding step in one operator is impossible here: {reason}")
        write = None if layer.write_gate is None or layer.write_gate.tied else layer.write_gate
        gates = layer.g_proj, layer.forget_gate, write
        self.projections = Joined(layer.q_proj, layer.k_proj, layer.v_proj, *gates)
        self.settings = [layer.num_heads, *(gate is not None for gate in gates), *_settings(layer, state)]
        self.o_proj = Joined(layer.o_proj)

    def __call__(self, x: Tensor, slots: Tensor | None = None) -> Tensor:
        """Returns y (b, embed_dim), and overwrites the state, or its rows at the slots (b,), with the next one."""
        y: Tensor = self.o_proj(_ops.mixer_step.default(self.projections(x), *self.settings, slots))
        return y


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch.nn.functional.linear of contiguous float32 tensors.

    Up to eight rows are computed by the native library, which is faster for so few.
    """
    y: Tensor = _ops.linear.default(x, weight, bias) if len(x) <= _FEW_ROWS else F.linear(x, weight, bias)
    return y


_FEW_ROWS = 8
# Elements of a joined weight: for a larger one, the time saved is not worth the copy's memory.
_MOST_COPIED = 2**22


class Joined:
    """Several projections of the same vector, their results side by side. Small ones become a single product.

    Arguments that are None are skipped. If several modules become one product, its weight is a copy of theirs.
    """

    @torch.no_grad()
    def __init__(self, *modules: Any) -> None:
        present = [module for module in modules if module is not None]
        self.parts = [(x.weight.detach(), None if x.bias is None else x.bias.detach()) for x in present]
        if len(present) > 1 and sum(weight.numel() for weight, _ in self.parts) <= _MOST_COPIED:
            bias = None if all(x.bias is None for x in present) else torch.cat([_bias(x) for x in present])
            self.parts = [(torch.cat([weight for weight, _ in self.parts]), bias)]

    def __call__(self, x: Tensor) -> Tensor:
        products = [linear(x, *part) for part in self.parts]
        return products[0] if len(products) == 1 else torch.cat(products, -1)


def _bias(module: Any) -> Tensor:
    bias: Tensor = module.weight.new_zeros(len(module.weight)) if module.bias is None else module.bias
    return bias


def _settings(layer: LinearRoPEAttention, state: LinearAttentionState) -> list[Any]:
    """The operator's arguments that do not change, in its order."""
    conv, norm, gate, rotary = layer.short_conv, layer.out_norm, layer.write_gate, layer.rotary
    weight = bias = decay = scale = None
    if conv is not None:
        weight, bias = conv.weight.detach()[:, 0], None if conv.bias is None else conv.bias.detach()
    if layer.decay is not None:
        decay = layer.decay.detach().log().clamp(min=MIN_LOG_DECAY)
    if norm is not None:
        scale = norm.weight.detach()
        scale = scale if layer.norm_over == "head" else scale.view(layer.num_out_heads, layer.value_head_dim)
    arguments = {
        "tied": gate is not None and gate.tied,
        "weight": weight,
        "bias": bias,
        "inputs": state.conv,
        "silu": conv is not None and conv.activation == "silu",
        "decay": decay,
        "kv": state.kv,
        "z": state.z,
        "positions": state.position.unsqueeze(1),
        "theta": None if rotary is None else rotary.turns_per_position(state.kv.device),
        "layout": 0 if rotary is None else native.LAYOUTS[rotary.layout],
        "feature_map": native.MAPS[layer.feature_map.elementwise or ""],
        "normalize": layer.normalize and not layer._out_norm_replaces_normalizer,
        "eps": 1e-6,
        "norm": scale,
        "norm_eps": 1e-6 if norm is None else norm.eps or 0.0,
        "over_heads": layer.norm_over == "all",
        "gate_first": layer.gate_order == "before",
        "skip": None if layer.skip is None else layer.skip.detach(),
        "skip_first": layer.skip_order == "before",
    }
    return list(arguments.values())


def why_not(layer: nn.Module, state: Any) -> str | None:
    """The reason why ``LayerStep`` cannot take the place of the layer's call with a donated state; None: it can."""
    if (reason := native.why_not()) is not None:
        return reason
    if not hasattr(_ops, "linear"):
        return "the library was built from other sources: run `make native`"
    if not isinstance(layer, LinearRoPEAttention):
        return f"attention in {type(layer).__name__}"
    return _layer_reason(layer) or why_not_plain([*layer.modules()], _KINDS) or _state_reason(layer, state)


def why_not_plain(modules: list[nn.Module], kinds: tuple[type, ...]) -> str | None:
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


def _layer_reason(layer: LinearRoPEAttention) -> str | None:
    """The reason why the operator does not cover the layer's options."""
    fmap, taps = layer.feature_map, 2 if layer.short_conv is None else layer.short_conv.taps
    if fmap.log_scaled or fmap.elementwise not in native.MAPS:
        return f"feature_map={fmap}"
    if layer.angle_steps is not None or (layer.rotary is not None and not _is_plain(layer.rotary)):
        return "a rotation with steps, axes, xpos or an attention factor"
    if layer.trapezoid is not None:
        return "trapezoid=True"
    if layer.q_norm is not None or layer.num_out_heads != layer.num_heads:
        return "more value heads than query heads" if layer.q_norm is None else "qk_norm=True"
    if not layer.causal or layer.rope_order != "after":
        return f"causal={layer.causal}, rope_order={layer.rope_order!r}"
    if layer.backend not in ("auto", "native"):
        return f"backend={layer.backend!r}"
    if (size := max(layer.head_dim, layer.value_head_dim)) > native.MAX_DIM:
        return f"heads of {size} numbers, more than {native.MAX_DIM}"
    if taps > MAX_TAPS:
        return f"{taps} taps, more than {MAX_TAPS}"
    return None


def _is_plain(rotary: Rotary) -> bool:
    return rotary.axes is None and rotary.xpos is None and rotary.attention_factor == 1


def _state_reason(layer: LinearRoPEAttention, state: Any) -> str | None:
    """The reason why the operator cannot write the layer's next state into this one's memory."""
    if not isinstance(state, LinearAttentionState) or state.slots is not None:
        return "a state in rows of a pool, or of another kind"
    if state.identity != identity_of(layer.feature_map, layer.rotary, layer.rope_order):
        return f"a state of {state.identity}"
    b, conv = state.kv.shape[0], layer.short_conv
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

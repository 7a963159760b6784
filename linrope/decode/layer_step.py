"""A layer's decoding step: its matrix products, and one operator for all that is between them.

b sequences, h query heads, g key/value heads, d head dim, e values, c channels.
"""

from typing import Any

import torch
from torch import Tensor

from linrope.backends import library, native
from linrope.common.writable import check_slots
from linrope.decode.products import Joined
from linrope.layer.attention import LinearRoPEAttention
from linrope.layer.feature_gate import FeatureForgetGate
from linrope.layer.state import LayerState
from linrope.operation.plan import backend_map
from linrope.recurrence.call import Call
from linrope.recurrence.decay import MIN_LOG_DECAY


class LayerStep:
    """Runs a LinearRoPEAttention on one token of each sequence, and overwrites the state in place.

        y = W_o mixer_step(W x)        x, y: (b, 1, embed_dim);  W: all projections of x, one below the other

    One call of the native library does everything between the matrix products, and the second product of a forget gate
    per feature. W may be a copy: prepare a new step after the weights have changed. ``prepare`` makes it, and says what
    it is for.
    """

    def __init__(self, layer: LinearRoPEAttention, state: LayerState) -> None:
        self.state = state
        write = layer.write_gate if layer.config.write_gate == "independent" else None
        # The first of the two products of a gate per feature is a projection of x
        forget: Any = layer.forget_gate
        forget = forget.down if isinstance(forget, FeatureForgetGate) else forget
        gates = layer.g_proj, forget, write, layer.erase_gate
        self.projections = Joined(layer.q_proj, layer.k_proj, layer.v_proj, *gates)
        self.o_proj = Joined(layer.o_proj)
        self._arguments = _arguments(layer, state)

    @torch.no_grad()
    def __call__(self, x: Tensor, slots: Tensor | None = None) -> Tensor:
        """x (b, 1, embed_dim) -> y of the same shape. Overwrites the state with the next one.

        slots (b,) int64, all different: the row of the state for each sequence of this call. Default: all rows.
        """
        rows = len(self.state.position)
        if slots is not None:
            check_slots(slots, rows, self.state.position.device)
            slots = slots.long().contiguous()
        expected = rows if slots is None else len(slots), 1, self.projections.size
        if x.shape != expected or x.dtype != torch.float32:
            raise ValueError(f"x: got {x.dtype} {tuple(x.shape)}, expected torch.float32 {expected}")
        return self.of_rows(x[:, 0].contiguous(), slots)[:, None]

    def of_rows(self, x: Tensor, slots: Tensor | None) -> Tensor:
        """The step without checks: x (b, embed_dim), contiguous float32."""
        arguments = self._arguments | {"x": self.projections(x), "slots": slots}
        y: Tensor = self.o_proj(library.run_by_name("mixer_step", arguments))
        return y


# The numbers of kernels/cpu/mixer.h; that of a tied erase gate is 3
_WRITE_FACTORS = {None: 0, "independent": 1, "tied": 2}


def _arguments(layer: LinearRoPEAttention, state: LayerState) -> dict[str, Any]:
    """The operator's arguments that do not change from token to token, by name."""
    elementwise, unit = backend_map(layer.feature_map)
    conv, norm, rotary = layer.short_conv, layer.out_norm, layer.rotary
    forget, erase = layer.forget_gate, layer.erase_gate
    weight = bias = decay = scale = up = up_bias = None
    bound = 0.0  # none
    if isinstance(forget, FeatureForgetGate):
        up, up_bias, bound = forget.up.detach(), forget.bias.detach(), forget.bound or 0.0
    if conv is not None:
        weight, bias = conv.weight.detach()[:, 0], None if conv.bias is None else conv.bias.detach()
    if layer.decay is not None:
        decay = layer.decay.detach().log().clamp(min=MIN_LOG_DECAY)
    if norm is not None:
        scale = norm.weight.detach()
        scale = scale if layer.norm_over == "head" else scale.view(layer.num_out_heads, layer.value_head_dim)
    return {
        "heads": layer.num_heads,
        "gate": layer.g_proj is not None,
        "forget": forget is not None,
        "up": up,
        "up_bias": up_bias,
        "bound": bound,
        "write": 3 if layer.config.tied_erase_gate else _WRITE_FACTORS[layer.config.write_gate],
        "erase": 0.0 if erase is None else float(erase.largest),
        "weight": weight,
        "bias": bias,
        "inputs": state.conv,
        "silu": conv is not None and conv.activation == "silu",
        "decay": decay,
        "kv": state.sums.kv,
        "z": state.sums.z if erase is None else None,
        "positions": state.position.unsqueeze(1),
        "theta": None if rotary is None else rotary.turns_per_position(state.sums.kv.device),
        "layout": 0 if rotary is None else native.LAYOUTS[rotary.layout],
        "feature_map": native.MAPS[elementwise or ""],
        "unit": unit,
        "normalize": layer.normalize and not layer._out_norm_replaces_normalizer,
        "eps": Call.eps,  # the layer has no option for it
        "norm": scale,
        "norm_eps": 1e-6 if norm is None else norm.eps or 0.0,
        "over_heads": layer.norm_over == "all",
        "gate_first": (layer.config.gate if norm is None else norm.gate_order) == "before",
        "skip": None if layer.skip is None else layer.skip.detach(),
        "skip_first": (layer.config.skip if norm is None else norm.skip_order) == "before",
    }

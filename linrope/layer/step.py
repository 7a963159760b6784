"""A layer's decoding step: one token of each sequence, in one call of the native library.

The layer's own call takes it wherever it computes the same (``one_token``), and ``linrope.decode`` builds on it.
"""

from itertools import chain
from operator import attrgetter, itemgetter, methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import functional as F

from linrope.backends import library, native
from linrope.common.private_names import (
    dicts_of,
    forward_mode,
    function_modes,
    has_global_hooks,
    parameters_of,
)
from linrope.common.tracing import plain
from linrope.layer.feature_gate import FeatureForgetGate
from linrope.layer.state import LayerState
from linrope.layer.step_reasons import why_not_calls, why_not_options, why_not_weights
from linrope.operation.plan import backend_map, identity_of
from linrope.recurrence.call import Call
from linrope.recurrence.decay import MIN_LOG_DECAY
from linrope.recurrence.identities import WITHOUT_Z
from linrope.recurrence.state import LinearAttentionState

FEW_ROWS = 8  # for so few, the library's matrix products are faster than PyTorch's
_KEPT = "_step"  # the attribute of a layer with its step
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "gate_proj", "forget_proj", "write_proj", "erase_proj")
# The numbers of kernels/cpu/mixer.h; that of a tied erase gate is 3
_WRITE_FACTORS = {None: 0, "independent": 1, "tied": 2}
_FROM_TOKEN_TO_TOKEN = (
    "x",
    "kv",
    "z",
    "positions",
    "inputs",
    "slots",
    "decay",
)  # mixer_step's first arguments


_needs_gradient = attrgetter("requires_grad")
_is_contiguous = methodcaller("is_contiguous")
_is_of_inference = methodcaller("is_inference")


def one_token(
    layer: Any, x: Tensor, state: LayerState, return_state: bool
) -> Tensor | tuple[Tensor, LayerState] | None:
    """The layer's result for one more token (b, 1, embed_dim), or None: only the layer's other code can tell it."""
    if type(x) is not Tensor or x.ndim != 3 or x.shape[1] != 1:
        return None
    step, sums = step_of(layer), state.sums
    if step.why_not is not None or type(sums) is not LinearAttentionState or sums.identity != step.identity:
        return None
    if has_global_hooks() or sums.angle is not None or state.last_token is not None:
        return None
    memory = [sums.kv, sums.z, sums.position, *([] if state.conv is None else [state.conv])]
    tensors = [x, *memory, *step.parameters]
    if not plain((sums.slots, *tensors)) or forward_mode() or function_modes():
        return None
    if torch.is_autocast_enabled("cpu") or (torch.is_grad_enabled() and any(map(_needs_gradient, tensors))):
        return None
    in_place = sums.donated or sums.slots is not None
    if not in_place:
        memory = [y.clone(memory_format=torch.contiguous_format) for y in memory]
    elif not _may_be_written(memory):
        return None
    try:
        y = step(x, *memory, slots=sums.slots)
    except (
        ValueError,
        RuntimeError,
    ):  # nothing is written; the layer's other code takes it, or names what is wrong
        return None
    if not return_state:
        return y
    if in_place:
        return y, state._with(sums._replace_unchecked(donated=False))
    kv, z, position, *conv = memory
    after = state._with(sums._replace_unchecked(kv=kv, z=z, position=position))
    after.conv = conv[0] if conv else None
    return y, after


def _may_be_written(memory: list[Tensor]) -> bool:
    outside = any(map(_is_of_inference, memory)) and not torch.is_inference_mode_enabled()
    return not outside and all(map(_is_contiguous, memory))


def step_of(layer: Any) -> "LayerStep":
    """The layer's step: the one that was made for its last call, unless the layer has changed."""
    kept = vars(layer).get(_KEPT)
    if not isinstance(kept, LayerStep) or not kept.fits(layer):
        kept = vars(layer)[_KEPT] = LayerStep(layer)
    return kept


class LayerStep:
    """Takes one token of each sequence through a LinearRoPEAttention, and overwrites the state's memory.

        y = W_o mixer_step(W x)        x, y: (b, 1, embed_dim) or (b, embed_dim);  W: all projections of x

    It reads the weights from the layer's own parameters. Whatever else it knows of the layer it has found once;
    ``fits`` says whether this still holds.

    Args:
        layer: the layer. It keeps its step, and so the step must not keep the layer.
    """

    why_not: str | None  # the reason why the layer's other code must take all steps; None: it need not

    def __init__(self, layer: Any) -> None:
        modules = [*layer.modules()]
        self._children = modules[1:]
        # What says how a module computes: every attribute, all submodules and all hooks. ``fits`` compares all of it,
        # so that nothing that ``_arguments`` reads can be forgotten.
        self._attributes = itemgetter(*[name for name in vars(layer) if name != _KEPT])
        self._seen = self._attributes(vars(layer))
        self._dicts = [each for module in self._children for each in (vars(module), *dicts_of(module))]
        self._dicts += dicts_of(layer)[:1]
        self._dicts_seen = [dict(each) for each in self._dicts]
        self._types = [*map(type, self._children)]
        self._parameter_dicts = [each for module in modules if (each := parameters_of(module))]
        parameters = [*chain.from_iterable([each.values() for each in self._parameter_dicts])]
        self._ids = [*map(id, parameters)]
        self.parameters = [x for x in parameters if x is not None]
        self.why_not = (
            native.why_not()
            or why_not_options(layer)
            or why_not_calls(self._children)
            or why_not_weights(modules)
        )
        if self.why_not is not None:
            return
        self.identity = identity_of(layer.feature_map, layer.rotary, layer.rope_order)
        self.identity += "" if layer.erase_gate is None else WITHOUT_Z
        self._without_z = layer.erase_gate is not None
        fixed = _arguments(layer)
        self._projections = [
            (fixed[name], fixed[_bias(name)]) for name in _PROJECTIONS if fixed[name] is not None
        ]
        self._last = fixed["o_proj"], fixed["o_bias"]
        names = library.argument_names("mixer_step")[len(_FROM_TOKEN_TO_TOKEN) :]
        self._whole = itemgetter(*names)(fixed)
        without = dict.fromkeys(y for x in (*_PROJECTIONS, "o_proj") for y in (x, _bias(x)))
        self._between = itemgetter(*names)(fixed | without)
        self._decay_logit = layer.decay_logit
        decay = layer.decay
        self._decay = None if decay is None or self._decay_logit is not None else _log_of(decay)

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the layer makes a step of its own

    def fits(self, layer: Any) -> bool:
        """Whether a new step of the layer would be this one."""
        try:
            return (
                self._attributes(vars(layer)) == self._seen
                and self._dicts == self._dicts_seen
                and [*map(type, self._children)] == self._types
                and [*map(id, chain.from_iterable([x.values() for x in self._parameter_dicts]))] == self._ids
            )
        except (KeyError, RuntimeError, ValueError):  # an attribute is gone, or was a tensor or an array
            return False

    def __call__(
        self,
        x: Tensor,
        kv: Tensor,
        z: Tensor,
        position: Tensor,
        conv: Tensor | None = None,
        *,
        slots: Tensor | None,
    ) -> Tensor:
        """Raises ValueError or RuntimeError, and then has written nothing, if an argument does not fit."""
        decay = self._decay
        if self._decay_logit is not None:
            decay = _log_of(self._decay_logit.detach().double().sigmoid())
        memory = kv, None if self._without_z else z, position, conv, slots, decay
        y: Tensor
        if x.shape[0] <= FEW_ROWS:
            y = library.run("mixer_step", x, *memory, *self._whole)
        else:
            columns = torch.cat([F.linear(x, *part) for part in self._projections], -1)
            normed = library.run("mixer_step", columns.flatten(0, -2), *memory, *self._between)
            y = F.linear(normed, *self._last).view(*x.shape[:-1], -1)
        # Autograd does not see what kernels write
        increment_version([kv, z, position] if conv is None else [kv, z, position, conv])
        return y


def _log_of(decay: Tensor) -> Tensor:
    return decay.log().clamp(min=MIN_LOG_DECAY)


def _bias(projection: str) -> str:
    return projection.replace("_proj", "_bias")


def _arguments(layer: Any) -> dict[str, Any]:
    """mixer_step's arguments that do not change from token to token, by name."""
    elementwise, unit = backend_map(layer.feature_map)
    conv, norm, rotary = layer.short_conv, layer.out_norm, layer.rotary
    forget, erase = layer.forget_gate, layer.erase_gate
    per_feature = isinstance(forget, FeatureForgetGate)
    weights = {"q_proj": layer.q_proj, "k_proj": layer.k_proj, "v_proj": layer.v_proj, "o_proj": layer.o_proj}
    weights |= {"gate_proj": layer.g_proj, "write_proj": layer.write_gate, "erase_proj": erase}
    arguments: dict[str, Any] = {name: module and module.weight for name, module in weights.items()}
    arguments |= {_bias(name): module and module.bias for name, module in weights.items()}
    if per_feature:  # the first of its two products is a projection of x
        arguments |= {
            "forget_proj": forget.down,
            "forget_bias": None,
            "up": forget.up,
            "up_bias": forget.bias,
        }
    else:
        arguments |= {"forget_proj": forget and forget.weight, "forget_bias": forget and forget.bias}
        arguments |= {"up": None, "up_bias": None}
    return arguments | {
        "heads": layer.num_heads,
        "gate": layer.g_proj is not None,
        "forget": forget is not None,
        "bound": (forget.bound or 0.0) if per_feature else 0.0,  # 0: none
        "write": 3 if layer.config.tied_erase_gate else _WRITE_FACTORS[layer.config.write_gate],
        "erase": 0.0 if erase is None else float(erase.largest),
        "weight": None if conv is None else conv.weight,
        "bias": None if conv is None else conv.bias,
        "silu": conv is not None and conv.activation == "silu",
        "theta": None if rotary is None else rotary.turns_per_position(torch.device("cpu")),
        "layout": 0 if rotary is None else native.LAYOUTS[rotary.layout],
        "feature_map": native.MAPS[elementwise or ""],
        "unit": unit,
        "normalize": layer.normalize and not layer._out_norm_replaces_normalizer,
        "eps": Call.eps,  # the layer has no option for it
        "norm": None if norm is None else norm.weight,
        "norm_eps": 1e-6 if norm is None else norm.eps or 0.0,
        "over_heads": layer.norm_over == "all",
        "gate_first": (layer.config.gate if norm is None else norm.gate_order) == "before",
        "skip": layer.skip,
        "skip_first": (layer.config.skip if norm is None else norm.skip_order) == "before",
    }

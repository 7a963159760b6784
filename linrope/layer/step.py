"""A layer's decoding step: one token of each sequence, in one call of the native library.

The layer's own call takes it wherever it computes the same (``one_token``), and ``linrope.decode`` builds on it.
"""

from itertools import chain
from operator import itemgetter, methodcaller
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
from linrope.common.writable import is_read_only
from linrope.layer.feature_gate import FeatureForgetGate
from linrope.layer.state import LayerState
from linrope.layer.step_reasons import why_not_calls, why_not_options
from linrope.operation.map_facts import backend_map
from linrope.operation.plan import identity_of
from linrope.recurrence.call import Call
from linrope.recurrence.decay import MIN_LOG_DECAY
from linrope.recurrence.identities import WITHOUT_Z

FEW_ROWS = 8  # for so few, the library's matrix products are faster than PyTorch's
_KEPT = "_step"  # the attribute of a layer with its step
_PROJECTIONS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "gate_proj",
    "forget_proj",
    "write_proj",
    "erase_proj",
    "o_proj",
)
# mixer_step's first arguments, which differ from token to token
_CHANGING = ("x", "kv", "z", "positions", "inputs", "slots", "decay")

_is_contiguous = methodcaller("is_contiguous")


def one_token(
    layer: Any, x: Tensor, state: LayerState, return_state: bool
) -> Tensor | tuple[Tensor, LayerState] | None:
    """The layer's result for one more token x (b, 1, embed_dim). None: the layer's other code must compute it."""
    if type(x) is not Tensor or x.dtype != torch.float32 or x.ndim != 3 or x.shape[1] != 1 or not x.is_cpu:
        return None
    step, sums = step_of(layer), state.sums
    if step.why_not is not None or sums.identity != step.identity:
        return None
    if has_global_hooks() or sums.angle is not None:
        return None
    memory = [sums.kv, sums.z, sums.position, *([] if state.conv is None else [state.conv])]
    parameters = step.parameters()
    if not plain((x, sums.slots, *memory, *parameters)):
        return None
    if forward_mode() or function_modes() or torch.is_autocast_enabled("cpu"):
        return None
    if torch.is_grad_enabled() and _need_gradients(x, *memory, *parameters):
        return None
    in_place = sums.donated or sums.slots is not None
    if not in_place:
        memory = [y.clone(memory_format=torch.contiguous_format) for y in memory]
    elif is_read_only(*memory) or not all(map(_is_contiguous, memory)):
        return None
    try:
        y = step(x, memory, sums.slots, parameters)
    except (ValueError, RuntimeError):
        return None  # nothing is written, and the layer's other code names what is wrong, or can do it
    if not return_state:
        return y
    if in_place:
        return y, state._with(sums._replace_unchecked(donated=False))
    kv, z, position, *conv = memory
    after = state._with(sums._replace_unchecked(kv=kv, z=z, position=position))
    after.conv = conv[0] if conv else None
    return y, after


def _need_gradients(*tensors: Tensor | None) -> bool:
    return any(x is not None and x.requires_grad for x in tensors)


def step_of(layer: Any) -> "LayerStep":
    """The layer's step: the one that was made for its last call, unless the layer has changed."""
    kept = vars(layer).get(_KEPT)
    if not isinstance(kept, LayerStep) or not kept.fits(layer):
        vars(layer)[_KEPT] = None  # before the step counts the layer's attributes: this is one of them
        kept = vars(layer)[_KEPT] = LayerStep(layer)
    return kept


class LayerStep:
    """Takes one token of each sequence through a LinearRoPEAttention, and overwrites the state's memory.

        y = W_o mixer_step(W x)        x, y: (b, 1, embed_dim) or (b, embed_dim);  W: all projections of x

    It reads the weights wherever the layer has them at the time of a call. Whatever else it knows of the layer it has
    found once; ``fits`` says whether this still holds.

    Args:
        layer: the layer. It keeps its step, and so the step must keep neither the layer nor a weight.
    """

    why_not: str | None  # the reason why the layer's other code must take all steps; None: it need not

    def __init__(self, layer: Any) -> None:
        modules = [*layer.modules()]
        self._children = modules[1:]
        # What says how a module computes: every attribute, all submodules and all hooks. ``fits`` compares all of it,
        # so that nothing that ``_constants`` reads can be forgotten.
        self._attributes = itemgetter(*[name for name in vars(layer) if name != _KEPT])
        self._seen, self._count = self._attributes(vars(layer)), len(vars(layer))
        self._dicts = [each for module in self._children for each in (vars(module), *dicts_of(module))]
        self._dicts += dicts_of(layer)[:1]
        self._dicts_seen = [dict(each) for each in self._dicts]
        self._types = [*map(type, self._children)]
        self._parameters = [parameters_of(module) for module in modules]
        self._names = [*map(list, self._parameters)]
        self.why_not = native.why_not() or why_not_options(layer) or why_not_calls(self._children)
        if self.why_not is not None:
            return
        self.identity = identity_of(layer.feature_map, layer.rotary, layer.rope_order)
        self.identity += "" if layer.erase_gate is None else WITHOUT_Z
        self._without_z = layer.erase_gate is not None
        decay = layer.decay
        self._decay = None if decay is None or layer.decay_logit is not None else _log_of(decay)
        # Each argument is a parameter or a constant, and has a place in a list of all of these
        places = {
            x: i for i, x in enumerate((id(m), name) for m, own in zip(modules, self._names) for name in own)
        }
        self._decay_logit = places.get((id(layer), "decay_logit"))
        weights = {name: places.get((id(module), own)) for name, (module, own) in _weights(layer).items()}
        constants = _constants(layer) | {name: None for name, place in weights.items() if place is None}
        self._constants = [*constants.values()]
        at = weights | {name: len(places) + i for i, name in enumerate(constants)}
        names = library.argument_names("mixer_step")
        self._order = names[len(_CHANGING) :]
        assert (*names,) == (*_CHANGING, *self._order)
        self._pick = itemgetter(*[at[name] for name in self._order])

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the layer makes a step of its own

    def fits(self, layer: Any) -> bool:
        """Whether nothing has changed that this step has read from the layer."""
        try:
            return (
                len(vars(layer)) == self._count
                and self._attributes(vars(layer)) == self._seen
                and self._dicts == self._dicts_seen
                and [*map(type, self._children)] == self._types
                and [*map(list, self._parameters)] == self._names
            )
        except (KeyError, RuntimeError, ValueError):  # an attribute is gone, or was a tensor or an array
            return False

    def parameters(self) -> list[Any]:
        """The layer's parameters, and None for each that it has not, in one order."""
        return [*chain.from_iterable([each.values() for each in self._parameters])]

    def __call__(
        self, x: Tensor, memory: list[Tensor], slots: Tensor | None, parameters: list[Any] | None = None
    ) -> Tensor:
        """memory: a state's kv, z, position and, with a convolution, conv. parameters: ``parameters()``.

        Raises ValueError or RuntimeError if an argument does not fit. Nothing is written then.
        """
        if parameters is None:
            parameters = self.parameters()
        kv, z, position, *conv = memory
        decay = self._decay
        if self._decay_logit is not None:
            decay = _log_of(parameters[self._decay_logit].detach().double().sigmoid())
        changing = kv, None if self._without_z else z, position, conv[0] if conv else None, slots, decay
        fixed = self._pick(parameters + self._constants)
        y: Tensor
        if x.shape[0] <= FEW_ROWS:
            y = library.run("mixer_step", x, *changing, *fixed)
        else:
            y = self._of_many_rows(x, changing, dict(zip(self._order, fixed)))
        increment_version(memory)  # autograd does not see what kernels write
        return y

    def _of_many_rows(self, x: Tensor, changing: tuple[Any, ...], fixed: dict[str, Any]) -> Tensor:
        """PyTorch's matrix products, and mixer_step between them."""
        weights = {
            name: (fixed[name], fixed[_bias(name)]) for name in _PROJECTIONS if fixed[name] is not None
        }
        last, rows = weights.pop("o_proj"), x.flatten(0, -2)
        F.linear(x.new_empty(0, last[0].shape[1]), *last)  # raises before anything is written
        sizes = [len(weight) for weight, _ in weights.values()]
        columns = x.new_empty(len(rows), sum(sizes))
        for (weight, bias), y in zip(weights.values(), columns.split(sizes, 1), strict=True):
            if bias is None:
                torch.mm(rows, weight.t(), out=y)
            else:
                torch.addmm(bias, rows, weight.t(), out=y)
        between = fixed | dict.fromkeys(y for name in _PROJECTIONS for y in (name, _bias(name)))
        normed = library.run("mixer_step", columns, *changing, *between.values())
        return F.linear(normed, *last).view(*x.shape[:-1], -1)


def _log_of(decay: Tensor) -> Tensor:
    return decay.log().clamp(min=MIN_LOG_DECAY)


def _bias(projection: str) -> str:
    return projection.replace("_proj", "_bias")


def _weights(layer: Any) -> dict[str, tuple[Any, str]]:
    """mixer_step's arguments that are parameters, by name: the module, or None, and the parameter's name in it."""
    gates = layer.forget_gate, layer.write_gate, layer.erase_gate
    projections = layer.q_proj, layer.k_proj, layer.v_proj, layer.g_proj, *gates, layer.o_proj
    weights: dict[str, tuple[Any, str]] = {}
    for name, module in zip(_PROJECTIONS, projections, strict=True):
        weights |= {name: (module, "weight"), _bias(name): (module, "bias")}
    if isinstance(layer.forget_gate, FeatureForgetGate):  # the first of its two products is a projection of x
        weights |= {"forget_proj": (layer.forget_gate, "down"), "forget_bias": (None, "")}
        weights |= {"up": (layer.forget_gate, "up"), "up_bias": (layer.forget_gate, "bias")}
    else:
        weights |= {"up": (None, ""), "up_bias": (None, "")}
    weights |= {"weight": (layer.short_conv, "weight"), "bias": (layer.short_conv, "bias")}
    return weights | {"norm": (layer.out_norm, "weight"), "skip": (layer, "skip")}


def _constants(layer: Any) -> dict[str, Any]:
    """mixer_step's other arguments that do not change from token to token, by name."""
    elementwise, query_factor = backend_map(layer.feature_map)
    conv, norm, rotary = layer.short_conv, layer.out_norm, layer.rotary
    forget, erase = layer.forget_gate, layer.erase_gate
    bound = forget.bound if isinstance(forget, FeatureForgetGate) else None
    write = "erased" if layer.config.tied_erase_gate else layer.config.write_gate or "none"
    return {
        "heads": layer.num_heads,
        "gate": layer.g_proj is not None,
        "forget": forget is not None,
        "bound": bound or 0.0,  # 0: none
        "write": native.WRITE_FACTORS[write],
        "erase": 0.0 if erase is None else float(erase.largest),
        "silu": conv is not None and conv.activation == "silu",
        "theta": None if rotary is None else rotary.turns_per_position(torch.device("cpu")),
        "layout": native.LAYOUTS["none" if rotary is None else rotary.layout],
        "feature_map": native.MAPS[elementwise or ""],
        "query_factor": query_factor,
        "normalize": layer.normalize and not layer.norm_suffices,
        "eps": Call.eps,  # the layer has no option for it
        "norm_eps": 1e-6 if norm is None else norm.eps or 0.0,
        "over_heads": layer.norm_over == "all",
        "gate_first": (layer.config.gate if norm is None else norm.gate_order) == "before",
        "skip_first": (layer.config.skip if norm is None else norm.skip_order) == "before",
    }

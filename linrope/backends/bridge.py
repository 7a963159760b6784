"""The operator of all chunked backends. Its arguments are the fields of ``Call``, and the incoming sums."""

from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple, cast, get_type_hints

import torch
from torch import Tensor

from linrope.backends.operator import Operator, Output, Tensors
from linrope.backends.protocol import ChunkedBackend
from linrope.common.precision import full_precision
from linrope.common.tracing import check_not_in_onnx
from linrope.recurrence.call import INPUTS, RECEIVED, Call, ResultGradients, Sums, sums_of
from linrope.recurrence.state import LinearAttentionState

_HINTS = get_type_hints(Call) | {"feature_map": str, "positions": Tensor}
_TYPES = {name: _HINTS[name] for name in RECEIVED}
_OTHERS = [name for name, x in _TYPES.items() if x in (Tensor, Tensor | None) and name not in INPUTS]
_SETTINGS = [name for name in _TYPES if name not in INPUTS and name not in _OTHERS]
_ALL_TYPES = _TYPES | dict.fromkeys(Sums._fields, Tensor | None) | {"backend": str}
# In the order of an Operator: tensors with gradients, other tensors, settings.
_ORDER = (*INPUTS, "kv", "z", *_OTHERS, "angle", *_SETTINGS, "backend")
_ARGUMENTS = {name: _ALL_TYPES[name] for name in _ORDER}


_GROUPS = INPUTS, _OTHERS, _SETTINGS
_getters = [attrgetter(*names) for names in _GROUPS]
_BLANK = Call(q=None, k=torch.empty(0, device="cpu"), v=torch.empty(0, device="cpu"))


# For callers of linrope's functions and layers, and for those of transformers' models, who pass no backend
EXPECTED_REFERENCE = (
    "expected 'reference', an argument of linear_rope_attention and an attribute of layers; for transformers' own "
    "models call disable() of linrope.integrations.transformers first"
)


class _BackendCall(NamedTuple):
    backend: str
    call: Call
    sums: Sums | None  # that the call continues from


def flatten(backend: str, call: Call, sums: Sums | None) -> tuple[Any, ...]:
    """The operator's arguments, without ``save``."""
    kv, z, angle = sums or (None, None, None)
    if torch.compiler.is_compiling():  # the compiler cannot trace an attrgetter
        inputs, others, settings = (tuple(getattr(call, name) for name in names) for names in _GROUPS)
    else:
        inputs, others, settings = (values(call) for values in _getters)
    return *inputs, kv, z, *others, angle, *settings, backend


def _unflatten(*arguments: Any) -> _BackendCall:
    named = dict(zip(_ARGUMENTS, arguments))
    take = named.pop
    backend, kv, z, angle = take("backend"), take("kv"), take("z"), take("angle")
    # Changing a call takes a fraction of the time of making one.
    return _BackendCall(backend, _BLANK.changed(**named), None if kv is None else Sums(kv, z, angle))


@cache
def _module(name: str) -> ChunkedBackend:
    from linrope.backends import load  # the table imports the backends, which import this module

    return cast(ChunkedBackend, load(name))


class _AttentionOperator(Operator[_BackendCall]):
    """Attends. The results are out, empty if not wanted, and the last kv and z, None if not wanted."""

    name = "attend"
    types = _ARGUMENTS
    inputs = len(INPUTS) + 2
    results = 3
    record = staticmethod(_unflatten)

    def new(self, record: _BackendCall, save: bool) -> Output:
        name, call, sums = record
        check_not_in_onnx(name, "'reference' or 'onnx'")
        v, saved = call.v, _module(name).new_saved(call) if save else []
        out = kv = z = None
        if call.q is not None:
            b, n, heads, _ = call.q.shape
            out = v.new_empty(b, n, heads * call.value_group, v.shape[3])
        if call.return_state:
            (g, e), f, s = v.shape[2:], call.k.shape[3], call.sequences
            wide = torch.promote_types(v.dtype, torch.float32)
            kv_dtype, z_dtype = (wide, torch.float64) if sums is None else (sums.kv.dtype, sums.z.dtype)
            kv, z = v.new_empty(s, g, f, e, dtype=kv_dtype), v.new_empty(s, g, f, dtype=z_dtype)
        return v.new_empty(0) if out is None else out, kv, z, saved

    def forward(self, record: _BackendCall, save: bool) -> Output:
        name, call, sums = record
        if call.k.shape[0] == 0:
            return self.new(record, save)
        with full_precision(call.v.device):
            out, last, saved = _module(name).forward(call, sums, save)
        kv, z = last or (None, None)
        return call.v.new_empty(0) if out is None else out, kv, z, saved

    def reads_results(self, record: _BackendCall) -> bool:
        return _module(record.backend).reads_results(record.call)

    def backward(self, record: _BackendCall, saved: list[Tensor], g: Tensors) -> Tensors:
        name, call, sums = record
        if call.k.shape[0] == 0:  # the batch is empty, but gates of batch size 1 are not: their gradient is 0
            inputs = flatten(*record)[: self.inputs]
            return [None if x is None else x.new_zeros(x.shape) for x in inputs]
        g_out, g_kv, g_z = g
        if call.q is None:  # compiled code passes zeros for absent results
            g_out = None
        if not call.return_state:
            g_kv = g_z = None
        with full_precision(call.v.device):
            return _module(name).backward(call, sums, saved, ResultGradients(g_out, g_kv, g_z))

    def refusal(self, arguments: Any) -> str:
        return f"second derivatives: got backend={arguments[len(self.types) - 1]!r}, {EXPECTED_REFERENCE}"


ATTEND = _AttentionOperator()


def attend(backend: str, call: Call, state: LinearAttentionState | None) -> tuple[Tensor, Sums | None]:
    """Runs a chunked backend with autograd and torch.compile. Returns out and, if wanted, the last sums."""
    sums = sums_of(None if state is None else state.rows())
    out, kv, z = ATTEND(flatten(backend, call, sums), _BackendCall(backend, call, sums))
    if not call.return_state:
        return out, None
    return out, Sums(kv, z, call.last_angle(None if sums is None else sums.angle))

"""Equation 19 on CPUs, in the compiled kernels of kernels/cpu. Loads their library, or says why it cannot.

Sums are float32, z is float64. The backward pass recomputes everything from the inputs.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linrope.backends import operators
from linrope.backends.call import Call, Gradients, Sums, needs_gradients, summed_to, transformed
from linrope.sequence.state import LinearAttentionState

MAX_DIM = 256
LIBRARY = Path(__file__).parents[1] / "lib" / "liblinrope_native.so"
WHY_PURE = LIBRARY.with_name("why_pure.txt")  # hatch_build.py puts it into wheels without the library
# The numbers of kernels/cpu/call.h
MAPS = {"identity": 0, "elu+1": 1, "relu": 2, "relu2": 3, "exp": 4, "silu": 5}
LAYOUTS = {"interleaved": 1, "half": 2}


def _load() -> str | None:
    """Loads the library, or returns why it cannot."""
    if not LIBRARY.is_file():
        return _why_absent()
    try:
        torch.ops.load_library(LIBRARY)
    except (OSError, RuntimeError) as error:
        return f"the native library cannot be loaded: {error}"
    return None


def _why_absent() -> str:
    if WHY_PURE.is_file():
        return f"a pure build ({WHY_PURE.read_text(encoding='utf-8').strip()})"
    if (Path(__file__).parents[2] / "kernels" / "cpu" / "build.py").is_file():
        return "not built in this tree: run `make native`"
    return f"this installation lacks {LIBRARY}, and does not say why"


_PROBLEM = _load()
_ops = torch.ops.linrope_native


def why_not() -> str | None:
    """Why no call can run on this machine; None: some can."""
    return _PROBLEM


def instruction_sets() -> list[str]:
    """The instruction sets with kernels that this machine can run, the best one first."""
    return [] if _PROBLEM else _ops.isas().split(",")


def instruction_set() -> str | None:
    """The instruction set in use."""
    return None if _PROBLEM else _ops.isa()


def use_instruction_set(name: str) -> None:
    """Switches to another of ``instruction_sets``, for tests. RuntimeError if there is none of that name."""
    if _PROBLEM:
        raise RuntimeError(_PROBLEM)
    _ops.set_isa(name)


def supports(call: Call, state: LinearAttentionState | None) -> str | None:
    f, e = call.k.shape[3], call.v.shape[3]
    if _PROBLEM:
        return _PROBLEM
    if call.k.device.type != "cpu":
        return f"tensors on {call.k.device}: it needs a CPU"
    if torch.float64 in (call.k.dtype, call.v.dtype):
        return "float64: use backend='eager'"
    if state is not None and (state.kv.dtype != torch.float32 or state.z.dtype != torch.float64):
        return f"a state of {state.kv.dtype} and {state.z.dtype}: use backend='eager'"
    if call.xpos_log_decay is not None:
        return "xpos, a decay per pair of features: use backend='eager'"
    if f > MAX_DIM or e > MAX_DIM:
        return f"{f} features and {e} values per head: it takes up to {MAX_DIM} of each; use backend='eager'"
    return None


def attend(call: Call, state: LinearAttentionState | None) -> tuple[Tensor, Sums | None]:
    """out, and the last sums if they are wanted, in the state's own memory if that was donated."""
    traced = torch.compiler.is_compiling() or transformed()
    if traced or (torch.is_grad_enabled() and needs_gradients(call, state)):
        return operators.attend("native", call, state)
    one = call.k.shape[1] == 1 and call.causal and call.q is not None and call.cu_seqlens is None
    if one and state is not None:
        return _step(call, state)
    if state is not None and state.slots is not None and not _dense_state(state):
        state = state.rows()  # a copy: the caller writes the results back
    sums, slots = (None, None) if state is None else (Sums(state.kv, state.z, state.angle), state.slots)
    out, kv, z = _forward(call, sums, slots)
    if not call.want_state:
        return out, None
    if state is not None and slots is not None:  # the kernel has written the pool's rows
        return out, Sums(state.kv, state.z, state.angle)
    return out, Sums(kv, z, call.last_angle(None if state is None else state.angle))


def _dense_state(state: LinearAttentionState) -> bool:
    """Whether the kernels can write to it: they write to contiguous tensors only."""
    return all(x is None or x.is_contiguous() for x in (state.kv, state.z, state.angle))


def _step(call: Call, state: LinearAttentionState) -> tuple[Tensor, Sums]:
    """One token of every sequence, in the state's memory if the kernel may write there."""
    in_place = (state.slots is not None or state.donated) and _dense_state(state)
    rows = state if in_place else state.rows()
    kv, z, angle = rows.kv, rows.z, rows.angle
    if not in_place:
        kv, z = (x.clone(memory_format=torch.contiguous_format) for x in (kv, z))
        angle = None if angle is None else angle.clone(memory_format=torch.contiguous_format)
    if call.angle_steps is not None:
        heads, pairs = call.angle_steps.shape[2:]
        if angle is None:  # the state was made without angle_steps
            angle = state.position.new_zeros(len(kv), heads, pairs)
        elif angle.shape[1] < heads:  # or with steps that all heads share
            angle = angle.expand(-1, heads, -1).clone(memory_format=torch.contiguous_format)
    q, k, v, same = _dense(call)
    out = _run(
        _ops.step.default,
        q=q,
        k=k,
        v=v,
        positions=call.positions,
        key_positions=call.key_positions,
        log_decay=call.log_decay,
        angle_steps=call.angle_steps,
        angle=angle,
        key_mask=call.key_mask,
        kv=kv,
        z=z,
        slots=rows.slots,
        advance=False,
        **settings(call),
    )
    return out if same else out.to(call.v.dtype), Sums(kv, z, angle)


def settings(call: Call) -> dict[str, Any]:
    """The kernels' arguments that do not depend on the tokens."""
    return {
        "feature_map": MAPS[call.feature_map],
        "theta": call.theta,
        "layout": LAYOUTS[call.layout] if call.pairs else 0,
        "normalize": call.normalize,
        "eps": call.eps,
        "add_eps": call.eps_mode == "add",
    }


def prepared_step(call: Call) -> list[Any]:
    """The step kernel's arguments in its schema's order, with None for those that every token has anew."""
    arguments = settings(call) | {"advance": True}
    return [arguments.get(name) for name in _places(_ops.step.default)]


def step_in_place(prepared: list[Any], state: LinearAttentionState, **token: Tensor | None) -> Tensor:
    """out of one token in the memory of a donated state, whose positions advance too.

    token: q, k, v, log_decay, angle_steps.
    RuntimeError, before anything is written: the tensors do not fit each other, or a number is out of range.
    """
    arguments, places = prepared.copy(), _places(_ops.step.default)
    for name, x in token.items():
        arguments[places[name]] = x
    arguments[places["positions"]] = state.position.unsqueeze(1)
    arguments[places["kv"]], arguments[places["z"]] = state.kv, state.z
    arguments[places["angle"]] = state.angle
    out: Tensor = _ops.step.default(*arguments)
    return out


@cache
def _places(operator: Any) -> dict[str, int]:
    """The places of an operator's arguments, by name."""
    return {argument.name: place for place, argument in enumerate(operator._schema.arguments)}


def _run(operator: Any, **arguments: Any) -> Any:
    """operator(**arguments), which as it stands would take 5 us more to sort the keywords."""
    return operator(*[arguments[name] for name in _places(operator)])


def new_saved(call: Call) -> list[Tensor]:
    return []


def reads_results(call: Call) -> bool:
    return False


def forward(
    call: Call, sums: Sums | None, save: bool
) -> tuple[Tensor | None, tuple[Tensor, Tensor] | None, list[Tensor]]:
    out, kv, z = _forward(call, sums, None)
    return out if call.q is not None else None, (kv, z) if call.want_state else None, []


def _forward(call: Call, sums: Sums | None, slots: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, same = _dense(call)
    out, kv, z = _run(
        _ops.forward.default,
        q=q if call.q is not None else None,
        k=k,
        v=v,
        slots=slots,
        want_state=call.want_state,
        **_tensors(call, sums),
        **settings(call),
    )
    return out if same else out.to(call.v.dtype), kv, z


def _summed(gradient: Tensor | None, like: Tensor | None) -> Tensor | None:
    if like is None or gradient is None:
        return None if like is None else torch.zeros_like(like)
    return summed_to(gradient, like)


def backward(
    call: Call,
    sums: Sums | None,
    results: list[Tensor],
    g_out: Tensor | None,
    g_kv: Tensor | None,
    g_z: Tensor | None,
) -> Gradients:
    q, k, v, _ = _dense(call)
    if g_out is not None:
        g_out = _rows_dense(g_out.to(v.dtype))
    some = call.k.shape[1] > 0  # without tokens the library has no gradients of log_decay and angle_steps
    dq, dk, dv, d_log, d_steps, d_kv, d_z = _run(
        _ops.backward.default,
        g_out=g_out,
        g_kv=_contiguous(g_kv),
        g_z=_contiguous(g_z),
        q=q if call.q is not None else None,
        k=k,
        v=v,
        want_log_decay=some and call.log_decay is not None,
        want_angle_steps=some and call.angle_steps is not None,
        **_tensors(call, sums),
        **settings(call),
    )
    return Gradients(
        q=None if call.q is None else dq,
        k=dk,
        v=dv.to(call.v.dtype),
        log_decay=_summed(d_log if some else None, call.log_decay),
        angle_steps=_summed(d_steps if some else None, call.angle_steps),
        kv=None if sums is None else d_kv,
        z=None if sums is None else d_z,
    )


def _tensors(call: Call, sums: Sums | None) -> dict[str, Any]:
    """The kernels' arguments that forward and backward share beside ``settings``."""
    return {
        "positions": call.positions.contiguous(),
        "key_positions": _contiguous(call.key_positions),
        "log_decay": call.log_decay,
        "angle_steps": call.angle_steps,
        "angle": None if sums is None else sums.angle,
        "key_mask": _contiguous(call.key_mask),
        "cu_seqlens": call.cu_seqlens,
        "kv": None if sums is None else sums.kv.contiguous(),
        "z": None if sums is None else sums.z.contiguous(),
        "causal": call.causal,
    }


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _dense(call: Call) -> tuple[Tensor, Tensor, Tensor, bool]:
    """q, k, v of one dtype with dense rows, and whether they had one dtype before."""
    q, k, v = call.k if call.q is None else call.q, call.k, call.v
    same = v.dtype == k.dtype == q.dtype
    if not same:  # features that a map made are float32
        wide = torch.promote_types(k.dtype, v.dtype)
        q, k, v = q.to(wide), k.to(wide), v.to(wide)
    return _rows_dense(q), _rows_dense(k), _rows_dense(v), same


def _rows_dense(x: Tensor) -> Tensor:
    if x.stride(-1) == 1:
        return x
    return (
        x.contiguous() if x.numel() else x.new_empty(x.shape)
    )  # an empty tensor is contiguous with any strides

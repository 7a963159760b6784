"""Eq. 19 on CPUs, in the compiled kernels of kernels/cpu. Loads the library, and says why not.

Sums are float32, z float64. The backward pass computes everything anew from the inputs.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from linrope.backends import operators
from linrope.backends.call import Call, Gradients, Sums, needs_gradients, summed_to, transformed
from linrope.sequence.state import LinearAttentionState

READS_RESULTS = False
MAX_DIM = 256
LIBRARY = Path(__file__).parents[1] / "lib" / "liblinrope_native.so"
WHY_PURE = LIBRARY.with_name("why_pure.txt")  # hatch_build.py puts it into wheels without the library
MAPS = {name: i for i, name in enumerate(("identity", "elu+1", "relu", "relu2", "exp", "silu"))}
LAYOUTS = {"interleaved": 1, "half": 2}


def _load() -> str | None:
    """Why the library cannot be had; None: it is loaded."""
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
    """Why this backend runs nothing on this machine; None: it runs."""
    return _PROBLEM


def instruction_sets() -> list[str]:
    """Those for which there are kernels that this machine can run, the best one first."""
    return [] if _PROBLEM else _ops.isas().split(",")


def instruction_set() -> str | None:
    """The one in use."""
    return None if _PROBLEM else _ops.isa()


def use_instruction_set(name: str) -> None:
    """Takes another of ``instruction_sets``, for tests; RuntimeError where there is none of that name."""
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
    if call.fade is not None:
        return "xpos, a decay per pair of features: use backend='eager'"
    if f > MAX_DIM or e > MAX_DIM:
        return f"{f} features and {e} values per head: it takes up to {MAX_DIM} of each; use backend='eager'"
    return None


def attend(call: Call, state: LinearAttentionState | None) -> tuple[Tensor, Sums | None]:
    """out, and the last sums where they are wanted; in the state's own memory where that was given away."""
    watched = torch.compiler.is_compiling() or transformed()
    if watched or (torch.is_grad_enabled() and needs_gradients(call, state)):
        return operators.attend("native", call, state)
    one = call.k.shape[1] == 1 and call.causal and call.q is not None and call.cu_seqlens is None
    if one and state is not None:
        return _step(call, state)
    if state is not None and state.slots is not None and not _dense_state(state):
        state = state.rows()  # the caller writes what comes of them
    sums, slots = (None, None) if state is None else (Sums(state.kv, state.z, state.angle), state.slots)
    out, kv, z = _forward(call, sums, slots)
    if not call.want_state:
        return out, None
    if state is not None and slots is not None:  # all of it is written in the pool's rows
        return out, Sums(state.kv, state.z, state.angle)
    return out, Sums(kv, z, call.last_angle(None if state is None else state.angle))


def _dense_state(state: LinearAttentionState) -> bool:
    """Whether the kernels can write to it, as they do to contiguous tensors alone."""
    return all(x is None or x.is_contiguous() for x in (state.kv, state.z, state.angle))


def _step(call: Call, state: LinearAttentionState) -> tuple[Tensor, Sums]:
    """One token of every sequence, in the state's memory where the kernel may write there."""
    in_place = (state.slots is not None or state.donated) and _dense_state(state)
    rows = state if in_place else state.rows()
    kv, z, angle = rows.kv, rows.z, rows.angle
    if not in_place:
        kv, z = (x.clone(memory_format=torch.contiguous_format) for x in (kv, z))
        angle = None if angle is None else angle.clone(memory_format=torch.contiguous_format)
    if call.angle_steps is not None:
        heads, pairs = call.angle_steps.shape[2:]
        if angle is None:  # the state was made without
            angle = state.position.new_zeros(len(kv), heads, pairs)
        elif angle.shape[1] < heads:  # or with steps that all heads share
            angle = angle.expand(-1, heads, -1).clone(memory_format=torch.contiguous_format)
    q, k, v, same = _dense(call)
    how = resolved(call)
    out = _ops.step.default(
        q, k, v, how.feature_map, how.log_decay, how.theta, call.positions, call.key_positions,
        call.angle_steps, angle, call.key_mask, kv, z, rows.slots,
        how.layout, how.normalize, how.eps, how.add_eps,
    )  # fmt: skip
    return out if same else out.to(call.v.dtype), Sums(kv, z, angle)


class Resolved(NamedTuple):
    """What the steps of a decoding loop have in common, as the operator takes it."""

    feature_map: int
    log_decay: Tensor | None
    theta: Tensor | None
    layout: int
    normalize: bool
    eps: float
    add_eps: bool


def resolved(call: Call) -> Resolved:
    layout = LAYOUTS[call.layout] if call.pairs else 0
    how = MAPS[call.feature_map], call.log_decay, call.theta, layout, call.normalize, call.eps
    return Resolved(*how, call.eps_mode == "add")


def follow(
    how: Resolved,
    state: LinearAttentionState,
    token: tuple[Tensor, Tensor, Tensor],
    log_decay: Tensor | None,
    angle_steps: Tensor | None,
) -> Tensor:
    """out of a further step in the memory of a state that was given away; its positions advance too.

    RuntimeError, before anything is written: the tensors do not fit each other, or their numbers the range.
    """
    out: Tensor = _ops.step.default(
        *token, how.feature_map, how.log_decay if log_decay is None else log_decay, how.theta,
        state.position.unsqueeze(1), None, angle_steps, state.angle, None, state.kv, state.z, None,
        how.layout, how.normalize, how.eps, how.add_eps, True,
    )  # fmt: skip
    return out


def new_saved(call: Call) -> list[Tensor]:
    return []


def forward(
    call: Call, sums: Sums | None, save: bool
) -> tuple[Tensor | None, tuple[Tensor, Tensor] | None, list[Tensor]]:
    out, kv, z = _forward(call, sums, None)
    return out if call.q is not None else None, (kv, z) if call.want_state else None, []


def _forward(call: Call, sums: Sums | None, slots: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, same = _dense(call)
    out, kv, z = _ops.forward.default(
        q if call.q is not None else None, k, v, *_how(call, sums), slots,
        LAYOUTS[call.layout] if call.pairs else 0, call.causal, call.normalize, call.eps, call.eps_mode ==
        "add",
        call.want_state,
    )  # fmt: skip
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
    some = call.k.shape[1] > 0  # without tokens nothing fades or turns, and the library knows of neither
    dq, dk, dv, d_log, d_steps, d_kv, d_z = _ops.backward.default(
        g_out, None if g_kv is None else g_kv.contiguous(), None if g_z is None else g_z.contiguous(),
        q if call.q is not None else None, k, v, *_how(call, sums), LAYOUTS[call.layout] if call.pairs else 0,
        call.causal, call.normalize, call.eps, call.eps_mode == "add",
        some and call.log_decay is not None, some and call.angle_steps is not None,
    )  # fmt: skip
    return Gradients(
        None if call.q is None else dq,
        dk,
        dv.to(call.v.dtype),
        _summed(d_log if some else None, call.log_decay),
        _summed(d_steps if some else None, call.angle_steps),
        None if sums is None else d_kv,
        None if sums is None else d_z,
    )


def _how(call: Call, sums: Sums | None) -> tuple[object, ...]:
    """The arguments that forward and backward share, in the operators' order."""
    kv, z, angle = (None, None, None) if sums is None else sums
    return (
        MAPS[call.feature_map], call.log_decay, call.theta, call.positions.contiguous(),
        None if call.key_positions is None else call.key_positions.contiguous(), call.angle_steps, angle,
        None if call.key_mask is None else call.key_mask.contiguous(), call.cu_seqlens,
        None if kv is None else kv.contiguous(), None if z is None else z.contiguous(),
    )  # fmt: skip


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
    return x.contiguous() if x.numel() else x.new_empty(x.shape)  # nothing is contiguous whatever its strides

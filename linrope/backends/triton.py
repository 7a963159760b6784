"""Equation 19 on GPUs, in the fused kernels of linrope_kernels.

The backward pass needs q, k, v, the normalizer, the states at the starts of segments and, if no tile of dq holds all
feature pairs, out. In Triton's interpreter (TRITON_INTERPRET=1 before Python starts) it runs CPU tensors, for tests.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from linrope_kernels import INTERPRETED
from linrope_kernels.convolution import convolve_bwd, convolve_fwd
from linrope_kernels.delta_backward import delta_bwd
from linrope_kernels.delta_forward import delta_fwd, delta_saved
from linrope_kernels.forward import attend_fwd, empty_saved, reads_out
from linrope_kernels.gates import gates_bwd, gates_fwd
from linrope_kernels.gradients import attend_bwd, state_bwd
from linrope_kernels.launch import NO_STATE, State, new_state, repeat
from linrope_kernels.norm import norm_bwd, norm_fwd
from linrope_kernels.repeat import repeat_launcher
from linrope_kernels.segments import RunningSums
from linrope_kernels.start import why_forgetful
from linrope_kernels.step import step_fwd
from torch import Tensor
from torch.autograd.graph import increment_version

from linrope.backends import bridge
from linrope.backends.protocol import COMMON
from linrope.common.tracing import traced
from linrope.recurrence.call import (
    Call,
    Gradients,
    ResultGradients,
    Results,
    Sums,
    needs_gradients,
    summed_to,
)
from linrope.recurrence.packing import owners
from linrope.recurrence.state import LinearAttentionState
from linrope.rotation.angles import units_to_features

OPTIONS = COMMON | {"erase", "query_factor"}
TAKES_VALUE_GROUPS = True  # but for the delta rule's kernels attend repeats the heads of q and k
CLAMPS_GATES = True
MAPS = dict.fromkeys(("elu+1", "relu", "relu2", "exp", "silu", "identity"))  # those of linrope_kernels.pieces
MAX_DIM = 256
MIN_CAPABILITY = (8, 0)
_LAUNCHERS: dict[str, Callable[..., Any]] = {
    run.__name__: run for run in (convolve_fwd, convolve_bwd, gates_fwd, gates_bwd, norm_fwd, norm_bwd)
}
NO_PHASES = (None, None)


def why_not() -> str | None:
    """The reason why the backend cannot run on this machine; None: it can."""
    if INTERPRETED:
        return None
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device"
    gpus = range(torch.cuda.device_count())
    if all(torch.cuda.get_device_capability(gpu) < MIN_CAPABILITY for gpu in gpus):
        return "no GPU here has compute capability 8.0 or more"
    return None


def why_slow_launches() -> str | None:
    """The reason why Triton looks up the compiled kernel of each launch; None: linrope_kernels remembers it."""
    return why_forgetful()


def why_not_on(device: torch.device, dtypes: Collection[torch.dtype]) -> str | None:
    """The reason why no kernel takes tensors of these dtypes there; None: they do."""
    if torch.float64 in dtypes:
        return "float64: use backend='eager'"
    if device.type != "cuda" and not (INTERPRETED and device.type == "cpu"):
        return f"tensors on {device}: it needs a CUDA device, or TRITON_INTERPRET=1 set before Python starts"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return "this GPU, whose compute capability is below 8.0"
    return None


def why_not_call(call: Call, state: LinearAttentionState | None) -> str | None:
    """The reason why these kernels cannot run the call; None: they can."""
    k, f, e = call.k, call.k.shape[3], call.v.shape[3]
    state_dtype = torch.float32 if state is None else state.kv.dtype
    if (reason := why_not_on(k.device, (k.dtype, call.v.dtype, state_dtype))) is not None:
        return reason
    if call.v.dtype == torch.bfloat16 and INTERPRETED:
        return "bfloat16 in Triton's interpreter, which multiplies its bit patterns: use float16 or float32"
    if call.query_factor and not by_delta_kernels(call):
        return "feature_map='unit' without erase: the features are made before the call"
    if f > MAX_DIM or e > MAX_DIM:
        return f"{f} features and {e} values per head: it takes up to {MAX_DIM} of each; use backend='eager'"
    return None


def by_delta_kernels(call: Call) -> bool:
    """True if the call is one for the kernels of the delta rule, which take a decay per unit, too."""
    return call.erase is not None or call.decays_by_unit


def launch(launcher: str, record: Sequence[Any], *others: Tensor | None) -> Any:
    """Calls a launcher of an operator around the attention. record: its arguments, the first of them a tensor."""
    with torch.cuda.device_of(record[0]):
        return repeat_launcher(_LAUNCHERS[launcher], record, *others)


def attend(call: Call, state: LinearAttentionState | None) -> tuple[Tensor, Sums | None]:
    step = call.causal and call.q is not None and call.k.shape[1] == 1 and call.cu_seqlens is None
    if step and not needs_gradients(call, state) and not traced(call.k):
        return _step(call.expanded(written=False), state)
    if not by_delta_kernels(call):
        return bridge.attend("triton", call.expanded(written=False), state)
    if call.decays_by_unit and call.erase is None:
        return _attend_by_unit(call, state)
    return bridge.attend("triton", call, state)


def _attend_by_unit(call: Call, state: LinearAttentionState | None) -> tuple[Tensor, Sums | None]:
    """The delta rule's kernels have no normalizer: den and z are the result of a second call.

    Its values are 1, and nothing rotates. out is a quotient of float32 numbers.
    """
    if not (call.normalize or call.return_state):
        return bridge.attend("triton", call, state)
    assert call.log_decay is not None
    of_num = call.changed(normalize=False, v=call.v.float()) if call.normalize else call
    of_den = call.changed(
        q=call.q if call.normalize else None,
        v=call.v.new_ones(1, 1, 1, 1, dtype=torch.float32).expand(*call.v.shape[:3], 1),
        log_decay=units_to_features(call.log_decay, call.pairs, call.layout),
        normalize=False,
        write=None,
        angle_steps=None,
        theta_turns=None,
        rotary=None,
    )
    num, sums = bridge.attend("triton", of_num, state)
    if state is not None:
        state = state.rows()
        kv = state.z[..., None].float()
        state = state._replace_unchecked(kv=kv, z=torch.zeros_like(state.z), angle=None)
    den, den_sums = bridge.attend("triton", of_den, state)
    if call.normalize:
        den = den + call.eps if call.eps_mode == "add" else den.clamp(min=call.eps)
        num = (num / den).to(call.v.dtype)
    if sums is not None and den_sums is not None:
        sums = sums._replace(z=den_sums.kv[..., 0].to(sums.z.dtype))
    return num, sums


def _step(call: Call, state: LinearAttentionState | None) -> tuple[Tensor, Sums | None]:
    """One token of every sequence, in one launch. It updates donated states and a pool's rows in place."""
    start = end = slots = angle = None
    if state is not None:
        in_place = state.donated or state.slots is not None
        if not (in_place and state.kv.is_contiguous() and state.z.is_contiguous()):
            state, in_place = state.rows(), False
        start, slots, angle = (state.kv.contiguous(), state.z.contiguous()), state.slots, state.angle
        end = start if in_place else (torch.empty_like(start[0]), torch.empty_like(start[1]))
        angle = angle if angle is None or slots is None else angle[slots]
    if not call.return_state:
        end = None
    elif end is None:
        end = new_state(call, None)
    phases, in_place = _phases(call, angle), start is not None and end is start
    states = start or NO_STATE if in_place else (*(start or NO_STATE), *(end or NO_STATE))
    others, kind = (*states, slots, *(phases or NO_PHASES)), "step in place" if in_place else "step"
    with torch.cuda.device_of(call.k):
        out = repeat(call, kind, others, lambda: step_fwd(call, phases, start, end, slots))
    if start is not None and in_place:
        increment_version(start)  # autograd does not see what kernels write
    return out, None if end is None else Sums(*end, call.last_angle(angle))


def _phases(call: Call, angle: Tensor | None) -> tuple[Tensor, Tensor | None] | None:
    """The angles of queries and, if they differ, keys, if these come from angle_steps; angle: as in Sums."""
    queries = None if call.angle_steps is None else call.angles_in_turns(angle)
    if queries is None:
        return None
    return queries, None if call.key_positions is None else call.angles_in_turns(angle, keys=True)


def _start(sums: Sums | None) -> tuple[State | None, Tensor | None]:
    """The state to start from, as the kernels read it, and its angle."""
    return (None, None) if sums is None else ((sums.kv.contiguous(), sums.z.contiguous()), sums.angle)


def reads_results(call: Call) -> bool:
    return not by_delta_kernels(call) and reads_out(call)


def new_saved(call: Call) -> list[Tensor]:
    return delta_saved(call) if by_delta_kernels(call) else empty_saved(call)


def forward(call: Call, sums: Sums | None, save: bool) -> Results:
    """out (b, n, h, e), the last kv and z if wanted, and the tensors that ``new_saved`` describes."""
    start, angle = _start(sums)
    phases, kind = _phases(call, angle), "forward, which saves" if save else "forward"
    others = *(start or NO_STATE), *(phases or NO_PHASES)
    run = delta_fwd if by_delta_kernels(call) else attend_fwd
    with torch.cuda.device_of(call.k):
        results: Results = repeat(call, kind, others, lambda: run(call, phases, start, save))
        return results


def backward(call: Call, sums: Sums | None, saved: list[Tensor], g: ResultGradients) -> Gradients:
    (start, angle), out, g_out, g_end, delta = _start(sums), None, g.out, None, by_delta_kernels(call)
    if reads_results(call):
        out, _, _, *saved = saved
    if g_out is None and call.q is not None and not delta:
        g_out = call.v.new_zeros(1).expand(*call.q.shape[:3], call.v.shape[3])
    if g.kv is not None or g.z is not None:
        kv, z = new_state(call, start)
        g_end = (
            torch.zeros_like(kv) if g.kv is None else g.kv.contiguous(),
            torch.zeros_like(z) if g.z is None else g.z.contiguous(),
        )
    phases = _phases(call, angle)
    others = *(start or NO_STATE), *(phases or NO_PHASES), g_out, *(g_end or NO_STATE), out, *saved

    def run() -> Any:
        if delta:
            return delta_bwd(call, phases, start, saved, g_out, g_end)
        if g_out is None:  # only the last state has a gradient
            assert g_end is not None
            return state_bwd(call, phases, start, g_end)
        return attend_bwd(call, phases, start, saved, out, g_out, g_end)

    with torch.cuda.device_of(call.k):
        d = repeat(call, "backward", others, run)
    d_log = d.log_decay if call.decays_by_unit else _summed_blocks(d.log_decay)
    d_kv, d_z = d.start or (None, None)
    return Gradients(
        q=d.q,
        k=d.k,
        v=d.v,
        log_decay=_summed_to(d_log, call.log_decay),
        angle_steps=_d_angle_steps(call, d.angles),
        write=_summed_to(_summed_blocks(d.write), call.write),
        erase=_summed_to(_summed_blocks(d.erase), call.erase),
        kv=d_kv,
        z=d_z,
    )


def _summed_blocks(x: Tensor | None) -> Tensor | None:
    """The terms of several programs, in a last axis, added up."""
    return x if x is None or x.ndim == 3 else x.sum(3)


def _summed_to(x: Tensor | None, like: Tensor | None) -> Tensor | None:
    return None if x is None or like is None else summed_to(x, like)


def _d_angle_steps(call: Call, d_angles: Tensor | None) -> Tensor | None:
    """The gradient of angle_steps: domega_t = sum_(i >= t) (<J phi_i, R^T dphi^_i> + <J psi_i, R^T dpsi^_i>)."""
    if call.angle_steps is None or d_angles is None:
        return None
    if (bounds := call.bounds) is None:
        sums = d_angles.flip(1).cumsum(1).flip(1)
    else:
        n = call.k.shape[1]
        tokens, ends = torch.arange(n, device=bounds.device), bounds[1:][owners(bounds, n)]
        first = tokens.where(tokens >= bounds[0], ends)  # tokens before all sequences have no sum
        sums = RunningSums(d_angles, packed=True).between(first, ends)
    return summed_to(sums, call.angle_steps)

"""Equation 19 on GPUs, in the fused kernels of linrope_kernels.

The backward pass needs q, k, v, the normalizer, the states at the starts of segments and, if no tile of dq holds all
feature pairs, out. In Triton's interpreter (TRITON_INTERPRET=1 before Python starts) it runs CPU tensors, for tests.
"""

import torch
from linrope_kernels import INTERPRETED, gradients, launch
from linrope_kernels.segments import RunningSums
from torch import Tensor
from torch.autograd.graph import increment_version

from linrope.backends import bridge
from linrope.recurrence.call import (
    Call,
    Gradients,
    ResultGradients,
    Sums,
    contiguous,
    needs_gradients,
    summed_to,
    traced,
)
from linrope.recurrence.packing import owners
from linrope.recurrence.state import LinearAttentionState

TAKES_VALUE_GROUPS = True  # attend expands the call itself, because the kernels need products in v's dtype
MAPS = dict.fromkeys(("elu+1", "relu", "relu2", "exp", "silu", "identity"))  # those of linrope_kernels.pieces
MAX_DIM = 256
MIN_CAPABILITY = (8, 0)


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


def why_not_call(call: Call, state: LinearAttentionState | None) -> str | None:
    """The reason why these kernels cannot run the call; None: they can."""
    k, f, e = call.k, call.k.shape[3], call.v.shape[3]
    if not k.is_cuda and not (INTERPRETED and k.device.type == "cpu"):
        return (
            f"tensors on {k.device}: it needs a CUDA device, or TRITON_INTERPRET=1 set before Python starts"
        )
    if k.is_cuda and torch.cuda.get_device_capability(k.device) < MIN_CAPABILITY:
        return "this GPU, whose compute capability is below 8.0"
    if torch.float64 in (k.dtype, call.v.dtype) or (state is not None and state.kv.dtype == torch.float64):
        return "float64: use backend='eager'"
    if call.v.dtype == torch.bfloat16 and INTERPRETED:
        return "bfloat16 in Triton's interpreter, which multiplies its bit patterns: use float16 or float32"
    if call.xpos_log_decay is not None:
        return "xpos, a decay per pair of features: use backend='eager'"
    if f > MAX_DIM or e > MAX_DIM:
        return f"{f} features and {e} values per head: it takes up to {MAX_DIM} of each; use backend='eager'"
    return None


def attend(call: Call, state: LinearAttentionState | None) -> tuple[Tensor, Sums | None]:
    call = call.expanded(round_values=True)  # the kernels multiply half-precision values as they are
    differentiates = torch.is_grad_enabled() and needs_gradients(call, state)
    step = call.causal and call.q is not None and call.k.shape[1] == 1 and call.cu_seqlens is None
    if step and not differentiates and not traced(call):
        return _step(call, state)
    return bridge.attend("triton", call, state)


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
    sums = None if start is None else Sums(*start, angle)
    kernel_call = _kernel_call(call, sums)
    if not call.return_state:
        end = None
    elif end is None:
        end = launch.new_state(kernel_call, None)
    with torch.cuda.device_of(call.k):
        out = launch.step_fwd(kernel_call, start, end, slots)
    if start is not None and end is start:
        increment_version(start)  # autograd does not see what kernels write
    return out, None if end is None else Sums(*end, call.last_angle(angle))


def _kernel_call(call: Call, sums: Sums | None = None, *, angles: bool = True) -> launch.Call:
    """The call in the kernels' own record. angles=False leaves out the angles of angle_steps."""
    # float16 inputs are multiplied in tf32: the precision is the same, and sums of features cannot overflow.
    dot = "bf16" if call.v.dtype == torch.bfloat16 else "tf32"
    if call.v.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest":
        dot = "ieee"
    phases = None
    if call.angle_steps is not None and angles:
        angle, keys = None if sums is None else sums.angle, None
        if call.key_positions is not None:
            keys = call.angles_in_turns(angle, keys=True)
        queries = call.angles_in_turns(angle)
        assert queries is not None
        phases = queries, keys
    return launch.Call(
        q=call.q,
        k=call.k,
        v=call.v,
        log_decay=call.log_decay,
        theta=call.theta_turns if call.angle_steps is None else None,
        positions=call.positions.contiguous(),
        key_positions=contiguous(call.key_positions),
        key_mask=contiguous(call.key_mask),
        cu_seqlens=call.cu_seqlens,
        layout=call.layout,
        feature_map=call.feature_map,
        causal=call.causal,
        normalize=call.normalize,
        eps=call.eps,
        eps_mode=call.eps_mode,
        dot=dot,
        phases=phases,
    )


def reads_results(call: Call) -> bool:
    return _kernel_call(call, angles=False).reads_out


def new_saved(call: Call) -> list[Tensor]:
    return launch.new_saved(_kernel_call(call, angles=False))


def _start_state(sums: Sums | None) -> launch.State | None:
    return None if sums is None else (sums.kv.contiguous(), sums.z.contiguous())


def forward(
    call: Call, sums: Sums | None, save: bool
) -> tuple[Tensor | None, launch.State | None, list[Tensor]]:
    """out (b, n, h, e), the last kv and z if wanted, and the tensors that ``new_saved`` describes."""
    with torch.cuda.device_of(call.k):
        return launch.attend_fwd(
            _kernel_call(call, sums), _start_state(sums), want_end=call.return_state, save=save
        )


def backward(call: Call, sums: Sums | None, results: list[Tensor], g: ResultGradients) -> Gradients:
    kernel_call, out, g_out, g_end = _kernel_call(call, sums), None, g.out, None
    if kernel_call.reads_out:
        out, _, _, *results = results
    if g_out is None and call.q is not None:
        g_out = call.v.new_zeros(1).expand(*call.q.shape[:3], call.v.shape[3])
    if g.kv is not None or g.z is not None:
        kv, z = launch.new_state(kernel_call, _start_state(sums))
        g_end = (
            torch.zeros_like(kv) if g.kv is None else g.kv.contiguous(),
            torch.zeros_like(z) if g.z is None else g.z.contiguous(),
        )
    with torch.cuda.device_of(call.k):
        if g_out is None:  # only the last state has a gradient
            assert g_end is not None
            d = gradients.state_bwd(kernel_call, _start_state(sums), g_end)
        else:
            d = gradients.attend_bwd(kernel_call, _start_state(sums), results, out, g_out, g_end)
    d_log_decay = None
    if call.log_decay is not None and d.log_decay is not None:
        d_log_decay = summed_to(d.log_decay, call.log_decay)
    d_kv, d_z = d.start or (None, None)
    return Gradients(
        q=d.q,
        k=d.k,
        v=d.v,
        log_decay=d_log_decay,
        angle_steps=_d_angle_steps(call, d.angles),
        write=None,
        kv=d_kv,
        z=d_z,
    )


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

"""Why linrope does not compute a call of one of the replaced functions. None: it does."""

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

from linrope import backends
from linrope.common.tracing import exporting
from linrope.integrations.transformers.past import recording_layer
from linrope.integrations.transformers.shared import ACTIVATIONS, SILU
from linrope.ops.convolution import MAX_TAPS


class OtherKernels(str):
    """The reason why a package with kernels of its own computes a call: it keeps packed sequences apart too."""


def tensors(x: Tensor, package: str = "") -> str | None:
    """The reason why linrope does not compute with tensors like x.

    package: the one with kernels of its own for GPUs, which go first.
    """
    if exporting():
        return "a graph for other runtimes is being recorded"
    if x.device.type == "cpu":
        return backends.native.why_not()
    if x.device.type != "cuda":
        return f"tensors on {x.device}"
    if package and is_installed(package):
        return OtherKernels(f"{package} is installed")
    triton = backends.available("triton")
    return triton if isinstance(triton, str) else None


@cache
def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _too_wide(x: Tensor, *sizes: int) -> str | None:
    """The reason why the kernels for x do not take heads of these sizes."""
    kernels: Any = backends.load(_kernels_for(x))
    return f"heads of {max(sizes)}, more than {kernels.MAX_DIM}" if max(sizes) > kernels.MAX_DIM else None


def _kernels_for(x: Tensor) -> str:
    return "native" if x.is_cpu else "triton"


def scan(hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, *_: Any, **__: Any) -> str | None:
    return tensors(hidden_states, "mamba_ssm") or _too_wide(
        hidden_states, hidden_states.shape[-1], B.shape[-1]
    )


def step(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    **_: Any,
) -> str | None:
    repeated = [dt.stride(-1), A.stride(-1), A.stride(-2), 0 if dt_bias is None else dt_bias.stride(-1)]
    if any(repeated) and hidden_states.shape[-1] > 1:
        return "step sizes or decays that differ between the channels of a head"
    if state.dtype not in (torch.float32, torch.float64):
        return f"a state of {state.dtype}"
    return scan(hidden_states, dt, A, B)


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *_: Any,
    use_qk_l2norm_in_kernel: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    **__: Any,
) -> str | None:
    if not use_qk_l2norm_in_kernel:
        return "queries and keys that are not normalized"
    reason = tensors(query, "fla") or _too_wide(query, value.shape[-1], key.shape[-1])
    if isinstance(reason, OtherKernels) and seq_idx is not None and cu_seqlens is None:
        return "fla takes cu_seqlens and ignores seq_idx"
    return reason


def convolution(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> str | None:
    if activation not in (None, *SILU):
        return f"activation {activation!r}"
    reason = tensors(hidden_states, "causal_conv1d")
    if reason is None and weight.shape[-1] > MAX_TAPS[_kernels_for(hidden_states)]:
        reason = f"{weight.shape[-1]} taps"
    return reason


def update(
    hidden_states: Tensor, conv_state: Tensor, weight: Tensor, *arguments: Any, **options: Any
) -> str | None:
    if recording_layer() is None and conv_state.shape[-1] < weight.shape[-1] - 1:
        return f"a state of {conv_state.shape[-1]} columns for {weight.shape[-1]} taps"
    return convolution(hidden_states, weight, *arguments, **options)


def combined(zxbcdt: Tensor, *_: Any, **__: Any) -> str | None:
    return tensors(zxbcdt, "mamba_ssm")


def lightning(module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> str | None:
    return tensors(hidden_states) or _too_wide(hidden_states, module.head_dim)


def norm(module: Any, hidden_states: Tensor, gate: Tensor | None = None) -> str | None:
    activation = getattr(module, "activation", "silu")
    return tensors(hidden_states) if activation in ACTIVATIONS else f"activation {activation!r}"

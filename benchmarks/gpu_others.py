"""The gated case in other libraries: only linear attention with a forget gate per head.

    out_i = sum_(j<=i) e^(L_i - L_j) <q_i, k_j> v_j        L_i = sum_(t<=i) a_t

flash-linear-attention's simple_gla takes a_t itself. mamba's SSD computes a_t = A dt_t and adds dt_t v_t,
so it is called with A = -1, dt = -a and v / dt. Neither has the rotation, the feature map or the
normalizer.
"""

from collections.abc import Callable
from copy import copy
from typing import Any

from torch import Tensor

from linrope import linear_rope_attention
from linrope.cli.bench.cases import AttentionCase

Function = Callable[[], Tensor]


def bare(case: AttentionCase, backend: str = "triton") -> Tensor:
    """The same function in linrope."""
    out: Tensor = linear_rope_attention(
        *case.inputs, log_decay=case.log_decay, feature_map=None, normalize=False, backend=backend
    )
    return out


def simple_gla(case: AttentionCase) -> tuple[AttentionCase, Function]:
    """The case whose leaves are differentiated, and the function; ImportError if fla is not installed."""
    from fla.ops.simple_gla import chunk_simple_gla

    q, k, v = case.inputs
    return case, lambda: chunk_simple_gla(q, k, v, g=case.log_decay, scale=1.0)[0]


def ssd(case: AttentionCase) -> tuple[AttentionCase, Function]:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    assert case.log_decay is not None
    (q, k, v), ssd_case = case.inputs, copy(case)
    dt = (-case.log_decay).detach().requires_grad_()
    x = (v / dt[..., None]).to(v.dtype).detach().requires_grad_()
    ssd_case.inputs, ssd_case.log_decay = (q, k, x), dt
    a: Any = -dt.new_ones(case.heads)
    return ssd_case, lambda: mamba_chunk_scan_combined(x, dt, a, k, q, chunk_size=256)


OTHERS = {"simple_gla": simple_gla, "mamba SSD": ssd}

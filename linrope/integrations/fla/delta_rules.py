"""DeltaNet, Gated DeltaNet and Kimi Delta Attention under fla's names."""

import math
from typing import Any, cast

from torch import Tensor
from torch.nn import functional as F

from linrope.feature_maps.base import widen
from linrope.integrations.fla.arguments import attend, refuse
from linrope.ops.arguments import check_dense


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule: each key replaces the share beta of what it reads.

        h_t = h_(t-1) + beta_t k_t (v_t - h_(t-1)^T k_t)^T      o_t = scale h_t^T q_t

    ``linrope.integrations.fla`` describes the arguments and errors of all functions. Unlike fla it takes float32.

    Args:
        beta: (B, T, HV). The state stays bounded if beta_t |k_t|^2 <= 2.

    >>> from linrope.integrations.fla import chunk_delta_rule
    >>> q = k = torch.ones(1, 2, 1, 1)
    >>> chunk_delta_rule(q, k, torch.tensor([4.0, 8.0]).view(1, 2, 1, 1), torch.full((1, 2, 1), 0.5))[0].flatten()
    tensor([2., 5.])
    """
    refuse(**kwargs)
    return fused_recurrent_delta_rule(
        q, k, v, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    )


def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``chunk_delta_rule``, whose beta may be None: 1. A decoding step is a call with one token and the state.

    >>> from linrope.integrations.fla import fused_recurrent_delta_rule
    >>> q = k = torch.ones(1, 2, 1, 1)
    >>> fused_recurrent_delta_rule(q, k, torch.tensor([4.0, 8.0]).view(1, 2, 1, 1))[0].flatten()
    tensor([4., 8.])
    """
    return attend(
        q,
        k,
        v,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        delta=True,
        beta=beta,
        unit=use_qk_l2norm_in_kernel,
    )


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule with a decay per head, as in Gated DeltaNet. ``chunk_gdn`` is the same function.

        h_t = e^g_t h_(t-1) + beta_t k_t (v_t - e^g_t h_(t-1)^T k_t)^T      o_t = scale h_t^T q_t

    ``linrope.integrations.fla`` describes the arguments and errors of all functions.

    Args:
        g: (B, T, HV).
        beta: (B, T, HV). The state stays bounded if beta_t |k_t|^2 <= 2.
        use_beta_sigmoid_in_kernel: sigmoid(beta) takes the place of beta, and 2 sigmoid(beta) with allow_neg_eigval.
        kwargs: use_gate_in_kernel=True, A_log and dt_bias, (HV,) each: -e^A_log softplus(g + dt_bias) takes the place
            of g.

    >>> from linrope.integrations.fla import chunk_gated_delta_rule
    >>> q = k = torch.ones(1, 2, 1, 1)
    >>> v, beta = torch.tensor([4.0, 8.0]).view(1, 2, 1, 1), torch.full((1, 2, 1), 0.5)
    >>> chunk_gated_delta_rule(q, k, v, beta.log(), beta)[0].flatten()
    tensor([2.0000, 4.5000])
    """
    gate = {name: kwargs.pop(name, None) for name in ("use_gate_in_kernel", "A_log", "dt_bias")}
    refuse(cp_context=cp_context, **kwargs)
    return fused_recurrent_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta=beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        **gate,
    )


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """``chunk_gated_delta_rule``: a decoding step is a call with one token and the state.

    ``fused_recurrent_gdn`` is the same function. Unlike fla's it has gradients.

    Args:
        gk: (B, T, HV, K), a log decay per feature, which adds to g.
        beta: None: 1.

    >>> from linrope.integrations.fla import fused_recurrent_gated_delta_rule
    >>> q = k = v = torch.ones(1, 1, 1, 1)
    >>> beta, h = torch.full((1, 1, 1), 0.5), torch.full((1, 1, 1, 1), 4.0)
    >>> fused_recurrent_gated_delta_rule(q, k, v, beta.log(), beta=beta, initial_state=h)[0].item()
    1.5
    """
    refuse(gv=gv, **kwargs)
    if use_gate_in_kernel:
        g = _gate(g, A_log, dt_bias)
    if g is not None and gk is not None:
        gk = g[..., None] + gk
    return attend(
        q,
        k,
        v,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        state_v_first=state_v_first,
        g=g if gk is None else gk,
        delta=True,
        beta=_beta(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval),
        unit=use_qk_l2norm_in_kernel,
        decay_name="g" if gk is None else "gk",
    )


chunk_gdn, fused_recurrent_gdn = chunk_gated_delta_rule, fused_recurrent_gated_delta_rule


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention: the delta rule with a decay per feature.

        h_t = D_t h_(t-1) + beta_t k_t (v_t - (D_t h_(t-1))^T k_t)^T      o_t = scale h_t^T q_t      D_t = Diag(e^g_t)

    ``linrope.integrations.fla`` describes the arguments and errors of all functions.

    Args:
        g: (B, T, HV, K).
        beta: (B, T, HV). The state stays bounded if beta_t |k_t|^2 <= 2.
        use_beta_sigmoid_in_kernel: sigmoid(beta) takes the place of beta, and 2 sigmoid(beta) with allow_neg_eigval.
        use_gate_in_kernel: -e^A_log softplus(g + dt_bias) takes the place of g. A_log (HV,) and dt_bias (HV K,) are
            keywords. With a lower_bound, lower_bound sigmoid(e^A_log (g + dt_bias)) does, and A_log may be None: 0.

    >>> from linrope.integrations.fla import chunk_kda
    >>> q, k, v = torch.randn(3, 1, 100, 4, 16)
    >>> g, beta, A_log = torch.randn(1, 100, 4, 16), torch.rand(1, 100, 4), torch.zeros(4)
    >>> options = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "A_log": A_log}
    >>> o, h = chunk_kda(q, k, v, g, beta, output_final_state=True, **options)
    >>> o.shape, h.shape
    (torch.Size([1, 100, 4, 16]), torch.Size([1, 4, 16, 16]))
    """
    gate = {name: kwargs.pop(name, None) for name in ("A_log", "dt_bias")}
    refuse(
        return_intermediate_states=return_intermediate_states,
        cp_context=cp_context,
        use_graph=use_graph,
        **kwargs,
    )
    return fused_recurrent_kda(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        **gate,
    )


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """``chunk_kda``: a decoding step is a call with one token and the state. Unlike fla's it has gradients.

    >>> from linrope.integrations.fla import fused_recurrent_kda
    >>> q = k = torch.eye(2)[:1].view(1, 1, 1, 2)
    >>> g, beta, h = torch.tensor([0.5, 1.0]).log().view(1, 1, 1, 2), torch.ones(1, 1, 1), torch.ones(1, 1, 2, 1)
    >>> o, h = fused_recurrent_kda(q, k, torch.full((1, 1, 1, 1), 9.0), g, beta, None, None, 1, h, True)
    >>> h.flatten()
    tensor([9., 1.])
    """
    refuse(**kwargs)
    if use_gate_in_kernel:
        g = _gate(g, A_log, dt_bias, lower_bound)
    return attend(
        q,
        k,
        v,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        state_v_first=state_v_first,
        g=g,
        delta=True,
        beta=_beta(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval),
        unit=use_qk_l2norm_in_kernel,
    )


def _beta(beta: Tensor | None, of_sigmoid: bool, doubled: bool) -> Tensor | None:
    if doubled and not of_sigmoid:
        raise ValueError("allow_neg_eigval=True: expected use_beta_sigmoid_in_kernel=True, or pass 2 * beta")
    if not of_sigmoid:
        return beta
    check_dense("beta", beta)
    return (2 if doubled else 1) * widen(cast(Tensor, beta)).sigmoid()


def _gate(
    g: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None = None
) -> Tensor:
    """The log decays, in float32 or wider, of a gate's inputs g (B, T, HV) or (B, T, HV, K)."""
    check_dense("g", g)
    x = widen(cast(Tensor, g))
    if x.ndim not in (3, 4):
        raise ValueError(f"g: got shape {tuple(x.shape)}, expected (B, T, HV) or (B, T, HV, K)")
    if dt_bias is not None:
        x = x + _reshaped("dt_bias", dt_bias, x.shape[2:])
    if lower_bound is not None and A_log is None:
        return lower_bound * x.sigmoid()
    rate = _reshaped("A_log", A_log, (x.shape[2], 1)[: x.ndim - 2]).exp()
    return -rate * F.softplus(x) if lower_bound is None else lower_bound * (rate * x).sigmoid()


def _reshaped(name: str, x: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """x, of any shape with as many numbers, in this shape."""
    check_dense(name, x)
    x = cast(Tensor, x)
    if x.numel() != math.prod(shape):
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected {math.prod(shape)} numbers")
    return widen(x).reshape(shape)

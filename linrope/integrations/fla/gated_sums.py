"""Linear attention, RetNet and gated linear attention under fla's names."""

from typing import Any

import torch
from torch import Tensor

from linrope.integrations.fla.arguments import attend, refuse
from linrope.operation.checks import check_tensors

State = Tensor | tuple[Tensor, Tensor]


def chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: State | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State | None]:
    """Causal linear attention of q and k that are features already.

        h_t = h_(t-1) + k_t v_t^T      z_t = z_(t-1) + k_t      o_t = scale h_t^T q_t / (scale z_t^T q_t + 1e-10)

    ``linrope.integrations.fla`` describes the arguments and errors of all functions.

    Args:
        normalize: False: o_t is the numerator alone.
        initial_state: with normalize=True (h, z), where z is (N, 1, H, K), or h alone. As in fla, the keys before h are
            then missing in the normalizer. The final state is (h, z) too.

    >>> from linrope.integrations.fla import chunk_linear_attn
    >>> q = k = v = torch.ones(1, 3, 1, 2)
    >>> o, (h, z) = chunk_linear_attn(q, k, v, output_final_state=True)
    >>> o[0, :, 0, 0], z[0, 0, 0]
    (tensor([1., 1., 1.]), tensor([3., 3.]))
    """
    return attend(
        q,
        k,
        v,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        normalize=normalize,
    )


fused_chunk_linear_attn = chunk_linear_attn


def fused_recurrent_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: State | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    normalize: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State | None]:
    """``chunk_linear_attn``, whose normalizer is off by default.

    >>> from linrope.integrations.fla import fused_recurrent_linear_attn
    >>> q = k = v = torch.ones(1, 3, 1, 2)
    >>> fused_recurrent_linear_attn(q, k, v, scale=1)[0][0, :, 0, 0]
    tensor([2., 4., 6.])
    """
    refuse(reverse=reverse)
    return chunk_linear_attn(q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens)


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with a decay per head, as in Mamba-2, Lightning Attention and RetNet.

        h_t = e^g_t h_(t-1) + k_t v_t^T      o_t = scale h_t^T q_t

    ``linrope.integrations.fla`` describes the arguments and errors of all functions.

    Args:
        g: (B, T, H), a log decay per token.
        g_gamma: (H,), a log decay per head, in place of g. None, as g: no decay.

    >>> from linrope.integrations.fla import chunk_simple_gla
    >>> q = k = v = torch.ones(1, 3, 1, 1)
    >>> chunk_simple_gla(q, k, v, g_gamma=torch.tensor([0.5]).log())[0].flatten()
    tensor([1.0000, 1.5000, 1.7500])
    """
    refuse(**kwargs)
    if g is not None and g_gamma is not None:
        raise ValueError(
            "g_gamma: got a tensor beside g, expected only one of them; g + g_gamma is their sum"
        )
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
        g_gamma=g_gamma,
        decay_name="g" if g_gamma is None else "g_gamma",
    )


def fused_chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``chunk_simple_gla``.

    >>> from linrope.integrations.fla import fused_chunk_simple_gla
    >>> q = k = v = torch.ones(1, 3, 1, 1)
    >>> fused_chunk_simple_gla(q, k, v)[0].flatten()
    tensor([1., 2., 3.])
    """
    return chunk_simple_gla(
        q, k, v, g, g_gamma, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens
    )


def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """``chunk_simple_gla``: a decoding step is a call with one token and the state.

    >>> from linrope.integrations.fla import fused_recurrent_simple_gla
    >>> q = k = v = torch.ones(1, 1, 1, 1)
    >>> o, h = fused_recurrent_simple_gla(q, k, v, initial_state=torch.ones(1, 1, 1, 1), output_final_state=True)
    >>> o.item(), h.item()
    (2.0, 2.0)
    """
    refuse(reverse=reverse, **kwargs)
    return chunk_simple_gla(
        q, k, v, g, g_gamma, scale, initial_state, output_final_state, state_v_first, cu_seqlens
    )


def chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """RetNet's attention without its rotation: ``chunk_simple_gla`` with fixed decays.

        h_t = (1 - 2^(-5 - i)) h_(t-1) + k_t v_t^T      o_t = scale h_t^T q_t      i = 0, 1, .. counts the heads of v

    ``linrope.integrations.fla`` describes the arguments and errors of all functions.

    >>> from linrope.integrations.fla import chunk_retention
    >>> q = k = v = torch.ones(1, 2, 2, 1)
    >>> chunk_retention(q, k, v)[0][0, 1, :, 0]
    tensor([1.9688, 1.9844])
    """
    refuse(**kwargs)
    return fused_recurrent_retention(q, k, v, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def fused_chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``chunk_retention``.

    >>> from linrope.integrations.fla import fused_chunk_retention
    >>> q = k = v = torch.ones(1, 2, 1, 1)
    >>> fused_chunk_retention(q, k, v)[0].flatten()
    tensor([1.0000, 1.9688])
    """
    return chunk_retention(q, k, v, scale, initial_state, output_final_state, cu_seqlens)


def fused_recurrent_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """``chunk_retention``: a decoding step is a call with one token and the state.

    >>> from linrope.integrations.fla import fused_recurrent_retention
    >>> q = k = v = torch.ones(1, 1, 1, 1)
    >>> fused_recurrent_retention(q, k, v, initial_state=torch.ones(1, 1, 1, 1))[0].item()
    1.96875
    """
    refuse(reverse=reverse, **kwargs)
    check_tensors(q, k, v, causal=True)
    heads = torch.arange(v.shape[2], device=v.device, dtype=torch.promote_types(v.dtype, torch.float32))
    g_gamma = torch.log1p(-(2.0 ** (-5 - heads)))
    return chunk_simple_gla(
        q, k, v, None, g_gamma, scale, initial_state, output_final_state, state_v_first, cu_seqlens
    )


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention, with a decay per feature.

        h_t = Diag(e^g_t) h_(t-1) + k_t v_t^T      o_t = scale h_t^T q_t

    ``linrope.integrations.fla`` describes the arguments and errors of all functions.

    Args:
        g: (B, T, H, K), a log decay per token and feature.

    >>> from linrope.integrations.fla import chunk_gla
    >>> q = k = torch.eye(2)[None, :, None]  # a feature each
    >>> g = torch.tensor([0.5, 0.25]).log().expand(1, 2, 1, 2)
    >>> chunk_gla(q, k, torch.ones(1, 2, 1, 1), g, scale=1, output_final_state=True)[1].flatten()
    tensor([0.5000, 1.0000])
    """
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
    )


def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """``chunk_gla``, whose g is called gk here and may be None: no decay.

    >>> from linrope.integrations.fla import fused_recurrent_gla
    >>> q = k = v = torch.ones(1, 3, 1, 1)
    >>> fused_recurrent_gla(q, k, v, torch.full((1, 3, 1, 1), 0.5).log())[0].flatten()
    tensor([1.0000, 1.5000, 1.7500])
    """
    refuse(gv=gv, reverse=reverse, **kwargs)
    return attend(
        q,
        k,
        v,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        state_v_first=state_v_first,
        g=gk,
        decay_name="gk",
    )

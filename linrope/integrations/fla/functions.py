"""fla's functions: seven recurrences, each with the signatures under which fla has it."""

import math
from collections.abc import Callable, Iterator
from inspect import Parameter, Signature
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from linrope.common.argument_checks import check_dense
from linrope.feature_maps.base import widen
from linrope.integrations.fla.arguments import REFUSED, UNREAD, attend, refuse
from linrope.operation.checks import check_tensors
from linrope.ops.arguments import check_shape

_Function = Callable[..., tuple[Tensor, Any]]
_State = Tensor | tuple[Tensor, Tensor]
_TYPES = {"cp_context": Any, "initial_state": _State | None, "max_num_seqs": int | None} | dict.fromkeys(
    ("lower_bound", "scale"), float | None
)


def _parameters(text: str) -> Iterator[Parameter]:
    """The parameters that a text such as "q k v | g reverse=False **kwargs" lists.

    Those before the bar are required. Those after it are optional; their default is None unless the text gives another.
    """
    required, _, optional = text.partition("|")
    for name in required.split():
        yield Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation=Tensor)
    for word in optional.split():
        name, _, value = word.partition("=")
        if name.startswith("**"):
            yield Parameter(name[2:], Parameter.VAR_KEYWORD, annotation=Any)
            continue
        default, kind = (value == "True", bool) if value else (None, _TYPES.get(name, Tensor | None))
        yield Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=kind)


def _variant(name: str, recurrence: _Function, text: str, keywords: tuple[str, ...] = ()) -> _Function:
    """The function of this name and signature. It calls the recurrence, whose docstring it has.

    keywords: what it passes on beside the arguments of its signature, in **kwargs.
    """
    signature = Signature(list(_parameters(text)), return_annotation=tuple[Tensor, _State | None])
    parameters = signature.parameters.values()
    names = [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
    defaults = {x.name: x.default for x in parameters if x.default is not x.empty}
    required, known, is_open = set(names) - defaults.keys(), set(names), len(names) < len(parameters)
    passed = {*names, *keywords} - UNREAD - REFUSED.keys()
    defaults = {key: x for key, x in defaults.items() if key in passed}

    def call(*arguments: Any, **options: Any) -> tuple[Tensor, Any]:
        given = dict(zip(names, arguments, strict=False)) | options
        twice = len(given) < len(arguments) + len(options)
        if twice or not required <= given.keys() or not (is_open or given.keys() <= known):
            try:
                signature.bind(*arguments, **options)
            except TypeError as error:
                raise TypeError(f"{name}() {error}") from None
        for key in given.keys() - passed:
            refuse(key, given.pop(key))
        return recurrence(**defaults | given)

    call.__name__ = call.__qualname__ = name
    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__doc__ = (recurrence.__doc__ or "").replace("chunk" + recurrence.__name__, name)
    return call


def _linear_attn(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Any]:
    """Causal linear attention of q and k that are features already.

        h_t = h_(t-1) + k_t v_t^T      z_t = z_(t-1) + k_t      o_t = scale h_t^T q_t / (scale z_t^T q_t + 1e-10)

    ``linrope.integrations.fla`` describes the arguments and errors of all functions.

    Args:
        normalize: False: o_t is the numerator alone.
        initial_state: with normalize=True (h, z), where z is (N, 1, H, K), or h alone. As in fla, the keys before h are
            then missing in the normalizer. The final state is (h, z) too.

    >>> from linrope.integrations.fla import chunk_linear_attn
    >>> q = k = v = torch.ones(1, 3, 1, 2)
    >>> o, (h, z) = chunk_linear_attn(q, k, v, normalize=True, output_final_state=True)
    >>> o[0, :, 0, 0], z[0, 0, 0]
    (tensor([1., 1., 1.]), tensor([3., 3.]))
    """
    return attend(q, k, v, **options)


chunk_linear_attn = fused_chunk_linear_attn = _variant(
    "chunk_linear_attn",
    _linear_attn,
    "q k v | scale initial_state output_final_state=False normalize=True cu_seqlens",
)
fused_recurrent_linear_attn = _variant(
    "fused_recurrent_linear_attn",
    _linear_attn,
    "q k v | scale initial_state output_final_state=False reverse=False normalize=False cu_seqlens",
)


def _simple_gla(
    q: Tensor, k: Tensor, v: Tensor, *, g: Tensor | None, g_gamma: Tensor | None, **options: Any
) -> tuple[Tensor, Any]:
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
    if g is not None and g_gamma is not None:
        raise ValueError(
            "g_gamma: got a tensor beside g, expected only one of them; g + g_gamma is their sum"
        )
    check_tensors(q, k, v, causal=True)
    if g_gamma is None:
        return attend(q, k, v, g=g, **options)
    check_dense("g_gamma", g_gamma)
    check_shape("g_gamma", g_gamma, (v.shape[2],))
    return attend(q, k, v, g=g_gamma.expand(1, v.shape[1], -1), decay_name="g_gamma", **options)


chunk_simple_gla = _variant(
    "chunk_simple_gla",
    _simple_gla,
    "q k v | g g_gamma scale initial_state output_final_state=False state_v_first=False cu_seqlens"
    " cu_seqlens_cpu **kwargs",
)
fused_chunk_simple_gla = _variant(
    "fused_chunk_simple_gla",
    _simple_gla,
    "q k v | g g_gamma scale initial_state output_final_state=False cu_seqlens",
)
fused_recurrent_simple_gla = _variant(
    "fused_recurrent_simple_gla",
    _simple_gla,
    "q k v | g g_gamma scale initial_state output_final_state=False reverse=False state_v_first=False cu_seqlens"
    " **kwargs",
)


def _retention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Any]:
    """RetNet's attention without its rotation: ``chunk_simple_gla`` with fixed decays.

        h_t = (1 - 2^(-5 - i)) h_(t-1) + k_t v_t^T      o_t = scale h_t^T q_t      i = 0, 1, .. counts the heads of v

    ``linrope.integrations.fla`` describes the arguments and errors of all functions.

    >>> from linrope.integrations.fla import chunk_retention
    >>> q = k = v = torch.ones(1, 2, 2, 1)
    >>> chunk_retention(q, k, v)[0][0, 1, :, 0]
    tensor([1.9688, 1.9844])
    """
    check_tensors(q, k, v, causal=True)
    heads = torch.arange(v.shape[2], device=v.device, dtype=torch.promote_types(v.dtype, torch.float32))
    return _simple_gla(q, k, v, g=None, g_gamma=torch.log1p(-(2.0 ** (-5 - heads))), **options)


chunk_retention = _variant(
    "chunk_retention",
    _retention,
    "q k v | scale initial_state output_final_state=False cu_seqlens **kwargs",
)
fused_chunk_retention = _variant(
    "fused_chunk_retention",
    _retention,
    "q k v | scale initial_state output_final_state=False cu_seqlens",
)
fused_recurrent_retention = _variant(
    "fused_recurrent_retention",
    _retention,
    "q k v | scale initial_state output_final_state=False reverse=False state_v_first=False cu_seqlens **kwargs",
)


def _gla(
    q: Tensor, k: Tensor, v: Tensor, *, g: Tensor | None = None, gk: Tensor | None = None, **options: Any
) -> tuple[Tensor, Any]:
    """Gated linear attention, with a decay per feature.

        h_t = Diag(e^g_t) h_(t-1) + k_t v_t^T      o_t = scale h_t^T q_t

    ``linrope.integrations.fla`` describes the arguments and errors of all functions.

    g is a log decay per token and feature, (B, T, H, K). ``fused_recurrent_gla`` calls it gk, and takes None: no decay.

    >>> from linrope.integrations.fla import chunk_gla
    >>> q = k = torch.eye(2)[None, :, None]  # a feature each
    >>> g = torch.tensor([0.5, 0.25]).log().expand(1, 2, 1, 2)
    >>> chunk_gla(q, k, torch.ones(1, 2, 1, 1), g, scale=1, output_final_state=True)[1].flatten()
    tensor([0.5000, 1.0000])
    """
    return attend(q, k, v, g=g if gk is None else gk, decay_name="g" if gk is None else "gk", **options)


chunk_gla = _variant(
    "chunk_gla",
    _gla,
    "q k v g | scale initial_state output_final_state=False state_v_first=False cu_seqlens cu_seqlens_cpu",
)
fused_recurrent_gla = _variant(
    "fused_recurrent_gla",
    _gla,
    "q k v | gk gv scale initial_state output_final_state=False reverse=False state_v_first=False cu_seqlens"
    " **kwargs",
)


def _delta_rule(
    q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor | None, use_qk_l2norm_in_kernel: bool, **options: Any
) -> tuple[Tensor, Any]:
    """The delta rule: of the value stored under a key, the share beta is replaced by the new value.

        h_t = h_(t-1) + beta_t k_t (v_t - h_(t-1)^T k_t)^T      o_t = scale h_t^T q_t

    ``linrope.integrations.fla`` describes the arguments and errors of all functions. Unlike fla it takes float32.

    Args:
        beta: (B, T, HV). The state stays bounded if beta_t |k_t|^2 <= 2. ``fused_recurrent_delta_rule`` takes None: 1.

    >>> from linrope.integrations.fla import chunk_delta_rule
    >>> q = k = torch.ones(1, 2, 1, 1)
    >>> v, beta = torch.tensor([4.0, 8.0]).view(1, 2, 1, 1), torch.full((1, 2, 1), 0.5)
    >>> chunk_delta_rule(q, k, v, beta)[0].flatten()
    tensor([2., 5.])
    """
    check_tensors(q, k, v, causal=True)
    beta = v.new_ones(1, v.shape[1], 1) if beta is None else beta
    return attend(q, k, v, beta=beta, unit=use_qk_l2norm_in_kernel, **options)


chunk_delta_rule = _variant(
    "chunk_delta_rule",
    _delta_rule,
    "q k v beta | scale initial_state output_final_state=False use_qk_l2norm_in_kernel=False cu_seqlens"
    " cu_seqlens_cpu **kwargs",
)
fused_recurrent_delta_rule = _variant(
    "fused_recurrent_delta_rule",
    _delta_rule,
    "q k v | beta scale initial_state output_final_state=False use_qk_l2norm_in_kernel=False cu_seqlens",
)


def _gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor | None,
    gk: Tensor | None = None,
    beta: Tensor | None,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    **options: Any,
) -> tuple[Tensor, Any]:
    """The delta rule with a decay per head, as in Gated DeltaNet.

        h_t = e^g_t h_(t-1) + beta_t k_t (v_t - e^g_t h_(t-1)^T k_t)^T      o_t = scale h_t^T q_t

    ``linrope.integrations.fla`` describes the arguments and errors of all functions. ``chunk_gdn`` and
    ``fused_recurrent_gdn`` are the same functions under shorter names. Unlike fla's, those for single tokens have
    gradients too.

    Args:
        g: (B, T, HV).
        beta: (B, T, HV). The state stays bounded if beta_t |k_t|^2 <= 2.
        use_beta_sigmoid_in_kernel: sigmoid(beta) takes the place of beta, and 2 sigmoid(beta) with allow_neg_eigval.

    With use_gate_in_kernel=True, -e^A_log softplus(g + dt_bias) takes the place of g. A_log and dt_bias are keywords,
    (HV,) each. ``fused_recurrent_gated_delta_rule`` alone takes gk, (B, T, HV, K), a log decay per feature, which adds
    to g, and None for beta: 1.

    >>> from linrope.integrations.fla import chunk_gated_delta_rule
    >>> q = k = torch.ones(1, 2, 1, 1)
    >>> v, beta = torch.tensor([4.0, 8.0]).view(1, 2, 1, 1), torch.full((1, 2, 1), 0.5)
    >>> chunk_gated_delta_rule(q, k, v, g=beta.log(), beta=beta)[0].flatten()
    tensor([2.0000, 4.5000])
    """
    if use_gate_in_kernel:
        g = _gate(g, A_log, dt_bias, lower_bound)
    if g is not None and gk is not None:
        gk = g[..., None] + gk
    beta = _beta(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    decay = {"g": g} if gk is None else {"g": gk, "decay_name": "gk"}
    return _delta_rule(q, k, v, beta=beta, **decay, **options)


chunk_gated_delta_rule = chunk_gdn = _variant(
    "chunk_gated_delta_rule",
    _gated_delta_rule,
    "q k v g beta | scale initial_state output_final_state=False use_qk_l2norm_in_kernel=False"
    " use_beta_sigmoid_in_kernel=False allow_neg_eigval=False state_v_first=False cu_seqlens cu_seqlens_cpu"
    " chunk_indices cp_context **kwargs",
    keywords=("use_gate_in_kernel", "A_log", "dt_bias"),
)
fused_recurrent_gated_delta_rule = fused_recurrent_gdn = _variant(
    "fused_recurrent_gated_delta_rule",
    _gated_delta_rule,
    "q k v | g gk gv beta scale initial_state output_final_state=False use_qk_l2norm_in_kernel=False"
    " use_gate_in_kernel=False A_log dt_bias use_beta_sigmoid_in_kernel=False allow_neg_eigval=False"
    " state_v_first=False cu_seqlens **kwargs",
)


def _kda(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Any]:
    """Kimi Delta Attention: the delta rule with a decay per feature.

        h_t = D_t h_(t-1) + beta_t k_t (v_t - (D_t h_(t-1))^T k_t)^T      o_t = scale h_t^T q_t      D_t = Diag(e^g_t)

    ``linrope.integrations.fla`` describes the arguments and errors of all functions. Unlike fla's, those for single
    tokens have gradients too.

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
    return _gated_delta_rule(q, k, v, **options)


chunk_kda = _variant(
    "chunk_kda",
    _kda,
    "q k v g beta | scale initial_state output_final_state=False use_qk_l2norm_in_kernel=False"
    " use_gate_in_kernel=False use_beta_sigmoid_in_kernel=False allow_neg_eigval=False safe_gate=False lower_bound"
    " disable_recompute=False return_intermediate_states=False state_v_first=False cu_seqlens cu_seqlens_cpu"
    " cp_context use_graph=False max_num_seqs **kwargs",
    keywords=("A_log", "dt_bias"),
)
fused_recurrent_kda = _variant(
    "fused_recurrent_kda",
    _kda,
    "q k v g beta | A_log dt_bias scale initial_state output_final_state=False use_qk_l2norm_in_kernel=False"
    " use_gate_in_kernel=False use_beta_sigmoid_in_kernel=False allow_neg_eigval=False lower_bound"
    " state_v_first=False cu_seqlens **kwargs",
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

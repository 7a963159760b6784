"""Compares the cases of a benchmark with the equation in float64, before they are timed.

For long sequences it computes only some rows of the outputs and gradients: enough to detect a wrong kernel,
in a few seconds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from linrope import Rotary
from linrope.conformance.bounds import BOUNDS

if TYPE_CHECKING:
    from benchmarks.bench.cases import AttentionCase, DecodeCase

EPS = 1e-6  # linear_rope_attention's default
# Tolerances by dtype, relative to the largest gradient
GRADIENT = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SLACK = 16  # factor for maps with exponentials: they round arguments that grow with the square of the inputs
SOFTMAX = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def check_attention(
    case: AttentionCase, attend: Callable[[], Tensor], name: str, options: dict[str, Any], slack: int = 1
) -> None:
    """Compares sampled and last rows of the output and of dq, and the last rows of the other gradients.

    options: feature_map, rotary, normalize and decay of attend. slack: a factor of all tolerances.

    Raises:
        AssertionError: an error is too large.
    """
    out, grads = case.forward(attend), case.training(attend)
    count = min(32 if case.n <= 8192 else 8, case.n)
    sampled = torch.randint(case.n, (count,), generator=torch.Generator().manual_seed(0))
    last = torch.arange(case.n - count, case.n)
    rows = torch.cat((sampled, last))
    slack = SLACK if options["feature_map"].log_scaled else slack
    for sequence in {0, case.batch - 1}:
        expected, bound, exact = _rows(case, sequence, rows, last, options)
        error = (out[sequence, rows].double().cpu() - expected).abs()
        near = bool((error <= slack * BOUNDS[case.dtype] * bound).all())
        _require(near, f"{name}: out is off at N = {case.n}")
        for label, got, wanted in zip(("dq", "dk", "dv", "dlog_decay"), grads, exact, strict=False):
            at = rows if label == "dq" else last
            error = (got[sequence, at].double().cpu() - wanted).abs()
            near = bool(error.max() <= slack * GRADIENT[case.dtype] * wanted.abs().max())
            _require(near, f"{name}: {label} is off at N = {case.n}")


def _rows(
    case: AttentionCase, sequence: int, rows: Tensor, last: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """out (r, h, e) at the rows, its bound M, dq at the rows, and the other gradients at the last rows.

    Only the last queries see the last keys, so the sampled rows suffice for the gradients of those keys.
    """
    leaves = [x.detach()[sequence].double().cpu() for x in case.leaves]
    leaves[0] = leaves[0][rows]
    q, k, v, *gates = (x.requires_grad_() for x in leaves)
    group = q.shape[1] // k.shape[1]
    phi, q_scale, psi, k_scale = _features(options["feature_map"], q, k)
    phi_hat, psi_hat = phi, psi
    if (rotary := options["rotary"]) is not None:
        phi_hat, psi_hat = rotary(phi[None], rows)[0], rotary(psi[None], torch.arange(case.n))[0]
    psi, psi_hat, v_of_head = (x.repeat_interleave(group, 1) for x in (psi, psi_hat, v))
    total = _log_decay(options["decay"], gates, case.n, k.shape[1]).cumsum(0)
    exponent = (total[rows][:, None] - total + k_scale).permute(2, 0, 1)  # (g, r, n)
    exponent = exponent.masked_fill(torch.arange(case.n) > rows[:, None], -torch.inf)
    top = exponent.detach().amax(-1, keepdim=True)
    weight = (exponent - top).exp().repeat_interleave(group, 0)

    num = torch.einsum("hrm,mhe->rhe", torch.einsum("rhf,mhf->hrm", phi_hat, psi_hat) * weight, v_of_head)
    bound = torch.einsum("rhf,mhf->hrm", phi_hat.detach().abs(), psi_hat.detach().abs()) * weight.detach()
    bound = torch.einsum("hrm,mhe->rhe", bound, v_of_head.detach().abs())
    if options["normalize"]:
        den = (torch.einsum("rhf,mhf->hrm", phi, psi) * weight).sum(-1).T[..., None].clamp(min=EPS)
        out, bound = num / den, bound / den.detach()
    else:
        scale = (top[..., 0].repeat_interleave(group, 0).T + q_scale).exp()[..., None]
        out, bound = num * scale, bound * scale
    g_out = case.g_out[sequence, rows].double().cpu()
    (dq,) = torch.autograd.grad(out, q, g_out, retain_graph=True)
    late = slice(len(rows) - len(last), None)
    others = torch.autograd.grad(out[late], (k, v, *gates), g_out[late])
    return out.detach(), bound, [dq, *(x[last] for x in others)]


def _features(fmap: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """phi, its log_scale, psi and its log_scale in float64, for tokens (n, heads, d)."""
    wide = copy.deepcopy(fmap).double().cpu()
    results: list[Tensor] = []
    for apply, x in ((wide.queries, q), (wide.keys, k)):
        features = apply(x)
        scaled = isinstance(features, tuple)
        results += features if scaled else (features, features.detach().new_zeros(features.shape[:-1]))
    phi, q_scale, psi, k_scale = results
    return phi, q_scale.detach(), psi, k_scale.detach()


def _log_decay(decay: Tensor | None, gates: list[Tensor], n: int, groups: int) -> Tensor:
    """(n, g): the log of the factor by which each token decays the keys before it."""
    fixed = torch.zeros(n, groups, dtype=torch.float64)
    if decay is not None:
        fixed = fixed + decay.double().cpu().log()
    return fixed if not gates else fixed + gates[0]


def _require(near: bool, message: str) -> None:
    """Raises AssertionError unless near; an assert statement would do nothing under python -O."""
    if not near:
        raise AssertionError(message)


def check_softmax(case: AttentionCase) -> None:
    rows = torch.randint(case.n, (32,), generator=torch.Generator().manual_seed(1))
    out = case.forward(case.softmax)
    q, k, v = (x.detach()[-1].double().cpu() for x in case.inputs)
    group = q.shape[1] // k.shape[1]
    rotary = Rotary(case.dim)
    q, k = (rotary(x[None], torch.arange(case.n))[0] for x in (q, k))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    logits = torch.einsum("rhd,mhd->hrm", q[rows], k) / case.dim**0.5
    logits = logits.masked_fill(torch.arange(case.n) > rows[:, None], -torch.inf)
    expected = torch.einsum("hrm,mhe->rhe", logits.softmax(-1), v)
    error = (out[-1, rows].double().cpu() - expected).abs().max()
    _require(bool(error <= SOFTMAX[case.dtype]), f"softmax attention's output is off at N = {case.n}")


def check_step(case: DecodeCase) -> None:
    options, state, group = case.options, case.state, case.heads // case.groups
    q, k, v = (x[:, 0].double().cpu() for x in case.token)
    at = case.positions[:, None].cpu()
    phi, q_scale, psi, k_scale = _features(options["feature_map"], q, k)
    phi_hat, psi_hat = (options["rotary"](x[:, None], at)[:, 0] for x in (phi, psi))
    gates = [options["log_decay"][:, 0].double().cpu()] if "log_decay" in options else []
    log_weight = _log_decay(options["decay"], gates, len(q), case.groups)
    largest = torch.zeros_like(log_weight)
    if state.log_scale is not None:
        log_weight = state.log_scale.cpu() + log_weight
        largest = torch.maximum(log_weight, k_scale)
    old, new = ((x - largest).exp()[..., None] for x in (log_weight, k_scale))
    kv = state.kv.double().cpu() * old[..., None] + (psi_hat * new)[..., None] * v[:, :, None]
    z = state.z.double().cpu() * old + psi * new
    kv, z, largest = (x.repeat_interleave(group, 1) for x in (kv, z, largest))
    num = torch.einsum("bhf,bhfe->bhe", phi_hat, kv)
    bound = torch.einsum("bhf,bhfe->bhe", phi_hat.abs(), kv.abs())
    if options["normalize"]:
        scale = 1 / (phi * z).sum(-1, keepdim=True).clamp(min=EPS)
    else:
        scale = (q_scale + largest).exp()[..., None]
    slack = SLACK if options["feature_map"].log_scaled else 1
    error = (case.linrope()[:, 0].double().cpu() - num * scale).abs()
    near = bool((error <= slack * BOUNDS[case.dtype] * bound * scale).all())
    _require(near, f"the step is off at position {case.position}")


def check_softmax_step(case: DecodeCase) -> None:
    assert case.cache is not None
    out = case.softmax()[0, :, 0].double().cpu()
    q = Rotary(case.dim)(case.token[0][:1].double().cpu(), case.positions[:1].cpu())[0, 0]
    group = case.heads // case.groups
    for head in range(case.heads):
        keys, values = (x[0, head // group].double().cpu() for x in case.cache)
        weights = (keys @ q[head] / case.dim**0.5).softmax(0)
        error = (out[head] - weights @ values).abs().max()
        near = bool(error <= SOFTMAX[case.dtype])
        _require(near, f"softmax attention's step is off at position {case.position}")

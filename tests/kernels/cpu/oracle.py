"""What the native operators compute, written out quadratically in float64; gradients come from autograd."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

MAPS = {
    0: lambda x: x,
    1: lambda x: torch.where(x > 0, x + 1, x.clamp(max=0).exp()),
    2: torch.relu,
    3: lambda x: torch.relu(x).square(),
    4: torch.exp,
    5: lambda x: x * torch.sigmoid(x),
}


@dataclass(frozen=True)
class Case:
    """The arguments of an operator, in its order."""

    q: Tensor | None
    k: Tensor
    v: Tensor
    feature_map: int = 1
    log_decay: Tensor | None = None
    theta: Tensor | None = None
    positions: Tensor | None = None
    key_positions: Tensor | None = None
    angle_steps: Tensor | None = None
    angle: Tensor | None = None
    key_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    kv: Tensor | None = None
    z: Tensor | None = None
    layout: int = 0
    causal: bool = True
    normalize: bool = True
    eps: float = 1e-6
    add_eps: bool = False

    def inputs(self) -> list[Any]:
        return [getattr(self, field.name) for field in fields(self)]

    def forward(self, ops: Any, want_state: bool = True, slots: Tensor | None = None) -> tuple[Tensor, ...]:
        given = self.inputs()
        return ops.forward(*given[:14], slots, *given[14:], want_state)

    def backward(
        self, ops: Any, g_out: Tensor | None, g_kv: Tensor | None, g_z: Tensor | None
    ) -> dict[str, Tensor]:
        wants = self.log_decay is not None, self.angle_steps is not None
        results = ops.backward(g_out, g_kv, g_z, *self.inputs(), *wants)
        names = ("q", "k", "v", "log_decay", "angle_steps", "kv", "z")
        return {name: x for name, x in zip(names, results, strict=True) if getattr(self, name) is not None}

    def double(self, grad: bool = False) -> "Case":
        """In float64; with grad the differentiable tensors are leaves, spread out to the gradients' shapes."""
        b, m, g = self.k.shape[:3]
        new: dict[str, Tensor] = {}
        for name in ("q", "k", "v", "log_decay", "angle_steps", "kv", "z"):
            x = getattr(self, name)
            if x is None:
                continue
            x = x.detach().double()
            if name == "log_decay":
                x = x.expand(b, m, g)
            if name == "angle_steps":
                x = x.expand(b, m, g, -1)
            new[name] = x.clone().requires_grad_(grad)
        return replace(self, **new)


def _angles(case: Case, tokens: slice, row: int, n: int, keys: bool, sequence: int) -> Tensor:
    """(n, g, pairs), in radians"""
    g, total = case.k.shape[2], torch.zeros(len(range(n)[tokens]), 1, 1, dtype=torch.float64)
    if case.theta is not None:
        given = case.key_positions if keys and case.key_positions is not None else case.positions
        given = given[min(row, len(given) - 1)]
        if given.ndim == 1 and len(given) == 1 and n > 1:
            given = given + torch.arange(n)
        given = given[tokens].reshape(-1, case.theta.shape[0])
        turns = (given[:, :, None, None] * case.theta).sum(1)  # integers that wrap
        total = total + turns.double() * (2 * math.pi / 2**64)
    if case.angle is not None:
        total = total + case.angle[sequence].double() * (2 * math.pi / 2**64)
    if case.angle_steps is not None:
        total = total + case.angle_steps[min(row, len(case.angle_steps) - 1)][tokens].double().cumsum(0)
    return total.expand(-1, g, -1)


def _turn(x: Tensor, angles: Tensor, layout: int) -> Tensor:
    """x (n, g, f), turned; the first 2 pairs features only"""
    if layout == 0:
        return x
    pairs = angles.shape[-1]
    first, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    a, b = (first[..., 0::2], first[..., 1::2]) if layout == 1 else first.split(pairs, -1)
    c, s = angles.cos(), angles.sin()
    a, b = a * c - b * s, a * s + b * c
    both = torch.stack((a, b), -1).flatten(-2) if layout == 1 else torch.cat((a, b), -1)
    return torch.cat((both, rest), -1)


def attend(case: Case) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
    """out, kv, z, and M: the numerator's sum of absolute values over the denominator."""
    (b, m, g, f), e = case.k.shape, case.v.shape[3]
    h = g if case.q is None else case.q.shape[2]
    n = m if case.q is None else case.q.shape[1]
    if case.cu_seqlens is None:
        sequences = [(i, slice(0, n), slice(0, m)) for i in range(b)]
    else:
        bounds = case.cu_seqlens.tolist()
        sequences = [(0, slice(x, y), slice(x, y)) for x, y in zip(bounds[:-1], bounds[1:], strict=True)]
    repeat = lambda x, dim: x.repeat_interleave(h // g, dim)  # noqa: E731
    out = case.v.new_zeros(b, n, h, e)
    bound = case.v.new_zeros(b, n, h, e)
    kvs, zs = [], []
    outs: list[tuple[int, slice, Tensor]] = []
    for i, (row, queries, keys) in enumerate(sequences):
        psi, v = MAPS[case.feature_map](case.k[row, keys]), case.v[row, keys]
        count = psi.shape[0]
        if case.key_mask is not None:
            seen = case.key_mask[row, keys][:, None, None]
            psi, v = psi.masked_fill(~seen, 0), v.masked_fill(~seen, 0)
        a = case.log_decay
        a = psi.new_zeros(count, g) if a is None else a[min(row, len(a) - 1), keys].expand(count, g)
        a = a.clamp(min=-1e4)
        hat = _turn(psi, _angles(case, keys, row, m, True, i), case.layout)
        # e^(sum of a over j < t <= i) by differences of sums, those of strong gates being exactly 0
        total = a.cumsum(0)
        last = (total[-1:] - total).exp() if count else total
        kv = torch.einsum("mgf,mg,mge->gfe", hat, last, v)
        z = torch.einsum("mgf,mg->gf", psi, last)
        if case.kv is not None:
            kept = total[-1].exp() if count else torch.ones(g, dtype=torch.float64)
            kv, z = kv + kept[:, None, None] * case.kv[i], z + kept[:, None] * case.z[i]
        kvs.append(kv), zs.append(z)
        if case.q is None:
            continue
        phi = MAPS[case.feature_map](case.q[row, queries])
        q_hat = _turn(phi, repeat(_angles(case, queries, row, n, False, i), 1), case.layout)
        fade = torch.ones(phi.shape[0], count, g, dtype=torch.float64)
        if case.causal:
            fade = (
                (total[:, None] - total[None])
                .masked_fill(~torch.ones(count, count).tril().bool()[..., None], -torch.inf)
                .exp()
            )
        fade = repeat(fade, 2)
        scores = torch.einsum("nhf,mhf,nmh->nmh", q_hat, repeat(hat, 1), fade)
        num = torch.einsum("nmh,mhe->nhe", scores, repeat(v, 1))
        size = torch.einsum(
            "nhf,mhf,nmh,mhe->nhe", q_hat.abs(), repeat(hat, 1).abs(), fade, repeat(v, 1).abs()
        )
        den = torch.einsum("nhf,mhf,nmh->nh", phi, repeat(psi, 1), fade)
        if case.kv is not None:
            start = repeat(
                total.exp() if case.causal else torch.ones(phi.shape[0], g, dtype=torch.float64), 1
            )
            num = num + start[..., None] * torch.einsum("nhf,hfe->nhe", q_hat, repeat(case.kv[i], 0))
            size = size + start[..., None] * torch.einsum(
                "nhf,hfe->nhe", q_hat.abs(), repeat(case.kv[i].abs(), 0)
            )
            den = den + start * torch.einsum("nhf,hf->nh", phi, repeat(case.z[i], 0))
        den = den[..., None] if case.normalize else torch.ones_like(den[..., None])
        if case.normalize:
            den = den + case.eps if case.add_eps else den.clamp(min=case.eps)
        outs.append((row, queries, num / den))
        bound[row, queries] = (size / den.abs()).detach()
    for row, queries, x in outs:
        out[row, queries] = x
    return (None if case.q is None else out), torch.stack(kvs), torch.stack(zs), bound


def gradients(case: Case, g_out: Tensor | None, g_kv: Tensor | None, g_z: Tensor | None) -> dict[str, Tensor]:
    case = case.double(grad=True)
    out, kv, z, _ = attend(case)
    loss = torch.zeros((), dtype=torch.float64)
    for x, weight in ((out, g_out), (kv, g_kv), (z, g_z)):
        if x is not None and weight is not None:
            loss = loss + (x * weight.double()).sum()
    leaves = {name: getattr(case, name) for name in ("q", "k", "v", "log_decay", "angle_steps", "kv", "z")}
    leaves = {name: x for name, x in leaves.items() if x is not None}
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaves[name]) if x is None else x
        for name, x in zip(leaves, grads, strict=True)
    }

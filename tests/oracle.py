"""What the tests compare with: eq. 19 written out in loops, random inputs, and all gradients of a call."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from hypothesis import settings
from torch import Tensor

from linrope import LinearAttentionState, Rotary, feature_maps, linear_rope_attention

POSITIVE = ("elu+1", "relu", "relu2", "exp", "softmax", "favor+")
SIGNED = ("silu", "identity")
BACKENDS = ("reference", "eager")


def examples(number: int) -> settings:
    """So many random examples in an ordinary run, twenty times as many in a thorough one."""
    return settings(max_examples=number * settings.default.max_examples // 100)


def use_map(name: str, d: int) -> dict[str, Any]:
    """Arguments for that map; signed ones go without the normalizer."""
    fmap = feature_maps.make(name, d, **({"seed": 0, "num_features": 2 * d} if name == "favor+" else {}))
    return {"feature_map": fmap, "normalize": name in POSITIVE}


def num_features(how: dict[str, Any], d: int) -> int:
    return getattr(how.get("feature_map"), "feature_dim", d)


def randoms(
    b: int, n: int, h: int, d: int, *, g: int | None = None, m: int | None = None, e: int | None = None,
    dtype: torch.dtype = torch.float64, seed: int = 0, scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q, k, v. No number lies near 0, where relu has its kink."""
    generator = torch.Generator().manual_seed(seed)
    g, m, e = g or h, n if m is None else m, e or d
    made = []
    for shape in ((b, n, h, d), (b, m, g, d), (b, m, g, e)):
        x = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        made.append(((x + 0.05 * x.sign()) * scale).to(torch.get_default_device(), dtype))
    return made[0], made[1], made[2]


def random_state(k: Tensor, v: Tensor, how: dict[str, Any], *, position: int = 7) -> LinearAttentionState:
    """A state that fits the call, with kv of both signs and z > 0, leaves of the graph."""
    like = {name: how[name] for name in ("feature_map", "normalize", "rotary") if name in how}
    _, state = linear_rope_attention(k[:, :0], k[:, :0], v[:, :0], **like, return_state=True)
    generator = torch.Generator().manual_seed(99)
    kv = torch.randn(state.kv.shape, generator=generator, dtype=torch.float64, device="cpu").to(state.kv)
    z = torch.rand(state.z.shape, generator=generator, dtype=torch.float64, device="cpu").to(state.z) + 0.5
    where = position + torch.arange(len(kv))
    return replace(state, kv=kv.requires_grad_(), z=z.requires_grad_(), position=where)


def everything(
    q: Tensor, k: Tensor, v: Tensor, state: LinearAttentionState | None = None, *,
    call: Callable[..., Any] = linear_rope_attention, **how: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """Output, last state, and the gradients of all inputs through all of them."""
    leaves = {"dq": q, "dk": k, "dv": v}
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    if state is not None:
        state = replace(state, kv=state.kv.detach().requires_grad_(), z=state.z.detach().requires_grad_())
        leaves |= {"dkv": state.kv, "dz": state.z}
    out, last = call(leaves["dq"], leaves["dk"], leaves["dv"], state=state, return_state=True, **how)
    results = {"out": out, "kv": last.kv, "z": last.z}
    loss, generator = torch.zeros((), dtype=torch.float64), torch.Generator().manual_seed(5)
    for x in results.values():
        weight = torch.randn(x.shape, generator=generator, dtype=torch.float64, device="cpu")
        loss = loss + (x.double() * weight.bfloat16().to(x.device)).sum()  # of few digits: exact anywhere
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return {name: x.detach() for name, x in results.items()} | dict(zip(leaves, grads, strict=True))


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    """Equal up to ``tolerance`` of each tensor's largest entry (of 1 if that is less): entries cancel."""
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        bound = tolerance * max(1.0, float(x.abs().max()) if x.numel() else 0.0)
        torch.testing.assert_close(
            actual[name], x, rtol=0, atol=bound, msg=lambda text, n=name: f"{n}: {text}"
        )


def rotation(position: int, theta: Tensor, f: int, layout: str) -> Tensor:
    """RoFormer eq. 15: R(p) as an (f, f) matrix, pair by pair."""
    matrix, pairs = torch.eye(f, dtype=torch.float64), len(theta)
    for t in range(pairs):
        i, j = (2 * t, 2 * t + 1) if layout == "interleaved" else (t, t + pairs)
        angle = position * float(theta[t])
        matrix[i, i] = matrix[j, j] = math.cos(angle)
        matrix[j, i] = math.sin(angle)
        matrix[i, j] = -math.sin(angle)
    return matrix


def equation_19(
    phi: Tensor,  # (b, n, h, f)
    psi: Tensor,  # (b, m, g, f)
    v: Tensor,  # (b, m, g, e)
    rotary: Rotary | None,
    positions: Tensor,  # (b, n)
    key_positions: Tensor,  # (b, m)
    key_mask: Tensor | None,
    causal: bool,
    normalize: bool,
    eps: float = 1e-6,
) -> Tensor:
    """(b, n, h, e), one query, one key at a time."""
    (b, n, h, f), (_, m, g, e) = phi.shape, v.shape

    def turn(x: Tensor, position: Tensor, head: int) -> Tensor:
        if rotary is None:
            return x
        theta = rotary.theta if rotary.theta.ndim == 1 else rotary.theta[head]
        return rotation(int(position), theta, f, rotary.layout) @ x

    out = torch.zeros(b, n, h, e, dtype=torch.float64)
    for s in range(b):
        for head in range(h):
            kv_head = head // (h // g)
            for i in range(n):
                num, den = torch.zeros(e, dtype=torch.float64), 0.0
                query = turn(phi[s, i, head], positions[s, i], kv_head)
                for j in range(i + 1 if causal else m):
                    if key_mask is not None and not key_mask[s, j]:
                        continue
                    key = turn(psi[s, j, kv_head], key_positions[s, j], kv_head)
                    num += (query @ key) * v[s, j, kv_head]
                    den += float(phi[s, i, head] @ psi[s, j, kv_head])
                out[s, i, head] = num / max(den, eps) if normalize else num
    return out

"""What the tests compare with: eq. 19 written out in loops, random inputs, and all gradients of a call."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from linrope import LinearAttentionState, Rotary, feature_maps, linear_rope_attention
from linrope.backends import native

POSITIVE = ("elu+1", "relu", "relu2", "exp", "softmax", "favor+")
SIGNED = ("silu", "identity")
BACKENDS = ("reference", "eager")  # those that compute in float64, too
NATIVE = pytest.param(
    "native", marks=pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))
)
FAST = ("eager", NATIVE)  # for float32, bfloat16, float16
MAPS = (*POSITIVE, *SIGNED)
every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_fast = pytest.mark.parametrize("backend", FAST)
every_map = pytest.mark.parametrize("name", MAPS)
both_directions = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
# In what a backend is compared with the oracle, and how many of a tensor's largest entry it may be off.
DTYPES = {"eager": torch.float64, "native": torch.float32, "triton": torch.float32}
TOLERANCES = {"eager": 1e-10, "native": 64 * 2.0**-23, "triton": 32 * 2.0**-23}


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


def random_state(
    k: Tensor, v: Tensor, how: dict[str, Any], *, position: int = 7, h: int | None = None
) -> LinearAttentionState:
    """A state that fits the call, with kv of both signs and z > 0, leaves of the graph."""
    like = {name: how[name] for name in ("feature_map", "normalize", "rotary", "rope_order") if name in how}
    if (rotary := how.get("rotary")) is not None and rotary.axes is not None:
        like["positions"] = torch.zeros(0, rotary.axes, dtype=torch.int64)
    if how.get("cu_seqlens") is not None:
        like["cu_seqlens"] = torch.zeros_like(how["cu_seqlens"])
    q = k.new_zeros(len(k), 0, h or k.shape[2], k.shape[3])
    _, state = linear_rope_attention(q, k[:, :0], v[:, :0], **like, return_state=True)
    generator = torch.Generator().manual_seed(99)
    kv = torch.randn(state.kv.shape, generator=generator, dtype=torch.float64, device="cpu").to(state.kv)
    z = torch.rand(state.z.shape, generator=generator, dtype=torch.float64, device="cpu").to(state.z) + 0.5
    where = position + torch.arange(len(kv))
    if state.log_scale is not None:  # of keys that were there, as kv says
        state = replace(
            state, log_scale=torch.rand(state.log_scale.shape, generator=generator).double() - 0.5
        )
    return replace(state, kv=kv.requires_grad_(), z=z.requires_grad_(), position=where)


def random_mask(b: int, m: int) -> Tensor:
    """A third hidden; the first key of the first sequence, and the whole second sequence, hidden too."""
    mask = torch.rand(b, m, generator=torch.Generator().manual_seed(3)) > 1 / 3
    mask[0, :1] = False
    mask[1:2] = False
    return mask


def everything(
    q: Tensor, k: Tensor, v: Tensor, state: LinearAttentionState | None = None, *,
    call: Callable[..., Any] = linear_rope_attention, **how: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """Output, last state, and the gradients of all inputs through all of them."""
    data = {name: how.pop(name) for name in ("log_decay", "angle_steps") if how.get(name) is not None}
    leaves = {"dq": q, "dk": k, "dv": v, **{f"d{name}": x for name, x in data.items()}}
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    how |= {name: leaves[f"d{name}"] for name in data}
    if state is not None:
        state = replace(state, kv=state.kv.detach().requires_grad_(), z=state.z.detach().requires_grad_())
        leaves |= {"dkv": state.kv, "dz": state.z}
    out, last = call(leaves["dq"], leaves["dk"], leaves["dv"], state=state, return_state=True, **how)
    results = {"out": out, "kv": last.kv, "z": last.z}
    integers = {} if last.angle is None else {"angle": last.angle}
    loss, generator = torch.zeros((), dtype=torch.float64), torch.Generator().manual_seed(5)
    for x in results.values():
        weight = torch.randn(x.shape, generator=generator, dtype=torch.float64, device="cpu")
        loss = loss + (x.double() * weight.bfloat16().to(x.device)).sum()  # of few digits: exact anywhere
    grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    found = {name: x.detach() for name, x in results.items()} | dict(zip(leaves, grads, strict=True))
    return found | integers


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    """Equal up to ``tolerance`` of each tensor's largest entry (of 1 if that is less): entries cancel."""
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        if not x.is_floating_point():
            assert torch.equal(actual[name], x), name
            continue
        bound = tolerance * max(1.0, float(x.abs().max()) if x.numel() else 0.0)
        torch.testing.assert_close(
            actual[name], x, rtol=0, atol=bound, msg=lambda text, n=name: f"{n}: {text}"
        )


def rotation(position: Tensor, rotary: Rotary, head: int) -> Tensor:
    """RoFormer eq. 15: R(p) as an (f, f) matrix, pair by pair; on a grid the axes add up."""
    matrix, pairs = torch.eye(rotary.dim, dtype=torch.float64), rotary.rotary_dim // 2
    per_head = rotary.theta.ndim == (2 if rotary.axes is None else 3)
    theta = rotary.theta[head] if per_head else rotary.theta
    for t in range(pairs):
        i, j = (2 * t, 2 * t + 1) if rotary.layout == "interleaved" else (t, t + pairs)
        angle = float(position * theta[t] if rotary.axes is None else sum(position * theta[:, t]))
        matrix[i, i] = matrix[j, j] = math.cos(angle)
        matrix[j, i] = math.sin(angle)
        matrix[i, j] = -math.sin(angle)
    return matrix


def xpos_powers(rotary: Rotary | None, distance: int, f: int) -> Tensor:
    """(f,): zeta_t^(distance / scale) of both features of pair t, 1 for those that do not turn."""
    powers = torch.ones(f, dtype=torch.float64)
    if rotary is None or rotary.xpos is None:
        return powers
    pairs = rotary.rotary_dim // 2
    for t in range(pairs):
        zeta = (t / pairs + 0.4) / 1.4
        i, j = (2 * t, 2 * t + 1) if rotary.layout == "interleaved" else (t, t + pairs)
        powers[i] = powers[j] = zeta ** (distance / rotary.xpos)
    return powers


def equation_19(
    phi: Tensor,  # (b, n, h, f)
    psi: Tensor,  # (b, m, g, f)
    v: Tensor,  # (b, m, g, e)
    rotary: Rotary | None,
    positions: Tensor,  # (b, n), with axes (b, n, axes)
    key_positions: Tensor,  # (b, m)
    key_mask: Tensor | None,
    causal: bool,
    normalize: bool,
    eps: float = 1e-6,
    decay: Tensor | None = None,  # (g,)
    sequence: list[int] | None = None,  # which packed sequence each token is of
) -> Tensor:
    """(b, n, h, e), one query, one key at a time."""
    (b, n, h, f), (_, m, g, e) = phi.shape, v.shape

    def turn(x: Tensor, position: Tensor, head: int) -> Tensor:
        return x if rotary is None else rotation(position, rotary, head) @ x

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
                    if sequence is not None and sequence[i] != sequence[j]:
                        continue
                    key, faded = turn(psi[s, j, kv_head], key_positions[s, j], kv_head), 1.0
                    if decay is not None:
                        faded = float(decay[kv_head]) ** int(positions[s, i] - key_positions[s, j])
                    if rotary is not None and rotary.xpos is not None:
                        key = key * xpos_powers(rotary, int(positions[s, i] - key_positions[s, j]), f)
                    num += faded * (query @ key) * v[s, j, kv_head]
                    den += faded * float(phi[s, i, head] @ psi[s, j, kv_head])
                out[s, i, head] = num / max(den, eps) if normalize else num
    return out

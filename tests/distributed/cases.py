"""Calls of the operation, for which shards have to give one process's numbers; each rank runs them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from linrope import LinearAttentionState, Rotary, feature_maps, linear_rope_attention
from linrope.distributed import Shard
from tests.support.oracle import DATA, random_state, randoms

B, H, G, D, E = 2, 4, 2, 8, 6
SEQUENCE = (*DATA, "positions", "key_positions", "key_mask")  # have an axis of tokens
ADDED = ("kv", "z", "decay")  # gradients that are sums over the ranks

LENGTHS = {  # of 2 and 4 ranks: one shard longer than a chunk of 64 tokens, empty ones, ones of a token
    2: ([80, 21], [0, 17], [17, 0], [16, 1]),
    4: ([30, 70, 5, 9], [9, 0, 8, 0], [1, 1, 15, 1], [0, 0, 0, 12]),
}
PACKED_LENGTHS = {2: ([80, 21], [101, 0]), 4: ([30, 70, 5, 9], [35, 0, 79, 0])}
BORDERS = {2: [0, 30, 30, 80, 101], 4: [0, 20, 20, 35, 100, 114]}  # documents: across borders, at them, empty


def gates(n: int, rows: int = B, heads: int = G) -> Tensor:
    return -torch.rand(rows, n, heads, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def steps(n: int, rows: int = B, heads: int = G, pairs: int = D // 2) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(rows, n, heads, pairs, generator=generator, dtype=torch.float64)


def mask(n: int) -> Tensor:
    return torch.rand(B, n, generator=torch.Generator().manual_seed(6)) < 0.7


def gaps(n: int, rows: int = B) -> Tensor:
    """Positions that do not fall, and begin after those of any state."""
    jumps = torch.randint(0, 3, (rows, n), generator=torch.Generator().manual_seed(7))
    return 20 + jumps.cumsum(1)


def decay() -> Tensor:
    return torch.tensor([0.9, 0.999], dtype=torch.float64)


def theta_per_head() -> Rotary:
    return Rotary(D, theta=torch.rand(G, D // 2, generator=torch.Generator().manual_seed(8)).double())


def strengths(n: int, rows: int = B, heads: int = G) -> Tensor:
    return -0.2 * gates(n, rows, heads)


DELTA_RULE: dict[str, Any] = {"feature_map": "unit", "normalize": False}
ALONE: dict[str, Callable[[int], dict[str, Any]]] = {
    "RoFormer's equation": lambda n: {"rotary": Rotary(D)},
    "no rotation, the numerator alone": lambda n: {"feature_map": "silu", "normalize": False},
    "decay": lambda n: {"rotary": Rotary(D, layout="half"), "decay": decay()},
    "gates": lambda n: {"rotary": Rotary(D), "log_decay": gates(n)},
    "steps": lambda n: {"rotary": Rotary(D), "angle_steps": steps(n)},
    "all that fades and turns": lambda n: {
        "rotary": theta_per_head(), "decay": decay(), "log_decay": gates(n, 1), "angle_steps": steps(n, 1),
        "key_mask": mask(n),
    },
    "steps for all heads without a rotation": lambda n: {"angle_steps": steps(n, heads=1, pairs=2)},
    "exponentials": lambda n: {"rotary": Rotary(D), "feature_map": "exp"},
    "exponentials that fade": lambda n: {
        "rotary": Rotary(D), "feature_map": "exp", "log_decay": gates(n), "decay": decay(),
        "key_mask": mask(n),
    },
    "random features": lambda n: {
        "rotary": Rotary(16), "feature_map": feature_maps.make("favor+", D, seed=0, num_features=16),
        "angle_steps": steps(n, pairs=8),
    },
    "gates per unit": lambda n: {
        "rotary": Rotary(D, rotary_dim=4, layout="half"), "log_decay": 3 * steps(n, pairs=6).sigmoid().log(),
        "decay": decay(), "key_mask": mask(n),
    },
    "gates per unit, steps and exponentials": lambda n: {
        "angle_steps": steps(n, pairs=2), "feature_map": "exp", "log_decay": steps(n, pairs=6).sigmoid().log(),
        "decay": decay(),
    },
    "gates per unit and erase": lambda n: {
        "rotary": Rotary(D), "erase": strengths(n), "log_decay": 3 * steps(n, heads=1).sigmoid().log(),
    } | DELTA_RULE,
    "positions": lambda n: {"rotary": Rotary(D), "positions": gaps(n), "decay": decay()},
    "positions of all rows": lambda n: {"rotary": Rotary(D), "positions": gaps(n, 1)[0], "decay": decay()},
    "positions on a grid": lambda n: {
        "rotary": Rotary.axial(D, axes=2), "positions": torch.stack((gaps(n), gaps(n) + 3), -1),
        "log_decay": gates(n),
    },
    "xPos": lambda n: {"rotary": Rotary(D, xpos=50.0), "positions": gaps(n), "log_decay": gates(n)},
    "rotated before the map": lambda n: {"rotary": Rotary(D), "rope_order": "before", "log_decay": gates(n)},
    "values of more heads": lambda n: {
        "rotary": theta_per_head(), "log_decay": gates(n), "write": gates(n, 1), "key_heads": 1,
    },
    "values of more heads, both ways": lambda n: {"rotary": Rotary(D), "causal": False, "key_heads": 1},
    "erase": lambda n: {
        "rotary": theta_per_head(), "decay": decay(), "log_decay": gates(n), "angle_steps": steps(n, 1),
        "erase": strengths(n), "key_mask": mask(n),
    } | DELTA_RULE,
    "erase for all heads": lambda n: {
        "rotary": Rotary(D), "erase": strengths(n, 1, 1), "positions": gaps(n), "decay": decay(),
    } | DELTA_RULE,
    "erase with values of more heads": lambda n: {
        "rotary": theta_per_head(), "erase": strengths(n), "write": gates(n, 1), "key_heads": 1,
        "angle_steps": steps(n, heads=1),
    } | DELTA_RULE,
    "bidirectional": lambda n: {"rotary": Rotary(D), "causal": False, "key_mask": mask(n)},
    "bidirectional steps": lambda n: {"rotary": Rotary(D), "causal": False, "angle_steps": steps(n)},
    "bidirectional exponentials": lambda n: {"rotary": Rotary(D), "causal": False, "feature_map": "exp"},
    "positions of keys": lambda n: {
        "rotary": Rotary(D), "causal": False, "positions": gaps(n), "key_positions": gaps(n) + 2,
    },
}  # fmt: skip

PACKED: dict[str, Callable[[int], dict[str, Any]]] = {
    "packed": lambda n: {"rotary": Rotary(D)},
    "packed and fading": lambda n: {
        "rotary": Rotary(D), "decay": decay(), "log_decay": gates(n, 1), "angle_steps": steps(n, 1),
    },
    "packed exponentials": lambda n: {"rotary": Rotary(D), "feature_map": "exp", "log_decay": gates(n, 1)},
    "packed with positions": lambda n: {"rotary": Rotary(D), "positions": gaps(n, 1)[0], "decay": decay()},
    "packed and erased": lambda n: {
        "rotary": Rotary(D), "erase": strengths(n, 1), "log_decay": gates(n, 1), "angle_steps": steps(n, 1),
    } | DELTA_RULE,
    "packed bidirectional": lambda n: {
        "rotary": Rotary(D), "causal": False, "angle_steps": steps(n, 1), "write": gates(n, 1, 1),
    },
    "packed bidirectional exponentials": lambda n: {
        "rotary": Rotary(D), "causal": False, "feature_map": "exp",
    },
}  # fmt: skip


CASES = ALONE | PACKED


def with_dtype(how: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {name: x.to(dtype) if name in DATA else x for name, x in how.items()}


def weights_like(x: Tensor, seed: int) -> Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def results(
    q: Tensor, k: Tensor, v: Tensor, how: dict[str, Any], state: LinearAttentionState | None,
    weight: Tensor, share: float, *, whole_state: bool,
) -> dict[str, Tensor]:  # fmt: skip
    """out, the last state and all gradients; share: of the last state's part of the loss."""
    if heads := how.get("key_heads"):  # q and k then have fewer heads than v
        q, k, weight = q[:, :, :heads], k[:, :, :heads], weight[:, :, : v.shape[2]]
        how = {name: x for name, x in how.items() if name != "key_heads"}
    leaves = {"q": q, "k": k, "v": v}
    leaves |= {name: how[name] for name in (*DATA, "decay") if how.get(name) is not None}
    leaves = {name: x.detach().clone().requires_grad_() for name, x in leaves.items()}
    how = how | {name: leaves[name] for name in how if name in leaves}
    if state is not None:
        state = replace(state, kv=state.kv.detach().requires_grad_(), z=state.z.detach().requires_grad_())
        leaves |= {"kv": state.kv, "z": state.z}
    out, last = linear_rope_attention(
        leaves["q"], leaves["k"], leaves["v"], **how, state=state, return_state=True
    )
    loss = (out.double() * weight).sum()
    found = {"out": out.detach()}
    if whole_state:
        for x in (last.kv, last.z):
            loss = loss + share * (x.double() * weights_like(x, 11)).sum()
        found |= {
            f"last {name}": x.detach() for name, x in last.tensors().items() if name != "angle_gradient_path"
        }
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return found | {f"d{name}": x for name, x in zip(leaves, grads, strict=True)}


def compare(name: str, lengths: list[int], dtype: torch.dtype, backend: str, given: bool) -> None:
    """Compares this rank's results with one process's, for this rank's tokens. given: whether a state is passed."""
    packed = name in PACKED
    n, b = sum(lengths), 1 if packed else B
    how = with_dtype(CASES[name](n), dtype) | {"backend": backend}
    q, k, v = (x.to(dtype) for x in randoms(b, n, H, D, g=G, e=E, seed=1))
    bounds = torch.tensor(BORDERS[len(lengths)]) if packed else None
    state = random_state(k.double(), v.double(), how | {"cu_seqlens": bounds}) if given else None
    if state is not None:
        state = state.to(dtype=torch.float32 if dtype != torch.float64 else None)
    weight = weights_like(v[:, :, :1].expand(-1, -1, H, -1), 12)
    one = results(q, k, v, how | {"cu_seqlens": bounds}, state, weight, 1.0, whole_state=not packed)

    shard = Shard(lengths=lengths, cu_seqlens=bounds)
    here = how | {"shard": shard}
    for key in SEQUENCE:
        if (x := how.get(key)) is not None:
            axes = key.endswith("positions") and how["rotary"].axes is not None
            here[key] = shard.take(x, x.ndim - 1 - axes if key.endswith("positions") else 1)
    parts = [shard.take(x) for x in (q, k, v)]
    many = results(*parts, here, state, shard.take(weight), 1 / shard.size, whole_state=not packed)
    assert one.keys() == many.keys()
    gaps, sizes = torch.zeros(2, len(one), dtype=torch.float64)
    for i, (key, x) in enumerate(one.items()):
        if key == "out" or key in ("dq", "dk", "dv", *(f"d{name}" for name in DATA)):
            x = shard.take(x)
        elif key.startswith("d"):
            dist.all_reduce(many[key])
        if x.numel():
            gaps[i] = (many[key] - x).double().abs().max()  # integers wrap, and are to be equal
            sizes[i] = x.double().abs().max() if x.is_floating_point() else 1
    for x in (gaps, sizes):  # on all ranks, before one of them fails and leaves the others waiting
        dist.all_reduce(x, dist.ReduceOp.MAX)
    # docs/numerics.md allows 16 u = 1e-6 of M, and M is a few times the largest entry.
    out, gradient = (1e-13, 1e-13) if dtype == torch.float64 else (3e-6, 2e-5)
    for key, found in zip(one, (gaps / sizes.clamp(min=1)).tolist(), strict=True):
        most = gradient if key.startswith("d") else out
        assert found <= most, f"{name}, {lengths}, {key}: {found:.1e}, expected at most {most:.0e}"

"""Gradients through linear_rope_state alone, which come from dk's and dv's kernels without any query."""

from typing import Any

import pytest
import torch
from torch import Tensor

from linrope import LinearAttentionState, Rotary, linear_rope_state
from tests.kernels.comparison import marks
from tests.oracle import random_state, randoms

pytestmark = marks
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "gates and steps": {"start": True, "gates": True, "segments": True, "n": 200, "mask": True},
    "packed gates": {"start": True, "gates": True, "segments": True, "n": 190, "packed": True},
    "packed": {"packed": True, "n": 190, "mask": True},
}


def gradients(
    backend: str, k: Tensor, v: Tensor, state: LinearAttentionState | None, how: dict[str, Any]
) -> dict[str, Tensor]:
    """Of everything that has one, through kv and z."""
    how = dict(how)
    leaves = {"k": k.detach().requires_grad_(), "v": v.detach().requires_grad_()}
    for name in ("log_decay", "angle_steps"):
        if name in how:
            how[name] = leaves[name] = how[name].detach().requires_grad_()
    if state is not None:
        leaves |= {"kv": state.kv, "z": state.z}
    last = linear_rope_state(leaves["k"], leaves["v"], state=state, backend=backend, **how)
    generator = torch.Generator().manual_seed(1)
    weights = (torch.randn(x.shape, generator=generator, device="cpu").to(x) for x in (last.kv, last.z))
    loss = sum((x * weight).double().sum() for x, weight in zip((last.kv, last.z), weights))
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_of_the_state_alone_are_the_oracle_s(
    case: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    if case.get("segments"):
        request.getfixturevalue("short_segments")
    packed, n = case.get("packed", False), case.get("n", 70)
    b = 1 if packed else 2
    _, k, v = randoms(b, n, 2, 8, e=16, dtype=torch.float32)
    how: dict[str, Any] = {"rotary": Rotary(8)}
    if packed:
        how["cu_seqlens"] = torch.tensor([0, 130, 130, n])
    if case.get("mask"):
        how["key_mask"] = torch.arange(n).expand(b, n) % 5 > 0
    if case.get("gates"):
        log = -torch.rand(b, n, 2) / 9
        log[:, 100] = -30.0
        how |= {"log_decay": log, "angle_steps": torch.randn(b, n, 1, 4)}
    state = random_state(k, v, how) if case.get("start") else None
    actual = gradients("triton", k, v, state, how)
    wide = {name: x.double() if name in ("log_decay", "angle_steps") else x for name, x in how.items()}
    oracle = gradients("reference", k.double(), v.double(), state, wide)
    for name, expected in oracle.items():
        error = (actual[name].double() - expected.double()).abs().max()
        assert error <= 1e-5 * expected.abs().max().clamp(min=1), f"{name}: {error}"

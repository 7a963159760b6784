"""Sums of log_decay's gradient over thousands of tokens, which is what a parameter receives.

A running sum over the sequence would keep each rounding error in all tokens before it: every entry is off by
little, and the sum by a lot. "eager" adds up pairs of a key and a query, chunk by chunk, and is the measure for the
others.
"""

import math
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from linrope import Rotary, linear_rope_attention
from linrope.conformance.bounds import FACTOR, SHARE, Yardstick
from tests.support.oracle import NATIVE, random_state, randoms

N, D = 2048, 16  # tokens; make test-long has four times as many
GATES = (0.05, 0.5, 0.9, 0.99, 0.9999, "mamba-2")
OPTIONS: dict[str, dict[str, Any]] = {
    "identity": {"feature_map": None, "normalize": False},
    "elu+1": {},
    "rotated": {"rotary": Rotary(D)},
    "rotated, unnormalized": {"rotary": Rotary(D), "normalize": False},
    "grouped heads": {"rotary": Rotary(D), "heads": 8},
    "few heads": {"rotary": Rotary(D), "rows": 1, "groups": 2},  # "native" cuts long sequences of few heads
    "packed": {"rotary": Rotary(D), "rows": 1, "bounds": [0, 1, 250, 1400]},
    "state": {"rotary": Rotary(D), "state": True},
    "state, few heads": {"rotary": Rotary(D), "rows": 1, "groups": 2, "state": True},
    "per unit": {"rotary": Rotary(D), "rows": 1, "units": D // 2, "state": True},
    "erase": {"rotary": Rotary(D), "rows": 1, "erases": True, "state": True},
    "erase, per unit": {"rotary": Rotary(D), "rows": 1, "units": D // 2, "erases": True, "state": True},
}
# Each option once, most of them with the strongest gate; make test-long runs the product.
ORDINARY = {(0.05, name) for name in ("identity", "grouped heads", "state, few heads")}
ORDINARY |= {("mamba-2", "packed"), (0.9, "per unit"), (0.05, "erase"), (0.9, "erase, per unit")}
CASES = [*((*x, N) for x in product(GATES, OPTIONS) if x in ORDINARY)]
CASES += [pytest.param(*x, 4 * N, marks=pytest.mark.long) for x in product(GATES, OPTIONS)]


def log_decay(gate: float | str, rows: int, n: int, heads: int) -> Tensor:
    """(rows, n, heads): a constant gate, or A dt as Mamba-2 starts with them."""
    if isinstance(gate, float):
        return torch.full((rows, n, heads), math.log(gate))
    generator = torch.Generator().manual_seed(1)
    dt = torch.exp(math.log(1e-3) + math.log(100) * torch.rand(rows, n, heads, generator=generator))
    return -torch.linspace(1, 16, heads) * dt


class Problem:
    def __init__(
        self, gate: float | str, *, rows: int = 2, groups: int = 4, heads: int | None = None, n: int = N,
        bounds: list[int] | None = None, state: bool = False, units: int = 0, erases: bool = False, **how: Any,
    ) -> None:  # fmt: skip
        self.q, self.k, self.v = randoms(rows, n, heads or groups, D, g=groups, e=D, dtype=torch.float32)
        self.log, self.how = log_decay(gate, rows, n, groups), how
        if units:  # from gates that are twice as open to those that are twice as closed
            self.log = self.log[..., None] * torch.linspace(0.5, 2, units)
        if erases:
            self.k = self.k / self.k.norm(dim=-1, keepdim=True)
            how |= {"feature_map": None, "normalize": False}
            how["erase"] = torch.rand(rows, n, groups, generator=torch.Generator().manual_seed(3))
        if bounds is not None:
            how["cu_seqlens"] = torch.tensor([*bounds, n], dtype=torch.int32)
        self.state = random_state(self.k[:, :1], self.v[:, :1], {"normalize": True} | how) if state else None

    def beside(self, change: Callable[[Tensor], Tensor]) -> "Problem":
        problem = copy(self)
        problem.q, problem.k, problem.v = change(self.q), change(self.k), change(self.v)
        return problem

    def sums(self, dtype: torch.dtype, backend: str, *, pieces: int = 1) -> Tensor:
        """(rows, groups, units): the gradient of log_decay, summed over the tokens. Gates are float32 or wider."""
        wide = torch.promote_types(dtype, torch.float32)
        log, state, loss = self.log.to(wide).requires_grad_(), self.state, torch.zeros((), dtype=wide)
        if state is not None:
            state = replace(state, kv=state.kv.detach().to(wide), z=state.z.detach())
        generator = torch.Generator().manual_seed(2)
        weights = torch.randn(self.q.shape, generator=generator).bfloat16().to(dtype)  # exact in any dtype
        for part in torch.arange(self.q.shape[1]).chunk(pieces):
            qkv = (x[:, part].to(dtype) for x in (self.q, self.k, self.v))
            out, state = linear_rope_attention(
                *qkv, log_decay=log[:, part], state=state, return_state=True, backend=backend, **self.how
            )
            loss = loss + (out * weights[:, part]).sum()
        if self.state is not None:  # the last state's gradient, too
            loss = loss + (state.kv * torch.randn(state.kv.shape, generator=generator)).sum()
        (gradient,) = torch.autograd.grad(loss, log)
        return gradient.double().sum(1)


def root_mean_square(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


@pytest.mark.parametrize("backend", [NATIVE])
@pytest.mark.parametrize(("gate", "name", "n"), CASES)
def test_sums_over_tokens_are_as_exact_as_those_of_eager(
    gate: float | str, name: str, n: int, backend: str
) -> None:
    problem = Problem(gate, n=n, **OPTIONS[name])

    def errors_of_eager(change: Callable[[Tensor], Tensor], several: bool) -> dict[str, float]:
        near = problem.beside(change)
        its_exact = exact if near.q is problem.q else near.sums(torch.float64, "eager")
        return {"sums": root_mean_square(near.sums(torch.float32, "eager") - its_exact)}

    exact = problem.sums(torch.float64, "eager")
    error, size = root_mean_square(problem.sums(torch.float32, backend) - exact), root_mean_square(exact)
    assert Yardstick(errors_of_eager).ratio("sums", error, size) <= 1


GATE_PATTERNS = {
    "closed beside open": [-1e-3, -1e-3, -1e-3, -30.0],
    "closed": [-20.0],
    "closed for good": [-40.0, -50.0],
    "of all sizes": [-1e-3, -20.0, -0.5, -1e4, -1e-6, -10.0, -50.0],
}


def gradient_by_pairs(
    q: Tensor, k: Tensor, v: Tensor, weights: Tensor, state_weights: Tensor, log: Tensor
) -> Tensor:
    """(b, n, h, d): d_log_decay of sum(out weights) + sum(kv state_weights), without a map and a normalizer.

    Token t's gate is in the terms of the keys before it, each with a query from t on or with the last state.
    log is (b, n, h, 1 or d).
    """
    L = log.cumsum(1)
    E = (L[:, :, None] - L[:, None]).clamp(max=0).exp()
    pairs = q[:, :, None] * k[:, None] * torch.einsum("bihe,bjhe->bijh", weights, v)[..., None] * E
    last = torch.einsum("bjhd,bhde,bjhe->bjhd", k, state_weights, v) * E[:, -1]
    terms = torch.cat((pairs, last[:, None]), 1)  # (b, reader, key, h, d)
    from_reader = terms.flip(1).cumsum(1).flip(1)[:, :-1]  # sums over readers from t on, (b, t, key, h, d)
    before = torch.ones(from_reader.shape[1:3], dtype=torch.bool).tril(-1)
    return (from_reader * before[..., None, None]).sum(2)


@pytest.mark.parametrize("pattern", GATE_PATTERNS)
@pytest.mark.parametrize("looks_at_state", [False, True], ids=["out", "out and state"])
@pytest.mark.parametrize("per_unit", [False, True], ids=["per head", "per unit"])
@pytest.mark.parametrize("backend", ["eager", NATIVE])
def test_gradients_are_exact_to_the_size_of_their_own_terms(
    backend: str, pattern: str, looks_at_state: bool, per_unit: bool
) -> None:
    """An open gate beside it adds nothing to the error of a closed one, nor do pairs that it does not stand between."""
    n, heads = 150, 2
    q, k, v = randoms(1, n, heads, D, e=D, dtype=torch.float32)
    weights = randoms(1, n, heads, D, dtype=torch.float32, seed=2)[0]
    state_weights = looks_at_state * randoms(1, heads, D, D, dtype=torch.float32, seed=3)[0]
    gates = torch.tensor(GATE_PATTERNS[pattern])
    order = torch.arange(n)[:, None] + torch.arange(D if per_unit else 1)
    log = gates[order % len(gates)][None, :, None].repeat(1, 1, heads, 1)
    log = (log if per_unit else log[..., 0]).requires_grad_()
    how: dict[str, Any] = {"feature_map": None, "normalize": False, "return_state": True, "backend": backend}
    inputs = [x.detach().double() for x in (q, k, v, weights, state_weights)]
    by_feature = log.detach().double().view(1, n, heads, -1)
    exact = gradient_by_pairs(*inputs, by_feature)
    size = gradient_by_pairs(*(x.abs() for x in inputs), by_feature)
    if not per_unit:
        exact, size = exact.sum(-1), size.sum(-1)
    out, state = linear_rope_attention(q, k, v, log_decay=log, **how)
    (found,) = torch.autograd.grad((out * weights).sum() + (state.kv * state_weights).sum(), log)
    assert ((found - exact).abs() <= 16 * 2.0**-24 * size + 2.0**-126).all()


@pytest.mark.parametrize(
    ("options", "looks_at_state"), [({}, False), ({"rotary": Rotary(D)}, True)], ids=["out", "out and state"]
)
@pytest.mark.parametrize("backend", ["eager", NATIVE])
def test_gates_that_are_almost_closed_have_exact_gradients(
    backend: str, options: dict[str, Any], looks_at_state: bool
) -> None:
    """Step sizes of about 1.3, as transformers makes untrained Mamba-2 layers: log decays of -0.5 to -90.

    The head that forgets most has gradients of 1e-7, and a token's pair with itself is of size 1. So is the last key in
    the last state, which no gate weakens.
    """
    n, heads = 300, 8
    q, k, v = randoms(2, n, heads, D, e=D, dtype=torch.float64)
    noise, weights = (randoms(2, n, heads, D, dtype=torch.float64, seed=seed)[0] for seed in (1, 2))
    log_decay = -torch.linspace(1, 32, heads) * 1.3 * torch.exp(0.3 * noise[..., 0])
    of_state = looks_at_state * randoms(2, heads, D, D, seed=3)[0]

    def gradient(dtype: torch.dtype, backend: str) -> Tensor:
        log = log_decay.clone().requires_grad_()
        qkv = (x.to(dtype) for x in (q, k, v))
        out, state = linear_rope_attention(*qkv, log_decay=log, return_state=True, backend=backend, **options)
        loss = (
            (out * weights.to(dtype)).sum() + (state.kv * of_state).sum() + (state.z * of_state[..., 0]).sum()
        )
        return torch.autograd.grad(loss, log)[0]

    exact = gradient(torch.float64, "reference")
    error = (gradient(torch.float32, backend) - exact).abs()
    assert (error.amax((0, 1)) <= 64 * 2.0**-24 * exact.abs().amax((0, 1))).all()


@pytest.mark.parametrize("backend", [NATIVE])
@pytest.mark.parametrize(
    ("gate", "name", "dtype"),
    [(0.05, "identity", torch.bfloat16), (0.05, "rotated", torch.float16), (0.9, "rotated", torch.bfloat16)],
)
def test_in_half_precision_sums_are_as_exact_as_those_of_the_reference(gate, name, backend, dtype) -> None:
    """With strong gates, the sum is what is left when large terms cancel."""
    problem = Problem(gate, n=512, **OPTIONS[name]).beside(lambda x: x.to(dtype).float())
    exact = problem.sums(torch.float64, "eager")
    error, other = (root_mean_square(problem.sums(dtype, x) - exact) for x in (backend, "reference"))
    assert error <= FACTOR * other + SHARE * root_mean_square(exact)


@pytest.mark.parametrize("backend", ["eager", NATIVE])
def test_pieces_that_pass_the_state_on_sum_up_like_one_call(backend: str) -> None:
    """Shards of a sequence do the same: gradients pass from piece to piece through the states."""
    problem = Problem("mamba-2", rotary=Rotary(D), rows=1)
    exact = problem.sums(torch.float64, "eager")
    allowed = root_mean_square(problem.sums(torch.float32, "eager") - exact)
    error = root_mean_square(problem.sums(torch.float32, backend, pieces=4) - exact)
    assert error <= FACTOR * allowed + SHARE * root_mean_square(exact)


@pytest.mark.parametrize("backend", ["triton"])
def test_sums_over_few_tokens_are_as_exact_in_the_interpreter(backend: str) -> None:
    """Two heads of it beside 64 of eager, which give the bound: two heads alone may have small sums by chance."""

    def error_and_size(heads: int, backend: str) -> tuple[float, float]:
        problem = Problem(math.exp(-0.75), rows=1, groups=heads, n=200, feature_map=None, normalize=False)
        exact = problem.sums(torch.float64, "eager")
        return root_mean_square(problem.sums(torch.float32, backend) - exact), root_mean_square(exact)

    error_of_eager, size = error_and_size(64, "eager")
    assert error_and_size(2, backend)[0] <= FACTOR * error_of_eager + SHARE * size

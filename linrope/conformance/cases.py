"""Calls that every backend must compute within the bounds, and its errors beside the equation in float64.

The oracle is "reference" in float64 on the inputs as rounded, on the CPU. bounds.py has the bounds.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from linrope import LinearAttentionState, Rotary, feature_maps, linear_rope_attention
from linrope.backends import load, native
from linrope.conformance.bounds import (
    BOUNDS,
    DATA,
    Yardstick,
    bound_of_sums,
    cancelling,
    error_in_bounds,
    everything,
    largest,
)

Results = dict[str, Tensor]
PARTS = ("forward", "gradients", "state")
HEADS, GROUPS, DIM = 4, 2, 64
EPS = 1e-6  # linear_rope_attention's default


@dataclass(frozen=True)
class Case:
    """A call, or several that continue each other."""

    name: str
    pieces: tuple[int, ...]  # tokens of each call; each continues from the state of the one before
    gates: bool = False  # a log decay for each token and key/value head
    erases: bool = False  # the delta rule, with nearly equal keys in the last head
    packed: tuple[int, ...] | None = None  # lengths of packed sequences
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def steps(self) -> bool:
        """True if the case decodes token by token, in the state's own memory and without gradients."""
        return self.pieces[-1] == 1

    def inputs(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """q, k, v, the gates and what is erased of all pieces; all but q, k and v are float32."""
        n, generator = sum(self.pieces), torch.Generator().manual_seed(len(self.name))
        random = partial(torch.randn, generator=generator, dtype=torch.float64)
        found = {name: random(1, n, HEADS if name == "q" else GROUPS, DIM).to(dtype) for name in "qkv"}
        if self.gates:
            found["log_decay"] = torch.nn.functional.logsigmoid(2 * random(1, n, GROUPS) + 2).float()
        if self.erases:
            alike = found["k"][:, :1, -1] + found["k"][:, :, -1] / 100
            found["k"] = torch.cat((found["k"][:, :, :-1], alike[:, :, None]), 2)
            psi: Any = feature_maps.make(self.how()["feature_map"], DIM).keys(found["k"].double())
            # With 2 / |psi|^2 a key turns what it reads into its negative. With more the state would grow.
            found["erase"] = (
                2 * torch.rand(1, n, GROUPS, generator=generator) / psi.square().sum(-1)
            ).float()
        return found

    def how(self) -> dict[str, Any]:
        """The other arguments of linear_rope_attention."""
        how: dict[str, Any] = {"feature_map": "elu+1", "rotary": Rotary(DIM), **self.options}
        if self.packed is not None:
            how["cu_seqlens"] = torch.tensor([0, *self.packed]).cumsum(0).int()
        return how


CASES = (
    Case("rotation, 200 tokens", (200,)),
    Case("gates, 200 tokens", (200,), gates=True),
    Case("decay, no rotation", (130,), options={"decay": torch.tensor([0.8, 0.999]), "rotary": None}),
    Case("decoding", (130, 1, 1, 1, 1), gates=True),
    Case("a continued sequence", (40, 100), gates=True),
    Case("no normalizer", (150,), gates=True, options={"normalize": False, "feature_map": "silu"}),
    Case(
        "the delta rule",
        (90, 80),
        gates=True,
        erases=True,
        options={"normalize": False, "feature_map": "unit"},
    ),
    Case("the map exp", (130,), options={"feature_map": "exp"}),
    Case("packed sequences", (152,), packed=(1, 17, 64, 70)),
    Case("bidirectional", (80,), options={"causal": False}),
    Case("one token", (1, 1)),
)


def cases_of(backend: str) -> list[Case]:
    """The cases that the backend computes."""
    module = load(backend)
    return [case for case in CASES if not case.erases or isinstance(module, str) or "erase" in module.OPTIONS]


def errors(backend: str, device: str, exact: "Exact") -> dict[str, float]:
    """The largest error of each of PARTS, as a share of the bound; decoding has no gradients."""
    dtype, sizes, oracle = exact.dtype, exact.sizes, exact.oracle
    found, out, last = _run(exact.case, exact.inputs, exact.case.how(), backend, device)
    forward = [error_in_bounds(x, oracle["out"], sizes["out"]) for x in (out, found.get("out", out))]
    bound = bound_of_sums(backend, dtype, native.instruction_set())
    state = [
        float(((_plain(x, last.log_scale) - exact.plain[name]).abs() / (bound * sizes[name] + 1e-37)).max())
        for name, x in (("kv", last.kv), ("z", last.z))
    ]
    besides = BOUNDS[dtype] * float(cancelling(sizes)) if backend == "triton" else 0.0
    gradients = [
        exact.yardstick.ratio(
            name, largest(found[name].double() - x), largest(x), besides if name == "dlog_decay" else 0.0
        )
        for name, x in oracle.items()
        if name.startswith("d")
    ]
    parts = {"forward": forward, "state": state, "gradients": gradients}
    return {name: _worst(part) for name, part in parts.items() if part}


def _worst(errors: list[float]) -> float:
    """The largest; infinite if a result is no number."""
    return math.inf if any(map(math.isnan, errors)) else max(errors)


class Exact:
    """What a case gives in float64 for inputs rounded to a dtype, and the bounds of its errors."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        self.case, self.dtype = case, dtype
        self.inputs = case.inputs(dtype)
        wide = {name: x.double() for name, x in self.inputs.items()}
        self.oracle, out, last = _run(case, wide, case.how(), "reference", "cpu")
        self.oracle = self.oracle or {"out": out}
        self.plain = {name: _plain(getattr(last, name), last.log_scale) for name in ("kv", "z")}
        self.sizes = sizes_of_terms(wide, case.how())
        self.sizes["out"] = self.sizes["out"][:, -self.oracle["out"].shape[1] :]

    @cached_property
    def yardstick(self) -> Yardstick:
        return Yardstick(self._reference_errors)

    def _reference_errors(self, change: Callable[[Tensor], Tensor], several: bool) -> dict[str, float]:
        """The errors of "reference" in this dtype, after a change of q, k and v."""
        inputs = {name: x if name in DATA else change(x) for name, x in self.inputs.items()}
        exact = self.oracle
        if not all(torch.equal(x, self.inputs[name]) for name, x in inputs.items()):
            wide = {name: x.double() for name, x in inputs.items()}
            exact, _, _ = _run(self.case, wide, self.case.how(), "reference", "cpu")
        found, _, _ = _run(self.case, inputs, self.case.how(), "reference", "cpu")
        return {name: largest(found[name].double() - x) for name, x in exact.items() if name[0] == "d"}


def sizes_of_terms(inputs: dict[str, Tensor], how: dict[str, Any]) -> dict[str, Tensor]:
    """M of docs/numerics.md, and the sizes of the terms of kv and z, for float64 inputs and positive or signed maps.

    The sums are those of the call, by "reference", of absolute values that are not rotated or normalized. With erase
    they are formed token by token.
    """
    if "erase" in inputs:
        return _sizes_with_erase(inputs, how)
    rest = {name: x for name, x in how.items() if name not in ("feature_map", "rotary", "normalize")}
    if "log_decay" in inputs:
        rest["log_decay"] = inputs["log_decay"]
    sums = partial(
        linear_rope_attention,
        **rest,
        feature_map=None,
        normalize=False,
        return_state=True,
        backend="reference",
    )
    fmap = feature_maps.make(how["feature_map"], DIM)
    phi, psi = (_features(x) for x in (fmap.queries(inputs["q"]), fmap.keys(inputs["k"])))
    rotated, lengths = [phi, psi], [phi.abs(), psi.abs()]
    if (rotary := how["rotary"]) is not None:
        ends = how.get("cu_seqlens", torch.tensor([0, phi.shape[1]])).diff().tolist()
        positions = torch.cat([torch.arange(n) for n in ends])
        rotated = [rotary(x, positions) for x in rotated]
        lengths = [x.unflatten(-1, (-1, 2)).norm(dim=-1).repeat_interleave(2, -1) for x in (phi, psi)]
    v = inputs["v"].abs()
    size, _ = sums(*(x.abs() for x in rotated), v)
    # A rotation rounds relative to a pair's length, where the products of single features may vanish. Both
    # features of a pair have its length here, so that half a product of lengths is a quarter of their sum.
    longest, last = sums(*lengths, v)
    size = torch.maximum(size, longest / 4 if rotary is not None else size)
    _, counted = sums(phi.abs(), psi.abs(), torch.ones_like(v[..., :1]))
    if how.get("normalize", True):
        den, _ = sums(phi, psi, torch.ones_like(v[..., :1]))
        size = size / den.clamp(min=EPS)
    return {"out": size, "kv": last.kv, "z": counted.z}


def _sizes_with_erase(inputs: dict[str, Tensor], how: dict[str, Any]) -> dict[str, Tensor]:
    """eta_t, the size of a column of S, and M = |phi| eta.

    P_t = e^(a_t) S_(t-1),   u_t = v_t - b_t P_t^T psi^_t,   S_t = P_t + psi^_t u_t^T
    eta_t = max(1, |1 - b_t |psi_t|^2|) e^(a_t) eta_(t-1) + |psi_t| (|v_t| + b_t |psi_t| |P_t|)
    """
    fmap, v = feature_maps.make(how["feature_map"], DIM), inputs["v"]
    phi, psi = _features(fmap.queries(inputs["q"])), _features(fmap.keys(inputs["k"]))
    psi_hat, lengths = how["rotary"](psi, torch.arange(psi.shape[1])), psi.norm(dim=-1)[..., None]
    factors, erase = inputs["log_decay"].exp()[..., None], inputs["erase"][..., None]
    S, eta, sizes = v.new_zeros(*v.shape[::2], DIM, v.shape[3]), v.new_zeros(*v.shape[::2], v.shape[3]), []
    for t in range(v.shape[1]):
        k, b, length = psi_hat[:, t, :, :, None], erase[:, t], lengths[:, t]
        P = factors[:, t, :, None] * S
        S = P + k * (v[:, t] - b * (k * P).sum(2))[:, :, None]
        growth = (1 - b * length.square()).abs().clamp(min=1) * factors[:, t]
        eta = growth * eta + length * (v[:, t].abs() + b * length * P.norm(dim=2))
        sizes.append(eta)
    M = torch.stack(sizes, 1).repeat_interleave(HEADS // GROUPS, 2) * phi.norm(dim=-1)[..., None]
    return {"out": M, "kv": eta[:, :, None].expand_as(S), "z": eta.new_zeros(*eta.shape[:2], DIM)}


def _features(features: Any) -> Tensor:
    """The features times e^log_scale, for maps that have one."""
    found: Tensor = features[0] * features[1].exp()[..., None] if isinstance(features, tuple) else features
    return found


def _plain(sums: Tensor, log_scale: Tensor | None) -> Tensor:
    """kv or z without the factor that exponential maps take out."""
    if log_scale is None:
        return sums.double()
    return sums.double() * log_scale.exp().reshape(*log_scale.shape, *[1] * (sums.ndim - log_scale.ndim))


def _run(
    case: Case, inputs: dict[str, Tensor], how: dict[str, Any], backend: str, device: str
) -> tuple[Results, Tensor, LinearAttentionState]:
    """everything() of the last piece ({} if the case decodes); the outputs without gradients; the last state."""
    here: dict[str, Any] = {
        name: x.to(device) if isinstance(x, Tensor) else x for name, x in (inputs | how).items()
    }
    options = {name: here[name] for name in how} | {"backend": backend}
    state: LinearAttentionState | None = None
    found: Results = {}
    outs = []
    for index, (q, k, v, gates) in enumerate(_pieces(case, here)):
        if index == len(case.pieces) - 1 and not case.steps:
            found = everything(q, k, v, state, **options, **gates)
        if case.steps and state is not None:
            state = state.donate()
        with torch.no_grad():
            out, state = linear_rope_attention(q, k, v, state=state, return_state=True, **options, **gates)
        outs.append(out.clone())
    assert state is not None
    out = torch.cat(outs[1:] if case.steps else outs[-1:], 1).cpu()
    return {name: x.cpu() for name, x in found.items()}, out, state.to("cpu")


def _pieces(case: Case, inputs: dict[str, Any]) -> Iterator[tuple[Tensor, Tensor, Tensor, dict[str, Any]]]:
    names = ("q", "k", "v", *(name for name in DATA if name in inputs))
    for tensors in zip(*(inputs[name].split(case.pieces, 1) for name in names), strict=True):
        q, k, v, *gates = tensors
        yield q, k, v, dict(zip(names[3:], gates, strict=True))

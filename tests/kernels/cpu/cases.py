"""Random arguments of the native operators, as Python passes them to the library."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from linrope import LinearAttentionState
from linrope.backends import library
from linrope.backends import native as backend
from linrope.feature_maps import UnitMap
from tests.support.contract import narrow
from tests.support.equation import Equation, Sizes

# Arguments are checked before an instruction set is chosen.
on_one_isa = pytest.mark.parametrize("isa", ["baseline"], indirect=True)


@dataclass(frozen=True)
class Case:
    """The arguments of an operator, by name."""

    q: Tensor | None
    k: Tensor
    v: Tensor
    feature_map: int = 1
    query_factor: float = 0.0
    log_decay: Tensor | None = None
    write: Tensor | None = None
    erase: Tensor | None = None
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

    def inputs(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def forward(self, ops: Any, want_state: bool = True, slots: Tensor | None = None) -> tuple[Tensor, ...]:
        """out, and the last kv and z."""
        results = self._forward(ops, want_state=want_state, slots=slots, save=False)
        return results["out"], results["kv"], results["z"]

    def _forward(self, ops: Any, **more: Any) -> dict[str, Tensor]:
        results = ops.forward(**self.inputs(), **more, save_z=self.erase is None)
        return dict(zip(library.result_names("forward"), results, strict=True))

    def step(self, ops: Any, advance: bool = False, slots: Tensor | None = None) -> Tensor:
        one_token = {name: x for name, x in self.inputs().items() if name not in ("cu_seqlens", "causal")}
        out: Tensor = ops.step(**one_token, slots=slots, advance=advance)
        return out

    def backward(
        self, ops: Any, g_out: Tensor | None, g_kv: Tensor | None, g_z: Tensor | None
    ) -> dict[str, Tensor]:
        wanted = ("log_decay", "angle_steps", "write", "erase")
        wants = {f"want_{name}": getattr(self, name) is not None for name in wanted}
        made = self._forward(ops, want_state=True, save=True)
        saved = {name: x for name, x in made.items() if name.startswith("saved")}
        results = ops.backward(**self.inputs(), **saved, **wants, g_out=g_out, g_kv=g_kv, g_z=g_z)
        named = zip(library.result_names("backward"), results, strict=True)
        return {name: x for name, x in named if getattr(self, name) is not None}


def by_equation(case: Case) -> tuple[Tensor, LinearAttentionState, Sizes]:
    """out, the last state, and the sizes of their terms. The tokens follow one another; theta has one axis and head."""
    (b, _, _, d), (_, _, g, e), rotary = case.k.shape, case.v.shape, None
    sequences = b if case.cu_seqlens is None else len(case.cu_seqlens) - 1
    if case.theta is not None:
        theta, layout = case.theta[0, 0].double() * (2 * math.pi / 2.0**64), [*backend.LAYOUTS][case.layout]
        # A Rotary has no odd number of features
        rotary = SimpleNamespace(
            axes=None, xpos=None, attention_factor=1, theta=theta, rotary_dim=2 * len(theta), layout=layout
        )
    name = [*backend.MAPS][case.feature_map]
    kv = torch.zeros(sequences, g, d, e) if case.kv is None else case.kv
    z = kv.new_zeros(kv.shape[:3]) if case.z is None else case.z
    position = torch.zeros(sequences, dtype=torch.int64)
    if case.positions is not None:
        position = position + case.positions[:, 0]
    names = ("q", "k", "v", "log_decay", "angle_steps", "write", "erase", "key_mask", "cu_seqlens")
    equation, factor = Equation(), case.query_factor
    out, state = equation(
        **{name: narrow(getattr(case, name), torch.float64) for name in names},
        state=LinearAttentionState(kv.double(), z.double(), position, "", case.angle), rotary=rotary,
        feature_map=UnitMap(d, name, factor) if factor else name, normalize=case.normalize, eps=case.eps,
    )  # fmt: skip
    return out, state, equation.sizes


def turns(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Frequencies of up to 0.16 turns per position."""
    return (torch.rand(shape, generator=generator, dtype=torch.float64) * 0.16 * 2.0**64).to(torch.int64)


def make(
    b: int = 2, n: int = 70, h: int = 2, g: int = 1, f: int = 12, e: int = 10, *, m: int | None = None,
    layout: int = 2, pairs: int | None = None, axes: int = 1, theta_heads: int = 1, state: bool = True,
    decay: float | None = None, steps: bool = False, write: bool = False, mask: bool = False,
    packed: list[int] | None = None, dtype: torch.dtype = torch.float32, seed: int = 0, **more: Any,
) -> Case:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    m = n if m is None else m
    pairs = f // 2 if pairs is None else pairs
    rows = b if packed is None else len(packed) - 1
    how: dict[str, Any] = {"layout": layout}
    if layout:
        how["theta"] = turns((axes, theta_heads, pairs), generator)
        how["positions"] = (
            torch.randint(0, 1000, (b, n, axes), generator=generator) if axes > 1 else torch.tensor([[5]])
        )
        if m != n:
            how["key_positions"] = torch.randint(0, 1000, (b, m), generator=generator)
    if decay is not None:
        how["log_decay"] = -decay * torch.rand(b, m, g, generator=generator)
    if steps:
        how["angle_steps"] = normal(b, n, g, pairs)
        how["angle"] = turns((rows, g, pairs), generator)
    if write:
        how["write"] = normal(b, m, g)
    if mask:
        how["key_mask"] = torch.rand(b, m, generator=generator) < 0.7
    if packed is not None:
        how["cu_seqlens"] = torch.tensor(packed)
    if state:
        how["kv"] = normal(rows, g, f, e)
        how["z"] = torch.rand(rows, g, f, generator=generator, dtype=torch.float64) + 0.5
    q, k, v = normal(b, n, h, f), normal(b, m, g, f), normal(b, m, g, e)
    q, k, v = (x + 0.05 * x.sign() for x in (q, k, v))  # no number near the kink of relu
    return Case(q.to(dtype), k.to(dtype), v.to(dtype), **how | more)


CASES: dict[str, dict[str, Any]] = {
    "half": {"layout": 2},
    "decay": {"decay": 0.3},
    "angle steps and decay": {"steps": True, "decay": 0.5, "h": 4, "g": 2, "write": True},
    "packed": {"b": 1, "packed": [0, 3, 3, 40, 70], "decay": 0.2, "steps": True},
    "cut into segments": {"b": 1, "n": 2100, "h": 1, "f": 6, "e": 5, "decay": 0.02, "steps": True, "write": True},
    "bidirectional": {"causal": False, "write": True},
}  # fmt: skip


def with_threads(run: Callable[[], list[Tensor]]) -> list[list[Tensor]]:
    """The results with one, two and three threads."""
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(run())
    return found


def random_like(x: Tensor, seed: int) -> Tensor:
    """Weights of few digits: exact in every type."""
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(x.dtype)


def error_of(message: str) -> type[Exception]:
    """What Python raises with this message: a ValueError for a shape or a number, else a RuntimeError."""
    return RuntimeError if any(word in message for word in ("dtype", "stride", "contiguous")) else ValueError

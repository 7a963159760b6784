"""Calls that go through every part of the kernels, and what the numerics contract allows of each."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from linrope import Rotary, feature_maps
from tests.support.equation import Equation

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Options = Callable[["Problem"], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """``before`` tokens only make a state; the rest of the n go on from it."""

    options: Options
    b: int = 1
    n: int = 130  # two chunks of 64 and a tail
    h: int = 2
    g: int = 1
    before: int = 0
    segments: bool = False  # few heads: a sequence is cut into three
    less: tuple[int, int] = (0, 0)  # taken from the sizes of heads and of values
    kind: str = "attend"  # "step": token by token; "state", "output": the last state or the output alone
    sizes: tuple[int, ...] = (64,)
    delta: bool = False  # keys for the delta rule: of length 1, and nearly equal in every other head


@dataclass
class Problem:
    case: Case
    dtype: torch.dtype
    size: int
    q: Tensor = field(init=False)
    k: Tensor = field(init=False)
    v: Tensor = field(init=False)
    how: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        c = self.case
        torch.manual_seed(0)
        d, e = self.size - c.less[0], self.size - c.less[1]
        shapes = (c.h, d), (c.g, d), (c.g, e)
        self.q, self.k, self.v = (torch.randn(c.b, c.n, *shape).to(self.dtype) for shape in shapes)
        if c.delta:
            k = self.k.float()
            k[:, :, ::2] = torch.randn(c.b, 1, 1, d) + 0.01 * k[:, :, ::2]
            self.k = (k / k.norm(dim=-1, keepdim=True)).to(self.dtype)
        self.how = c.options(self)

    def piece(
        self, which: slice, wide: bool, backend: str
    ) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
        how = {"backend": backend} | self.how
        for name in ("log_decay", "write", "erase", "angle_steps", "key_mask"):
            if name in how:
                how[name] = how[name][:, which]
        q, k, v = (x[:, which].double() if wide else x[:, which] for x in (self.q, self.k, self.v))
        return (q, k, v), how

    def for_equation(self, which: slice) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
        """The same tokens in float64, as arguments of an Equation."""
        qkv, how = self.piece(which, True, "")
        del how["backend"]
        name = how.pop("feature_map", "elu+1")
        return qkv, how | {"feature_map": None if name is None else feature_maps.make(name, self.q.shape[3])}

    def magnitude(self) -> Tensor:
        """M of docs/numerics.md, (b, n, h, e)."""
        equation, (qkv, how) = Equation(), self.for_equation(slice(None))
        equation(*qkv, **how)
        return equation.sizes.out[:, self.case.before :]


def plain(p: Problem) -> dict[str, Any]:
    return {"rotary": Rotary(p.q.shape[3])}


def half(p: Problem) -> dict[str, Any]:
    return {"rotary": Rotary(p.q.shape[3], layout="half")}


def mask(p: Problem) -> dict[str, Any]:
    mask = torch.rand(p.k.shape[:2]) > 0.3
    mask[:, 0] = False  # the first query sees nothing
    return {"key_mask": mask}


def gates(p: Problem) -> dict[str, Any]:
    b, n, g, d = p.k.shape
    log = -torch.rand(b, n, g).square()
    log[:, 3::17], log[:, 7::23], log[:, 11::29] = -20, 0, -1e4
    return half(p) | {"log_decay": log, "angle_steps": torch.randn(b, n, 1, d // 2), "eps_mode": "add"}


def write(p: Problem) -> dict[str, Any]:
    return {"write": torch.rand(p.k.shape[:3])}


def decay(p: Problem) -> dict[str, Any]:
    return {"decay": torch.tensor([0.9, 0.999][: p.k.shape[2]])}


def packed(p: Problem) -> dict[str, Any]:
    n = p.k.shape[1]
    return plain(p) | {"cu_seqlens": torch.tensor([0, n // 4, n // 4, n], dtype=torch.int32)}


def both_ways(p: Problem) -> dict[str, Any]:
    return {"causal": False}


def other_positions(p: Problem) -> dict[str, Any]:
    at = torch.arange(p.k.shape[1])
    return half(p) | {"positions": at + 2**30, "key_positions": at.flip(0) * 3 + 2**30}


def raw(p: Problem) -> dict[str, Any]:
    """Nothing is done to q, k and v: the tiles go into products as they were loaded."""
    return {"feature_map": None, "rotary": None, "normalize": False}


def clamped(p: Problem) -> dict[str, Any]:
    """The divisor is eps for the first tokens, den for the last."""
    return {"eps": 50.0 * p.size}


def mapped(name: str, **more: Any) -> Options:
    return lambda p: plain(p) | {"feature_map": name} | more


def axial(p: Problem) -> dict[str, Any]:
    return {"rotary": Rotary.axial(p.q.shape[3], 2), "positions": torch.randint(0, 99, (p.k.shape[1], 2))}


def partial(p: Problem) -> dict[str, Any]:
    d = p.q.shape[3]
    return {"rotary": Rotary(d, layout="half", rotary_dim=d // 2)}


def erase(p: Problem) -> dict[str, Any]:
    """Some tokens erase up to twice what the state holds for their keys, whose length is 1."""
    share = torch.rand(p.k.shape[:3])
    share[:, 2::5] *= 2
    return {"erase": share, "feature_map": None, "normalize": False}


def one_key(p: Problem) -> dict[str, Any]:
    """The same key at each token, with b = 2. Rounding makes it longer than 299 others: the state might grow."""
    keys = torch.randn(300, p.k.shape[3]).to(p.dtype)
    lengths = torch.nn.functional.normalize(keys.float(), dim=-1).to(p.dtype).float().norm(dim=-1)
    p.q = p.k = keys[lengths.argmax()].expand_as(p.k).clone()
    return {"erase": torch.full(p.k.shape[:3], 2.0), "feature_map": "unit", "normalize": False}


def undivided_gates(p: Problem) -> dict[str, Any]:
    return {name: x for name, x in gates(p).items() if name != "eps_mode"}


def units(p: Problem, pairs: int) -> dict[str, Any]:
    """A log decay per unit, of all sizes side by side: -1e-6 .. -1e4."""
    *shape, d = p.k.shape
    return {"log_decay": -(10 ** (10 * torch.rand(*shape, d - pairs) - 6))}


def units_of_pairs(p: Problem) -> dict[str, Any]:
    return units(p, p.q.shape[3] // 2)


def units_of_both_kinds(p: Problem) -> dict[str, Any]:
    """Half of the features turn in pairs."""
    return partial(p) | units(p, p.q.shape[3] // 4)


def join(*parts: Options) -> Options:
    def options(p: Problem) -> dict[str, Any]:
        return {name: x for part in parts for name, x in part(p).items()}

    return options


ALL = (64, 128, 256)
GROUPED: dict[str, Any] = {"b": 2, "h": 4, "g": 2}
DELTA: dict[str, Any] = {"delta": True, "sizes": ALL}
CASES = {
    "plain": Case(plain, before=33, sizes=ALL),
    "gates": Case(join(gates, mask), n=100, before=20, **GROUPED, sizes=ALL),
    "packed": Case(join(packed, decay), h=4, g=2, sizes=(64, 128)),
    "segments": Case(join(plain, mask, decay, write, clamped), n=230, before=33, segments=True, sizes=ALL),
    "bidirectional": Case(join(other_positions, both_ways, mask), n=100, **GROUPED, sizes=ALL),
    "bidirectional packed": Case(join(packed, both_ways), n=190, segments=True),
    "bidirectional resumed": Case(join(plain, both_ways, mask), n=230, before=33, segments=True),
    "raw": Case(raw, before=33, sizes=(64, 128)),
    "raw bidirectional": Case(join(raw, both_ways), before=33, sizes=ALL),
    "odd sizes": Case(partial, h=3, g=1, less=(16, 24), sizes=(64, 128)),
    "relu2": Case(mapped("relu2")),
    "silu": Case(mapped("silu", normalize=False)),
    "axes": Case(axial),
    "state alone": Case(join(half, decay, mask), n=190, g=2, segments=True, kind="state"),
    "steps": Case(plain, b=2, n=3, h=4, g=2, kind="step", sizes=ALL),
    "steps with gates": Case(join(gates, mask, write), b=2, n=5, h=4, g=2, kind="step", sizes=ALL),
    "erase": Case(join(undivided_gates, erase, write), n=120, before=20, **GROUPED, **DELTA),
    "erase per unit": Case(
        join(undivided_gates, units_of_pairs, erase, write, mask), n=120, before=20, **GROUPED, **DELTA
    ),
    "erase packed": Case(join(packed, decay, erase, mapped("unit")), n=150, h=4, g=2, **DELTA),
    "erase alone": Case(join(plain, erase), before=33, h=1, less=(16, 24), **DELTA),
    "erase, state alone": Case(join(half, erase, mask), n=100, g=2, kind="state", **DELTA),
    "erase, steps": Case(join(undivided_gates, erase, write), b=2, n=5, h=4, g=2, kind="step", **DELTA),
    "erase, one key": Case(one_key, n=1536, h=1, kind="output"),
    "decay per unit": Case(join(mapped("silu", normalize=False), units_of_both_kinds), before=33, sizes=ALL),
    "decay per unit, divided": Case(join(units_of_both_kinds, mask, write), n=100, before=20, **GROUPED),
    "raw steps": Case(raw, b=2, n=5, h=4, g=2, kind="step", less=(16, 24)),
}

"""The delta rule of `step` and `forward`, against the equation in float64 with its error bound."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.kernels.cpu.cases import Case, by_equation, make, random_like, with_threads

pytestmark = pytest.mark.usefixtures("isa")


def exact(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out and the last kv, and the M of each: a rounding error of u adds up to a small multiple of u M."""
    out, state, sizes = by_equation(case)
    return out, state.kv, sizes.out, sizes.kv


def fits(got: Tensor, expected: Tensor, bound: Tensor, dtype: torch.dtype) -> None:
    assert bool(got.isfinite().all())
    u = torch.finfo(dtype).eps / 2
    most = float(((got.double() - expected).abs() / (bound * u + 1e-30)).max())
    assert most <= (16 if dtype == torch.float32 else 4), most


def delta(
    *, b: int = 2, n: int = 70, h: int = 2, g: int = 1, alike: float = 0.0, top: float = 1.0, seed: int = 0,
    shared: bool = False, **more: Any,
) -> Case:  # fmt: skip
    """Unit keys that share a part of their direction: 0 none of it, 1 all of it. erase is in (0, top)."""
    case = make(b, n, h, g, normalize=False, seed=seed, **{"feature_map": 0} | more)
    generator = torch.Generator().manual_seed(seed + 1)
    one = F.normalize(torch.randn(case.k.shape[-1], generator=generator), dim=0)
    k = F.normalize(alike * one + (1 - alike) * F.normalize(case.k.float(), dim=-1), dim=-1)
    rows = (1, n, 1) if shared else (b, n, g)
    erase = top * torch.rand(rows, generator=generator)
    return replace(case, k=k.to(case.k.dtype), z=None, erase=erase)


CASES: dict[str, dict[str, Any]] = {
    "plain": {"layout": 0, "state": False},
    "rotation, a state": {},
    "64 features": {"f": 64, "e": 64, "layout": 1, "decay": 0.1},
    "127 features, 140 values": {"b": 1, "f": 127, "e": 140, "layout": 2, "pairs": 20, "decay": 0.1},
    "small": {"f": 5, "e": 3, "layout": 1, "pairs": 2},
    "keys alike": {"alike": 0.99, "f": 40, "e": 36, "n": 200, "layout": 0},
    "keys alike, erase up to 2": {"alike": 0.9, "top": 2.0, "f": 40, "e": 36, "n": 150, "decay": 0.1},
    "the same key": {"alike": 1.0, "f": 32, "e": 32, "n": 150, "layout": 0},
    "strong gates": {"decay": 30.0, "f": 36, "e": 20},
    "grouped query heads": {"h": 4, "g": 2, "steps": True, "decay": 0.5, "write": True},
    "mask": {"mask": True, "write": True, "shared": True, "g": 2},
    "relu": {"feature_map": 2, "decay": 0.2},
    "many sequences": {"b": 9, "n": 33, "write": True},
}


LONG = {"b": 1, "n": 900, "f": 20, "e": 20, "alike": 0.9, "layout": 0}


@cache  # for all instruction sets
def solved(name: str, dtype: torch.dtype) -> tuple[Case, tuple[Tensor, Tensor, Tensor, Tensor]]:
    case = delta(**CASES.get(name, LONG), dtype=dtype)
    return case, exact(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_forward_is_the_equation(native, name, dtype):
    case, (expected, kv, bound, kv_bound) = solved(name, dtype)
    out, last, z = case.forward(native)
    assert z is None
    fits(out, expected, bound, dtype)
    fits(last, kv, kv_bound, torch.float32 if dtype == torch.float32 else dtype)
    empty, alone, _ = replace(case, q=None).forward(native)
    assert empty.numel() == 0
    torch.testing.assert_close(alone, last, rtol=1e-5, atol=1e-5)


def token(case: Case, t: int, kv: Tensor) -> Case:
    """The call of token t alone."""
    at = {
        name: None if x is None else x[:, t : t + 1]
        for name in ("q", "k", "v", "log_decay", "write", "erase", "key_mask")
        for x in (getattr(case, name),)
    }
    position = None if case.positions is None else case.positions + t
    return replace(case, **at, positions=position, kv=kv)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [x for x in CASES if x not in ("plain", "grouped query heads")])
def test_steps_are_the_equation(native, name, dtype, swapped):
    case, (expected, last, bound, kv_bound) = solved(name, dtype)
    assert case.kv is not None
    kv = case.kv.mT.contiguous().mT if swapped else case.kv.clone()
    out = [token(case, t, kv).step(native) for t in range(case.k.shape[1])]
    fits(torch.cat(out, 1), expected, bound, dtype)
    fits(kv, last, kv_bound, torch.float32)


def test_steps_with_angle_steps_and_grouped_heads(native):
    case = delta(**CASES["grouped query heads"])
    assert case.kv is not None
    assert case.angle is not None
    assert case.angle_steps is not None
    expected, last, bound, kv_bound = exact(case)
    kv, angle = case.kv.clone(), case.angle.clone()
    out = [
        replace(token(case, t, kv), angle_steps=case.angle_steps[:, t : t + 1], angle=angle).step(native)
        for t in range(case.k.shape[1])
    ]
    fits(torch.cat(out, 1), expected, bound, torch.float32)
    fits(kv, last, kv_bound, torch.float32)


def test_values_with_more_heads_than_keys(native):
    case = delta(h=2, g=4, decay=0.2, write=True)
    case = replace(case, k=case.k[:, :, :2].contiguous())
    expected, kv, bound, kv_bound = exact(case)
    out, last, _ = case.forward(native)
    fits(out, expected, bound, torch.float32)
    fits(last, kv, kv_bound, torch.float32)


def test_packed_sequences(native):
    bounds = [0, 3, 3, 40, 70]
    case = delta(b=1, packed=bounds, decay=0.2, layout=0)
    expected, kv, bound, kv_bound = exact(case)
    out, last, _ = case.forward(native)
    fits(out, expected, bound, torch.float32)
    fits(last, kv, kv_bound, torch.float32)


def test_rows_of_a_pool(native):
    case = delta(f=36, e=20, decay=0.1)
    assert case.kv is not None
    whole, last, _ = case.forward(native)
    slots, pool = torch.tensor([4, 1]), torch.full((6, 1, 36, 20), torch.nan)
    pool[slots] = case.kv
    out, *_ = replace(case, kv=pool).forward(native, slots=slots)
    assert torch.equal(out, whole)
    assert torch.equal(pool[slots], last)
    kv = case.kv.clone()
    pool[slots] = case.kv
    steps = [token(case, 0, x).step(native, slots=i) for x, i in ((kv, None), (pool, slots))]
    assert torch.equal(*steps)
    assert torch.equal(pool[slots], kv)
    assert bool(pool[[0, 2, 3, 5]].isnan().all())


@pytest.mark.parametrize(("b", "h", "n"), [(1, 1, 2100), (3, 4, 300)])
def test_the_bits_do_not_depend_on_threads(native, b, h, n):
    case = delta(b=b, h=h, g=h, n=n, f=40, e=36, decay=0.02)
    weights = [random_like(x, 1) for x in case.forward(native)[:2]]
    one, *others = with_threads(
        lambda: [*case.forward(native)[:2], *case.backward(native, *weights, None).values()]
    )
    for other in others:
        assert all(map(torch.equal, one, other))


def test_a_long_sequence_in_pieces(native):
    case, (expected, kv, bound, kv_bound) = solved("long", torch.float32)
    out, last, _ = case.forward(native)
    fits(out, expected, bound, torch.float32)
    fits(last, kv, kv_bound, torch.float32)
    names = ("q", "k", "v", "erase")
    first, second = (
        {name: getattr(case, name)[:, i] for name in names} for i in (slice(411), slice(411, None))
    )
    head, state, _ = replace(case, **first).forward(native)
    tail, state, _ = replace(case, **second, kv=state).forward(native)
    fits(torch.cat((head, tail), 1), expected, bound, torch.float32)
    fits(state, kv, kv_bound, torch.float32)


def test_erase_of_zero_is_the_call_without_it(native):
    case = delta(f=40, e=36, decay=0.1, layout=2)
    zeros = replace(case, erase=torch.zeros(1, 1, 1).expand(1, 70, 1))
    z = torch.zeros(2, 1, 40, dtype=torch.float64)
    plain = replace(case, erase=None, z=z)
    for got, expected in zip(zeros.forward(native)[:2], plain.forward(native)[:2], strict=True):
        assert torch.equal(got, expected)
    kv = [case.kv.clone(), case.kv.clone()]
    out = [token(zeros, 0, kv[0]).step(native), token(plain, 0, kv[1]).step(native)]
    assert torch.equal(*out)
    assert torch.equal(*kv)


@pytest.mark.parametrize("what", ["v", "k", "erase"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_later_tokens_change_no_bit_of_earlier_results(native, what, number, dtype):
    case = delta(b=1, n=100, h=2, f=40, e=36, decay=0.1, dtype=dtype)
    x = getattr(case, what).clone()
    x[:, 45:] = number
    out, changed = (y.forward(native)[0][:, :45] for y in (case, replace(case, **{what: x})))
    assert bool(out.isfinite().all())
    assert torch.equal(out, changed)


def test_masked_tokens_may_hold_anything(native):
    case = delta(mask=True, decay=0.1)
    gone = ~case.key_mask[:, :, None]
    dirty = replace(
        case, erase=case.erase.masked_fill(gone, torch.nan), k=case.k.masked_fill(gone[..., None], torch.nan),
        v=case.v.masked_fill(gone[..., None], torch.inf),
    )  # fmt: skip
    assert all(map(torch.equal, case.forward(native)[:2], dirty.forward(native)[:2]))
    weights = [random_like(x, 1) for x in case.forward(native)[:2]]
    one, other = (x.backward(native, *weights, None) for x in (case, dirty))
    assert all(torch.equal(x, other[name]) for name, x in one.items())


def test_types_and_shared_rows_of_erase(native):
    case = delta(g=2, shared=True)
    half = replace(case, erase=case.erase.bfloat16())
    full = replace(case, erase=half.erase.double().expand(2, -1, 2).contiguous())
    assert all(map(torch.equal, half.forward(native)[:2], full.forward(native)[:2]))


def test_what_does_not_go_with_erase_is_refused(native):
    case = delta()
    for message, change in {
        "erase: got shape": {"erase": torch.ones(2, 70, 3)},
        "erase: got dtype|erase: got": {"erase": torch.ones(2, 70, 1, dtype=torch.int64)},
        "normalize: got true with erase": {"normalize": True},
        "erase: got causal=False": {"causal": False},
        "z: got a tensor with erase": {"z": torch.ones(2, 1, 12, dtype=torch.float64)},
    }.items():
        with pytest.raises((ValueError, RuntimeError), match=message):
            replace(case, **change).forward(native)
    plain = replace(token(case, 0, case.kv), erase=None)
    with pytest.raises(ValueError, match="erase: got None for a state without z"):
        plain.step(native)

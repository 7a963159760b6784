"""The delta rule: what ``erase`` does, what the calls around it see, and which calls refuse it."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from linrope import LinearAttentionState, Rotary, feature_maps, linear_rope_attention, linear_rope_state
from linrope.backends import native
from linrope.conformance.bounds import BOUNDS
from linrope.recurrence.identities import WITHOUT_Z
from tests.support.contract import of_backends
from tests.support.equation import Equation
from tests.support.oracle import NATIVE, everything, randoms

B, N, H, G, F, E = 2, 37, 4, 2, 6, 3
COMPUTE = ("reference", "eager")
computing = pytest.mark.parametrize("backend", COMPUTE)
computing_float32 = pytest.mark.parametrize("backend", [*COMPUTE, NATIVE, "triton"])
UNIT = feature_maps.make("unit", F, activation="silu")
WITHOUT: dict[str, Any] = {"feature_map": UNIT, "normalize": False, "rotary": Rotary(F)}
Tensors = tuple[list[Tensor], dict[str, Tensor]]


def tokens(b: int = B, n: int = N) -> Tensors:
    """q, k, v with keys of about length 1, and gates, steps and factors of each token."""
    q, k, v = randoms(b, n, H, F, g=G, e=E)
    generator = torch.Generator().manual_seed(1)

    def numbers(*shape: int) -> Tensor:
        return torch.rand(b, n, *shape, generator=generator, dtype=torch.float64)

    data = {"log_decay": -numbers(G) / 5, "angle_steps": 2 * numbers(G, F // 2), "write": numbers(G)}
    return [q, k / k.norm(dim=-1, keepdim=True), v], data | {"erase": 2 * numbers(G)}


def part(tensors: Tensors, where: slice) -> Tensors:
    return [x[:, where] for x in tensors[0]], {name: x[:, where] for name, x in tensors[1].items()}


def call(tensors: Tensors, backend: str, **options: Any) -> tuple[Tensor, LinearAttentionState]:
    qkv, data = tensors
    return linear_rope_attention(*qkv, **WITHOUT | data | options, backend=backend, return_state=True)


@computing
def test_the_state_alone_is_that_of_a_call(backend: str) -> None:
    (q, k, v), data = tokens()
    _, state = call(([q, k, v], data), backend)
    alone = linear_rope_state(k, v, **data, feature_map=UNIT, rotary=WITHOUT["rotary"], backend=backend)
    torch.testing.assert_close(alone.kv, state.kv, rtol=0, atol=1e-12)
    assert alone.identity == state.identity


@computing
def test_a_value_is_read_back_until_its_key_is_written_again(backend: str) -> None:
    keys = torch.eye(F, dtype=torch.float64)[[0, 1, 0]].view(1, 3, 1, F)
    values = torch.arange(1.0, 4, dtype=torch.float64).view(1, 3, 1, 1)
    options: dict[str, Any] = {"feature_map": None, "normalize": False, "backend": backend}
    erase = torch.ones(1, 3, 1, dtype=torch.float64)
    assert linear_rope_attention(keys, keys, values, erase=erase, **options).flatten().tolist() == [1, 2, 3]
    assert linear_rope_attention(keys, keys, values, **options).flatten().tolist() == [1, 2, 4]


@computing
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 1e30])
def test_left_padding_may_hold_anything(garbage: float, backend: str) -> None:
    (qkv, data), pad = tokens(), 5
    mask = torch.ones(B, pad + N, dtype=torch.bool)
    mask[:, :pad] = False
    padded = [torch.cat((torch.full_like(x[:, :pad], garbage), x), 1) for x in qkv]
    padded[0][:, :pad] = qkv[0][:, :pad]  # a hidden token still asks
    around = {name: torch.cat((torch.full_like(x[:, :pad], garbage), x), 1) for name, x in data.items()}
    around["log_decay"] = torch.cat((torch.zeros(B, pad, G), data["log_decay"]), 1)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    found = everything(*padded, **WITHOUT | around, backend=backend, key_mask=mask, positions=places)
    plain = everything(*qkv, **WITHOUT | data, backend=backend)
    out = call((qkv, data), backend)[0]
    torch.testing.assert_close(found["out"][:, pad:], out, rtol=0, atol=1e-11)
    torch.testing.assert_close(found["kv"], plain["kv"], rtol=0, atol=1e-11)
    assert found["dk"].isfinite().all()
    assert found["derase"].isfinite().all()
    assert found["derase"][:, :pad].abs().max() == 0


KINDS = ("open gates", "closed gates", "gates of all sizes", "nearly equal keys", "erase up to 2")


@of_backends("kind", reference=KINDS, eager=KINDS, native=KINDS, triton=KINDS[2:])
def test_float32_stays_within_the_bound(kind: str, backend: str) -> None:
    """out within 16 u M, and gradients as exact, the gates' included, with a loss on the last state too."""
    n = 40 if backend == "triton" else 150
    q, k, v = randoms(1, n, 2, 16)
    share = torch.rand(1, n, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    gates = -share / 10
    if kind == "nearly equal keys":
        k, share, gates = k[:, :1] + 1e-2 * k, torch.ones_like(share), torch.zeros_like(gates)
    elif kind == "closed gates":
        gates = torch.full_like(gates, -20)
    elif kind == "gates of all sizes":
        gates[:, ::17], gates[:, 3::7], gates[:, 5::11] = -1e4, 0, -20
    narrow = [x.float() for x in (q / 4, k / k.norm(dim=-1, keepdim=True), v)]
    data = {"erase": share * (2 if kind == "erase up to 2" else 1), "log_decay": gates}
    data = {name: x.float() for name, x in data.items()}
    options: dict[str, Any] = {"feature_map": None, "normalize": False, "rotary": Rotary(16)}
    wide, equation = {name: x.double() for name, x in data.items()}, Equation()
    exact = everything(*(x.double() for x in narrow), call=equation, **options, **wide)
    found = everything(*narrow, **options, **data, backend=backend)
    assert ((found["out"].double() - exact["out"]).abs() <= BOUNDS[torch.float32] * equation.sizes.out).all()
    for name, x in exact.items():
        assert (found[name].double() - x).abs().max() <= 1e-5 * x.abs().max(), name


OF_CALL_AND_ERASE = [
    *product((torch.bfloat16, torch.float16, torch.float32), (torch.bfloat16, torch.float32, torch.float64))
]


@of_backends(
    "dtype dtype_of_erase", reference=OF_CALL_AND_ERASE, eager=OF_CALL_AND_ERASE, native=OF_CALL_AND_ERASE,
    triton=[(torch.float16, torch.bfloat16), (torch.float32, torch.float64)],
)  # fmt: skip
def test_dtypes_may_differ(dtype: torch.dtype, dtype_of_erase: torch.dtype, backend: str) -> None:
    qkv, data = tokens(1, 9) if backend == "triton" else tokens()
    qkv, data = [x.to(dtype) for x in qkv], {"erase": data["erase"].to(dtype_of_erase).requires_grad_()}
    out, state = call((qkv, data), backend)
    exact, _ = call(([x.double() for x in qkv], {"erase": data["erase"].double()}), "reference")
    assert out.dtype == dtype
    assert state.kv.dtype == torch.float32
    assert (out - exact).abs().max() < 8 * torch.finfo(dtype).eps * exact.abs().max()
    out.float().sum().backward()
    assert data["erase"].grad is not None
    assert data["erase"].grad.dtype == dtype_of_erase


@computing_float32
def test_a_loss_on_the_state_alone(backend: str) -> None:
    qkv, data = tokens(1, 20) if backend == "triton" else tokens()
    leaves = [x.float().requires_grad_() for x in qkv]
    narrow = {name: x.float() for name, x in data.items()}
    _, state = call((leaves, narrow), backend)
    dq, dk, dv = torch.autograd.grad(state.kv.square().sum(), leaves, allow_unused=True)
    _, exact = call(
        ([x.double() for x in leaves], {name: x.double() for name, x in narrow.items()}), "reference"
    )
    expected = torch.autograd.grad(exact.kv.square().sum(), leaves[1:])
    assert dq is None or dq.abs().max() == 0
    for found, x in zip((dk, dv), expected, strict=True):
        assert (found - x).abs().max() <= 1e-5 * x.abs().max()


def test_the_reference_has_second_derivatives() -> None:
    (q, k, v), data = part(tokens(1), slice(4))
    leaves = [x.requires_grad_() for x in (k, data["erase"])]

    def out(k: Tensor, erase: Tensor) -> Tensor:
        return linear_rope_attention(q, k, v, **WITHOUT, erase=erase, backend="reference")

    assert torch.autograd.gradgradcheck(out, leaves, fast_mode=True)


@computing
@pytest.mark.parametrize("way", ["autocast", "checkpoint", "inference mode"])
def test_what_pytorch_does_around_a_call_changes_no_bit(way: str, backend: str) -> None:
    qkv, data = tokens()
    qkv, data = [x.float() for x in qkv], {name: x.float() for name, x in data.items()}

    def around(*args: Any, **kwargs: Any) -> Any:
        if way == "checkpoint":
            return checkpoint(linear_rope_attention, *args, **kwargs, use_reentrant=False)
        if way == "inference mode":
            with torch.inference_mode():
                linear_rope_attention(*(x.detach() for x in args), **kwargs)
            return linear_rope_attention(*args, **kwargs)
        with torch.autocast("cpu", torch.bfloat16):
            return linear_rope_attention(*args, **kwargs)

    plain = everything(*qkv, **WITHOUT | data, backend=backend)
    found = everything(*qkv, call=around, **WITHOUT | data, backend=backend)
    for name, x in plain.items():
        assert torch.equal(found[name], x), name
        assert found[name].dtype == x.dtype


@computing
@pytest.mark.parametrize("what", ["k", "v", "erase"])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_what_is_no_number_reaches_all_later_tokens_of_its_head_alone(
    what: str, wrong: float, backend: str
) -> None:
    """docs/numerics.md: earlier tokens of its chunk, too, in reference of all its sequence."""
    t, n = 70, 150
    (q, k, v), data = tokens(n=n)
    inputs = {"q": q, "k": k, "v": v, **data}
    clean, state = call(([q, k, v], data), backend)
    changed = inputs[what].clone()
    changed[0, t, 0] = wrong
    inputs[what] = changed
    out, last = call(([inputs.pop(name) for name in "qkv"], inputs), backend)
    assert not out[0, t:, : H // G].isfinite().any()
    assert not last.kv[0, 0].isfinite().any()
    untouched = torch.ones(B, n, H, dtype=torch.bool)
    untouched[0, 64 if backend == "eager" else 0 :, : H // G] = False
    assert torch.equal(out[untouched], clean[untouched])
    assert torch.equal(last.kv[0, 1], state.kv[0, 1])
    assert torch.equal(last.kv[1], state.kv[1])


# The state


@computing
def test_a_normalizer_refuses_the_state(backend: str) -> None:
    tensors, positive = tokens(), feature_maps.make("unit", F, activation="elu+1")
    _, state = call(tensors, backend, feature_map=positive, rotary=None, angle_steps=None)
    assert state.z.abs().max() == 0
    qkv = tensors[0]
    with pytest.raises(ValueError, match="state: made without z; expected normalize=False"):
        linear_rope_attention(*qkv, feature_map=positive, state=state, backend=backend)
    how = {"feature_map": positive, "normalize": False, "backend": backend}
    _, later = linear_rope_attention(*qkv, state=state, **how, return_state=True)
    assert later.identity.endswith(WITHOUT_Z)


@computing
def test_a_donated_state_loses_its_z(backend: str) -> None:
    qkv, data = part(tokens(), slice(1))
    options: dict[str, Any] = {
        "feature_map": None,
        "normalize": False,
        "erase": data["erase"],
        "backend": backend,
    }
    state = linear_rope_state(*qkv[1:], feature_map=None)
    kv = state.kv
    with torch.no_grad():
        expected, after = linear_rope_attention(*qkv, state=state, **options, return_state=True)
        out, last = linear_rope_attention(*qkv, state=state.donate(), **options, return_state=True)
    assert last.kv is kv
    assert last.identity == after.identity == state.identity + WITHOUT_Z
    assert torch.equal(out, expected)
    assert torch.equal(last.kv, after.kv)
    assert last.z.abs().max() == 0


@computing_float32
@torch.no_grad()
def test_a_refused_step_leaves_a_donated_state_as_it_was(backend: str) -> None:
    qkv, data = part(tokens(), slice(1))
    qkv = [x.float() for x in qkv]
    how: dict[str, Any] = {"feature_map": feature_maps.make("unit", F, activation="elu+1")}
    state = linear_rope_state(*qkv[1:], **how)  # its z, which a call with erase sets to 0, is not 0
    before = state.clone()
    how |= {"normalize": False, "erase": data["erase"].float(), "log_decay": torch.ones(B, 1, G)}
    with pytest.raises(ValueError, match="log_decay: got up to 1, expected numbers <= 0"):
        linear_rope_attention(*qkv, state=state.donate(), backend=backend, **how)
    assert torch.equal(state.kv, before.kv)
    assert torch.equal(state.z, before.z)


@computing
def test_a_pool_must_be_made_without_z(backend: str) -> None:
    qkv, data = tokens()
    options: dict[str, Any] = {"feature_map": None, "erase": data["erase"], "backend": backend}
    slots = torch.tensor([2, 0])
    empty = [x.new_zeros(3, 0, *x.shape[2:]) for x in qkv[1:]]
    with_z = linear_rope_state(*empty, feature_map=None)
    with pytest.raises(ValueError, match="state: got rows of a pool with z, expected one without z"):
        linear_rope_attention(*qkv, state=with_z.at(slots), normalize=False, **options)
    pool = linear_rope_state(*empty, **options | {"erase": data["erase"][:1, :0]})
    expected, after = linear_rope_attention(*qkv, normalize=False, **options, return_state=True)
    with torch.no_grad():
        out = linear_rope_attention(*qkv, state=pool.at(slots), normalize=False, **options)
    assert torch.equal(out, expected)
    assert torch.equal(pool.kv[slots], after.kv)


@computing_float32
@pytest.mark.parametrize("n", [1, 2])
def test_a_call_in_a_pool_leaves_other_rows_as_they_are(n: int, backend: str) -> None:
    """Its own rows have a z of zeros then, also where calls without erase have added to it."""
    tensors = tokens(3, 2 + n)
    qkv, data = ([x.float() for x in tensors[0]], {name: x.float() for name, x in tensors[1].items()})
    first, second, third = (part((qkv, data), x) for x in (slice(1), slice(1, 2), slice(2, None)))
    _, pool = call(first, backend)
    with torch.no_grad():
        _, pool = call(second, backend, state=pool, erase=None)
        before = {name: x.clone() for name, x in pool.tensors().items()}
        slots = torch.tensor([1])
        call(
            ([x[:1] for x in third[0]], {name: x[:1] for name, x in third[1].items()}),
            backend,
            state=pool.at(slots),
        )
    assert all(torch.equal(x[[0, 2]], before[name][[0, 2]]) for name, x in pool.tensors().items())
    assert not torch.equal(pool.kv[1], before["kv"][1])
    assert pool.z[1].abs().max() == 0


# Which backend computes it


@pytest.mark.parametrize("n", [N, 1])  # a decoding step is chosen a backend for apart
def test_auto_takes_native_on_a_cpu(n: int) -> None:
    qkv, data = tokens()
    (q, k, v), erase = (x[:, :n].float() for x in qkv), data["erase"][:, :n]
    options: dict[str, Any] = {"feature_map": None, "normalize": False, "erase": erase}
    if n == 1:
        options["state"] = linear_rope_state(k, v, feature_map=None)
    expected = "eager" if native.why_not() else "native"
    out = linear_rope_attention(q, k, v, **options)
    assert torch.equal(out, linear_rope_attention(q, k, v, **options, backend=expected))

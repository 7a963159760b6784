"""What must change nothing: grouping, shifting, empty tensors, masked numbers, strides, modes."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import Tensor

from linrope import Rotary, feature_maps, linear_rope_attention, linear_rope_state
from linrope.operation import checks
from tests.support.contract import of_backends, refused
from tests.support.oracle import (
    BACKENDS,
    DATA,
    MAPS,
    NATIVE,
    NATIVE_MAPS,
    POSITIVE,
    assert_same,
    both_directions,
    every_backend,
    every_kernel,
    everything,
    num_features,
    random_mask,
    random_state,
    randoms,
    use_map,
)


def tokens_for(backend: str) -> int:
    """More than one chunk, but fewer in the slow interpreter."""
    return 20 if backend == "triton" else 70


def heads_for(backend: str) -> int:
    """One in the slow interpreter, which runs a program for each."""
    return 1 if backend == "triton" else 2


# Shifted positions, and calls without keys


@every_backend
@both_directions
@pytest.mark.parametrize("explicit", [True, False])
def test_shifting_all_positions_changes_nothing(explicit: bool, causal: bool, backend: str) -> None:
    q, k, v = randoms(2, 70, 2, 4)
    how: dict[str, Any] = {"rotary": Rotary(4), "causal": causal, "backend": backend}
    at_zero, shift = linear_rope_attention(q, k, v, **how), 1_000_000
    if explicit:
        how["positions"] = shift + torch.arange(70)
    else:
        _, empty = linear_rope_attention(q[:, :0], k[:, :0], v[:, :0], return_state=True, **how)
        how["state"] = replace(empty, position=empty.position + shift)
    # A float64 angle near 1e6 is spaced by 1e-10.
    assert_same({"out": linear_rope_attention(q, k, v, **how)}, {"out": at_zero}, tolerance=1e-9)


@every_kernel
@pytest.mark.parametrize(("b", "n", "m"), [(2, 0, 0), (0, 5, 5), (2, 5, 0), (2, 0, 5)])
def test_empty_tensors_give_zeros_and_empty_gradients(b: int, n: int, m: int, backend: str) -> None:
    q, k, v = randoms(b, n, 2, 4, m=m, dtype=torch.float32)
    xpos = Rotary(4, xpos=20.0)
    rotations = (Rotary(4),) if backend == "triton" else (Rotary(4), None, xpos)
    for causal, rotary, with_state in product((True, False), rotations, (True, False)):
        if (causal and n != m) or (rotary is xpos and not (causal and backend in BACKENDS)):
            continue
        how: dict[str, Any] = {"rotary": rotary}
        state = random_state(k, v, how) if with_state else None
        if m != n:
            how["positions"] = torch.arange(n)
        results = everything(q, k, v, state, causal=causal, backend=backend, **how)
        assert results["out"].shape == (b, n, 2, 4)
        assert all(x.isfinite().all() for x in results.values())
        assert with_state or m > 0 or not results["out"].any()


@both_directions
@of_backends(
    "name",
    reference=POSITIVE,
    eager=POSITIVE,
    triton=["elu+1"],
    native=[x for x in NATIVE_MAPS if x in POSITIVE],
)
def test_a_query_without_keys_gives_zero_and_finite_gradients(name: str, causal: bool, backend: str) -> None:
    n = tokens_for(backend)
    q, k, v = randoms(2, n, heads_for(backend), 4, dtype=torch.float32)
    how = use_map(name, 4)
    mask = torch.ones(2, n, dtype=torch.bool)
    mask[0], mask[1, :3] = False, False
    rotary = Rotary(num_features(how, 4))
    results = everything(q, k, v, rotary=rotary, key_mask=mask, causal=causal, backend=backend, **how)
    assert not results["out"][0].any()
    assert not (causal and results["out"][1, :3].any())
    assert results["out"][1, 3:].any()
    assert all(x.isfinite().all() for x in results.values())
    assert not results["dk"][0].any()


PLACES = [*product((1, 0), (5, 0), (True, False))]


@of_backends(
    "row token causal", reference=PLACES, eager=PLACES, native=PLACES, triton=[(1, 5, True), (0, 0, False)]
)  # fmt: skip
def test_a_nan_stays_in_its_sequence(row: int, token: int, causal: bool, backend: str) -> None:
    q, k, v = randoms(3, tokens_for(backend), 1, 4, dtype=torch.float32)
    how: dict[str, Any] = {"rotary": Rotary(4), "causal": causal, "backend": backend}
    state = random_state(k, v, {"rotary": how["rotary"]})
    clean = everything(q, k, v, state, **how)
    for x in (q, k, v):
        x[row, token, 0, 0] = math.nan
    dirty = everything(q, k, v, state, **how)
    others = [i for i in range(3) if i != row]
    for name, x in clean.items():
        assert torch.equal(dirty[name][others], x[others]), name
    assert dirty["out"][row].isnan().any()


IN_A_PACK = [*product(("k", "v", "log_decay"), (False, True))]


@of_backends(
    "wrong state_alone", reference=IN_A_PACK, eager=IN_A_PACK, native=IN_A_PACK,
    triton=[("log_decay", False), ("v", True)],
)  # fmt: skip
def test_a_nan_stays_in_its_packed_sequence(wrong: str, state_alone: bool, backend: str) -> None:
    q, k, v = randoms(1, 12, 1, 4, dtype=torch.float32)
    inputs = {"k": k, "v": v, "log_decay": -torch.rand(1, 12, 1), "angle_steps": torch.rand(1, 12, 1, 2)}
    how: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 4, 8, 12]), "backend": backend}

    def gradients() -> list[Tensor]:
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        if state_alone:
            state = linear_rope_state(**leaves, **how)
            loss = state.kv.sum() + state.z.sum()
        else:
            loss = linear_rope_attention(q, **leaves, **how).sum()
        return list(torch.autograd.grad(loss, list(leaves.values())))

    clean = gradients()
    inputs[wrong][:, 5] = math.nan
    others = [*range(4), *range(8, 12)]
    for found, expected in zip(gradients(), clean, strict=True):
        torch.testing.assert_close(found[:, others], expected[:, others], rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("poison")
@every_kernel
def test_tokens_outside_of_all_packed_sequences_give_zeros(backend, monkeypatch) -> None:
    """On a GPU and in torch.compile such bounds are not refused."""
    monkeypatch.setattr(checks, "values_readable", lambda x: False)
    q, k, v = randoms(1, 12, 1, 4, dtype=torch.float32)
    gates, steps, write = -torch.rand(1, 12, 1), torch.rand(1, 12, 1, 2), torch.rand(1, 12, 1)
    how = {"cu_seqlens": torch.tensor([2, 5, 9]), "log_decay": gates, "angle_steps": steps, "write": write}
    if "erase" not in refused(backend):
        how |= {"erase": torch.rand(1, 12, 1), "feature_map": "unit", "normalize": False}
    found = everything(q, k, v, backend=backend, **how)
    for name in ("out", "dq", "dk", "dv", *(f"d{name}" for name in DATA if name in how)):
        assert not found[name][:, [0, 1, 9, 10, 11]].any(), name
        assert found[name][:, 3:5].any(), name


GARBAGE = (math.nan, math.inf, -math.inf, 1000.0)
# (map, all keys or those before, what masked keys hold). The other maps' features are made before a backend sees a key.
BY_MAP = [(name, causal, GARBAGE) for name in ("elu+1", "exp") for causal in (True, False)]
BY_MAP += [(name, True, (x,)) for name, x in zip(MAPS, cycle(GARBAGE)) if name not in ("elu+1", "exp")]


@of_backends(
    "name causal held", reference=BY_MAP, eager=BY_MAP, native=[x for x in BY_MAP if x[0] in NATIVE_MAPS],
    triton=[("elu+1", False, (math.nan,)), ("relu2", True, (math.inf,))],
)  # fmt: skip
def test_what_masked_keys_hold_does_not_matter(
    name: str, causal: bool, held: tuple[float, ...], backend: str
) -> None:
    n, h = tokens_for(backend), heads_for(backend)
    q, k, v = randoms(2, n, h, 4, dtype=torch.float32)
    how = use_map(name, 4) | {"causal": causal, "backend": backend, "key_mask": random_mask(2, n)}
    how["rotary"] = Rotary(num_features(how, 4))
    factors, hidden = torch.full((2, n, h), 0.02), ~how["key_mask"][..., None]
    cases = [("write", how)]
    if causal and "erase" not in refused(backend) and not how["feature_map"].log_scaled:
        activation = how["feature_map"].elementwise
        fmap = feature_maps.make("unit", 4, activation=activation) if activation else how["feature_map"]
        cases.append(("erase", how | {"normalize": False, "feature_map": fmap}))
    for gate, case in cases:
        clean = everything(q, k, v, **{gate: factors}, **case)
        for garbage in held:
            dirty_k, dirty_v = (x.masked_fill(hidden[..., None], garbage) for x in (k, v))
            dirty = everything(q, dirty_k, dirty_v, **{gate: factors.masked_fill(hidden, garbage)}, **case)
            for tensor in ("out", "kv", "dq", "dv", "dk", f"d{gate}", *(["z"] if gate == "write" else [])):
                assert torch.equal(dirty[tensor], clean[tensor]), tensor


# Strides, dtypes, modes


@of_backends(
    "causal", reference=[True, False], eager=[True, False], native=[True, False], triton=[True]
)  # fmt: skip
def test_strides_of_inputs_and_gradients_do_not_matter(causal: bool, backend: str) -> None:
    """Not in one bit, in compiled kernels; but on a GPU Triton compiles another kernel for other strides."""
    b, n, h, d = 2, tokens_for(backend), 2, 4
    q, k, v = randoms(b, n, h, d, dtype=torch.float64 if backend in BACKENDS else torch.float32)
    q, k, v = q, k[:1].expand_as(k), v[:, :, :1].expand_as(v)
    views = q.transpose(1, 2).contiguous().transpose(1, 2), k.movedim(3, 0).contiguous().movedim(0, 3), v
    tolerance = 1e-12 if backend in BACKENDS else 1e-6 if q.is_cuda else 0.0
    how: dict[str, Any] = {"rotary": Rotary(d), "causal": causal, "backend": backend}
    assert_same(everything(*views, **how), everything(*(x.clone() for x in (q, k, v)), **how), tolerance)
    alike = [x[..., :1].expand_as(x) for x in (q, k, v)]  # a last stride of 0
    assert_same(everything(*alike, **how), everything(*(x.contiguous() for x in alike), **how), tolerance)

    weights = torch.randn(n, dtype=q.dtype)[None, :, None, None].expand(b, n, h, d)
    grads = []
    for weight in (weights, weights.contiguous(), weights.transpose(2, 3).contiguous().transpose(2, 3)):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = linear_rope_attention(*leaves, **how)
        grads.append(dict(zip("qkv", torch.autograd.grad(out, leaves, weight), strict=True)))
    assert_same(grads[0], grads[1], tolerance)
    assert_same(grads[2], grads[1], tolerance)


@pytest.mark.parametrize("backend", ["reference", "eager", NATIVE])
@pytest.mark.parametrize("n", [0, 1, 5])
def test_strides_of_states_and_positions_do_not_matter(n: int, backend: str) -> None:
    """kv and z with gaps or in another order, gates and positions of stride 0: without and with gradients."""
    q, k, v = randoms(2, n, 2, 4, dtype=torch.float32)
    gate = torch.tensor(-0.5).expand(2, n, 2)
    places = torch.tensor(7).expand(n)
    how: dict[str, Any] = {"rotary": Rotary(4), "backend": backend, "return_state": True}
    _, good = linear_rope_attention(*randoms(2, 3, 2, 4, seed=1, dtype=torch.float32), **how)
    odd = replace(good, kv=good.kv.mT.contiguous().mT, z=torch.stack((good.z, good.z), -1)[..., 0])
    results = []
    for state, log_decay, positions in ((good, gate.clone(), places.clone()), (odd, gate, places)):
        call = {**how, "state": state, "log_decay": log_decay, "positions": positions}
        with torch.no_grad():
            out, after = linear_rope_attention(q, k, v, **call)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        recorded, _ = linear_rope_attention(*leaves, **call)
        results.append((out, after.kv, after.z, recorded, *torch.autograd.grad(recorded.sum(), leaves)))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


@every_kernel
def test_strides_of_bounds_and_angles_do_not_matter(backend: str) -> None:
    q, k, v = randoms(1, 8, 2, 4, dtype=torch.float32)
    bounds, steps = torch.tensor([0, 3, 8]), torch.rand(1, 8, 2, 2)
    state = linear_rope_state(k, v, angle_steps=steps, cu_seqlens=bounds)
    odd = replace(state, angle=state.angle.mT.contiguous().mT)
    gaps = torch.stack((bounds, bounds), -1)[..., 0]
    how: dict[str, Any] = {"angle_steps": steps, "backend": backend}
    expected = everything(q, k, v, state, cu_seqlens=bounds, **how)
    assert_same(everything(q, k, v, odd, cu_seqlens=gaps, **how), expected, 0.0)
    with torch.no_grad():
        out = linear_rope_attention(q, k, v, state=odd, cu_seqlens=gaps, **how)
    assert torch.equal(out, expected["out"])


@pytest.mark.parametrize("backend", ["reference", "eager", NATIVE])
@pytest.mark.parametrize("n", [0, 1, 5])
def test_strides_of_coordinates_do_not_matter(n: int, backend: str) -> None:
    q, k, v = randoms(2, n, 2, 8, dtype=torch.float32)
    how: dict[str, Any] = {"rotary": Rotary.axial(8, axes=2), "backend": backend}
    first = randoms(2, 1, 2, 8, dtype=torch.float32)[1:]
    state = linear_rope_state(*first, positions=torch.ones(1, 2).long(), **how)
    places = torch.arange(2 * n).view(n, 2)
    gaps = torch.stack((places, places), -1)[..., 0]
    one, other = (linear_rope_attention(q, k, v, positions=x, state=state, **how) for x in (places, gaps))
    assert torch.equal(one, other)


def empty_with_strides_of_0(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """As from numpy, which gives an array without numbers such strides."""
    return torch.empty_strided(shape, [0] * len(shape), dtype=dtype)


@every_kernel
@pytest.mark.parametrize(("b", "n", "m"), [(2, 0, 0), (2, 5, 0), (2, 0, 5), (0, 5, 5)])
def test_strides_of_empty_tensors_do_not_matter(b: int, n: int, m: int, backend: str) -> None:
    def tokens(length: int) -> Tensor:
        shape = (b, length, 2, 8)
        return empty_with_strides_of_0(*shape) if b * length == 0 else torch.ones(shape)

    def places(length: int) -> Tensor:
        x = torch.arange(2 * b * length).view(b, length, 2)
        return x if x.numel() else empty_with_strides_of_0(b, length, 2, dtype=torch.int64)

    q, k, v = (tokens(x).requires_grad_() for x in (n, m, m))
    how: dict[str, Any] = {"rotary": Rotary.axial(8, axes=2), "causal": False, "backend": backend}
    out = linear_rope_attention(q, k, v, positions=places(n), key_positions=places(m), **how)
    assert out.shape == (b, n, 2, 8)
    gradients = torch.autograd.grad(out, (q, k, v), tokens(n))
    assert not any(x.any() for x in (out, *gradients) if m == 0)


@every_backend
@pytest.mark.parametrize("name", MAPS)
def test_output_has_the_dtype_of_v_and_the_state_is_wide(name: str, backend: str) -> None:
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    for dtype, causal in product(dtypes, (True, False)):
        q, k, v = (x.requires_grad_() for x in randoms(1, 5, 2, 4, dtype=dtype))
        how = use_map(name, 4) | {"causal": causal, "backend": backend}
        out, state = linear_rope_attention(q, k, v, return_state=True, **how)
        assert out.dtype == dtype
        assert state.kv.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert state.z.dtype == torch.float64
        out.sum().backward()
        assert {x.grad.dtype for x in (q, k, v) if x.grad is not None} == {dtype}


@both_directions
def test_a_float32_state_does_not_narrow_a_float64_call(causal: bool) -> None:
    q, k, v = randoms(2, 70, 2, 4)
    how: dict[str, Any] = {"rotary": Rotary(4), "causal": causal, "backend": "eager"}
    state = random_state(k, v, how).to(dtype=torch.float32)
    narrow, wide = (everything(q, k, v, x, **how) for x in (state, state.to(dtype=torch.float64)))
    assert narrow["kv"].dtype == narrow["dkv"].dtype == torch.float32
    assert_same(narrow, {name: x.to(narrow[name].dtype) for name, x in wide.items()})


@both_directions
@of_backends(
    "name dtype", eager=product(POSITIVE, [torch.float32, torch.bfloat16]),
    reference=[("elu+1", torch.float32)], triton=[("elu+1", torch.float32)],
)  # fmt: skip
def test_autocast_does_not_narrow_the_sums(backend: str, name: str, dtype: torch.dtype, causal: bool) -> None:
    q, k, v = randoms(2, tokens_for(backend), heads_for(backend), 4, dtype=dtype)
    how = use_map(name, 4) | {"causal": causal, "backend": backend}
    how["rotary"] = Rotary(num_features(how, 4))
    plain = everything(q, k, v, **how)

    def call(*args: Any, **kwargs: Any) -> Any:  # PyTorch wants backward passes outside of autocast
        with torch.autocast("cpu", torch.bfloat16):
            return linear_rope_attention(*args, **kwargs)

    cast = everything(q, k, v, call=call, **how)
    for tensor, x in plain.items():
        assert torch.equal(cast[tensor], x), tensor
        assert cast[tensor].dtype == x.dtype


BOTH_ORDERS = [*product((True, False), (True, False))]


@of_backends(
    "inference_first causal", reference=BOTH_ORDERS, eager=BOTH_ORDERS, native=BOTH_ORDERS,
    triton=[(True, True), (False, False)],
)  # fmt: skip
def test_inference_mode_and_training_may_follow_each_other(inference_first, causal, backend) -> None:
    q, k, v = randoms(2, tokens_for(backend), heads_for(backend), 4, dtype=torch.float32)
    how: dict[str, Any] = {"rotary": Rotary(4), "causal": causal, "backend": backend}

    @torch.inference_mode()
    def infer() -> Tensor:
        return linear_rope_attention(q, k, v, **how)

    def train() -> Tensor:
        return everything(q, k, v, **how)["out"]

    calls = (infer, train) if inference_first else (train, infer)
    with ThreadPoolExecutor(1) as fresh:  # a thread of its own has no memory kept from earlier calls
        first, second = fresh.submit(lambda: [call() for call in calls]).result()
    assert torch.equal(first, second)
    with torch.no_grad():
        assert torch.equal(linear_rope_attention(q, k, v, **how), first)


@both_directions
@pytest.mark.parametrize("backend", [NATIVE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "heads"), [(2047, 1), (2200, 8)])  # other rows are cut by tokens
def test_a_row_has_the_same_bits_in_any_batch(n, heads, dtype, causal, backend) -> None:
    q, k, v = randoms(3, n, heads, 8, dtype=dtype)
    batch = linear_rope_attention(q, k, v, causal=causal, backend=backend)
    for i in range(3):
        row = slice(i, i + 1)
        alone = linear_rope_attention(q[row], k[row], v[row], causal=causal, backend=backend)
        assert torch.equal(alone, batch[row])

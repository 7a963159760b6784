"""``state_from_sums``: states around the caller's own sums, in either order of their memory."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from linrope import LinearAttentionState, Rotary, linear_rope_attention, linear_rope_state, state_from_sums
from linrope.backends import native
from tests.oracle import BACKENDS, NATIVE

FEATURES: dict[str, Any] = {"feature_map": None, "normalize": False}


@pytest.fixture(params=native.instruction_sets() or [None])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test once for each instruction set that the machine has."""
    if request.param is None:
        pytest.skip(str(native.why_not()))
    before = native.instruction_set()
    native.use_instruction_set(request.param)
    yield request.param
    native.use_instruction_set(str(before))


def token(b: int, g: int, f: int, e: int, queries: int = 1) -> dict[str, Tensor]:
    return {
        "q": torch.randn(b, 1, g * queries, f),
        "k": torch.randn(b, 1, g, f),
        "v": torch.randn(b, 1, g, e),
        "log_decay": -torch.rand(b, 1, g) * torch.tensor([0.0, 1e-3, 3.0])[torch.randint(3, (b, 1, g))],
    }


@pytest.mark.parametrize(
    "shape", [(1, 1, 4, 8), (2, 3, 37, 19), (1, 2, 1, 5), (3, 1, 128, 64), (2, 2, 64, 1), (1, 2, 40, 33)]
)
@pytest.mark.parametrize("queries", [1, 2])
def test_steps_in_swapped_memory(
    shape: tuple[int, int, int, int], queries: int, instruction_set: str
) -> None:
    torch.manual_seed(0)
    b, g, f, e = shape
    memory = torch.randn(b, g, e, f)
    exact = state_from_sums(memory.mT.double(), feature_map=None)
    state = state_from_sums(memory.mT, feature_map=None)
    for _ in range(4):
        inputs = token(b, g, f, e, queries)
        wide = {name: x.double() for name, x in inputs.items()}
        out, state = linear_rope_attention(
            **inputs, state=state.donate(), return_state=True, backend="native", **FEATURES
        )
        expected, exact = linear_rope_attention(**wide, state=exact, return_state=True, **FEATURES)
        size = linear_rope_attention(
            **{name: x.abs() if name != "log_decay" else x for name, x in wide.items()},
            state=state_from_sums(exact.kv.abs(), feature_map=None),
            **FEATURES,
        )
        assert bool(((out - expected).abs() <= 3e-6 * size + 1e-12).all())
        torch.testing.assert_close(memory.mT.double(), exact.kv, rtol=1e-5, atol=1e-6)
        assert state.kv.data_ptr() == memory.data_ptr()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("swapped", [False, True])
def test_sums_continue_like_the_state_they_come_from(backend: str, n: int, swapped: bool) -> None:
    torch.manual_seed(0)
    rotary = Rotary(8)
    q, k, v = torch.randn(3, 2, 9, 2, 8)
    options: dict[str, Any] = {"rotary": rotary, "decay": torch.tensor([0.9, 0.99]), "backend": backend}
    _, state = linear_rope_attention(q, k, v, return_state=True, **options)
    kv = state.kv.mT.contiguous().mT if swapped else state.kv
    same = state_from_sums(kv, state.z, rotary=rotary, position=state.position)
    assert same.identity == state.identity
    assert same.kv.data_ptr() == kv.data_ptr()
    q, k, v = torch.randn(3, 2, n, 2, 8)
    expected = linear_rope_attention(q, k, v, state=state, **options)
    assert torch.equal(linear_rope_attention(q, k, v, state=same, **options), expected)


def test_without_z_only_the_numerator_can_be_computed() -> None:
    q, k, v = torch.randn(3, 1, 4, 2, 8)
    state = state_from_sums(torch.zeros(1, 2, 8, 8))
    out, after = linear_rope_attention(q, k, v, state=state, normalize=False, return_state=True)
    torch.testing.assert_close(out, linear_rope_attention(q, k, v, normalize=False))
    again = linear_rope_state(k, v, state=LinearAttentionState.cat([after]))
    for made in (state, after, again, after.reorder(torch.tensor([0]))):
        with pytest.raises(ValueError, match="state: made without z; expected normalize=False"):
            linear_rope_attention(q, k, v, state=made)
    with pytest.raises(ValueError, match="state: made with"):
        linear_rope_attention(q, k, v, feature_map="relu", state=state, normalize=False)


def test_a_pool_in_swapped_memory() -> None:
    pool = torch.randn(5, 2, 6, 4)
    rows, before = torch.tensor([3, 1]), pool.clone()
    inputs = token(2, 2, 4, 6)
    out = linear_rope_attention(
        **inputs, state=state_from_sums(pool.mT, feature_map=None).at(rows), **FEATURES
    )
    alone = state_from_sums(before[rows].mT, feature_map=None)
    expected, after = linear_rope_attention(**inputs, state=alone, return_state=True, **FEATURES)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(pool[rows].mT, after.kv)
    assert torch.equal(pool[[0, 2, 4]], before[[0, 2, 4]])


@pytest.mark.skipif(native.why_not() is not None, reason=NATIVE)
def test_other_calls_copy_swapped_memory() -> None:
    """Only a step of one token reads it as it lies."""
    kv = torch.randn(1, 2, 6, 4).mT
    inputs = {
        name: x.expand(-1, 3, -1, -1) if x.ndim == 4 else x.expand(-1, 3, -1)
        for name, x in token(1, 2, 4, 6).items()
    }
    state = state_from_sums(kv, feature_map=None)
    got = linear_rope_attention(**inputs, state=state, backend="native", **FEATURES)
    expected = linear_rope_attention(**inputs, state=state, backend="eager", **FEATURES)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"kv": torch.zeros(2, 3, 4)}, ValueError, r"kv: got shape \(2, 3, 4\), expected \(b, g, f, e\)"),
        ({"kv": [1.0]}, TypeError, "kv: got list, expected a tensor"),
        ({"kv": torch.zeros(1, 2, 4, 4).half()}, TypeError, "state.kv: got torch.float16"),
        ({"z": torch.zeros(1, 2, 5)}, ValueError, "expected .b, g, f, e., .b, g, f., .b,."),
        ({"position": torch.zeros(1)}, TypeError, "state.position: got torch.float32, expected int64"),
        ({"feature_map": "elu"}, ValueError, "feature_map='elu'"),
        (
            {"feature_map": "dpfp"},
            ValueError,
            "feature_map='dpfp': got kv of 4 features, expected the object",
        ),
        ({"rope_order": "during"}, ValueError, "rope_order='during'"),
        ({"rotary": "half"}, TypeError, "rotary: got str, expected a Rotary or None"),
    ],
)
def test_bad_sums(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        state_from_sums(**({"kv": torch.zeros(1, 2, 4, 4)} | arguments))


def test_lists_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"z: got list, expected a tensor"):
        state_from_sums(torch.zeros(1, 2, 8, 4), [1.0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"theta: got list, expected a tensor"):
        Rotary(8, theta=[1.0, 2.0, 3.0, 4.0])  # type: ignore[arg-type]

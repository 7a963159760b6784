"""``state_from_sums``: states around the caller's own sums, in either order of their memory."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from linrope import LinearAttentionState, Rotary, linear_rope_attention, linear_rope_state, state_from_sums
from linrope.backends import native
from tests.support import contract
from tests.support.oracle import NATIVE, every_backend

attend = partial(linear_rope_attention, feature_map=None, normalize=False)


@pytest.fixture(params=native.instruction_sets() or [None])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    """The test once for each instruction set that the machine has."""
    if request.param is None:
        pytest.skip(str(native.why_not()))
    with contract.instruction_set(request.param):
        yield


def token(b: int, g: int, f: int, e: int, queries: int = 1) -> dict[str, Tensor]:
    q, k, v = (torch.randn(b, 1, *shape) for shape in ((g * queries, f), (g, f), (g, e)))
    strengths = torch.tensor([0.0, 1e-3, 3.0])[torch.randint(3, (b, 1, g))]
    return {"q": q, "k": k, "v": v, "log_decay": -torch.rand(b, 1, g) * strengths}


@pytest.mark.parametrize(
    "shape", [(1, 1, 4, 8), (2, 3, 37, 19), (1, 2, 1, 5), (3, 1, 128, 64), (2, 2, 64, 1), (1, 2, 40, 33)]
)
@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.usefixtures("instruction_set")
def test_steps_in_swapped_memory(shape: tuple[int, int, int, int], queries: int) -> None:
    b, g, f, e = shape
    memory = torch.randn(b, g, e, f)
    exact = state_from_sums(memory.mT.double(), feature_map=None)
    state = state_from_sums(memory.mT, feature_map=None)
    for _ in range(4):
        inputs = token(b, g, f, e, queries)
        wide = {name: x.double() for name, x in inputs.items()}
        out, state = attend(**inputs, state=state.donate(), return_state=True, backend="native")
        expected, exact = attend(**wide, state=exact, return_state=True)
        sizes = {name: x.abs() for name, x in wide.items()} | {"log_decay": wide["log_decay"]}
        size = attend(**sizes, state=state_from_sums(exact.kv.abs(), feature_map=None))
        assert bool(((out - expected).abs() <= 3e-6 * size + 1e-12).all())
        torch.testing.assert_close(memory.mT.double(), exact.kv, rtol=1e-5, atol=1e-6)
        assert state.kv.data_ptr() == memory.data_ptr()


@every_backend
@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("swapped", [False, True])
def test_sums_continue_like_the_state_they_come_from(backend: str, n: int, swapped: bool) -> None:
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
    out = attend(**inputs, state=state_from_sums(pool.mT, feature_map=None).at(rows))
    alone = state_from_sums(before[rows].mT, feature_map=None)
    expected, after = attend(**inputs, state=alone, return_state=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(pool[rows].mT, after.kv)
    assert torch.equal(pool[[0, 2, 4]], before[[0, 2, 4]])


@pytest.mark.skipif(native.why_not() is not None, reason=NATIVE)
def test_other_calls_copy_swapped_memory() -> None:
    """Only a step of one token reads it as it lies."""
    state = state_from_sums(torch.randn(1, 2, 6, 4).mT, feature_map=None)
    inputs = {name: x.expand(-1, 3, *x.shape[2:]) for name, x in token(1, 2, 4, 6).items()}
    torch.testing.assert_close(*(attend(**inputs, state=state, backend=x) for x in ("native", "eager")))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"kv": torch.zeros(2, 3, 4)}, ValueError, r"kv: got shape \(2, 3, 4\), expected \(b, g, f, e\)"),
        *(({name: [1.0]}, TypeError, f"^{name}: got list, expected a tensor") for name in ("kv", "z")),
        ({"kv": torch.zeros(1, 2, 4, 4).half()}, TypeError, "state.kv: got torch.float16"),
        ({"z": torch.zeros(1, 2, 5)}, ValueError, "expected .b, g, f, e., .b, g, f., .b,."),
        ({"position": torch.zeros(1)}, TypeError, "state.position: got torch.float32, expected int64"),
        ({"feature_map": "elu"}, ValueError, "feature_map='elu'"),
        ({"feature_map": "taylor2"}, ValueError, "feature_map='taylor2': got kv of 4 features, expected the object"),
        ({"feature_map": "exp"}, ValueError, r"log_scale: got None, expected a tensor \(b, g\), .* feature_map='exp'"),
        ({"log_scale": torch.zeros(1, 2)}, ValueError, r"log_scale: got a tensor, expected None, .*='elu\+1'"),
        ({"rope_order": "during"}, ValueError, "rope_order='during'"),
        ({"rotary": "half"}, TypeError, "rotary: got str, expected a Rotary, such as Rotary.dim"),
    ],
)  # fmt: skip
def test_bad_sums(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        state_from_sums(**({"kv": torch.zeros(1, 2, 4, 4)} | change))

"""What the Triton kernels alone promise: bounds of memory, segments, NaN, and what they refuse.

tests/backends compares them, in Triton's interpreter, with the equation.
"""

from typing import Any

import pytest
import torch
from linrope_kernels import INTERPRETED, decay, log_decay, pieces, repeat, tiles
from linrope_kernels.launch import cut

from linrope import Rotary, linear_rope_attention
from linrope.feature_maps.unit import EPS
from linrope.recurrence.call import Call
from linrope.recurrence.decay import MIN_LOG_DECAY
from linrope.recurrence.packing import rising_bounds
from tests.support.contract import TABLE, check
from tests.support.oracle import random_state, randoms

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poison"),
    # exp(x) is formed for all x in elu(x) + 1, also where x + 1 is taken; NumPy would warn.
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]


def test_whatever_cu_seqlens_holds_nothing_is_read_out_of_bounds() -> None:
    """On a GPU its numbers are not checked."""
    for numbers in ([0, 99, 5, 70], [-5, 1000], [70, 0, 3], [2**31 - 1, -(2**31), 7]):
        cuts = torch.tensor(numbers, dtype=torch.int32)
        bounds = rising_bounds(cuts, 70)
        assert 0 <= int(bounds.min()) <= int(bounds.max()) <= 70
        assert bool((bounds.diff() >= 0).all())
        q = torch.zeros(1, 70, 1, 16)
        where = torch.zeros(1, 70).long()
        spans = cut(Call(q=q, k=q, v=q, positions=where, cu_seqlens=cuts, feature_map="elu+1"), 70).spans
        assert bool((spans[:, 0] <= spans[:, 1]).all())
        assert 0 <= int(spans[:, :2].min()) <= int(spans[:, :2].max()) <= 70
        assert 0 <= int(spans[:, 2].min()) <= int(spans[:, 2].max()) < len(numbers) - 1


@pytest.mark.parametrize("n", [0, 1, 511, 512, 513, 65_536, 1_000_001])
@pytest.mark.parametrize("most", [1, 2, 66, 528])
def test_segments_cover_the_sequence(n: int, most: int) -> None:
    number, length = tiles.segments(n, most)
    assert (number - 1) * length < max(n, 1) <= number * length
    assert number <= most
    assert number == 1 or (length >= tiles.SHORTEST_SEGMENT and length % 128 == 0)


def test_dk_and_dv_have_at_least_32_pairs_in_bfloat16() -> None:
    """With 16, ptxas 12.8 made a kernel that read outside of its memory."""
    for kernel in ("dk", "dv", "dkv"):
        assert tiles.tile(kernel, 16, 16, "bf16", 90, kernel != "dkv").pairs == 32


def test_enough_segments_to_fill_a_gpu() -> None:
    assert tiles.most_segments(8, 1, 132, 4) == 33  # 264 programs, on 132 multiprocessors
    assert tiles.most_segments(240, 1, 132, 4) == 1
    assert tiles.most_segments(150, 1, 132, 4) == 3  # 450 in two waves of 264, since one would leave 114 idle
    assert tiles.most_segments(192, 1, 132, 4) == 1  # 384 would fill two waves no better than 192 fill one
    assert tiles.most_segments(8, 2, 132, 8) == 8


def test_constants_are_those_of_the_other_backends() -> None:
    assert (pieces.UNIT_EPS.value, decay.MIN_LOG_DECAY.value) == (EPS, MIN_LOG_DECAY)


def test_float16_does_not_overflow_where_features_do() -> None:
    q, k, v = randoms(1, 70, 1, 16, dtype=torch.float16, scale=3)
    out = linear_rope_attention(q, k, v, feature_map="exp", rotary=Rotary(16), backend="triton")
    assert out.isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "d", "why"),
    [(torch.float64, 16, r"backend='triton' cannot run: float64: use backend='eager'"),
     *([(torch.bfloat16, 16, r"bfloat16 in Triton's interpreter")] if INTERPRETED else []),  # a GPU multiplies it
     (torch.float32, 258, r"258 features and 258 values per head: it takes up to 256")],
)  # fmt: skip
def test_what_it_cannot_do_is_named(dtype: torch.dtype, d: int, why: str) -> None:
    with pytest.raises(RuntimeError, match=why):
        linear_rope_attention(*randoms(1, 2, 1, d, dtype=dtype), backend="triton")


def test_a_float64_state_is_refused() -> None:
    q, k, v = randoms(1, 2, 1, 16, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="float64"):
        linear_rope_attention(q, k, v, state=random_state(k.double(), v.double(), {}), backend="triton")


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_of_gates_over_many_anchors(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_decay, "ANCHOR", 16)
    monkeypatch.setattr(repeat, "_PASSES", {})
    b, n, generator = (1, 70, torch.Generator().manual_seed(0)) if packed else (2, 36, torch.Generator())
    q, k, v = randoms(b, n, 1, 16, e=8, dtype=torch.float32)
    gates = -0.2 * torch.rand(b, n, 1, generator=generator).square()
    how: dict[str, Any] = {"rotary": Rotary(16), "log_decay": gates}
    if packed:  # an empty sequence, one of a single token, one that ends with a segment
        how["cu_seqlens"] = torch.tensor([0, 24, 24, 25, 43, 70], dtype=torch.int32)
    triton = next(contract for contract in TABLE if contract.name == "triton")
    mask = torch.rand(b, n, generator=generator) > 0.3
    check(triton, q, k, v, random_state(k, v, how), key_mask=mask, **how)


@pytest.mark.skipif(not INTERPRETED, reason="only NumPy says what is computed and not stored")
@pytest.mark.parametrize(
    "how", [{}, {"erase": torch.ones(1, 20, 1), "normalize": False, "feature_map": "unit"}]
)
def test_programs_without_tokens_do_not_compute_with_fresh_memory(
    how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed calls may start more programs than they have segments. NumPy's warning is an error."""
    empty = torch.Tensor.new_empty

    def filled(x: torch.Tensor, *shape: Any, **options: Any) -> torch.Tensor:
        fresh = empty(x, *shape, **options)
        return fresh.fill_(torch.finfo(fresh.dtype).max) if fresh.is_floating_point() else fresh

    monkeypatch.setattr(torch.Tensor, "new_empty", filled)
    inputs = [x.requires_grad_() for x in randoms(1, 20, 1, 16, dtype=torch.float32)]
    gates = torch.full((1, 20, 1), -0.1, requires_grad=True)
    bounds = torch.tensor([0, 5, 5, 20])
    out = linear_rope_attention(*inputs, log_decay=gates, cu_seqlens=bounds, backend="triton", **how)
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in (*inputs, gates))


def test_nothing_is_saved_without_gradients_and_little_with_them() -> None:
    q, k, v = randoms(1, 100, 8, 16, dtype=torch.float32)  # the table of angles is shared by all heads
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        linear_rope_attention(q, k, v, rotary=Rotary(16), backend="triton")
        assert not saved
        out = linear_rope_attention(q.requires_grad_(), k, v, rotary=Rotary(16), backend="triton")
    assert out.data_ptr() not in {x.data_ptr() for x in saved if x.numel()}  # only large heads read it
    own = {x.data_ptr() for x in (q, k, v)}
    extra = sum(x.numel() for x in saved if x.numel() and x.data_ptr() not in own)
    assert extra <= 0.1 * 4 * q.numel()

"""The kernels in Triton's interpreter: outputs, states and all gradients against the float64 oracle."""

from typing import Any

import pytest
import torch
from hypothesis import given
from linrope_kernels import INTERPRETED, launch, segments, tiles

from linrope import Rotary, feature_maps, linear_rope_attention
from linrope.feature_maps import ELEMENTWISE
from tests.backends.problems import CONFIGS, Problem
from tests.bounds import error_in_bounds
from tests.kernels import comparison
from tests.kernels.comparison import TOLERANCE, compare, every_dtype, long_here
from tests.oracle import both_directions, everything, examples, random_state, randoms

pytestmark = comparison.marks


# Shapes


@every_dtype
@pytest.mark.parametrize(("n", "d"), [(1, 16), (63, 48), (64, 16), (65, 48), (200, 48)])
def test_every_length(n: int, d: int, dtype: torch.dtype) -> None:
    q, k, v = randoms(1, n, 2, d, g=1, e=d // 2, dtype=dtype)
    how: dict[str, Any] = {"rotary": Rotary(d)}
    compare(q, k, v, random_state(k, v, how), **how)


@pytest.mark.parametrize(
    ("d", "e", "causal"),
    [
        (2, 1, True),
        (5, 3, False),
        (6, 96, True),
        (32, 40, False),
        (96, 16, True),
        (128, 40, False),
        (40, 128, True),
    ],
)
def test_every_head_size(d: int, e: int, causal: bool) -> None:
    q, k, v = randoms(1, 70, 2, d, g=1, e=e, dtype=torch.float32)
    how: dict[str, Any] = {"rotary": Rotary(d) if d % 2 == 0 else None}
    compare(q, k, v, random_state(k, v, how), causal=causal, **how)


@pytest.mark.parametrize(("d", "e"), [(192, 192), (256, 256)])
def test_large_heads(d: int, e: int) -> None:
    q, k, v = randoms(1, 40, 1, d, e=e, dtype=torch.float32)
    how: dict[str, Any] = {"rotary": Rotary(d, layout="half")}
    compare(q, k, v, random_state(k, v, how), **how)


@pytest.mark.parametrize(
    ("dtype", "h", "g", "causal"),
    [
        (torch.float32, 4, 2, True),
        (torch.float32, 6, 1, False),
        (torch.float32, 3, 3, True),
        (torch.float16, 4, 2, False),
    ],
    ids=str,
)
def test_grouped_heads(dtype: torch.dtype, h: int, g: int, causal: bool) -> None:
    q, k, v = randoms(1, 70, h, 16, g=g, dtype=dtype)
    how: dict[str, Any] = {"rotary": Rotary(16, theta=torch.rand(g, 8))}
    compare(q, k, v, random_state(k, v, how), causal=causal, **how)


@pytest.mark.parametrize(("n", "m"), [(5, 70), (70, 5), (0, 5), (5, 0), (70, 70)])
def test_cross_attention(n: int, m: int) -> None:
    q, k, v = randoms(2, n, 2, 16, g=1, m=m, dtype=torch.float32)
    positions = {"positions": torch.arange(n) + 5, "key_positions": torch.randint(0, 99, (2, m))}
    for where in ({}, positions):
        how = {"rotary": Rotary(16), "causal": False}
        compare(q, k, v, random_state(k, v, how), **how, **where)


@pytest.mark.parametrize(("b", "n"), [(0, 5), (2, 0)])
def test_empty_inputs(b: int, n: int) -> None:
    q, k, v = randoms(b, n, 2, 16, dtype=torch.float32)
    out, state = linear_rope_attention(q, k, v, backend="triton", return_state=True)
    assert out.shape == (b, n, 2, 16)
    assert torch.equal(state.z, torch.zeros(b, 2, 16, dtype=torch.float64))


# Options


@both_directions
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_map(name: str, causal: bool) -> None:
    q, k, v = randoms(1, 70, 2, 16, dtype=torch.float32)
    how: dict[str, Any] = {"feature_map": name, "normalize": ELEMENTWISE[name].positive}
    how["rotary"] = Rotary(16)
    compare(q, k, v, random_state(k, v, how), causal=causal, **how)


def test_a_map_that_runs_before_the_kernel() -> None:
    q, k, v = randoms(1, 70, 2, 16, dtype=torch.float32)
    fmap = feature_maps.make("softmax", 16)
    compare(q, k, v, feature_map=fmap, rotary=Rotary(fmap.feature_dim))


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize(("rotary_dim", "causal"), [(2, False), (8, True), (14, False), (24, True)])
def test_every_rotation(rotary_dim: int, layout: str, causal: bool) -> None:
    q, k, v = randoms(1, 70, 2, 24, dtype=torch.float32)
    how: dict[str, Any] = {"rotary": Rotary(24, rotary_dim=rotary_dim, layout=layout)}
    compare(q, k, v, random_state(k, v, how), causal=causal, **how)


@both_directions
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("with_state", [True, False])
def test_every_option(with_state: bool, masked: bool, normalize: bool, causal: bool) -> None:
    q, k, v = randoms(3, 40, 2, 16, g=1, e=8, dtype=torch.float32)
    how: dict[str, Any] = {"rotary": Rotary(16), "normalize": normalize}
    state = random_state(k, v, how) if with_state else None
    mask = None
    if masked:
        mask = torch.rand(3, 40) > 0.3
        mask[0, :1], mask[1] = False, False
        v = v.masked_fill(~mask[..., None, None], float("nan"))
        actual = linear_rope_attention(q, k, v, causal=causal, key_mask=mask, backend="triton", **how)
        assert actual.isfinite().all()
        v = v.nan_to_num()
    compare(q, k, v, state, causal=causal, key_mask=mask, **how)


@both_directions
def test_positions(causal: bool) -> None:
    q, k, v = randoms(2, 40, 1, 16, dtype=torch.float32)
    gaps = torch.randint(0, 2**31 - 1, (2, 40))
    for where in (
        {"positions": gaps},
        {"positions": gaps[0, ::1]},
        {"positions": gaps.T.contiguous().T},
        {"positions": gaps, "key_positions": gaps.flip(1)},
        {"key_positions": gaps[1]},
    ):
        compare(q, k, v, causal=causal, rotary=Rotary(16), **where)


def test_scores_depend_on_relative_position_only() -> None:
    q, k, v = randoms(1, 70, 2, 16, dtype=torch.float32)
    how: dict[str, Any] = {"rotary": Rotary(16), "backend": "triton"}
    near = linear_rope_attention(q, k, v, positions=torch.arange(70), **how)
    far = linear_rope_attention(q, k, v, positions=torch.arange(70) + 2**31 - 70, **how)
    torch.testing.assert_close(far, near, rtol=0, atol=1e-5)


def test_queries_without_keys_give_zero() -> None:
    q, k, v = randoms(1, 70, 2, 16, dtype=torch.float32)
    mask = torch.arange(70)[None] >= 3
    results = everything(q, k, v, key_mask=mask, backend="triton", rotary=Rotary(16))
    assert torch.equal(results["out"][:, :3], torch.zeros(1, 3, 2, 16))
    assert all(x.isfinite().all() for x in results.values())


@both_directions
def test_strides_do_not_matter(causal: bool) -> None:
    q, k, v = randoms(2, 40, 2, 16, g=1, dtype=torch.float32)
    how: dict[str, Any] = {"rotary": Rotary(16), "causal": causal}
    expected = everything(q, k, v, backend="triton", **how)
    views = (
        q.transpose(1, 2).contiguous().transpose(1, 2),
        k.movedim(3, 0).contiguous().movedim(0, 3),
        torch.cat((v, v), 3)[..., :16],
    )
    for name, x in everything(*views, backend="triton", **how).items():
        assert torch.equal(x, expected[name])
    q.requires_grad_()
    ones = torch.ones(1).expand(2, 40, 2, 16)
    grads = []
    for g_out in (ones, ones.contiguous()):
        out = linear_rope_attention(q, k, v, backend="triton", **how)
        grads.append(torch.autograd.grad(out, q, g_out)[0])
    assert torch.equal(*grads)


# Segments


@pytest.mark.parametrize(
    ("n", "causal"),
    [(64, True), (65, False), (190, True), (333, False), pytest.param(333, True, marks=long_here)],
)
@pytest.mark.usefixtures("short_segments")
def test_segments(n: int, causal: bool) -> None:
    q, k, v = randoms(2, n, 2, 16, g=1, e=8, dtype=torch.float32)
    how: dict[str, Any] = {"rotary": Rotary(16)}
    mask = torch.rand(2, n) > 0.3
    compare(q, k, v, random_state(k, v, how), causal=causal, key_mask=mask, **how)


@pytest.mark.usefixtures("short_segments")
def test_segments_of_large_heads() -> None:
    q, k, v = randoms(1, 190, 1, 128, e=96, dtype=torch.float32)
    compare(q, k, v, rotary=Rotary(128))


@pytest.mark.usefixtures("short_segments")
def test_segments_of_packed_bidirectional_sequences() -> None:
    q, k, v = randoms(1, 190, 2, 16, g=1, e=8, dtype=torch.float32)
    how: dict[str, Any] = {"rotary": Rotary(16), "causal": False}
    how["cu_seqlens"] = torch.tensor([0, 0, 130, 190])
    compare(q, k, v, random_state(k, v, how), **how)


def test_decay_and_packing_where_feature_pairs_are_split() -> None:
    q, k, v = randoms(1, 70, 1, 128, e=40, dtype=torch.float32)
    how: dict[str, Any] = {"rotary": Rotary(128), "decay": torch.tensor([0.9])}
    compare(q, k, v, cu_seqlens=torch.tensor([0, 30, 70]), **how)


def test_whatever_cu_seqlens_holds_nothing_is_read_out_of_bounds() -> None:
    """On a GPU its numbers are not checked."""
    for numbers in ([0, 99, 5, 70], [-5, 1000], [70, 0, 3], [2**31 - 1, -(2**31), 7]):
        cuts = torch.tensor(numbers, dtype=torch.int32)
        bounds = segments.rising_bounds(cuts, 70)
        assert 0 <= int(bounds.min()) <= int(bounds.max()) <= 70
        assert bool((bounds.diff() >= 0).all())
        q = torch.zeros(1, 70, 1, 16)
        call = launch.Call(
            q=q, k=q, v=q, positions=torch.zeros(1, 70).long(), cu_seqlens=cuts, dot="ieee"
        )  # fmt: skip
        slots = call.segments(70).slots
        assert slots is not None
        assert bool((slots[:, 0] <= slots[:, 1]).all())
        assert 0 <= int(slots[:, :2].min()) <= int(slots[:, :2].max()) <= 70
        assert 0 <= int(slots[:, 2].min()) <= int(slots[:, 2].max()) < len(numbers) - 1


@pytest.mark.parametrize("n", [0, 1, 511, 512, 513, 65_536, 1_000_001])
@pytest.mark.parametrize("most", [1, 2, 66, 528])
def test_segments_cover_the_sequence(n: int, most: int) -> None:
    number, length = tiles.segments(n, most)
    assert (number - 1) * length < max(n, 1) <= number * length
    assert number <= most
    assert number == 1 or (length >= tiles.SHORTEST and length % 128 == 0)


def test_enough_segments_to_fill_a_gpu() -> None:
    assert tiles.most_segments(8, 1, 132, 4) == 33  # 264 programs, on 132 multiprocessors
    assert tiles.most_segments(240, 1, 132, 4) == 1
    assert tiles.most_segments(150, 1, 132, 4) == 3  # 450 in two waves of 264, since one would leave 114 idle
    assert tiles.most_segments(8, 2, 132, 8) == 8


# The numerics contract


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@examples(4)
@given(config=CONFIGS)
def test_output_error_is_within_the_bound(dtype: torch.dtype, config: dict[str, Any]) -> None:
    problem = Problem(config, dtype)
    oracle, sizes = problem.exact()
    if sizes.out.max() >= torch.finfo(dtype).max:
        return  # float16 cannot hold it
    inputs, how = problem.second(dtype, "triton")
    assert error_in_bounds(linear_rope_attention(*inputs, **how), oracle, sizes.out) <= 1


@pytest.mark.usefixtures("short_segments")
def test_future_tokens_do_not_change_one_bit_of_the_past() -> None:
    how: dict[str, Any] = {"rotary": Rotary(16), "backend": "triton"}
    now, then = (randoms(1, 200, 2, 16, dtype=torch.float32, seed=seed) for seed in (0, 1))
    out = linear_rope_attention(*now, **how)
    for cut in (1, 31, 33, 64, 130):
        mixed = (torch.cat((x[:, :cut], 30 * y[:, cut:]), 1) for x, y in zip(now, then, strict=True))
        assert torch.equal(linear_rope_attention(*mixed, **how)[:, :cut], out[:, :cut])


@pytest.mark.parametrize("name", ["elu+1", "relu"])
def test_nan_reaches_every_later_token_and_no_earlier_one(name: str) -> None:
    q, k, v = randoms(1, 100, 1, 16, dtype=torch.float32)
    k[0, 40, 0, 3] = float("nan")
    out = linear_rope_attention(q, k, v, feature_map=name, rotary=Rotary(16), backend="triton")
    assert out[:, :40].isfinite().all()
    assert out[:, 40:].isnan().all()


def test_float16_does_not_overflow_where_features_do() -> None:
    q, k, v = randoms(1, 70, 1, 16, dtype=torch.float16, scale=3)
    out = linear_rope_attention(q, k, v, feature_map="exp", rotary=Rotary(16), backend="triton")
    assert out.isfinite().all()


# What it cannot do


@pytest.mark.parametrize(
    ("dtype", "d", "why"),
    [
        (torch.float64, 16, r"backend='triton' cannot run: float64: use backend='eager'"),
        pytest.param(
            torch.bfloat16,
            16,
            r"bfloat16 in Triton's interpreter",
            marks=pytest.mark.skipif(not INTERPRETED, reason="a GPU multiplies bfloat16"),
        ),
        (torch.float32, 258, r"258 features and 258 values per head: it takes up to 256"),
    ],
)
def test_what_it_cannot_do_is_named(dtype: torch.dtype, d: int, why: str) -> None:
    q, k, v = randoms(1, 2, 1, d, dtype=dtype)
    with pytest.raises(RuntimeError, match=why):
        linear_rope_attention(q, k, v, backend="triton")


def test_xpos_is_left_to_eager() -> None:
    q, k, v = randoms(1, 2, 1, 16, dtype=torch.float32)
    with pytest.raises(RuntimeError, match=r"xpos, a decay per pair of features: use backend='eager'"):
        linear_rope_attention(q, k, v, rotary=Rotary(16, xpos=512.0), backend="triton")


def test_a_float64_state_is_refused() -> None:
    q, k, v = randoms(1, 2, 1, 16, dtype=torch.float32)
    _, state = linear_rope_attention(q, k, v, return_state=True)
    with pytest.raises(RuntimeError, match="float64"):
        linear_rope_attention(q, k, v, state=state.to(dtype=torch.float64), backend="triton")

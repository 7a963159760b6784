"""What the Triton kernels of the layer's operators alone promise: tiles, sums in parts, what is compiled from them.

tests/ops compares them, in Triton's interpreter, with float64.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from linrope_kernel_tools.report import SHARED_LIMIT
from linrope_kernels import INTERPRETED, convolution, norm, partial_sums

from linrope.ops import convolve, gated_norm
from tests.kernels.compiled import CAPABILITIES, run_compiled
from tests.ops.cases import Tensors, differentiate, numbers, relative_error

pytestmark = pytest.mark.usefixtures("poison")


def compare(inputs: Tensors, call: Any) -> None:
    """The result and all gradients, with float64."""
    exact = differentiate(inputs, lambda x: call(**x, backend="eager"), torch.float64)
    actual = differentiate(inputs, lambda x: call(**x, backend="triton"))
    assert max(relative_error(x, y) for x, y in zip(actual, exact, strict=True)) < 2e-6


# ---- Sums


def test_rows_are_summed_in_their_order_and_two_tables_at_once() -> None:
    a, b = numbers(70, 40), numbers(3, 5, seed=2)
    sums = torch.empty(40), torch.empty(5, dtype=torch.float16)
    partial_sums.sum_rows(a, sums[0], b, sums[1])
    assert torch.equal(sums[0], a.double().sum(0).float())
    assert torch.equal(sums[1], b.double().sum(0).half())
    partial_sums.sum_rows(None, None, b, sums[0][:5])
    assert torch.equal(sums[0][:5], b.double().sum(0).float())


# ---- The convolution


@pytest.mark.parametrize("batch", [1, 3, 1000, 100_000])
@pytest.mark.parametrize("positions", [1, 8, 9, 2000, 2**20])
@pytest.mark.parametrize("channels", [3, 64, 4096])
def test_chunks_are_long_where_programs_are_many(channels: int, positions: int, batch: int) -> None:
    rows, blocks = 512 // min(64, max(16, channels)), -(-channels // 64)
    length = convolution.chunk_length(positions, batch, rows, blocks)
    parts = -(-batch * -(-positions // length) // rows)
    assert length % convolution.UNROLL == 0
    assert length <= 64 or parts > convolution.MOST_SUMS / 2
    assert parts <= convolution.MOST_SUMS or length >= positions
    half = -(-batch * -(-positions // (length // 2)) // rows)
    assert length == 8 or parts * blocks >= convolution.ENOUGH_PROGRAMS or half > convolution.MOST_SUMS


@pytest.mark.parametrize("cuts", [None, [0, 0, 1, 50, 50, 81, 130]], ids=["batch", "packed"])
def test_long_chunks_and_several_blocks_of_channels(cuts, monkeypatch) -> None:
    monkeypatch.setattr(convolution, "ENOUGH_PROGRAMS", 1)
    monkeypatch.setattr(convolution, "MOST_SUMS", 2)
    before = numbers(1 if cuts is None else len(cuts) - 1, 3, 140, seed=3)[..., 70:]
    inputs = {"x": numbers(1, 130, 70), "weight": numbers(70, 4, seed=2), "bias": None, "before": before}
    bounds = None if cuts is None else torch.tensor(cuts)
    compare(inputs, lambda **x: convolve(**x, cu_seqlens=bounds, silu=True))


def test_inputs_before_an_empty_sequence_reach_nothing() -> None:
    inputs = {"x": numbers(1, 9, 4), "weight": numbers(4, 3, seed=2), "before": numbers(3, 2, 4)}
    inputs["before"][1] = torch.nan
    cuts = torch.tensor([0, 4, 4, 9])
    found = differentiate(inputs, lambda x: convolve(**x, cu_seqlens=cuts, silu=True, backend="triton"))
    assert all(bool(x.isfinite().all()) for x in found)
    assert not found[-1][1].any()


# ---- The norm


@pytest.mark.parametrize("over_heads", [False, True])
@pytest.mark.parametrize(
    ("h", "group", "e"), [(1, 1, 1), (16, 1, 64), (64, 1, 256), (12, 3, 96), (64, 64, 256)]
)
def test_tiles_cover_the_heads(h: int, group: int, e: int, over_heads: bool) -> None:
    tile = norm.tile(h, group, e, over_heads)
    assert tile.members >= group
    assert tile.values >= e
    assert tile.kv_heads * tile.blocks * group >= h
    assert tile.elements >= 1024
    assert tile.elements <= max(4096 if over_heads else 1024, tile.members * tile.values)
    assert tile.tokens == 1 or tile.blocks == 1 or not over_heads


FORMS: dict[str, dict[str, Any]] = {
    "several tiles": {"h": 5, "g": 5, "e": 24, "over": "all"},
    "several blocks": {"h": 3, "g": 3, "e": 2000, "over": "all", "gate_order": "before"},
    "grouped in blocks": {"h": 6, "g": 2, "e": 700, "over": "all", "skip_order": "before"},
    "blocks of programs": {"h": 6, "g": 2, "e": 300},
}


@pytest.mark.parametrize("form", FORMS)
def test_programs_that_sum_over_many_tokens(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = dict(FORMS[form])
    h, g, e = (options.pop(name) for name in ("h", "g", "e"))
    n, over_heads = 4 if e > 100 else 9, "over" in options
    tile = norm.tile(h, h // g, e, over_heads)
    monkeypatch.setattr(norm, "ELEMENTS", 2 * tile.elements * (1 if over_heads else tile.blocks))  # two parts
    inputs = {
        "out": numbers(2, n, h, e), "weight": numbers(h * e if over_heads else e, seed=2),
        "gate": numbers(2, n, h * e, seed=3), "v": numbers(2, n, g, e, seed=4), "skip": numbers(h, seed=5),
    }  # fmt: skip
    compare(inputs, lambda **x: gated_norm(**x, **options))


@pytest.mark.parametrize("over", ["head", "all"])
def test_the_magnitudes_of_models(over: str) -> None:
    """Outputs that a long sequence has made small, in some heads below eps; wide gates; one large channel."""
    out, gate = 1e-3 * numbers(2, 20, 4, 16), 5 * numbers(2, 20, 64, seed=3)
    out[..., 2, :] *= 1e-4
    out[..., 3] *= 30
    weight, order = numbers(64 if over == "all" else 16, seed=2), "before" if over == "all" else "after"
    inputs = {"out": out, "weight": weight, "gate": gate}
    compare(inputs, lambda **x: gated_norm(**x, over=over, gate_order=order))


def test_what_they_cannot_do_is_named() -> None:
    x = torch.zeros(1, 2, 4)
    refused = [
        (x, 9, "9 taps: it takes up to 8; use backend='eager'"),
        (x.double(), 2, "float64: use backend='eager'"),
    ]
    refused += [(x.bfloat16(), 2, "bfloat16 in Triton's interpreter")] if INTERPRETED else []
    for inputs, taps, why in refused:
        with pytest.raises(RuntimeError, match=why):
            convolve(inputs, torch.zeros(4, taps), backend="triton")
    # 3 heads of 5000 are 15,000 values in a tile of 4 times 8,192.
    for h, e, limit in ((20, 1000, ": the kernel takes up to 16384"), (3, 5000, "")):
        out = torch.zeros(1, 1, h, e)
        with pytest.raises(RuntimeError, match=f"{h} heads of {e} values share a head of v{limit}"):
            gated_norm(out, v=out[:, :, :1], skip=torch.zeros(h), backend="triton")


# ---- What the compilers make of them

KERNELS = {
    "convolve_fwd_kernel", "convolve_bwd_kernel", "convolve_step_kernel", "norm_fwd_kernel", "norm_bwd_kernel",
    "sum_rows_kernel",
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_they_compile_for_every_gpu_and_do_not_spill(capability: int) -> None:
    found = run_compiled(str(Path(__file__).parent / "operators_without_gpu.py"), str(capability), "all")
    assert {x["kernel"] for x in found} == KERNELS
    assert not [x for x in found if x["shared"] > SHARED_LIMIT[capability] or x["spills"]]


LONG = [(90, "bf16", ()), (80, "bf16", ()), (90, "fp32", ()),
        (90, "fp16", ("convolution", "two taps", "steps", "any bounds", "norm"))]  # fmt: skip


@pytest.mark.parametrize(
    ("capability", "dtype", "names"),
    [(90, "bf16", ("packed", "norm over all")), *(pytest.param(*x, marks=pytest.mark.long) for x in LONG)],
)
def test_compiled_they_compute_the_same_without_races(capability: int, dtype: str, names: tuple) -> None:
    """In the emulator; its lines are the cases, no names all of them."""
    lines = run_compiled("-m", "tests.kernels.ptx.check_operators", str(capability), dtype, *names)
    assert len(lines) >= max(1, len(names))
    assert not [(x["case"], x["fault"], x["findings"]) for x in lines if x["fault"] or x["findings"]]
    assert not [(x["case"], x["ratios"]) for x in lines if not max(x["ratios"].values()) <= 1]

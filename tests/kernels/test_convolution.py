"""What the Triton kernels of the convolution alone promise: chunks, sums in parts, what is compiled from them.

tests/ops compares them, in Triton's interpreter, with float64.
"""

from itertools import product

import pytest
import torch
from linrope_kernels import convolution, repeat

from linrope.ops import convolve_parts
from tests.ops.cases import differentiate, numbers, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]


def test_programs_share_channels_only_where_these_are_few_or_chunks_too_long() -> None:
    for positions, blocks, rows in product((1, 8, 9, 2000, 2**20), (1, 3, 255, 256, 4000), (16, 64)):
        length = convolution.chunk_length(positions, rows, blocks)
        programs = -(-positions // (rows * length)) * blocks
        assert length % convolution.UNROLL == 0
        assert length <= convolution.LONGEST
        if blocks >= convolution.ENOUGH_PROGRAMS:
            assert programs == blocks or length == convolution.LONGEST
        else:
            assert programs == blocks or length >= convolution.SHORTEST
            assert programs >= convolution.ENOUGH_PROGRAMS or length <= 2 * convolution.SHORTEST


@pytest.mark.parametrize(
    ("b", "n", "c", "programs"),
    [(8, 512, 4096, 1), (8, 1024, 4096, 1), (8, 2048, 16384, 1), (1, 16384, 4096, 1), (1, 65536, 2048, 12)],
)  # fmt: skip
def test_of_many_channels_one_program_sums_over_all_positions(b: int, n: int, c: int, programs: int) -> None:
    """So that a backward pass is one launch."""
    parts = [torch.empty(b, n, size, device="meta") for size in (c // 4, c // 4, c // 2)]
    call = convolution.Convolution(
        parts=parts, weight=torch.empty(c, 4, device="meta"), bias=None, before=None, cu_seqlens=None, silu=True
    )  # fmt: skip
    channels = convolution.block_of_channels(call)
    positions, rows = b * (n + 3), 1024 // channels
    length = convolution.chunk_length(positions, rows, call.blocks(channels))
    assert -(-positions // (rows * length)) == programs


@pytest.mark.parametrize(
    ("cuts", "shortest"), [(None, 32), ([0, 0, 1, 50, 50, 81, 130], 1)], ids=["batch", "packed"]
)
def test_several_programs_per_channel_and_long_chunks(cuts, shortest: int, monkeypatch) -> None:
    monkeypatch.setattr(convolution, "SHORTEST", shortest)
    monkeypatch.setattr(repeat, "_PASSES", {})
    before = numbers(1 if cuts is None else len(cuts) - 1, 3, 140, seed=3)[..., 70:]
    inputs = {"x": numbers(1, 130, 70), "weight": numbers(70, 4, seed=2), "bias": None, "before": before}
    bounds = None if cuts is None else torch.tensor(cuts)

    def call(x, weight, bias, before, backend):
        how = {"before": before, "cu_seqlens": bounds, "silu": True, "backend": backend}
        return torch.cat(convolve_parts(x.split([5, 65], -1), weight, bias, **how), -1)

    exact = differentiate(inputs, lambda x: call(**x, backend="eager"), torch.float64)
    found = differentiate(inputs, lambda x: call(**x, backend="triton"))
    assert max(relative_error(x, y) for x, y in zip(found, exact, strict=True)) < 2e-6


def test_inputs_before_an_empty_sequence_reach_nothing() -> None:
    inputs = {"x": numbers(1, 9, 4), "weight": numbers(4, 3, seed=2), "before": numbers(3, 2, 4)}
    inputs["before"][1] = torch.nan
    how = {"cu_seqlens": torch.tensor([0, 4, 4, 9]), "silu": True, "backend": "triton"}
    found = differentiate(inputs, lambda x: convolve_parts((x.pop("x"),), **x, **how)[0])
    assert all(bool(x.isfinite().all()) for x in found)
    assert not found[-1][1].any()

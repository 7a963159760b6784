"""benchmarks/gpu_tiles.py: what it tries, and what it takes for the same results."""

import torch
from linrope_kernels import tiles

from benchmarks import gpu_tiles


def test_the_table_s_own_tile_is_tried_first_and_the_others_differ() -> None:
    for kernel, size in gpu_tiles.CANDIDATES:
        own, *others = (tile for _, tile in gpu_tiles.candidates([f"{kernel}-{size}"]))
        assert own == tiles.TABLE["bf16"][kernel, size]
        assert own not in others
        assert len(set(others)) == len(others) > 2


def test_a_difference_counts_by_its_tensor_and_nan_is_no_small_one() -> None:
    x, y = torch.tensor([3.0, 4.0]), torch.tensor([30.0, 40.0])
    assert gpu_tiles.difference((x, y), (x, y)) == 0
    assert abs(gpu_tiles.difference((x + torch.tensor([0.0, 0.5]), y), (x, y)) - 0.1) < 1e-6
    assert not gpu_tiles.difference((x * float("nan"), y), (x, y)) <= 1

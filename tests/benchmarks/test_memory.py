"""benchmarks/memory.py: a row in pieces takes the memory of a piece, and more blocks take more only to train."""

import sys

import pytest

from benchmarks.memory import peak

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

LENGTH = 16384


def least(blocks: int, piece: int, call: str) -> int:
    """The smallest peak of three runs. A heap that earlier tests have fragmented can only make a peak larger."""
    return min(peak(64, blocks, LENGTH, piece, call) for _ in range(3))


def test_rows_in_pieces_and_blocks_without_gradients_take_no_more_memory() -> None:
    training, reading = (
        [least(blocks, LENGTH, call) for blocks in (1, 3)] for call in ("training", "reading")
    )
    assert training[1] > 2 * training[0]
    assert reading[1] < 1.5 * reading[0]
    assert least(1, 1024, "training") < training[0] / 4

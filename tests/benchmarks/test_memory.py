"""benchmarks/memory.py: a row in pieces takes the memory of a piece, and more blocks take more only to train."""

import sys

import pytest

from benchmarks.memory import peak

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def test_a_row_in_pieces_takes_the_memory_of_a_piece() -> None:
    whole, pieces = (peak(64, 1, 16384, piece, "training") for piece in (16384, 1024))
    assert pieces < whole / 4


def test_blocks_share_their_memory_without_gradients() -> None:
    found = {
        call: [peak(64, blocks, 16384, 16384, call) for blocks in (1, 3)] for call in ("training", "reading")
    }
    assert found["training"][1] > 2 * found["training"][0]
    assert found["reading"][1] < 1.5 * found["reading"][0]
